"""Statistics of every head of one attention call: the definitions, on the sums of stream.py."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from headwise.call import AttentionCall, own_precision
from headwise.masks import Mask
from headwise.statistics.bounds import Cost, entropy_lower_bound, low_rank_note, measure_cost
from headwise.statistics.interface import Job, Sums, wide_dtype
from headwise.statistics.jobs import prepare
from headwise.statistics.sight import visible_pairs
from headwise.statistics.stream import stream


@dataclass(frozen=True, eq=False)
class HeadStatistics:
    """What each head of one call does. Attention maps are clues, never explanations.

    B batch, H query heads, L queries, S keys. Everything is on the CPU. A mean is over the rows
    that count: asked for by `query_rows`, and with at least one key they may see; it is NaN where
    there is no such row. With a learned sink a row's weights sum to less than 1.

    Per head, (B, H), float64:
        entropy: mean of H_i = −Σ_j p_ij ln p_ij, nats (Clark 2019, arXiv 1906.04341).
        effective_keys: mean of e^{H_i}, keys. relative_entropy: mean of H_i/ln|M_i| over the
            rows that see |M_i| ≥ 2 keys.
        largest_weight: mean of max_j p_ij (Voita 2019, arXiv 1905.09418).
        distance: Σ p_ij |i − j| / Σ p_ij, in positions (Vig & Belinkov 2019, arXiv 1906.04284).
        distance_ratio: that, over the distance of uniform attention with the same mask.
        previous_token: mean p_{i,i−1} over rows whose previous position holds a key; own_token:
            mean p_{i,i}.
        duplicate_token, induction: mean over rows whose token occurred before of the weight on
            those earlier tokens, and on the tokens right after them; None without token ids
            (Wang 2022, arXiv 2211.00593; Olsson 2022, arXiv 2209.11895). matched_rows: how many
            rows those are. Olsson's measure takes [BOS] r r with random r: on it, such rows are the
            second copy.
        hidden_mass: Σ of the weights outside the declared mask, must be exactly 0; None when no
            mask was declared.
        sink_logit_mass: mean of 1 − Σ_j p_ij; None without learned sinks.
        frobenius: ‖A‖²_F. rows: rows that count.
        entropy_bound: mean of the least entropy that scores of each row's measured norm allow
            (Zhai 2023, arXiv 2303.06296, theorem 3.1). score_norm: mean of that norm,
            ‖s_i − mean s_i‖₂ over the keys that the row sees.
    sink: (B, H, 4), α_1 … α_4: α_k = mean over rows at or after the k-th real token of the weight
        on it (Gu 2024, arXiv 2410.10781). NaN where there are fewer tokens.
    distance_histogram: (B, H, bins): share of the weight at distances {0}, {1}, {2, 3}, {4 … 7} …
    Per row: row_entropy, row_lse (natural, sink logit included), (B, H, L) float64, NaN at rows
        that do not count. top_keys int64 and top_weights, (B, H, L, k): the k strongest keys of
        each row, strongest first; −1 and 0 where there are fewer.
    received: (B, H, S), Σ_i p_ij. cells: (B, H, m, n), Σ of p over blocks of `block` =
        (queries, keys) pairs. Both leave out rows that do not count.
    gram: (B, H, H), G₁ = Σ_ij p^h p^g; cosine: G₁ normalised (Li 2018, arXiv 1810.10183).
    bhattacharyya: (B, H, H), mean_i Σ_j √(p^h_ij p^g_ij); ln 2 ≤ JS/(1 − BC) ≤ 1, so it stands
        for the Jensen–Shannon divergence. All three None without `pairs`.
    """

    entropy: Tensor
    effective_keys: Tensor
    relative_entropy: Tensor
    largest_weight: Tensor
    distance: Tensor
    distance_ratio: Tensor
    distance_histogram: Tensor
    sink: Tensor
    previous_token: Tensor
    own_token: Tensor
    duplicate_token: Tensor | None
    induction: Tensor | None
    matched_rows: Tensor | None
    hidden_mass: Tensor | None
    sink_logit_mass: Tensor | None
    rows: Tensor
    frobenius: Tensor
    score_norm: Tensor
    entropy_bound: Tensor
    row_entropy: Tensor
    row_lse: Tensor
    top_keys: Tensor
    top_weights: Tensor
    received: Tensor
    cells: Tensor
    block: tuple[int, int]
    gram: Tensor | None
    cosine: Tensor | None
    bhattacharyya: Tensor | None
    cost: Cost
    low_rank: str | None


def head_statistics(
    call: AttentionCall,
    *,
    lse: Tensor | None = None,
    declared: Mask | None = None,
    token_ids: Tensor | None = None,
    query_rows: Tensor | None = None,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    map_cells: int = 256,
    top: int = 8,
    pairs: bool = True,
    tile: tuple[int, int] | None = None,
) -> HeadStatistics:
    """Exact statistics of every head of a call, in memory linear in L and S.

    Args:
        call: the attention computation; half-precision tensors are read as float32.
        lse: (B, H, L), the call's logsumexp, where it is known: it saves the first of two passes
            over rows too long for one tile.
        declared: the mask that the call is believed to have; weight outside it is hidden mass.
        token_ids: (B, S) or (S,), the keys' tokens; query i is token i + S − L.
        query_rows: bool (B, L) or (L,), True for rows that count. Padding rows are not queries.
        query_positions, key_positions: whole numbers (B, L) and (B, S), or without B; default:
            aligned at the end, query i at i + S − L and key j at j. Give both, counted from the
            real tokens, where the first visible key is not the first token, and for
            cross-attention, where the two axes count apart.
        map_cells: the pooled map has at most map_cells × map_cells cells.
        top: strongest keys kept for each row.
        pairs: compare all pairs of heads.
        tile: (rows, keys) of a tile; None chooses.

    Raises:
        ValueError: a shape or a number that does not fit the call.
    """
    if map_cells < 1 or top < 0 or (tile is not None and min(tile) < 1):
        raise ValueError(
            f"head_statistics: wanted map_cells ≥ 1, top ≥ 0 and tile sides ≥ 1, "
            f"got map_cells={map_cells}, top={top}, tile={tile}"
        )
    block = (
        max(1, -(-call.query_length // map_cells)),
        max(1, -(-call.key_length // map_cells)),
    )
    options = {
        "lse": lse,
        "token_ids": token_ids,
        "query_rows": query_rows,
        "query_positions": query_positions,
        "key_positions": key_positions,
    }
    with own_precision(call.query.device):
        jobs = prepare(
            call, options, declared=declared, block=block, top=top, pairs=pairs, tile=tile
        )
        return _join(call, [_finish(job, stream(job)) for job in jobs], block)


def _finish(job: Job, sums: Sums) -> dict[str, Tensor | None]:
    """One batch element's statistics from its sums."""
    wide = wide_dtype(job.query.device)
    active = sums.active
    rows = active.sum(-1)
    counts = job.sight.counts.expand(active.shape)

    def mean(values: Tensor, where: Tensor = active) -> Tensor:
        return torch.where(where, values, 0.0).sum(-1) / where.sum(-1)

    distance, ratio, histogram, own, previous = _distances(job, sums)
    several = active & (counts >= 2)
    share = sums.entropy / counts.clamp(min=2).to(wide).log()
    later = (job.query_at[:, None] >= job.places) & active[..., None]  # (H, L, 4)
    has_place = torch.stack([(job.place_of_key == k).any() for k in range(4)])
    sink = sums.sink_sums / later.sum(1)
    matched = None if job.matches is None else (job.matches.matched & active).sum(-1)
    frobenius = sums.gram if sums.overlap is None else sums.gram.diagonal(dim1=-2, dim2=-1)
    cosine = overlap = None
    if sums.overlap is not None:
        size = frobenius.sqrt()
        cosine = sums.gram / (size[:, None] * size[None, :])
        both = active.to(wide)
        overlap = sums.overlap / (both @ both.mT)
    return {
        "entropy": mean(sums.entropy),
        "effective_keys": mean(sums.entropy.exp()),
        "relative_entropy": mean(share, several),
        "largest_weight": mean(sums.largest),
        "distance": distance,
        "distance_ratio": ratio,
        "distance_histogram": histogram,
        "sink": torch.where(has_place, sink, math.nan),
        "previous_token": previous,
        "own_token": own,
        "duplicate_token": None if matched is None else sums.duplicate / matched,
        "induction": None if matched is None else sums.induction / matched,
        "matched_rows": matched,
        "hidden_mass": None if job.declared is None else sums.hidden,
        "sink_logit_mass": None if job.sinks is None else mean(sums.sink),
        "rows": rows,
        "frobenius": frobenius,
        "score_norm": mean(sums.spread),
        "entropy_bound": mean(entropy_lower_bound(sums.spread, counts)),
        "row_entropy": sums.entropy,
        "row_lse": sums.lse,
        "top_keys": sums.top_keys,
        "top_weights": sums.top_weights,
        "received": sums.received,
        "cells": sums.cells,
        "gram": None if sums.overlap is None else sums.gram,
        "cosine": cosine,
        "bhattacharyya": overlap,
    }


