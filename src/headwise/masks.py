"""What may attend to what: causal, window, padding, documents, prefix, keep, hide.

A mask is an object that says what it means, so its polarity cannot be misread. Join masks with
`&`, `|` and `~`.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from headwise.intervals import CompiledMask, Everything, Mask, Sizes, from_grid, unexpand

Align = Literal["end", "start"]

# Runs of at most so many rows are kept for the next layer: 64 of them hold 32 MiB at the most.
MOST_KEPT_ROWS = 1 << 16


# --- the ways to say what may be seen ------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Band(Mask):
    """Keys from `left` before the query's own position to `right` after it; None is no bound."""

    left: int | None
    right: int | None
    align: Align = "end"
    offset: int | Tensor | None = None

    def lower(self, sizes: Sizes) -> CompiledMask:
        causal = self.left is None and self.right == 0 and self.offset is None
        causal = causal and (self.align == "end" or sizes.queries == sizes.keys)
        if causal and sizes.queries == 1 and sizes.keys > 0:
            return CompiledMask(sizes, is_full=True)
        if self._can_be_kept(sizes):
            runs = _kept_runs(self.left, self.right, self.align, self.offset, *sizes[2:4])
        else:
            runs = self.runs(sizes)
        return CompiledMask(sizes, runs, is_causal=causal)

    def origin(self) -> Hashable | None:
        if isinstance(self.offset, Tensor):
            return None
        return self.left, self.right, self.align, self.offset

    def runs(self, sizes: Sizes) -> Tensor:
        shift = self._shift(sizes)
        own = torch.arange(sizes.queries, device=sizes.device) + shift
        low = torch.zeros_like(own) if self.left is None else own - self.left
        high = torch.full_like(own, sizes.keys) if self.right is None else own + self.right + 1
        low, high = low.clamp(0, sizes.keys), high.clamp(0, sizes.keys)
        runs = torch.stack((low, torch.maximum(low, high)), dim=-1).to(torch.int32)
        return runs[:, None, :, None, :]

    def _can_be_kept(self, sizes: Sizes) -> bool:
        """Whether the runs follow from a few numbers: then they are made once, not in every layer.

        Making them takes longer than a small call's arithmetic.
        """
        return (
            not torch.compiler.is_compiling()  # first: a traced size must not be compared
            and _get_current_dispatch_mode() is None
            and sizes.device.type == "cpu"
            and sizes.queries <= MOST_KEPT_ROWS
            and not isinstance(self.offset, Tensor)
        )

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


@lru_cache(maxsize=64)
def _kept_runs(
    left: int | None, right: int | None, align: Align, offset: int | None, queries: int, keys: int
) -> Tensor:
    # Made outside inference mode: autograd may not save what was made inside.
    with torch.inference_mode(False):
        sizes = Sizes(1, 1, queries, keys, torch.device("cpu"))
        return _Band(left, right, align, offset).runs(sizes)


@dataclass(frozen=True, eq=False)
class Lengths(Mask):
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
        return from_grid(sizes, (queries[:, :, None] == keys[:, None, :])[:, None])

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
        grid = unexpand(grid.to(sizes.device))
        return from_grid(sizes, grid.expand(*grid.shape[:3], sizes.keys))


@dataclass(frozen=True, eq=False)
class Real(Mask):
    real: Tensor

    def lower(self, sizes: Sizes) -> CompiledMask:
        _fit("padding: real", self.real, (sizes.batch, sizes.keys))
        return from_grid(sizes, self.real.to(sizes.device).bool()[:, None, None, :])


@dataclass(frozen=True, eq=False)
class Compact(Mask):
    """Runs or bits kept from a grid; its axes broadcast as the grid's did."""

    inner: CompiledMask

    def lower(self, sizes: Sizes) -> CompiledMask:
        own = self.inner.sizes
        if own.keys != sizes.keys or any(
            have not in (1, want) for have, want in zip(own[:3], sizes[:3], strict=True)
        ):
            raise ValueError(
                f"mask: made from a grid {tuple(own[:4])}, "
                f"used with (B, H, L, S) = {tuple(sizes[:4])}"
            )
        moved = self.inner.lower(own._replace(device=sizes.device))
        same = own.queries == sizes.queries
        return CompiledMask(
            sizes, moved.intervals, moved.bits, moved.is_full, same and moved.is_causal
        )


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
            f"{name}: wanted (L, S) or (B, H, L, S) = {full}, got rank {len(shape)}, {shape}; "
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
    return Everything()


def causal(*, align: Align = "end", offset: int | Tensor | None = None) -> Mask:
    """Each query sees its own position and what came before.

    By default the last query sees the last key, which is right for decoding and for prompts in
    chunks. `align="start"` lets query 0 see key 0 only. `offset` (a number, or a tensor (B,)) says
    it outright: query i sees keys 0 … i + offset.

    Raises:
        ValueError: an unknown `align`, or both `align="start"` and `offset`.
    """
    return _Band(None, 0, align, _check_place("causal", align, offset))


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
    offset = _check_place("window", align, offset)
    for name, number in (("size", size), ("left", left), ("right", right)):
        if number is not None and type(number) is not int:
            raise TypeError(f"window: {name} counts keys, so it is a whole number; got {number!r}")
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


def _check_place(name: str, align: str, offset: int | Tensor | None) -> int | Tensor | None:
    if align not in ("end", "start"):
        raise ValueError(f"{name}: align is 'end' or 'start', got {align!r}")
    if offset is not None and align == "start":
        raise ValueError(f"{name}: offset= already says where query 0 stands; leave align out")
    if offset is None or isinstance(offset, int | torch.SymInt):
        return offset
    return _whole(f"{name}: offset", offset)


def _whole(name: str, numbers: object) -> Tensor:
    """Whole numbers as a tensor; lists are taken too.

    Raises:
        TypeError: fractions, or what is no number.
    """
    try:
        found = torch.as_tensor(numbers)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name}: wanted whole numbers, got {numbers!r}") from None
    if found.is_floating_point() or found.is_complex():
        raise TypeError(f"{name}: wanted whole numbers, got {found.dtype}")
    return found


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
        return Lengths(_whole("padding: lengths", lengths), side)
    assert real is not None
    real = torch.as_tensor(real)
    if real.is_floating_point() or real.is_complex():
        raise TypeError(
            f"padding: real is bool or 0/1 integers, True for real tokens; got {real.dtype}. "
            "An additive mask of 0 and −inf is keep(mask == 0)"
        )
    if real.dtype != torch.bool and not torch.compiler.is_compiling():
        odd = real[(real != 0) & (real != 1)]
        if odd.numel():
            raise ValueError(f"padding: real holds 0 and 1 only, got {odd[0].item()}")
    return Real(real)


def documents(ids: Tensor, *, query_ids: Tensor | None = None) -> Mask:
    """Packed documents: a query sees the keys of its own document.

    `ids`: (S,) or (B, S), one document id a key. With fewer queries than keys the queries are the
    last ones; `query_ids` (L,) or (B, L) says it outright. Join with `causal()` for decoders.
    """
    return _Documents(
        torch.as_tensor(ids), None if query_ids is None else torch.as_tensor(query_ids)
    )


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
    batch, heads, queries, keys = (int(n) for n in grid.shape)
    sizes = Sizes(batch, heads, queries, keys, grid.device)
    return Compact(_Grid(_want_bool("from_dense", grid), "from_dense").lower(sizes))
