"""What may attend to what.

A mask is an object that says what it means, so its polarity cannot be misread. It compiles to row
intervals (for each query row, at most two runs of consecutive keys: memory linear in the number of
queries) and to packed bits only where rows need more runs than that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Align = Literal["end", "start"]


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
        if isinstance(self, _Everything):
            return other
        return self if isinstance(other, _Everything) else _And(self, other)

    def __or__(self, other: Mask) -> Mask:
        _want_mask("|", other)
        if isinstance(self, _Everything) or isinstance(other, _Everything):
            return _Everything()
        return _Or(self, other)

    def __invert__(self) -> Mask:
        return _Not(self)


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
            packed = _rows_of(self.bits, rows)[..., start // 8 : (stop + 7) // 8]
            shift = torch.arange(8, device=packed.device, dtype=torch.uint8)
            spread = ((packed.unsqueeze(-1) >> shift) & 1).flatten(-2).bool()
            seen = seen & spread[..., start % 8 : start % 8 + stop - start]
        return seen

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


# --- the ways to say what may be seen ------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Everything(Mask):
    def lower(self, sizes: Sizes) -> CompiledMask:
        return CompiledMask(sizes, is_full=True)


@dataclass(frozen=True, eq=False)
class _Band(Mask):
    """Keys from `left` before the query's own position to `right` after it; None is no bound."""

    left: int | None
    right: int | None
    align: Align = "end"
    offset: int | Tensor | None = None

    def lower(self, sizes: Sizes) -> CompiledMask:
        shift = self._shift(sizes)
        own = torch.arange(sizes.queries, device=sizes.device) + shift
        low = torch.zeros_like(own) if self.left is None else own - self.left
        high = torch.full_like(own, sizes.keys) if self.right is None else own + self.right + 1
        low, high = low.clamp(0, sizes.keys), high.clamp(0, sizes.keys)
        runs = torch.stack((low, torch.maximum(low, high)), dim=-1).to(torch.int32)
        causal = self.left is None and self.right == 0 and self.offset is None
        causal = causal and (self.align == "end" or sizes.queries == sizes.keys)
        if causal and sizes.queries == 1 and sizes.keys > 0:
            return CompiledMask(sizes, is_full=True)
        return CompiledMask(sizes, runs[:, None, :, None, :], is_causal=causal)

    def _shift(self, sizes: Sizes) -> int | Tensor:
        """Key position of query 0: (B, 1), or one number for every batch element."""
        if self.offset is None:
            shift = sizes.keys - sizes.queries if self.align == "end" else 0
            return torch.full((1, 1), shift, device=sizes.device)
        if isinstance(self.offset, Tensor):
            if self.offset.dim() != 1 or self.offset.shape[0] not in (1, sizes.batch):
                raise ValueError(
                    f"causal/window: offset must have one number a batch element, wanted shape "
                    f"({sizes.batch},), got {tuple(self.offset.shape)}"
                )
            return self.offset.to(sizes.device)[:, None]
        return torch.full((1, 1), self.offset, device=sizes.device)


@dataclass(frozen=True, eq=False)
class _Lengths(Mask):
    lengths: Tensor
    side: Literal["left", "right"]

    def lower(self, sizes: Sizes) -> CompiledMask:
        _fit("padding: lengths", self.lengths, (sizes.batch,))
        count = self.lengths.to(sizes.device)
        if not torch.compiler.is_compiling() and bool(((count < 0) | (count > sizes.keys)).any()):
            raise ValueError(
                f"padding: lengths must lie in 0..{sizes.keys} (the number of keys), "
                f"got {count.tolist()}"
            )
        zero, full = torch.zeros_like(count), torch.full_like(count, sizes.keys)
        pair = (zero, count) if self.side == "right" else (full - count, full)
        return CompiledMask(sizes, torch.stack(pair, -1).to(torch.int32)[:, None, None, None, :])


