"""The algebra of masks: row intervals, packed bits, and how &, | and ~ join them.

A mask compiles to row intervals (for each query row, at most two runs of consecutive keys: memory
linear in the number of queries) and to packed bits only where rows need more runs than that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Sizes(NamedTuple):
    """The sizes that a mask is compiled for: batch B, query heads H, queries L, keys S."""

    batch: int
    heads: int
    queries: int
    keys: int
    device: torch.device


class Mask(ABC):
    """Which keys each query may attend to. Join masks with `&`, `|` and `~`; True is visible."""

    @abstractmethod
    def lower(self, sizes: Sizes) -> CompiledMask:
        """This mask for the given sizes. Masks call it on their parts; others call `compile`."""

    def origin(self) -> Hashable | None:
        """What the mask follows from for any sizes; None where it must be read anew each time."""
        return None

    def compile(
        self,
        *,
        batch: int,
        heads: int,
        queries: int,
        keys: int,
        device: torch.device | str = "cpu",
    ) -> CompiledMask:
        """Row intervals or packed bits for (B, H, L, S).

        Raises:
            ValueError: the mask carries sizes that do not fit.
        """
        return self.lower(Sizes(batch, heads, queries, keys, torch.device(device)))

    def dense(
        self,
        queries: int,
        keys: int,
        *,
        batch: int = 1,
        heads: int = 1,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """The whole (B, H, L, S) bool grid. For tests: its memory grows with L·S."""
        compiled = self.compile(batch=batch, heads=heads, queries=queries, keys=keys, device=device)
        return compiled.tile().expand(batch, heads, queries, keys)

    def draw(
        self,
        queries: int,
        keys: int,
        *,
        batch: int = 1,
        heads: int = 1,
        item: int = 0,
        head: int = 0,
    ) -> str:
        """The small grid that people check by eye: a row a query, `x` visible and `.` hidden."""
        grid = self.dense(queries, keys, batch=batch, heads=heads)[item, head].tolist()
        wide = len(str(max(keys - 1, 0)))
        tall = len(str(max(queries - 1, 0)))
        head_line = " " * (tall + 7) + " ".join(f"{key:>{wide}}" for key in range(keys))
        lines = [f"{'key':>{tall + 6}} {head_line[tall + 7 :]}"]
        for query, row in enumerate(grid):
            cells = " ".join(f"{'x' if cell else '.':>{wide}}" for cell in row)
            lines.append(f"query {query:>{tall}} {cells}")
        return "\n".join(line.rstrip() for line in lines)

    def __and__(self, other: Mask) -> Mask:
        _want_mask("&", other)
        if isinstance(self, Everything):
            return other
        return self if isinstance(other, Everything) else And(self, other)

    def __or__(self, other: Mask) -> Mask:
        _want_mask("|", other)
        if isinstance(self, Everything) or isinstance(other, Everything):
            return Everything()
        return Or(self, other)

    def __invert__(self) -> Mask:
        return Not(self)


def _want_mask(operation: str, other: object) -> None:
    if not isinstance(other, Mask):
        raise TypeError(
            f"mask {operation}: wanted another headwise mask, got {type(other).__name__}; wrap a "
            "bool tensor in keep(...) if True means visible, in hide(...) if True means hidden"
        )


@dataclass(frozen=True, eq=False)
class CompiledMask(Mask):
    """A mask made concrete: key j is visible to row i if it lies in a run and its bit is set.

    intervals: int32 (b, h, l, n, 2), n ≤ 2 disjoint runs [start, end) a row, in order; None when
        every key lies in. b, h and l are full or 1 (broadcast).
    bits: uint8 (b, h, l, ⌈S/8⌉), key j is bit j % 8 of byte j // 8; None when every bit is set.
    is_full: every key is known to be visible. is_causal: exactly j ≤ i + (S − L).
    """

    sizes: Sizes
    intervals: Tensor | None = None
    bits: Tensor | None = None
    is_full: bool = False
    is_causal: bool = False

    def lower(self, sizes: Sizes) -> CompiledMask:
        if sizes[:4] != self.sizes[:4]:
            raise ValueError(
                f"mask: compiled for (B, H, L, S) = {tuple(self.sizes[:4])}, "
                f"used with {tuple(sizes[:4])}"
            )
        if sizes.device == self.sizes.device:
            return self
        return CompiledMask(
            sizes,
            None if self.intervals is None else self.intervals.to(sizes.device),
            None if self.bits is None else self.bits.to(sizes.device),
            self.is_full,
            self.is_causal,
        )

    def tile(self, rows: slice = slice(None), keys: slice = slice(None)) -> Tensor:
        """Visibility of a tile: bool, broadcastable to (B, H, rows, keys); no larger than that."""
        start, stop, _ = keys.indices(self.sizes.keys)
        index = torch.arange(start, stop, device=self.sizes.device)
        seen = torch.ones(1, 1, 1, stop - start, dtype=torch.bool, device=self.sizes.device)
        if self.intervals is not None:
            runs = _rows_of(self.intervals, rows)
            inside = (index >= runs[..., 0:1]) & (index < runs[..., 1:2])
            seen = inside.any(dim=-2)
        if self.bits is not None:
            seen = seen & _unpack(_rows_of(self.bits, rows), start, stop)
        return seen

    def part(self, rows: slice = slice(None), keys: slice = slice(None)) -> CompiledMask:
        """The mask of some rows and some keys, as a mask of its own."""
        first, last, _ = rows.indices(self.sizes.queries)
        start, stop, _ = keys.indices(self.sizes.keys)
        sizes = self.sizes._replace(queries=last - first, keys=stop - start)
        runs, bits = self.intervals, self.bits
        if runs is not None:
            runs = (_rows_of(runs, rows) - start).clamp(0, stop - start)
        if bits is not None:
            bits = _rows_of(bits, rows)
            if start % 8 == 0:
                bits = bits[..., start // 8 : (stop + 7) // 8]
            else:
                bits = _pack(_unpack(bits, start, stop))
        return CompiledMask(sizes, runs, bits, self.is_full)

    def counts(self) -> Tensor:
        """The number of keys that each row sees: int64, broadcastable to (B, H, L)."""
        if self.bits is None:
            if self.intervals is None:
                return torch.full((1, 1, 1), self.sizes.keys, device=self.sizes.device)
            return (self.intervals[..., 1] - self.intervals[..., 0]).sum(-1).long()
        # In blocks of rows, so that memory stays linear.
        rows = max(1, (1 << 22) // max(1, self.sizes.keys))
        blocks = range(0, max(1, self.sizes.queries), rows)
        parts = [self.tile(slice(begin, begin + rows)).sum(-1) for begin in blocks]
        return parts[0] if parts[0].shape[-1] == 1 else torch.cat(parts, dim=-1)

    def hull(self, rows: slice = slice(None)) -> tuple[int, int]:
        """The smallest [low, high) that holds every key these rows see; (0, 0) when none.

        Packed bits are not searched: they only narrow it. Reads tensors on the host.
        """
        if self.intervals is None:
            return 0, self.sizes.keys
        runs = _rows_of(self.intervals, rows)
        starts, ends = runs[..., 0], runs[..., 1]
        filled = ends > starts
        if not bool(filled.any()):
            return 0, 0
        low = torch.where(filled, starts, self.sizes.keys).min()
        return int(low), int(torch.where(filled, ends, 0).max())


def _rows_of(tensor: Tensor, rows: slice) -> Tensor:
    """Rows of a (b, h, l, …) tensor whose l may be 1, standing for every row."""
    return tensor if tensor.shape[2] == 1 else tensor[:, :, rows]


@dataclass(frozen=True, eq=False)
class Everything(Mask):
    def lower(self, sizes: Sizes) -> CompiledMask:
        return CompiledMask(sizes, is_full=True)


@dataclass(frozen=True, eq=False)
class And(Mask):
    left: Mask
    right: Mask

    def lower(self, sizes: Sizes) -> CompiledMask:
        a, b = self.left.lower(sizes), self.right.lower(sizes)
        if a.is_full or b.is_full:
            return b if a.is_full else a
        if a.intervals is None or b.intervals is None:
            runs = a.intervals if b.intervals is None else b.intervals
        else:
            one, two = a.intervals.unsqueeze(-2), b.intervals.unsqueeze(-3)
            start = torch.maximum(one[..., 0], two[..., 0]).flatten(-2)
            end = torch.minimum(one[..., 1], two[..., 1]).flatten(-2)
            runs = torch.stack((start, torch.maximum(start, end)), dim=-1)
        if a.bits is None or b.bits is None:
            bits = a.bits if b.bits is None else b.bits
        else:
            bits = a.bits & b.bits
        return _settle(sizes, runs, bits)


@dataclass(frozen=True, eq=False)
class Or(Mask):
    left: Mask
    right: Mask

    def lower(self, sizes: Sizes) -> CompiledMask:
        a, b = self.left.lower(sizes), self.right.lower(sizes)
        if a.is_full or b.is_full:
            return a if a.is_full else b
        if a.bits is not None or b.bits is not None or a.intervals is None or b.intervals is None:
            return from_grid(sizes, a.tile() | b.tile())
        shape = torch.broadcast_shapes(a.intervals.shape[:3], b.intervals.shape[:3])
        both = [runs.expand(*shape, *runs.shape[3:]) for runs in (a.intervals, b.intervals)]
        return _settle(sizes, _disjoint(torch.cat(both, dim=-2)), None)


@dataclass(frozen=True, eq=False)
class Not(Mask):
    inner: Mask

    def lower(self, sizes: Sizes) -> CompiledMask:
        seen = self.inner.lower(sizes)
        if seen.bits is not None:
            return from_grid(sizes, ~seen.tile())
        whole = torch.tensor([[0, sizes.keys]], dtype=torch.int32, device=sizes.device)
        runs = whole[None, None, None] if seen.intervals is None else _disjoint(seen.intervals)
        edge = runs.new_zeros(*runs.shape[:3], 1)
        starts = torch.cat((edge, runs[..., 1]), dim=-1)
        ends = torch.cat((runs[..., 0], edge + sizes.keys), dim=-1)
        return _settle(sizes, torch.stack((starts, torch.maximum(starts, ends)), -1), None)


# --- runs and grids ------------------------------------------------------------------------------


def _disjoint(runs: Tensor) -> Tensor:
    """Sort runs by start and cut away what an earlier run already covers. (…, n, 2) → the same."""
    start, order = runs[..., 0].sort(dim=-1)
    end = runs[..., 1].gather(-1, order)
    reach = end.cummax(dim=-1).values
    before = torch.cat((torch.zeros_like(reach[..., :1]), reach[..., :-1]), dim=-1)
    start = torch.maximum(start, before)
    return torch.stack((start, torch.maximum(start, end)), dim=-1)


def _settle(sizes: Sizes, runs: Tensor | None, bits: Tensor | None) -> CompiledMask:
    """Keep at most two runs a row; rows that need more go to bits."""
    if runs is None or runs.shape[-2] <= 2:
        return CompiledMask(sizes, runs, bits)
    if not torch.compiler.is_compiling():
        filled = runs[..., 1] > runs[..., 0]
        if int(filled.sum(-1).max() if filled.numel() else 0) <= 2:
            order = (~filled).to(torch.int8).sort(dim=-1, stable=True).indices[..., :2]
            return CompiledMask(
                sizes, runs.gather(-2, order[..., None].expand(*order.shape, 2)), bits
            )
    return from_grid(sizes, CompiledMask(sizes, runs, bits).tile())


def from_grid(sizes: Sizes, grid: Tensor) -> CompiledMask:
    """A (b, h, l, S) bool grid as runs where each row has at most two, else as packed bits."""
    if not torch.compiler.is_compiling():
        runs = _runs_of(grid)
        if runs is not None:
            return CompiledMask(sizes, runs)
    return CompiledMask(sizes, bits=_pack(grid))


def from_blocks(sizes: Sizes, blocks: Iterable[Tensor]) -> CompiledMask:
    """A mask from blocks of its grid's rows, (b, h, rows, S) each: the whole grid is never held."""
    compiled = [from_grid(sizes, block) for block in blocks]
    if all(block.bits is None for block in compiled):
        runs = [block.intervals for block in compiled if block.intervals is not None]
        most = max((r.shape[-2] for r in runs), default=1)
        # A block of rows with one run each gets an empty second one beside blocks that have two.
        even = [torch.cat((r, r[..., -1:, 1:].expand(*r.shape[:-2], most - r.shape[-2], 2)), -2)
                for r in runs]  # fmt: skip
        return CompiledMask(sizes, torch.cat(even, 2) if even else None)
    packed = [
        _pack(block.tile().expand(-1, -1, -1, sizes.keys)) if block.bits is None else block.bits
        for block in compiled
    ]
    return CompiledMask(sizes, bits=torch.cat(packed, dim=2))


