"""Estimates from a random sample of query rows, each with its standard error: faster, not exact."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.call import AttentionCall, own_precision
from headwise.masks import Mask
from headwise.statistics.interface import Job, wide_dtype
from headwise.statistics.jobs import prepare
from headwise.statistics.sight import Sight
from headwise.statistics.stream import TILE


@dataclass(frozen=True, eq=False)
class Estimate:
    """A mean over sampled rows and its standard error, tensors of one shape.

    The standard error is s/√n·√(1 − n/N), n rows of N sampled without replacement: 0 where every
    row was taken, NaN where fewer than two were.
    """

    mean: Tensor
    standard_error: Tensor


@dataclass(frozen=True, eq=False)
class SampledStatistics:
    """Estimates of the row means of `HeadStatistics`, by the same names and definitions.

    estimates: (B, H) each, except sink (B, H, 4) and bhattacharyya (B, H, H). `hidden_mass` is a
    sum there and a mean over rows here. rows: (B,) rows sampled; of: (B,) rows that count.
    """

    estimates: dict[str, Estimate]
    rows: Tensor
    of: Tensor

    def __getitem__(self, name: str) -> Estimate:
        return self.estimates[name]


def sampled_statistics(
    call: AttentionCall,
    *,
    sampled: int = 256,
    seed: int = 0,
    declared: Mask | None = None,
    token_ids: Tensor | None = None,
    query_rows: Tensor | None = None,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
) -> SampledStatistics:
    """Statistics of exact rows for a random sample of queries, with standard errors.

    Args:
        call: the attention computation.
        sampled: rows drawn from each batch element, without replacement; all where there are fewer.
        seed: of the generator that draws them.
        declared, token_ids, query_rows, query_positions, key_positions: as `head_statistics`.

    Raises:
        ValueError: a shape or a number that does not fit the call.
    """
    if sampled < 1:
        raise ValueError(f"sampled_statistics: wanted at least 1 row, got sampled={sampled}")
    options = {
        "lse": None,
        "token_ids": token_ids,
        "query_rows": query_rows,
        "query_positions": query_positions,
        "key_positions": key_positions,
    }
    draw = torch.Generator().manual_seed(seed)
    items, taken, of = [], [], []
    for job in prepare(call, options, declared=declared):
        counted = job.sight.active.any(0).nonzero().flatten()
        chosen = torch.randperm(counted.shape[0], generator=draw)[:sampled].sort().values
        rows = counted[chosen.to(counted.device)]
        with own_precision(call.query.device):
            items.append(_estimate(job, rows, counted.shape[0]))
        taken.append(rows.shape[0])
        of.append(counted.shape[0])
    estimates = {
        name: Estimate(
            torch.stack([item[name].mean for item in items]).double().cpu(),
            torch.stack([item[name].standard_error for item in items]).double().cpu(),
        )
        for name in items[0]
    }
    return SampledStatistics(estimates, torch.tensor(taken), torch.tensor(of))


def _estimate(job: Job, rows: Tensor, population: int) -> dict[str, Estimate]:
    heads, keys = job.query.shape[0], job.key.shape[1]
    step = max(1, TILE // max(1, heads * keys))
    parts = [_rows(job, rows[begin : begin + step]) for begin in range(0, rows.shape[0], step)]
    if not parts:
        parts = [_rows(job, rows)]
    joined = {
        name: (
            torch.cat([part[name][0] for part in parts], 1),
            torch.cat([part[name][1] for part in parts], 1),
        )
        for name in parts[0]
    }
    left_out = max(0.0, 1 - rows.shape[0] / max(1, population))
    moved, mass = joined.pop("moved"), joined.pop("mass")
    out = {name: _mean(values, where, left_out) for name, (values, where) in joined.items()}
    # A ratio of two means; its error is that of the residuals (Cochran 1977, section 6.4).
    size = _mean(*mass, left_out).mean
    ratio = _mean(*moved, left_out).mean / size
    residual = (moved[0] - ratio[:, None] * mass[0]) / size[:, None]
    out["distance"] = Estimate(ratio, _mean(residual, moved[1], left_out).standard_error)
    return out


def _mean(values: Tensor, where: Tensor, left_out: float) -> Estimate:
    """Mean over axis 1 where `where`, and its standard error."""
    count = where.sum(1)
    mean = torch.where(where, values, 0.0).sum(1) / count
    apart = torch.where(where, values - mean.unsqueeze(1), 0.0).square().sum(1)
    if left_out == 0:
        return Estimate(mean, torch.where(count > 0, 0.0, torch.full_like(mean, math.nan)))
    variance = torch.where(count > 1, apart / (count - 1).clamp(min=1), math.nan)
    return Estimate(mean, (variance / count * left_out).sqrt())


def _rows(job: Job, rows: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Values of some rows and where they count, (H, rows, …), from their whole weights."""
    p, log_p, seen, active = _weights(job, rows)
    wide = wide_dtype(p.device)
    counts = seen.sum(-1).expand(active.shape)
    # 0·(−inf) is 0 here; NaN stays NaN.
    entropy = -torch.where(p == 0, 0.0, p * log_p).sum(-1)
    apart = job.query_at[rows, None] - job.key_at[None, :]
    used = job.key_at[job.used]

    def weight_at(distance: int) -> tuple[Tensor, Tensor]:
        place = job.query_at[rows] - distance
        exists = torch.zeros_like(active)
        if used.numel():
            exists = active & (place >= used.min()) & (place <= used.max())
        return torch.where(apart == distance, p, 0.0).sum(-1), exists

    both = active[:, None] & active[None]
    root = p.sqrt().transpose(0, 1)
    out = {
        "entropy": (entropy, active),
        "effective_keys": (entropy.exp(), active),
        "relative_entropy": (entropy / counts.clamp(min=2).to(wide).log(), active & (counts >= 2)),
        "largest_weight": (p.amax(-1) if p.shape[-1] else entropy, active),
        "moved": ((p * apart.abs()).sum(-1), active),
        "mass": (p.sum(-1), active),
        "previous_token": weight_at(1),
        "own_token": weight_at(0),
        "bhattacharyya": (
            torch.bmm(root, root.mT).permute(1, 0, 2),
            both.permute(0, 2, 1),
        ),
    }
    on_place, exists = [], []
    for k in range(job.places.shape[0]):
        holds = job.place_of_key == k
        on_place.append(torch.where(holds, p, 0.0).sum(-1))
        later = job.query_at[rows] >= job.places[k]
        exists.append(active & later & holds.any())
    out["sink"] = (torch.stack(on_place, -1), torch.stack(exists, -1))
    if job.sinks is not None:
        out["sink_logit_mass"] = (1 - p.sum(-1), active)
    if job.declared is not None:
        stated = _tile_rows(job.declared, rows)
        out["hidden_mass"] = (torch.where(stated, 0.0, p).sum(-1), active)
    if job.matches is not None:
        matched = active & job.matches.matched[rows]
        for name, later_by in (("duplicate_token", 0), ("induction", 1)):
            total = torch.zeros_like(entropy)
            for place, row in enumerate(rows.tolist()):
                _, key = job.matches.pairs(slice(row, row + 1))
                key = key[key + later_by < p.shape[-1]] + later_by
                total[:, place] = p[:, place, key].sum(-1)
            out[name] = (total, matched)
    return {name: (values.to(wide), where) for name, (values, where) in out.items()}