@dataclass(frozen=True, eq=False)
class _Documents(Mask):
    ids: Tensor
    query_ids: Tensor | None

    def lower(self, sizes: Sizes) -> CompiledMask:
        keys = self._by_row(self.ids, "ids", sizes, sizes.keys)
        if self.query_ids is not None:
            queries = self._by_row(self.query_ids, "query_ids", sizes, sizes.queries)
        elif sizes.queries > sizes.keys:
            raise ValueError(
                f"documents: {sizes.queries} queries but {sizes.keys} keys; pass query_ids= to say "
                "which document each query belongs to"
            )
        else:
            queries = keys[:, sizes.keys - sizes.queries :]
        # Consecutive ids, the usual packing, give one run a row without an L×S grid.
        grown = keys[:, 1:] >= keys[:, :-1]
        if not torch.compiler.is_compiling() and bool(grown.all()):
            keys, queries = keys.contiguous(), queries.contiguous()
            start = torch.searchsorted(keys, queries, side="left")
            end = torch.searchsorted(keys, queries, side="right")
            runs = torch.stack((start, end), -1).to(torch.int32)
            return CompiledMask(sizes, runs[:, None, :, None, :])
        return _from_grid(sizes, (queries[:, :, None] == keys[:, None, :])[:, None])

    @staticmethod
    def _by_row(ids: Tensor, name: str, sizes: Sizes, length: int) -> Tensor:
        rows = ids[None] if ids.dim() == 1 else ids
        _fit(f"documents: {name}", rows, (sizes.batch, length))
        return rows.to(sizes.device)


@dataclass(frozen=True, eq=False)
class _Prefix(Mask):
    length: int | Tensor

    def lower(self, sizes: Sizes) -> CompiledMask:
        length = torch.as_tensor(self.length, device=sizes.device).reshape(-1)
        _fit("prefix: length", length, (sizes.batch,))
        end = length.clamp(0, sizes.keys)
        runs = torch.stack((torch.zeros_like(end), end), dim=-1).to(torch.int32)
        return CompiledMask(sizes, runs[:, None, None, None, :])


@dataclass(frozen=True, eq=False)
class _Grid(Mask):
    """A bool grid, True visible: (L, S), or four axes of which each is full or 1."""

    grid: Tensor
    name: str

    def lower(self, sizes: Sizes) -> CompiledMask:
        check_grid(self.name, self.grid, *sizes[:4])
        grid = self.grid if self.grid.dim() == 4 else self.grid[None, None]
        grid = _unexpand(grid.to(sizes.device))
        return _from_grid(sizes, grid.expand(*grid.shape[:3], sizes.keys))


@dataclass(frozen=True, eq=False)
class _Real(Mask):
    real: Tensor

    def lower(self, sizes: Sizes) -> CompiledMask:
        _fit("padding: real", self.real, (sizes.batch, sizes.keys))
        return _from_grid(sizes, self.real.to(sizes.device).bool()[:, None, None, :])


@dataclass(frozen=True, eq=False)
class _And(Mask):
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
class _Or(Mask):
    left: Mask
    right: Mask

    def lower(self, sizes: Sizes) -> CompiledMask:
        a, b = self.left.lower(sizes), self.right.lower(sizes)
        if a.is_full or b.is_full:
            return a if a.is_full else b
        if a.bits is not None or b.bits is not None or a.intervals is None or b.intervals is None:
            return _from_grid(sizes, a.tile() | b.tile())
        shape = torch.broadcast_shapes(a.intervals.shape[:3], b.intervals.shape[:3])
        both = [runs.expand(*shape, *runs.shape[3:]) for runs in (a.intervals, b.intervals)]
        return _settle(sizes, _disjoint(torch.cat(both, dim=-2)), None)


@dataclass(frozen=True, eq=False)
class _Not(Mask):
    inner: Mask

    def lower(self, sizes: Sizes) -> CompiledMask:
        seen = self.inner.lower(sizes)
        if seen.bits is not None:
            return _from_grid(sizes, ~seen.tile())
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
    return _from_grid(sizes, CompiledMask(sizes, runs, bits).tile())


def _from_grid(sizes: Sizes, grid: Tensor) -> CompiledMask:
    """A (b, h, l, S) bool grid as runs where each row has at most two, else as packed bits."""
    if not torch.compiler.is_compiling():
        runs = _runs_of(grid)
        if runs is not None:
            return CompiledMask(sizes, runs)
    return CompiledMask(sizes, bits=_pack(grid))


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