def _distances(job: Job, sums: Sums) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Distance, its ratio to uniform attention, its histogram, own token, previous token."""
    active, by_distance = sums.active, sums.distances
    wide = by_distance.dtype
    signed = torch.arange(by_distance.shape[-1], device=by_distance.device) + sums.distance_low
    apart = signed.abs()
    mass = by_distance.sum(-1)
    distance = (by_distance * apart).sum(-1) / mass
    uniform = job.sight.uniform_distance(job.query_at, job.key_at)
    even = torch.where(active, uniform.to(wide).expand(active.shape), 0.0).sum(-1) / active.sum(-1)
    # The bins {0}, {1}, {2, 3}, {4 … 7} …: the number of binary digits of the distance.
    digits = torch.frexp(apart.to(wide)).exponent.long()
    bins = int(digits.max()) + 1 if digits.numel() else 1
    histogram = by_distance.new_zeros(by_distance.shape[0], bins)
    histogram.index_add_(1, digits, by_distance)

    def at(apart_by: int) -> Tensor:
        """Mean weight at one signed distance, over rows whose key at that position exists."""
        column = apart_by - sums.distance_low
        used = job.key_at[job.used]
        if not used.numel() or not 0 <= column < by_distance.shape[-1]:
            return by_distance.new_full(by_distance.shape[:1], math.nan)
        place = job.query_at - apart_by
        exists = active & (place >= used.min()) & (place <= used.max())
        return by_distance[:, column] / exists.sum(-1)

    return distance, distance / even, histogram / mass[:, None], at(0), at(1)


def _join(
    call: AttentionCall,
    items: list[dict[str, Tensor | None]],
    block: tuple[int, int],
) -> HeadStatistics:
    """Batch elements side by side, on the CPU."""
    joined: dict[str, Tensor | None] = {}
    for name in items[0]:
        parts = [item[name] for item in items]
        tensors = [part for part in parts if part is not None]
        if len(tensors) < len(parts):
            joined[name] = None
            continue
        if name == "distance_histogram":
            # Positions may reach further in one batch element than in another.
            bins = max(part.shape[-1] for part in tensors)
            # A head without rows that count has no shares, in no bin.
            tensors = [
                torch.where(part[..., :1].isnan(), math.nan, pad(part, (0, bins - part.shape[-1])))
                for part in tensors
            ]
        stacked = torch.stack(tensors).cpu()
        wide = stacked.is_floating_point() and name != "top_weights"
        joined[name] = stacked.to(torch.float64) if wide else stacked
    return HeadStatistics(
        block=block,
        cost=measure_cost(call, visible_pairs(call)),
        low_rank=low_rank_note(call.head_dim, call.key_length),
        **joined,  # type: ignore[arg-type]
    )
