"""What goes into the inner loop and what comes out: a native pass replaces what lies between."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.statistics.sight import Sight
from headwise.statistics.tokens import Matches


@dataclass(frozen=True, eq=False)
class Job:
    """One batch element's attention and what is wanted of it. Shapes without a batch axis.

    query (H, L, D), key (Hkv, S, D): float32 or float64. bias: broadcastable to (H, L, S).
    at: position of query 0 minus position of key 0, where positions are consecutive; otherwise
    query_at (L,) and key_at (S,) give them (int64). used: bool (S,), keys that some counted row
    sees. places (n,): the first positions, whose weight is wanted; place_of_key (S,): which of
    them a key holds, or −1. declared: the mask that the call is believed to have.
    block: (queries, keys) per cell of the pooled map. tile: (rows, keys), None to choose.
    """

    query: Tensor
    key: Tensor
    scale: float
    softcap: float | None
    bias: Tensor | None
    sinks: Tensor | None
    sight: Sight
    lse: Tensor | None
    at: int | None
    query_at: Tensor
    key_at: Tensor
    used: Tensor
    places: Tensor
    place_of_key: Tensor
    matches: Matches | None
    declared: Sight | None
    block: tuple[int, int]
    top: int
    pairs: bool
    tile: tuple[int, int] | None


@dataclass(eq=False)
class Sums:
    """What `stream` returns. Rows that do not count are NaN in row tensors and absent from sums.

    active: bool (H, L), the rows that count: asked for, and with a key to attend to.
    Row tensors (H, L): lse (natural, sink logit included), mass Σ_j p_ij, entropy (nats), largest
    weight, sink (the sink logit's weight), spread ‖s_i − mean s_i‖₂ over visible keys; top_keys
    and top_weights (H, L, k), strongest first, −1 and 0 where a row has fewer keys.
    distances (H, n): Σ_i p over pairs with i − j = distance_low + column.
    received (H, S), cells (H, rows, columns), gram and overlap (H, H): Σ p p' and Σ √(p p') with
    overlap None where pairs were not asked for (gram then has only its diagonal, (H,)).
    sink_sums (H, n), duplicate (H,), induction (H,), hidden (H,): sums of p over rows.
    """

    active: Tensor
    lse: Tensor
    mass: Tensor
    entropy: Tensor
    largest: Tensor
    sink: Tensor
    spread: Tensor
    top_keys: Tensor
    top_weights: Tensor
    distance_low: int
    distances: Tensor
    received: Tensor
    cells: Tensor
    gram: Tensor
    overlap: Tensor | None
    sink_sums: Tensor
    duplicate: Tensor
    induction: Tensor
    hidden: Tensor


def wide_dtype(device: torch.device) -> torch.dtype:
    """The dtype of accumulators that hold one number a row or a key (MPS has no float64)."""
    return torch.float32 if device.type == "mps" else torch.float64


def blank(job: Job) -> Sums:
    """Sums of no rows: NaN in row tensors, zeros elsewhere."""
    heads, queries = job.query.shape[:2]
    keys, device, wide = job.key.shape[1], job.query.device, wide_dtype(job.query.device)
    top = min(job.top, keys)

    def rows(value: float = math.nan, *more: int, dtype: torch.dtype | None = None) -> Tensor:
        shape = (heads, queries, *more)
        return torch.full(shape, value, dtype=dtype or wide, device=device)

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=wide, device=device)

    if job.at is not None:
        low, high = job.at - (keys - 1), job.at + queries - 1
    else:
        low = int(job.query_at.min() - job.key_at.max()) if keys and queries else 0
        high = int(job.query_at.max() - job.key_at.min()) if keys and queries else 0
    gq, gk = job.block
    return Sums(
        active=rows(False, dtype=torch.bool),
        lse=rows(), mass=rows(), entropy=rows(), largest=rows(), sink=rows(), spread=rows(),
        top_keys=rows(-1, top, dtype=torch.int64),
        top_weights=rows(0.0, top, dtype=job.query.dtype),
        distance_low=low,
        distances=zeros(heads, max(0, high - low + 1)),
        received=zeros(heads, keys),
        cells=zeros(heads, -(-queries // gq), -(-keys // gk)),
        gram=zeros(heads, heads) if job.pairs else zeros(heads),
        overlap=zeros(heads, heads) if job.pairs else None,
        sink_sums=zeros(heads, job.places.shape[0]),
        duplicate=zeros(heads), induction=zeros(heads), hidden=zeros(heads),
    )  # fmt: skip


def first_keys(job: Job) -> list[tuple[int, int]]:
    """(key, place) of the keys that hold one of the first positions."""
    first = (job.place_of_key >= 0).nonzero().flatten()
    return list(zip(first.tolist(), job.place_of_key[first].tolist(), strict=True))


def longest(x: Tensor) -> float:
    """The largest Euclidean norm of a row."""
    return float(torch.linalg.vector_norm(x, dim=-1).max()) if x.numel() else 0.0