def _unexpand(tensor: Tensor) -> Tensor:
    """Axes that only repeat (stride 0) shrink to 1, so that nothing is copied per head."""
    for axis in range(3):
        if tensor.shape[axis] > 1 and tensor.stride(axis) == 0:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor


def _fit(name: str, tensor: Tensor, wanted: tuple[int, ...]) -> None:
    """Each axis of `tensor` is as wanted; the first may be 1."""
    shape = tuple(tensor.shape)
    if len(shape) != len(wanted) or shape[1:] != wanted[1:] or shape[0] not in (1, wanted[0]):
        raise ValueError(f"{name}: wanted shape {wanted}, got {shape}")


def check_grid(name: str, grid: Tensor, batch: int, heads: int, queries: int, keys: int) -> None:
    """A tensor laid over the score grid: (L, S), or (B, H, L, S) with each axis full or 1.

    Raises:
        ValueError: another rank (three axes could mean batch or heads) or other sizes.
    """
    shape = tuple(grid.shape)
    full = (batch, heads, queries, keys)
    if len(shape) == 3:
        raise ValueError(
            f"{name}: rank 3, shape {shape}, could be (B, L, S) or (H, L, S); make it rank 4, "
            "tensor[:, None] for batch or tensor[None] for heads"
        )
    if len(shape) not in (2, 4):
        raise ValueError(
            f"{name}: wanted (L, S) or (B, H, L, S) = {full}, got rank {len(shape)}, shape {shape}; "
            "key padding of shape (B, S) goes into padding(...)"
        )
    wanted = full[4 - len(shape) :]
    if any(have not in (1, want) for have, want in zip(shape, wanted, strict=True)):
        hint = ""
        if shape == (batch, keys) and batch != queries:
            hint = "; key padding of shape (B, S) goes into padding(...)"
        raise ValueError(f"{name}: cannot broadcast shape {shape} to {wanted}{hint}")


# --- public constructors -------------------------------------------------------------------------


def everything() -> Mask:
    """Every query sees every key."""
    return _Everything()


def causal(*, align: Align = "end", offset: int | Tensor | None = None) -> Mask:
    """Each query sees its own position and what came before.

    By default the last query sees the last key, which is right for decoding and for prompts in
    chunks. `align="start"` lets query 0 see key 0 only. `offset` (a number, or a tensor (B,)) says
    it outright: query i sees keys 0 … i + offset.

    Raises:
        ValueError: an unknown `align`, or both `align="start"` and `offset`.
    """
    _check_align("causal", align, offset)
    return _Band(None, 0, align, offset)


def window(
    size: int | None = None,
    *,
    left: int | None = None,
    right: int | None = None,
    align: Align = "end",
    offset: int | Tensor | None = None,
) -> Mask:
    """A sliding window.

    `window(size)` looks back over `size` keys, the query's own among them, and never ahead.
    `window(left=a, right=b)` sees a keys before and b keys after the query's own (None: no bound).
    `align` and `offset` place query 0 among the keys as in `causal`.

    Raises:
        ValueError: a size below 1, a negative side, or both conventions at once.
    """
    _check_align("window", align, offset)
    if size is not None:
        if left is not None or right is not None:
            raise ValueError("window: give size, or left and right, not both")
        if size < 1:
            raise ValueError(
                f"window: size counts the query's own key, so it is at least 1; got {size}"
            )
        return _Band(size - 1, 0, align, offset)
    if left is None and right is None:
        raise ValueError("window: give size (keys back, own included), or left= and right=")
    for name, side in (("left", left), ("right", right)):
        if side is not None and side < 0:
            raise ValueError(f"window: {name} counts keys beside the query's own; got {side}")
    return _Band(left, right, align, offset)


def _check_align(name: str, align: str, offset: int | Tensor | None) -> None:
    if align not in ("end", "start"):
        raise ValueError(f"{name}: align is 'end' or 'start', got {align!r}")
    if offset is not None and align == "start":
        raise ValueError(f"{name}: offset= already says where query 0 stands; leave align out")


