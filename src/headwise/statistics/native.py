"""The inner loop in the compiled module (native/statistics.inl): the same sums, on the CPU.

Rows are summed in parts that the sizes alone decide, so the bits do not depend on the number of
threads. Row quantities and sums over rows are float64; single weights have the call's precision.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headwise import native
from headwise.backends.native import CODES, tell_bias, tell_mask
from headwise.statistics.interface import Job, Sums, blank, first_keys, longest


def refuse(job: Job) -> str | None:
    """Why the native pass cannot take a job; None where it can."""
    if job.query.device.type != "cpu":
        return f"it runs on the CPU, and the call is on {job.query.device}"
    if job.tile is not None:
        return "the size of a tile was given, and its tiles are its own"
    if not (job.query.numel() and job.key.numel()):
        return "there is nothing to compute"
    # A finite product of the longest vectors is a bound on every score; NaN fails it too.
    largest = longest(job.query) * longest(job.key)
    limit = torch.finfo(job.query.dtype).max / 4
    if not largest * max(1.0, job.scale) < limit:
        return "a score may not be finite"
    for name, added in (("bias", job.bias), ("sink", job.sinks)):
        if added is not None and not bool(((added.abs() < limit) | (added == -math.inf)).all()):
            return f"a {name} is not finite"
    try:
        native.module()
    except ImportError as error:
        return str(error)
    return None


def run(job: Job) -> Sums:
    """Every sum of `Sums`, in memory linear in L + S; `refuse(job)` must be None."""
    sums = blank(job)
    kept: list[Tensor] = []

    def at(tensor: Tensor, dtype: torch.dtype | None = None) -> int:
        """Where a contiguous tensor of this dtype lies; it is kept until the pass is done."""
        tensor = tensor.to(dtype or tensor.dtype).contiguous()
        kept.append(tensor)
        return tensor.data_ptr()

    def rows(tensor: Tensor) -> tuple[int, int, int, int]:
        if tensor.stride(2) != 1:
            tensor = tensor.contiguous()
        kept.append(tensor)
        return tensor.data_ptr(), 0, tensor.stride(0), tensor.stride(1)

    heads, queries, dim = job.query.shape
    kv_heads, keys = job.key.shape[:2]
    runs, bits, masks = tell_mask(job.sight.mask, job.sight.item)
    kept.extend(masks)
    declared = None
    if job.declared is not None:
        *stated, masks = tell_mask(job.declared.mask, job.declared.item)
        declared = tuple(stated)
        kept.extend(masks)
    active = job.sight.active
    first = torch.tensor(first_keys(job), dtype=torch.int64).reshape(-1, 2)
    matches = job.matches
    overlap = sums.overlap if sums.overlap is not None else sums.gram
    native.module().statistics(
        CODES[job.query.dtype],
        (1, heads, kv_heads, queries, keys, dim, dim),
        rows(job.query),
        rows(job.key),
        runs,
        bits,
        None if job.bias is None else tell_bias(job.bias[None]),
        0 if job.sinks is None else at(job.sinks, job.query.dtype),
        (job.scale, job.softcap or 0.0, 0.0),
        torch.get_num_threads(),
        (at(active, torch.uint8), 0 if active.shape[0] == 1 else queries),
        declared,
        (
            int(job.at is not None),
            job.at or 0,
            sums.distance_low,
            sums.distances.shape[1],
            at(job.query_at),
            at(job.key_at),
        ),
        (at(first), first.shape[0], at(job.places), job.places.shape[0]),
        None if matches is None else (at(matches.order), at(matches.first), at(matches.count)),
        (*job.block, *sums.cells.shape[1:], sums.top_keys.shape[2], int(job.pairs)),
        tuple(
            x.data_ptr()
            for x in (
                sums.lse,
                sums.mass,
                sums.entropy,
                sums.largest,
                sums.sink,
                sums.spread,
                sums.top_keys,
                sums.top_weights,
            )
        ),
        tuple(
            x.data_ptr()
            for x in (
                sums.distances,
                sums.received,
                sums.cells,
                sums.gram,
                overlap,
                sums.sink_sums,
                sums.duplicate,
                sums.induction,
                sums.hidden,
            )
        ),
    )
    sums.active.copy_(active.expand(sums.active.shape))
    return sums
