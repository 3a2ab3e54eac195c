"""Which earlier positions hold the same token: what duplicate-token and induction heads look for."""

from __future__ import annotations

import torch
from torch import Tensor


class Matches:
    """For each query, the earlier real keys with the query's own token.

    Duplicate token: Σ_{j<i, x_j=x_i} p_ij (Wang 2022, arXiv 2211.00593). Induction:
    Σ_{j≤i, x_{j−1}=x_i} p_ij (Olsson 2022, arXiv 2209.11895): the same keys, each one later. So
    one sorted list serves both, and its size is that of the tokens.

    ids (S,): the keys' tokens; query i is token i + S − L. real: bool (S,), keys that count.
    """

    def __init__(self, ids: Tensor, real: Tensor, queries: int) -> None:
        keys = ids.shape[0]
        index = torch.arange(keys, device=ids.device)
        kept = index[real]
        # Sorted by token and, inside a token, by position: the earlier matches of a token are the
        # entries between its group's begin and itself.
        self.order = kept[torch.sort(ids[kept], stable=True).indices]
        grouped = ids[self.order]
        begin = torch.searchsorted(grouped, grouped, side="left")
        place = torch.arange(self.order.shape[0], device=ids.device)
        self.first = torch.zeros(keys, dtype=torch.int64, device=ids.device)
        self.count = torch.zeros_like(self.first)
        self.first[self.order] = begin
        self.count[self.order] = place - begin
        self.first, self.count = self.first[keys - queries :], self.count[keys - queries :]

    @property
    def matched(self) -> Tensor:
        """bool (L,): queries whose token occurred before."""
        return self.count > 0

    def pairs(self, rows: slice) -> tuple[Tensor, Tensor]:
        """(row inside the block, key): every match of a block of rows."""
        count, first = self.count[rows], self.first[rows]
        row = torch.repeat_interleave(torch.arange(count.shape[0], device=count.device), count)
        before = torch.cumsum(count, 0) - count
        place = torch.arange(row.shape[0], device=count.device) - before[row] + first[row]
        return row, self.order[place]

    def mass(self, weight: Tensor, scale: Tensor, rows: slice, keys: slice, later: int) -> Tensor:
        """Σ over matches of weight·scale, per head (H,). weight (H, rows, keys): a tile."""
        row, key = self.pairs(rows)
        key = key + later - keys.start
        inside = (key >= 0) & (key < keys.stop - keys.start)
        row, key = row[inside], key[inside]
        if not row.numel():
            return scale.new_zeros(scale.shape[0])
        return (weight[:, row, key] * scale[:, row]).sum(-1)