def padding(
    real: Tensor | None = None,
    *,
    lengths: Tensor | None = None,
    side: Literal["left", "right"] = "right",
) -> Mask:
    """Hide padding keys.

    `real`: (B, S), bool or 0/1, True for real tokens (a tokenizer's attention_mask). Or `lengths`:
    (B,) counts of real tokens, with the padding on `side`.

    Raises:
        ValueError: neither or both are given; `real` holds something besides 0 and 1.
        TypeError: `real` is a float tensor.
    """
    if (real is None) == (lengths is None):
        raise ValueError("padding: give real (B, S), or lengths (B,) with side=")
    if side not in ("left", "right"):
        raise ValueError(f"padding: side is 'left' or 'right', got {side!r}")
    if lengths is not None:
        return _Lengths(torch.as_tensor(lengths), side)
    assert real is not None
    if real.is_floating_point() or real.is_complex():
        raise TypeError(
            f"padding: real is bool or 0/1 integers, True for real tokens; got {real.dtype}. "
            "An additive mask of 0 and −inf is keep(mask == 0)"
        )
    if real.dtype != torch.bool and not torch.compiler.is_compiling():
        odd = real[(real != 0) & (real != 1)]
        if odd.numel():
            raise ValueError(f"padding: real holds 0 and 1 only, got {odd[0].item()}")
    return _Real(real)


def documents(ids: Tensor, *, query_ids: Tensor | None = None) -> Mask:
    """Packed documents: a query sees the keys of its own document.

    `ids`: (S,) or (B, S), one document id a key. With fewer queries than keys the queries are the
    last ones; `query_ids` (L,) or (B, L) says it outright. Join with `causal()` for decoders.
    """
    return _Documents(ids, query_ids)


def prefix(length: int | Tensor) -> Mask:
    """The first `length` keys (a number, or a tensor (B,)) are visible to every query.

    A prefix-LM is `causal() | prefix(n)`; attention sinks beside a window are
    `causal() & (window(w) | prefix(4))`.
    """
    if isinstance(length, int) and length < 0:
        raise ValueError(f"prefix: length is at least 0, got {length}")
    return _Prefix(length)


def keep(grid: Tensor) -> Mask:
    """A bool tensor in which True means visible: (L, S), or (B, H, L, S) with axes full or 1."""
    return _Grid(_want_bool("keep", grid), "keep")


def hide(grid: Tensor) -> Mask:
    """A bool tensor in which True means hidden: (L, S), or (B, H, L, S) with axes full or 1."""
    return _Grid(~_want_bool("hide", grid), "hide")


def _want_bool(name: str, grid: Tensor) -> Tensor:
    if not isinstance(grid, Tensor):
        raise TypeError(f"{name}: wanted a bool tensor, got {type(grid).__name__}")
    if grid.dtype == torch.bool:
        return grid
    if grid.is_floating_point():
        raise TypeError(
            f"{name}: wanted a bool tensor, got {grid.dtype}; an additive mask of 0 and −inf is "
            "keep(mask == 0), a 0/1 mask is keep(mask > 0), real-valued scores go into bias="
        )
    raise TypeError(
        f"{name}: wanted a bool tensor, got {grid.dtype}; a 0/1 mask is {name}(mask != 0)"
    )


def from_dense(grid: Tensor) -> Mask:
    """For adapters: another library's (B, H, L, S) keep-grid, turned back into runs at once.

    Broadcast axes (size 1 or stride 0) stay broadcast. The result is compact: it keeps no
    reference to `grid`. Raises as `keep` does.
    """
    sizes = Sizes(*(int(n) for n in grid.shape), grid.device)
    return _Compact(_Grid(_want_bool("from_dense", grid), "from_dense").lower(sizes))


@dataclass(frozen=True, eq=False)
class _Compact(Mask):
    """Runs or bits kept from a grid; its axes broadcast as the grid's did."""

    inner: CompiledMask

    def lower(self, sizes: Sizes) -> CompiledMask:
        own = self.inner.sizes
        if own.keys != sizes.keys or any(
            have not in (1, want) for have, want in zip(own[:3], sizes[:3], strict=True)
        ):
            raise ValueError(
                f"mask: made from a grid {tuple(own[:4])}, used with (B, H, L, S) = {tuple(sizes[:4])}"
            )
        moved = self.inner.lower(own._replace(device=sizes.device))
        return CompiledMask(sizes, moved.intervals, moved.bits)
