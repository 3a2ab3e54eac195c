"""Numbers beside the weights: the entropy that score norms allow, low rank, what a call costs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.call import AttentionCall
from headwise.masks import CompiledMask


def entropy_lower_bound(norm: Tensor, keys: Tensor) -> Tensor:
    """The least entropy, in nats, of a softmax over T scores of a given norm.

    Zhai 2023 (arXiv 2303.06296), theorem 3.1: with β = e^{−σ√(T/(T−1))},
    H ≥ ln(1 + (T−1)β) + σ√(T(T−1))·β/(1 + (T−1)β). The paper bounds ‖s‖ by spectral norms; a
    softmax ignores a constant, so the measured σ = ‖s − mean s‖₂ gives the tighter bound.

    Args:
        norm: σ of each row. keys: T of each row, the same shape; a row with T < 2 has bound 0.
    """
    others = (keys - 1).clamp(min=1).to(norm.dtype)
    gap = norm * ((others + 1) / others).sqrt()
    rest = others * torch.exp(-gap)  # (T − 1)·β
    # β reaches 0 before an infinite gap can make 0·∞ of the second term.
    second = torch.where(rest > 0, rest * gap, 0.0) / (1 + rest)
    second = torch.where(gap.isnan(), gap, second)
    return torch.where(keys >= 2, torch.log1p(rest) + second, 0.0)


def low_rank_note(head_dim: int, context: int) -> str | None:
    """Scores of head dimension D over N > D keys have rank at most D (Bhojanapalli 2020, arXiv
    2002.07028). Information, not a fault: it holds for every large language model."""
    if head_dim >= context:
        return None
    return (
        f"head dimension {head_dim} is below the context length {context}: scores have rank at "
        f"most {head_dim} (true of every large language model)"
    )


@dataclass(frozen=True)
class Cost:
    """What one call costs. pairs: visible (query, key) pairs over batch and heads. flops: of scores
    and values, 2·(D + Dv) a visible pair. kv_bytes: keys and values that a cache must keep to
    continue: those of the longest row, so a window keeps min(N, W)."""

    pairs: int
    flops: int
    kv_bytes: int


def measure_cost(call: AttentionCall, mask: CompiledMask) -> Cost:
    """The cost of a call, exact for its mask."""
    counts = mask.counts()
    full = counts.expand(call.batch, call.num_heads, call.query_length)
    pairs = int(full.sum())
    longest = full.flatten(1).amax(-1).sum() if full[0].numel() else 0
    width = call.num_kv_heads * (call.head_dim + call.value_dim) * call.key.element_size()
    return Cost(pairs, 2 * pairs * (call.head_dim + call.value_dim), int(longest) * width)
