"""Masks of other libraries, read back: bool grids, additive grids, block masks, padding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from headwise import masks
from headwise.intervals import CompiledMask, Mask, unexpand

# An additive grid of zeros and one number at or below this is a mask: e^-10000 is 0 in every dtype.
# Older models write -1e4 or -1e9 where newer ones write the dtype's minimum.
LOWEST_OFFSET = -1e4


class Read(NamedTuple):
    """What a grid says: who may be seen, and what is added to the scores."""

    mask: Mask | None
    bias: Tensor | None


class Reader:
    """read_grid, once for a tensor that many layers share: reading 4096² entries takes seconds.

    A tensor written to since then is read again. Its version tells; under inference mode, where
    tensors have none, a copy is compared. Tensors are held until `forget`, so that no other gets
    their id.
    """

    def __init__(self) -> None:
        self._known: dict[tuple, tuple[Tensor, int | Tensor, Read]] = {}

    def __call__(
        self, grid: Tensor | None, batch: int, heads: int, queries: int, keys: int
    ) -> Read:
        if grid is None:
            return Read(None, None)
        key = (id(grid), batch, heads, queries, keys)
        known = self._known.get(key)
        if known is not None:
            state = known[1]
            if torch.equal(state, grid) if isinstance(state, Tensor) else state == grid._version:
                return known[2]
        read = read_grid(grid, batch, heads, queries, keys)
        now = grid.clone() if grid.is_inference() else grid._version
        self._known[key] = (grid, now, read)
        return read

    def forget(self) -> None:
        self._known.clear()


def read_grid(grid: Tensor | None, batch: int, heads: int, queries: int, keys: int) -> Read:
    """A dense attention mask in torch's meaning (bool: True is visible; float: added to scores).

    `grid` broadcasts to (B, H, L, S) as torch broadcasts. Hidden entries of a float grid are −inf,
    numbers near the dtype's minimum, or, where the rest is 0, one number at or below −10000. Zeros
    add nothing and make no bias.
    """
    if grid is None:
        return Read(None, None)
    while grid.dim() < 4:
        grid = grid[None]
    if grid.dim() > 4:
        grid = grid.flatten(0, grid.dim() - 4)
    if grid.shape[-1] > keys:  # made for a longer cache; the model reads its first keys
        grid = grid[..., :keys]
    grid = unexpand(grid)
    # nn.MultiheadAttention writes a copy a head; one is enough where all are the same.
    if grid.shape[1] > 1 and bool((grid == grid[:, :1]).all()):
        grid = grid[:, :1]
    if grid.dtype == torch.bool:
        return Read(_visible(grid, queries, keys), None)
    if not grid.is_floating_point():
        raise TypeError(f"an attention mask of dtype {grid.dtype} is neither bool nor float")
    hidden = grid <= torch.finfo(grid.dtype).min / 4
    rest = torch.where(hidden, 0.0, grid)
    low = rest.min() if rest.numel() else rest.new_zeros(())
    if bool(low <= LOWEST_OFFSET) and bool(((rest == 0) | (rest == low)).all()):
        hidden, rest = hidden | (rest == low), torch.zeros_like(rest)
    mask = _visible(~hidden, queries, keys) if bool(hidden.any()) else None
    return Read(mask, rest if bool((rest != 0).any()) else None)


def _visible(grid: Tensor, queries: int, keys: int) -> Mask | None:
    if bool(grid.all()):
        return None
    mask = masks.from_dense(grid.expand(*grid.shape[:3], keys))
    # Said as what it is where it is plainly causal: backends and reports know that word.
    if grid.shape[:2] == (1, 1) and grid.shape[2] == queries:
        plain = mask.compile(batch=1, heads=1, queries=queries, keys=keys, device=grid.device)
        shape = describe(plain)
        if shape == Shape(causal=True) and queries > 1:
            return masks.causal()
    return mask


def padding_of(real: Tensor) -> Mask | None:
    """(B, S), 1 or True for real tokens."""
    return None if bool(real.bool().all()) else masks.padding(real.bool())


def real_keys(visible: CompiledMask) -> Tensor:
    """(B, S) bool: keys that at least one row of any head may see."""
    sizes = visible.sizes
    if visible.is_full:
        return torch.ones(sizes.batch, sizes.keys, dtype=torch.bool, device=sizes.device)
    if visible.bits is not None or visible.intervals is None:
        seen = visible.tile().any(2).any(1)
        return seen.expand(sizes.batch, sizes.keys)
    # The runs as +1 and −1 on a line of keys: memory linear in L and S.
    runs = visible.intervals.flatten(1, 3).long()
    line = runs.new_zeros(runs.shape[0], sizes.keys + 1)
    one = torch.ones_like(runs[..., 0])
    line.scatter_add_(1, runs[..., 0], one)
    line.scatter_add_(1, runs[..., 1], -one)
    return (line.cumsum(1)[:, :-1] > 0).expand(sizes.batch, sizes.keys)


@dataclass(frozen=True)
class Shape:
    """A mask in a few plain properties; `other` is the visible share of one that has no word."""

    causal: bool = False
    aligned_at_start: bool = False
    window: int | None = None
    sides: tuple[int, int] | None = None
    padding: bool = False
    empty_rows: int = 0
    other: float | None = None

    def words(self) -> str:
        """For people: "causal", "full", "padding", "causal + window 128" …"""
        parts = []
        if self.other is not None:
            parts.append(f"irregular, {self.other:.0%} visible")
        if self.causal:
            parts.append("causal from the first key" if self.aligned_at_start else "causal")
        if self.window is not None:
            parts.append(f"window {self.window}")
        if self.sides is not None:
            parts.append(f"window {self.sides[0]} back, {self.sides[1]} ahead")
        if self.padding:
            parts.append("padding")
        if not parts:
            parts.append("full")
        text = " + ".join(parts)
        if self.empty_rows:
            text += f" ({self.empty_rows} rows see no key)"
        return text


def describe(visible: CompiledMask) -> Shape:
    """Find the word for a compiled mask: its rows against a band and the keys that are real."""
    if visible.is_full:
        return Shape()
    sizes = visible.sizes
    counts = visible.counts()
    spread = (sizes.batch // counts.shape[0]) * (sizes.queries // max(1, counts.shape[2]))
    empty = int((counts == 0).all(1).sum()) * spread
    runs = visible.intervals
    plain = runs is not None and visible.bits is None
    if plain:
        assert runs is not None
        filled = runs[..., 1] > runs[..., 0]
        plain = runs.shape[1] == 1 and not bool((filled.sum(-1) > 1).any())
    if not plain:
        share = float(counts.double().mean()) / max(1, sizes.keys)
        return Shape(other=share, empty_rows=empty)
    assert runs is not None
    # One run a row, (b, l). Empty rows fit any word, so they are left out.
    far = sizes.keys + 1
    start = torch.where(filled, runs[..., 0], far).amin(-1)[:, 0].long()
    end = torch.where(filled, runs[..., 1], 0).amax(-1)[:, 0].long()
    live = end > 0
    low = torch.where(live, start, far).amin(1, keepdim=True)
    high = end.amax(1, keepdim=True)
    padded = bool((live.any(1) & ((low > 0) | (high < sizes.keys)).squeeze(1)).any())
    if start.shape[1] == 1 and sizes.queries != 1:  # every row alike
        return Shape(padding=padded, empty_rows=empty)
    steps = torch.arange(sizes.queries, device=sizes.device)[None]
    bands = {}
    for shift in (sizes.keys - sizes.queries, 0):
        band = _band(start, end, live, low, high, steps + shift, sizes.keys)
        if band is not None:
            bands[shift] = band
    # Rows may fit a band at either end; the causal one is what was meant.
    for shift in sorted(bands, key=lambda shift: not bands[shift].causal):
        at_start = shift == 0 and sizes.keys != sizes.queries and bands[shift].causal
        return replace(bands[shift], aligned_at_start=at_start, empty_rows=empty)
    share = float(counts.double().mean()) / max(1, sizes.keys)
    return Shape(other=share, empty_rows=empty)


def _band(
    start: Tensor,
    end: Tensor,
    live: Tensor,
    low: Tensor,
    high: Tensor,
    own: Tensor,
    keys: int,
) -> Shape | None:
    """The band that, cut to the real keys [low, high), gives exactly these runs; None if none."""

    def fits(wanted: Tensor, have: Tensor) -> bool:
        return bool((~live | (wanted == have)).all())

    ahead = _reach(end - 1 - own, live & (end < high))
    back = _reach(own - start, live & (start > low))
    if ahead is False or back is False or (ahead or 0) < 0 or (back or 0) < 0:
        return None
    wide_end = high if ahead is None else torch.minimum(own + ahead + 1, high)
    wide_start = low if back is None else torch.maximum(own - back, low)
    if not fits(wide_end, end) or not fits(wide_start, start):
        return None
    # Padding is what the band alone, cut to the keys there are, would show and these rows do not.
    alone_end = torch.full_like(end, keys) if ahead is None else (own + ahead + 1).clamp(max=keys)
    alone_start = torch.zeros_like(start) if back is None else (own - back).clamp(min=0)
    padded = not (fits(alone_end, end) and fits(alone_start, start))
    if ahead == 0:
        return Shape(causal=True, window=None if back is None else back + 1, padding=padded)
    if ahead is None and back is None:
        return Shape(padding=padded)
    sides = (keys if back is None else back, keys if ahead is None else ahead)
    return Shape(sides=sides, padding=padded)


def _reach(distance: Tensor, inside: Tensor) -> int | bool | None:
    """The one distance of rows that stop inside: None if no row does, False if they differ."""
    found = distance.expand(inside.shape)[inside]
    if found.numel() == 0:
        return None
    first = int(found[0])
    return first if bool((found == first).all()) else False
