"""What one batch element's rows may see, arranged so that tiles pay for masks only at edges."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headwise.call import AttentionCall
from headwise.masks import CompiledMask, keep


class Span(NamedTuple):
    """Keys of a row block: all visible pairs lie in [low, high), every pair of the block that lies
    in [solid_low, solid_high) is visible. The mask matters only between the two."""

    low: int
    high: int
    solid_low: int
    solid_high: int


def visible_pairs(call: AttentionCall) -> CompiledMask:
    """The call's mask, less the pairs that a bias of −inf hides (reference.py hides them too)."""
    bias = call.bias
    if bias is None or not bool((bias == -torch.inf).any()):
        return call.visible
    return (call.visible & keep(bias != -torch.inf)).compile(
        batch=call.batch,
        heads=call.num_heads,
        queries=call.query_length,
        keys=call.key_length,
        device=call.query.device,
    )


class Sight:
    """The mask of one batch element.

    active: bool (h, L), h is H or 1: rows that count and that see a key.
    counts: int64 (h, L): the keys that each row sees.
    """

    def __init__(self, mask: CompiledMask, item: int, rows_that_count: Tensor | None) -> None:
        self.mask = mask
        self.item = item
        sizes = mask.sizes
        self.queries, self.keys = sizes.queries, sizes.keys
        counts = self._pick(mask.counts())
        self.counts = counts.expand(counts.shape[0], self.queries)
        active = self.counts > 0
        if rows_that_count is not None:
            active = active & rows_that_count.to(active.device)
        self.active = active
        self._active = active.cpu().numpy()
        self._runs: np.ndarray | None = None
        if mask.intervals is not None:
            runs = self._pick(mask.intervals)
            runs = runs.expand(runs.shape[0], self.queries, *runs.shape[2:])
            self._runs = runs.cpu().numpy()

    def _pick(self, tensor: Tensor) -> Tensor:
        return tensor[self.item if tensor.shape[0] > 1 else 0]

    def tile(self, rows: slice, keys: slice) -> Tensor:
        """Visibility of a tile: bool, broadcastable to (H, rows, keys)."""
        return self._pick(self.mask.tile(rows, keys))

    def any_active(self, rows: slice) -> bool:
        return bool(self._active[:, rows].any())

    def all_active(self, rows: slice) -> bool:
        return bool(self._active[:, rows].all())

    def span(self, rows: slice) -> Span:
        """The keys that a block of rows needs. Rows that do not count ask for nothing."""
        active = self._active[:, rows]
        if not active.any():
            return Span(0, 0, 0, 0)
        if self._runs is None:
            solid = 0 if self.mask.bits is not None else self.keys
            return Span(0, self.keys, 0, solid)
        runs = self._runs[:, rows]
        heads = max(runs.shape[0], active.shape[0])
        active = np.broadcast_to(active, (heads, active.shape[1]))
        runs = np.broadcast_to(runs, (heads, *runs.shape[1:]))[active]  # (rows, runs, 2)
        starts, ends = runs[..., 0], runs[..., 1]
        filled = ends > starts
        if not filled.any():
            return Span(0, 0, 0, 0)
        low = int(starts[filled].min())
        high = int(ends[filled].max())
        if self.mask.bits is not None or (filled.sum(-1) > 1).any():
            return Span(low, high, low, low)
        # One run a row: what lies in the latest start … the earliest end is seen by all.
        first = int(np.where(filled, starts, -1).max(-1).max())
        last = int(np.where(filled, ends, -1).max(-1).min())
        return Span(low, high, first, last) if last > first else Span(low, high, low, low)

    def used_keys(self) -> Tensor:
        """bool (S,): keys that at least one counted row sees in at least one head."""
        device = self.mask.sizes.device
        if self.mask.bits is None and self._runs is None:
            return torch.full((self.keys,), bool(self._active.any()), device=device)
        if self.mask.bits is None:
            assert self._runs is not None
            heads = max(self._runs.shape[0], self._active.shape[0])
            runs = np.broadcast_to(self._runs, (heads, *self._runs.shape[1:]))
            active = np.broadcast_to(self._active, (heads, self.queries))
            edges = np.zeros(self.keys + 1, dtype=np.int64)
            np.add.at(edges, runs[active][..., 0].ravel(), 1)
            np.add.at(edges, runs[active][..., 1].ravel(), -1)
            return torch.from_numpy(edges[:-1].cumsum() > 0).to(device)
        used = torch.zeros(self.keys, dtype=torch.bool, device=device)
        step = max(1, (1 << 22) // max(1, self.keys))
        for begin in range(0, self.queries, step):
            rows = slice(begin, min(begin + step, self.queries))
            seen = self.tile(rows, slice(0, self.keys)) & self.active[:, rows, None]
            used |= seen.flatten(0, 1).any(0)
        return used

    def uniform_distance(self, query_at: Tensor, key_at: Tensor) -> Tensor:
        """Mean |i − j| of attention spread evenly over each row's keys: (h, L), 0 at idle rows.

        query_at (L,), key_at (S,): positions. Where the keys' positions are consecutive and rows
        see runs, each row is a closed form; else the mask is read in blocks of rows.
        """
        wide = torch.float32 if query_at.device.type == "mps" else torch.float64
        counts = self.counts.to(wide).clamp(min=1)
        step = key_at.new_ones(()) if self.keys < 2 else (key_at[1:] - key_at[:-1])
        if self.mask.bits is None and bool((step == 1).all()) and self.keys:
            at = query_at.to(wide)[None, :]
            base = key_at[0].to(wide)
            if self.mask.intervals is None:
                pairs = torch.tensor([[[[0, self.keys]]]], device=query_at.device)
            else:
                pairs = self._pick(self.mask.intervals)
            runs = pairs.to(wide) + base  # (h, l, n, 2), now in positions
            total = torch.zeros_like(counts)
            for number in range(runs.shape[-2]):
                start, end = runs[..., number, 0], runs[..., number, 1]
                total = total + _spread_to(at, end) - _spread_to(at, start)
            return torch.where(self.active, total / counts, 0.0)
        parts = []
        block = max(1, (1 << 21) // max(1, self.keys))
        for begin in range(0, self.queries, block):
            rows = slice(begin, min(begin + block, self.queries))
            apart = (query_at[rows, None] - key_at[None, :]).abs().to(wide)
            seen = self.tile(rows, slice(0, self.keys))
            parts.append(torch.where(seen, apart, 0.0).sum(-1))
        total = torch.cat(parts, -1) if parts else torch.zeros_like(counts)
        return torch.where(self.active, total / counts, 0.0)


def _spread_to(at: Tensor, end: Tensor) -> Tensor:
    """A function whose difference F(end) − F(start) is Σ |at − p| over p = start … end − 1."""
    # Below `at` the terms fall by one from at − p; above it they rise. Both sums are triangles.
    gap = end - at
    return torch.where(gap > 0, gap * (gap - 1) / 2, -(gap * (gap - 1)) / 2)
