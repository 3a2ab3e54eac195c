"""Earlier positions with the same token: what duplicate-token and induction heads look for."""

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
        # Sorted by token and, inside a token, by position. The earlier matches of token i are then
        # consecutive: from its token's begin to where (token, i) itself would stand.
        token = torch.unique(ids, return_inverse=True)[1]
        place = token * keys + torch.arange(keys, device=ids.device)
        kept = place[real].sort().values
        self.order = kept % max(1, keys)
        own = place[keys - queries :]
        self.first = torch.searchsorted(kept, own - own % max(1, keys))
        self.count = torch.searchsorted(kept, own) - self.first

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