def _tile_rows(sight: Sight, rows: Tensor) -> Tensor:
    everything = slice(0, sight.keys)
    tiles = [sight.tile(slice(row, row + 1), everything) for row in rows.tolist()]
    return torch.cat(tiles, -2) if tiles else sight.tile(slice(0, 0), everything)


def _weights(job: Job, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """p and ln p (H, rows, S) of some rows, what they see, and which rows count (H, rows)."""
    heads = job.query.shape[0]
    key = job.key.repeat_interleave(heads // max(1, job.key.shape[0]), 0)
    s = (job.query[:, rows] * job.scale) @ key.mT
    if job.softcap is not None:
        s = job.softcap * torch.tanh(s / job.softcap)
    if job.bias is not None:
        s = s + (job.bias[:, rows] if job.bias.shape[-2] > 1 else job.bias)
    seen = _tile_rows(job.sight, rows)
    active = job.sight.active[:, rows].expand(heads, -1)
    s = torch.where(seen & active[..., None], s, -torch.inf)
    peak = s.amax(-1) if s.shape[-1] else s.new_full(s.shape[:2], -torch.inf)
    active = active & (peak != -torch.inf)
    if job.sinks is not None:
        peak = torch.maximum(peak, job.sinks.to(s.dtype)[:, None])
    # Less the largest score first: then e^{s−m} and ln p keep their digits under large offsets.
    s = s - torch.where(active, peak, 0.0)[..., None]
    total = s.exp().sum(-1)
    if job.sinks is not None:
        total = total + (job.sinks.to(s.dtype)[:, None] - peak).exp()
    log_p = s - torch.where(active, total, 1.0).log()[..., None]
    return log_p.exp(), log_p, seen, active