def _runs_of(grid: Tensor) -> Tensor | None:
    """The runs of True along the last axis: int32 (b, h, l, n, 2), or None when a row has > 2."""
    keys = grid.shape[-1]
    if grid.numel() == 0:
        return grid.new_zeros(*grid.shape[:3], 1, 2, dtype=torch.int32)
    edge = torch.nn.functional.pad(grid.to(torch.int8), (1, 1)).diff(dim=-1)
    opens, closes = edge[..., :keys] == 1, edge[..., 1:] == -1
    count = opens.sum(-1)
    most = int(count.max())
    if most > 2:
        return None

    def first(flags: Tensor) -> Tensor:
        return flags.to(torch.int8).argmax(-1)

    def last(flags: Tensor) -> Tensor:
        return keys - 1 - first(flags.flip(-1))

    start, end = first(opens), first(closes) + 1
    end = torch.where(count > 0, end, start)
    pairs = [torch.stack((start, end), -1)]
    if most == 2:
        start, stop = last(opens), last(closes) + 1
        start = torch.where(count > 1, start, stop)
        stop = torch.where(count > 0, stop, end)
        start = torch.where(count > 0, start, end)
        pairs.append(torch.stack((start, stop), -1))
    return torch.stack(pairs, dim=-2).to(torch.int32)


def _pack(grid: Tensor) -> Tensor:
    spare = -grid.shape[-1] % 8
    octets = torch.nn.functional.pad(grid.to(torch.uint8), (0, spare)).unflatten(-1, (-1, 8))
    weight = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=grid.device)
    return (octets * weight).sum(-1, dtype=torch.uint8)


def _unpack(bits: Tensor, start: int, stop: int) -> Tensor:
    """Keys start … stop − 1 of packed bits, as bool."""
    octets = bits[..., start // 8 : (stop + 7) // 8].unsqueeze(-1)
    shift = torch.arange(8, device=bits.device, dtype=torch.uint8)
    spread = ((octets >> shift) & 1).flatten(-2).bool()
    return spread[..., start % 8 : start % 8 + stop - start]


def unexpand(tensor: Tensor) -> Tensor:
    """Axes that only repeat (stride 0) shrink to 1, so that nothing is copied per head."""
    for axis in range(3):
        if tensor.shape[axis] > 1 and tensor.stride(axis) == 0:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor
