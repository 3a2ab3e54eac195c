"""Head statistics by their definitions (METRICS), on whole float64 maps: slow, plain, for tests.

Written apart from headwise.statistics and in another way: no tiles, no tricks, one batch element
and head at a time.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from headwise import masks
from headwise.call import AttentionCall

BINS = 20  # of the distance histogram: more than any length here needs


def make(
    batch: int = 1, heads: int = 2, kv: int = 1, queries: int = 7, keys: int | None = None,
    dim: int = 5, seed: int = 0, dtype: torch.dtype = torch.float64, size: float = 1.0,
    **more: Any,
) -> AttentionCall:  # fmt: skip
    """A random call; `more` goes to AttentionCall. Values have head dimension 3."""
    keys = queries if keys is None else keys
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype) * size

    q, k = normal(batch, heads, queries, dim), normal(batch, kv, keys, dim)
    return AttentionCall(q, k, normal(batch, kv, keys, 3), **more)


def weights(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    """(A, visible, scores), each (B, H, L, S) in float64."""
    key = call.key.double().repeat_interleave(call.num_heads // call.num_kv_heads, 1)
    scale = 1 / math.sqrt(call.head_dim) if call.scale is None else call.scale
    scores = torch.einsum("bhid,bhjd->bhij", call.query.double(), key) * scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    seen = (call.mask or masks.everything()).dense(
        call.query_length, call.key_length, batch=call.batch, heads=call.num_heads
    )
    if call.bias is not None:
        scores = scores + call.bias.double()
        seen = seen & (call.bias != -math.inf)
    scores = torch.where(seen, scores, -math.inf)
    everything = scores
    if call.sinks is not None:
        sink = call.sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)
        everything = torch.cat((scores, sink), -1)
    p = torch.softmax(everything, -1)[..., : call.key_length]
    return torch.where(seen.any(-1, keepdim=True), p, 0.0), seen, scores


def statistics(
    call: AttentionCall,
    *,
    token_ids: Tensor | None = None,
    query_rows: Tensor | None = None,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    declared: masks.Mask | None = None,
    block: tuple[int, int] = (1, 1),
) -> dict[str, Tensor]:
    """Every statistic of HeadStatistics, as (B, H, …) float64; NaN where nothing is to be meant."""
    a, seen, scores = weights(call)
    batch, heads, length, keys = a.shape
    stated = None
    if declared is not None:
        stated = declared.dense(length, keys, batch=batch, heads=heads)
    out: list[list[dict[str, Tensor]]] = []
    maps = torch.zeros_like(a)
    row_counts = torch.zeros(batch, heads, length, dtype=torch.bool)
    for b in range(batch):
        qp = torch.arange(length) + keys - length
        kp = torch.arange(keys)
        rows_wanted = torch.ones(length, dtype=torch.bool)
        if query_rows is not None:
            rows_wanted = query_rows[b]
        counted = seen[b].any(-1) & rows_wanted  # (H, L)
        row_counts[b] = counted
        used = (seen[b] & counted[..., None]).any(0).any(0)
        first = int(used.nonzero()[0]) if used.any() else 0
        if query_positions is not None:
            qp, kp, first = query_positions[b], key_positions[b], 0
        ids = None if token_ids is None else token_ids[b]
        out.append([])
        for h in range(heads):
            rows = counted[h].nonzero().flatten().tolist()
            maps[b, h, rows] = a[b, h, rows]
            one = _head(a[b, h], seen[b, h], scores[b, h], rows, qp, kp, used, first, ids)
            if stated is not None:
                one["hidden_mass"] = a[b, h, rows][~stated[b, h, rows]].sum()
            if call.sinks is not None:
                one["sink_logit_mass"] = 1 - a[b, h, rows].sum(-1).mean()
            out[-1].append(one)
    result = {
        name: torch.stack([torch.stack([head[name].double() for head in item]) for item in out])
        for name in out[0][0]
    }
    result |= _maps(maps, row_counts, block)
    return result


def _head(
    p: Tensor, seen: Tensor, s: Tensor, rows: list[int], qp: Tensor, kp: Tensor, used: Tensor,
    first: int, ids: Tensor | None,
) -> dict[str, Tensor]:  # fmt: skip
    length, keys = p.shape
    entropy, relative, largest, moved, even, bound, norms = [], [], [], [], [], [], []
    histogram = torch.zeros(BINS, dtype=torch.float64)
    previous, own, duplicate, induction = [], [], [], []
    row_entropy = torch.full((length,), math.nan, dtype=torch.float64)
    sinks: list[list[Tensor]] = [[], [], [], []]
    used_places = kp[used].tolist()
    for i in rows:
        row = p[i]
        h = -torch.special.xlogy(row, row).sum()
        row_entropy[i] = h
        entropy.append(h)
        keys_seen = int(seen[i].sum())
        if keys_seen >= 2:
            relative.append(h / math.log(keys_seen))
        largest.append(row.max())
        apart = (qp[i] - kp).abs()
        moved.append((row * apart).sum())
        even.append(apart[seen[i]].double().mean())
        for j in range(keys):
            d = int(apart[j])
            histogram[math.floor(math.log2(d)) + 1 if d else 0] += row[j]
        visible = s[i][seen[i]]
        norms.append((visible - visible.mean()).norm())
        bound.append(_zhai(float(norms[-1]), keys_seen))
        at = int(qp[i])
        if used_places and min(used_places) <= at - 1 <= max(used_places):
            previous.append(row[kp == at - 1].sum())
        if used_places and min(used_places) <= at <= max(used_places):
            own.append(row[kp == at].sum())
        for k in range(4):
            if at >= first + k and first + k in used_places:
                sinks[k].append(row[(kp == first + k) & used].sum())
        if ids is not None:
            me = i + keys - length
            earlier = [j for j in range(me) if used[j] and ids[j] == ids[me]]
            if earlier:
                duplicate.append(row[earlier].sum())
                induction.append(row[[j + 1 for j in earlier]].sum())
    mass = p[rows].sum()
    out = {
        "entropy": _mean(entropy),
        "effective_keys": _mean([h.exp() for h in entropy]),
        "relative_entropy": _mean(relative),
        "largest_weight": _mean(largest),
        "distance": sum(moved, torch.tensor(0.0).double()) / mass,
        "distance_ratio": sum(moved, torch.tensor(0.0).double()) / mass / _mean(even),
        "distance_histogram": histogram / mass,
        "sink": torch.stack([_mean(column) for column in sinks]),
        "previous_token": _mean(previous),
        "own_token": _mean(own),
        "rows": torch.tensor(len(rows)),
        "frobenius": p[rows].square().sum(),
        "score_norm": _mean(norms),
        "entropy_bound": _mean(bound),
        "row_entropy": row_entropy,
    }
    if ids is not None:
        out |= {"duplicate_token": _mean(duplicate), "induction": _mean(induction)}
        out["matched_rows"] = torch.tensor(len(duplicate))
    return out


def _zhai(sigma: float, keys: int) -> Tensor:
    if keys < 2:
        return torch.tensor(0.0, dtype=torch.float64)
    beta = math.exp(-sigma * math.sqrt(keys / (keys - 1)))
    top = sigma * math.sqrt(keys * (keys - 1)) * beta
    value = math.log(1 + (keys - 1) * beta) + top / (1 + (keys - 1) * beta)
    return torch.tensor(value, dtype=torch.float64)


def _mean(values: list[Tensor]) -> Tensor:
    return torch.stack(values).double().mean() if values else torch.tensor(math.nan).double()


def _maps(p: Tensor, counted: Tensor, block: tuple[int, int]) -> dict[str, Tensor]:
    batch, heads, length, keys = p.shape
    gq, gk = block
    cells = torch.zeros(batch, heads, -(-length // gq), -(-keys // gk), dtype=torch.float64)
    for i in range(cells.shape[2]):
        for j in range(cells.shape[3]):
            part = p[:, :, i * gq : (i + 1) * gq, j * gk : (j + 1) * gk]
            cells[:, :, i, j] = part.sum((-1, -2))
    gram = torch.zeros(batch, heads, heads, dtype=torch.float64)
    cosine, overlap = torch.zeros_like(gram), torch.zeros_like(gram)
    for b in range(batch):
        for g in range(heads):
            for h in range(heads):
                one, two = p[b, g], p[b, h]
                gram[b, g, h] = (one * two).sum()
                cosine[b, g, h] = gram[b, g, h] / (one.norm() * two.norm())
                rows = counted[b, g] & counted[b, h]
                by_row = (one * two).sqrt().sum(-1)[rows]
                overlap[b, g, h] = by_row.mean()
    return {
        "received": p.sum(2), "cells": cells,
        "gram": gram, "cosine": cosine, "bhattacharyya": overlap,
    }  # fmt: skip


def top_keys(call: AttentionCall, count: int) -> tuple[Tensor, Tensor]:
    """Weights (B, H, L, count) of the strongest keys, strongest first, and the whole map."""
    a, _, _ = weights(call)
    return a.sort(-1, descending=True).values[..., :count], a
