"""Where a token stands, told to attention in three ways: rotary, ALiBi, T5 relative bias.

`Rotary` turns queries and keys before the dot product; `ALiBi` and `RelativeBias` add to the
scores. All of them read integer positions, (L,) or (B, L), never the index of a row in some tensor,
so left padding, caches and packed documents only change the numbers that come in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from headwise.intervals import And, Mask
from headwise.masks import Lengths, Real
from headwise.rotary import (
    LinearScaling,
    Llama3Scaling,
    NTKScaling,
    Rotary,
    YaRNScaling,
    check_positions,
)

__all__ = [
    "ALiBi",
    "LinearScaling",
    "Llama3Scaling",
    "NTKScaling",
    "Position",
    "RelativeBias",
    "Rotary",
    "YaRNScaling",
    "alibi_slopes",
    "count_positions",
    "position_after",
    "real_tokens",
    "require_causal",
]


def real_tokens(mask: Mask | None, batch: int, keys: int) -> Tensor | None:
    """Which keys are real, bool (B, S), as the `padding(...)` parts of a mask say.

    None: the mask knows no padding. Only parts joined by & count: under | or ~ a padding mask no
    longer says that a token is a pad.
    """
    if isinstance(mask, And):
        left, right = real_tokens(mask.left, batch, keys), real_tokens(mask.right, batch, keys)
        return (left if right is None else right) if left is None or right is None else left & right
    real: Tensor | None = None
    if isinstance(mask, Real) and mask.real.dim() == 2 and mask.real.shape[1] == keys:
        real = mask.real.bool()
    elif isinstance(mask, Lengths) and mask.lengths.dim() == 1:
        index, count = torch.arange(keys, device=mask.lengths.device), mask.lengths[:, None]
        real = index < count if mask.side == "right" else index >= keys - count
    # What does not fit is left for the mask itself to refuse, with its own words.
    if real is None or real.shape[0] not in (1, batch):
        return None
    return real.expand(batch, keys)


def count_positions(real: Tensor, start: Tensor | int = 0) -> Tensor:
    """Positions counted from the real tokens: start + cumsum(real) - 1, int64 (B, L).

    `start` is one number, or (B,). A pad carries the number of the real token before it (start - 1
    where there is none).
    """
    count = real.to(torch.int64).cumsum(-1) - 1
    return count + (start[:, None] if isinstance(start, Tensor) else start)


def position_after(positions: Tensor, real: Tensor | None) -> Tensor:
    """The next position of each row, (B,): one more than that of its last real token.

    A row without a real token goes on from its last column, which holds its own count.
    """
    last = positions[:, -1]
    if real is not None:
        index = torch.arange(real.shape[1], device=real.device)
        newest = torch.where(real, index, -1).amax(-1)
        at = positions.gather(1, newest.clamp(min=0)[:, None])[:, 0]
        last = torch.where(newest >= 0, at, last)
    return last + 1


def _rows(positions: Tensor) -> Tensor:
    """(L,) or (B, L) → (1 or B, L)."""
    return positions[None] if positions.dim() == 1 else positions


def alibi_slopes(num_heads: int) -> list[float]:
    """One slope a head, in the order of the authors' code (Press et al. 2021, arXiv 2108.12409).

    A power of two: 2 ** (-8 (h + 1) / H). Any other count: the slopes of the next lower power of
    two, then every other slope of its double. Not sorted, and checkpoints depend on that order.
    """
    lower = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (head + 1) / lower) for head in range(lower)]
    finer = [2.0 ** (-8 * (head + 1) / (2 * lower)) for head in range(0, 2 * lower, 2)]
    return slopes + finer[: num_heads - lower]


@dataclass(frozen=True)
class ALiBi:
    """Attention with linear biases: each head's slope times the distance, taken off the score.

    form="distance" (default): -slope * |i - j|, right under every mask. Memory H * L * S; for one
        decoded token that is O(S).
    form="key": slope * (j - last), one row for all queries, so memory is H * S at any length.
        Softmax does not see what is added to a whole row, so weights are the same, but only where
        no row sees a later key: the layer checks the mask, and refuses sinks (a sink logit does see
        it; so does the lse). It costs precision: float32 scores round by up to slope * S * 6e-8
        (5e-4 at 16k tokens).
    """

    form: Literal["distance", "key"] = "distance"

    def __post_init__(self) -> None:
        if self.form not in ("distance", "key"):
            raise ValueError(f"ALiBi: form={self.form!r} must be 'distance' or 'key'")

    def bias(
        self, queries: Tensor, keys: Tensor, *, num_heads: int, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """(1 or B, H, L, S), or (1 or B, H, 1, S) for form="key".

        queries: int positions (L,) or (B, L). keys: (S,) or (B, S). Half types hold the product
        slope * distance rounded once.
        """
        check_positions("ALiBi", queries)
        check_positions("ALiBi", keys)
        keys = _rows(keys)[:, None, None, :]
        if self.form == "key":
            last = keys.amax(-1, keepdim=True) if keys.shape[-1] else keys
            steps = keys - last
        else:
            steps = -(_rows(queries)[:, None, :, None] - keys).abs()
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        slopes = torch.tensor(alibi_slopes(num_heads), dtype=wide, device=keys.device)
        return (steps.to(wide) * slopes[:, None, None]).to(dtype)


def require_causal(query: Tensor, keys: int, mask: Mask | None) -> Mask | None:
    """ValueError unless `ALiBi(form="key")` is right here: no row of `query` (B, Hq, L, D) sees a
    later one of the `keys` keys, and the dtype can hold the bias. Returns the mask, compiled."""
    batch, heads, length, _ = query.shape
    if query.dtype in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"ALiBi(form='key'): slope * distance to the last key, in {query.dtype}, loses the "
            "differences between near keys; use ALiBi(), or float32"
        )
    if mask is None and length > 1:
        raise ValueError(
            "ALiBi(form='key'): needs a causal mask, got none; pass mask=causal(), or use ALiBi()"
        )
    # A compiled graph cannot look into the mask: there the first eager call is the check.
    if mask is None or torch.compiler.is_compiling():
        return mask
    seen = mask.compile(batch=batch, heads=heads, queries=length, keys=keys, device=query.device)
    own = torch.arange(keys - length, keys, device=query.device)[:, None]
    if seen.intervals is not None and seen.bits is None:
        start, end = seen.intervals.unbind(-1)
        ahead = bool((torch.where(end > start, end, 0) > own + 1).any())
    else:
        index = torch.arange(keys, device=query.device)
        ahead = bool((seen.tile() & (index > own)).any())
    if ahead:
        raise ValueError(
            "ALiBi(form='key'): needs a causal mask, but some query sees a later key; use ALiBi()"
        )
    return seen


class RelativeBias(nn.Module):
    """T5's learned bias: one number per head and bucket of distances (Raffel et al. 2020, arXiv
    1910.10683, section 2.1).

    Half of a side's buckets hold one distance each, the others grow by a constant ratio up to
    `max_distance`; everything further shares the last. bidirectional=True spends half of the
    buckets on keys after the query (encoders); False puts all of those into bucket 0 (causal
    decoders).

    One module may serve all layers of a stack, as in T5. The bias is (1 or B, H, L, S): a learned
    table read at every pair, so memory is H * L * S.

    weight: (num_buckets, num_heads), the layout of `relative_attention_bias.weight` in T5
    checkpoints.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
    ) -> None:
        super().__init__()
        side = num_buckets // 2 if bidirectional else num_buckets
        if side < 2 or (bidirectional and num_buckets % 2):
            raise ValueError(
                f"RelativeBias: num_buckets={num_buckets} must be at least "
                + ("4 and even, half of them for each direction" if bidirectional else "2")
            )
        if max_distance <= side // 2:
            raise ValueError(
                f"RelativeBias: max_distance={max_distance} must exceed the {side // 2} distances "
                "that have a bucket of their own"
            )
        self.num_heads, self.num_buckets = num_heads, num_buckets
        self.max_distance, self.bidirectional = max_distance, bidirectional
        self.weight = nn.Parameter(torch.empty(num_buckets, num_heads))
        # A table, because log() rounds otherwise on other devices and when compiled, and an edge
        # distance would change its bucket. Built in float32 on the CPU, as the checkpoints were
        # trained.
        self.table: Tensor
        self.register_buffer(
            "table", self._buckets_by_distance(side, max_distance), persistent=False
        )
        self.reset_parameters()

    @staticmethod
    def _buckets_by_distance(side: int, max_distance: int) -> Tensor:
        exact = side // 2
        distance = torch.arange(max_distance + 1, dtype=torch.int64, device="cpu")
        ratio = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
        grown = exact + (ratio * (side - exact)).to(torch.int64)
        return torch.where(distance < exact, distance, grown.clamp(max=side - 1))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.num_heads**-0.5)

    def buckets(self, queries: Tensor, keys: Tensor) -> Tensor:
        """The bucket of every pair, int64 (1 or B, L, S)."""
        check_positions("RelativeBias", queries)
        check_positions("RelativeBias", keys)
        ahead = _rows(keys)[:, None, :] - _rows(queries)[:, :, None]
        behind = ahead.abs() if self.bidirectional else (-ahead).clamp(min=0)
        bucket = self.table[behind.clamp(max=self.max_distance)]
        return bucket + (ahead > 0) * (self.num_buckets // 2) if self.bidirectional else bucket

    def bias(
        self, queries: Tensor, keys: Tensor, *, num_heads: int, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """(1 or B, H, L, S) from (L,) or (B, L) query and (S,) or (B, S) key positions."""
        if num_heads != self.num_heads:
            raise ValueError(
                f"RelativeBias: built for num_heads={self.num_heads}, the layer has "
                f"num_heads={num_heads}"
            )
        # Heads first before the look-up, so that keys are the contiguous axis.
        return self.weight.t().to(dtype)[:, self.buckets(queries, keys)].transpose(0, 1)

    def extra_repr(self) -> str:
        return (
            f"{self.num_heads}, num_buckets={self.num_buckets}, max_distance={self.max_distance}, "
            f"bidirectional={self.bidirectional}"
        )


Position = Rotary | ALiBi | RelativeBias
