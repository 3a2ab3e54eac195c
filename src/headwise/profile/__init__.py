"""What attention costs as context grows: counted from shapes, and measured in fresh processes.

shape = headwise.profile.from_options(num_heads=32, num_kv_heads=8, head_dim=128, layers=32)
headwise.profile.cost(shape, 131_072, dtype="bfloat16").kv_bytes   # 16 GiB
"""

from __future__ import annotations

from headwise.profile.analytic import Cost, cost, reach
from headwise.profile.shapes import Layer, Shape, from_config, from_model, from_options

__all__ = ["Cost", "Layer", "Shape", "cost", "from_config", "from_model", "from_options", "reach"]
