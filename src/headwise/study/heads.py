"""How alike the heads of a trained model are: redundant ones are a hint that fewer would do."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from headwise.statistics import head_statistics
from headwise.watch import watch

# Two heads whose weights have this cosine read nearly the same keys.
ALIKE = 0.95


def alike(model: nn.Module, inputs: dict[str, Any]) -> float | None:
    """The share of pairs of heads in one layer whose weights on these inputs have a cosine above
    `ALIKE`; None where every layer has one head."""
    model.eval()
    with torch.inference_mode(), watch(model) as seen:
        model(**inputs)
    close = pairs = 0
    for one in seen:
        cosine = head_statistics(one.call).cosine
        assert cosine is not None
        count = cosine.shape[-1]
        above = torch.ones(count, count, dtype=torch.bool).triu(1)
        close += int((cosine[:, above] > ALIKE).sum())
        pairs += cosine.shape[0] * int(above.sum())
    return close / pairs if pairs else None
