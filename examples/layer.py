"""Multi-head attention in ten lines: a layer, its weights, and every step of it printed."""

import torch

import headwise
from headwise.positions import Rotary

layer = headwise.MultiHeadAttention(64, 8, num_kv_heads=2, position=Rotary())
x = torch.randn(1, 6, 64)

output, weights = layer(x, mask=headwise.causal(), need_weights=True)
print(output.shape, weights.shape)  # (1, 6, 64), (1, 8, 6, 6): one map for each head
print(layer.trace(x, mask=headwise.causal()))
