"""Key/value caches: what one attention layer keeps of the tokens it has seen.

One cache serves one layer. Keys go in already turned to their true position, once. The cache also
keeps each token's position and whether it is real, so that a later call needs neither the old
padding mask nor a counter of its own.

`append` returns the keys of this call in the order of time, old ones first. A mask aligned at the
end (`causal()`, `window(n)`, the default) therefore stands right by itself: query i of L is key S -
L + i.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headwise.positions import count_positions, position_after


class Cached(NamedTuple):
    """What a call attends to.

    keys (B, Hkv, S, D); values (B, Hkv, S, Dv);
    positions (1 or B, S) int64, one row when all rows agree; real (B, S) bool, or None when no
    token so far was padding.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    real: Tensor | None


class _Cache:
    """Storage and bookkeeping that both caches share. Columns [begin, end) of the buffers are "
    "held."""

    def __init__(
        self,
        batch: int,
        num_kv_heads: int,
        columns: int,
        head_dim: int,
        value_dim: int | None,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
    ) -> None:
        value_dim = head_dim if value_dim is None else value_dim
        self._make((batch, num_kv_heads, columns), head_dim, value_dim, dtype, device)
        self._positions = torch.zeros(batch, columns, dtype=torch.int64, device=device)
        self._real: Tensor | None = None
        self._next = torch.zeros(batch, dtype=torch.int64, device=device)
        self._same = True
        self._begin = self._end = 0
        self.seen = 0

    def _make(
        self,
        shape: tuple[int, int, int],
        head_dim: int,
        value_dim: int,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
    ) -> None:
        self._keys = torch.zeros(*shape, head_dim, dtype=dtype, device=device)
        self._values = torch.zeros(*shape, value_dim, dtype=dtype, device=device)

    @property
    def _sizes(self) -> tuple[int, int, int, int]:
        """Batch, key/value heads, width of a key, width of a value."""
        return (*self._keys.shape[:2], self._keys.shape[3], self._values.shape[3])

    @property
    def batch(self) -> int:
        return self._keys.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return self._keys.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the key and value buffers."""
        return sum(t.numel() * t.element_size() for t in (self._keys, self._values))

    @property
    def next_position(self) -> Tensor:
        """The position that each row's next real token gets, int64 (B,): real tokens ever seen."""
        return self._next

    def next_positions(self, length: int, real: Tensor | None = None) -> Tensor:
        """Positions of the next `length` tokens, (1 or B, length); `real` (B, length) marks "
        "pads."""
        if real is not None:
            return count_positions(real, self._next)
        start = self._next[:1] if self._same else self._next
        return start[:, None] + torch.arange(length, device=start.device)

    def reset(self) -> None:
        """Forget everything; the memory stays."""
        self._begin = self._end = self.seen = 0
        self._real, self._same = None, True
        self._next = torch.zeros_like(self._next)

    def reorder(self, indices: Tensor) -> None:
        """Row i becomes what row indices[i] was, as beam search needs. `indices`: int (B',).

        B' may differ from B: repeat rows to open beams, pick some to close them.
        """
        if indices.dim() != 1 or indices.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"{self._name}.reorder: indices must be integers of shape (batch,), got "
                f"{indices.dtype} {tuple(indices.shape)}"
            )
        indices = indices.to(self._keys.device)
        self._pick(indices)
        self._positions = self._positions.index_select(0, indices)
        self._next = self._next.index_select(0, indices)
        if self._real is not None:
            self._real = self._real.index_select(0, indices)

    def _pick(self, indices: Tensor) -> None:
        """Reorder the buffers of keys and values."""
        held = slice(self._begin, self._end)
        for name in ("_keys", "_values"):
            buffer = getattr(self, name)
            chosen = buffer[:, :, held].index_select(0, indices)
            if len(indices) != buffer.shape[0]:
                buffer = buffer.new_zeros(len(indices), *buffer.shape[1:])
                setattr(self, name, buffer)
            buffer[:, :, held] = chosen

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _check(self, key: Tensor, value: Tensor, real: Tensor | None) -> None:
        batch, heads, head_dim, value_dim = self._sizes
        length = key.shape[-2]
        for name, tensor, width in (("key", key, head_dim), ("value", value, value_dim)):
            if tuple(tensor.shape) != (batch, heads, length, width):
                raise ValueError(
                    f"{self._name}.append: {name} must be (batch, kv heads, length, width) = "
                    f"({batch}, {heads}, {length}, {width}), got {tuple(tensor.shape)}; a cache "
                    "belongs to "
                    "one layer and one batch size"
                )
            if tensor.dtype != self.dtype:
                raise ValueError(
                    f"{self._name}.append: the cache is {self.dtype} but {name} is "
                    f"{tensor.dtype}; make the "
                    "cache with the layer's dtype"
                )
        if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
            raise ValueError(
                f"{self._name}.append: the new keys require grad, but a cache is written in place "
                "and "
                "carries no gradient; call the layer under torch.no_grad(), or train without a "
                "cache"
            )
        if real is not None and tuple(real.shape) != (batch, length):
            raise ValueError(
                f"{self._name}.append: real must be (batch, length) = ({batch}, {length}), "
                f"got {tuple(real.shape)}"
            )

    def _note(
        self, length: int, positions: Tensor | None, real: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Positions (B, L) and real flags of the new columns; moves the counters on."""
        if real is None and self._real is not None:
            real = torch.ones(self.batch, length, dtype=torch.bool, device=self._keys.device)
        if positions is None:
            positions = self.next_positions(length, real)
        positions = positions if positions.dim() == 2 else positions[None]
        self._same = self._same and positions.shape[0] == 1 and real is None
        positions = positions.to(torch.int64).expand(self.batch, length)
        if length:
            self._next = position_after(positions, real)
        self.seen += length
        return positions, real

    def _put(
        self, start: int, key: Tensor, value: Tensor, positions: Tensor, real: Tensor | None
    ) -> None:
        new = slice(start, start + key.shape[2])
        self._keys[:, :, new] = key
        self._values[:, :, new] = value
        self._put_tokens(new, positions, real)

    def _put_tokens(self, new: slice, positions: Tensor, real: Tensor | None) -> None:
        self._positions[:, new] = positions
        if real is not None:
            if self._real is None:
                # Everything before the first pad was real.
                self._real = torch.ones_like(self._positions, dtype=torch.bool)
            self._real[:, new] = real

    def _view(self, start: int, stop: int) -> Cached:
        rows = slice(0, 1) if self._same else slice(None)
        return Cached(
            self._keys[:, :, start:stop],
            self._values[:, :, start:stop],
            self._positions[rows, start:stop],
            None if self._real is None else self._real[:, start:stop],
        )

    def _drop(self, count: int) -> None:
        self._end -= count
        self.seen -= count
        held = slice(self._begin, self._end)
        if self._end == self._begin:
            self._next = torch.zeros_like(self._next)
        else:
            real = None if self._real is None else self._real[:, held]
            self._next = position_after(self._positions[:, held], real)

    def _want_length(self, length: int) -> None:
        if not 0 <= length <= self.seen:
            raise ValueError(
                f"{self._name}.crop: length={length} must lie in 0..{self.seen}, the tokens seen"
            )


class KVCache(_Cache):
    """Every key and value of up to `capacity` tokens, in memory allocated once.

    Args:
        batch: rows B. num_kv_heads: Hkv. capacity: most tokens, pads included.
        head_dim: D of the keys. value_dim: Dv, `head_dim` when None.
        dtype, device: as the layer's projections give them (`layer.make_cache` sets all of these).

    What `append` returned stays as it is until `reset`, `crop` or `reorder`.
    Bytes: 2 * B * Hkv * capacity * D * itemsize (see `nbytes`).
    """

    def __init__(
        self,
        batch: int,
        num_kv_heads: int,
        capacity: int,
        head_dim: int,
        value_dim: int | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if capacity < 1:
            raise ValueError(f"KVCache: capacity={capacity} must be at least 1 token")
        super().__init__(batch, num_kv_heads, capacity, head_dim, value_dim, dtype, device)

    @property
    def capacity(self) -> int:
        return self._keys.shape[2]

    @property
    def length(self) -> int:
        """Tokens held, pads included."""
        return self._end

    def visible_after(self, length: int) -> int:
        """How many keys a call with `length` new tokens will see, those among them."""
        return self._end + length

    def append(
        self,
        key: Tensor,
        value: Tensor,
        *,
        positions: Tensor | None = None,
        real: Tensor | None = None,
    ) -> Cached:
        """Take in `key` (B, Hkv, L, D) and `value` (B, Hkv, L, Dv); return all that is held.

        `positions` (L,) or (B, L): default `next_positions`. `real` (B, L) bool: False marks
        padding.

        Raises:
            ValueError: more tokens than capacity, other shapes or dtype, or keys that require grad.
        """
        self._check(key, value, real)
        length = key.shape[2]
        if self._end + length > self.capacity:
            raise ValueError(
                f"KVCache: capacity={self.capacity} holds {self._end} tokens and {length} more "
                "came; make "
                f"it at least {self._end + length}, or use RollingKVCache with a window"
            )
        self._put(self._end, key, value, *self._note(length, positions, real))
        self._end += length
        return self._view(0, self._end)

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens and forget the newer ones (rejected drafts, a new "
        "turn)."""
        self._want_length(length)
        self._drop(self.seen - length)

    def __repr__(self) -> str:
        batch, heads, capacity, width = self._keys.shape
        return (
            f"KVCache({self._end} of {capacity} tokens, batch {batch}, kv heads {heads}, head dim "
            f"{width}, "
            f"{self.dtype}, {self.nbytes} bytes)"
        )


class RollingKVCache(_Cache):
    """The last `window` keys and values, for layers that look back no further.

    A call sees at most `window - 1` older keys before its own. Memory does not grow with the text:
    the buffers hold two windows, so that old keys are moved once a window, not once a token.

    `window` counts as `headwise.window` does: the query's own key is one of them. The layer must be
    built with `AttentionOptions(window=...)` no larger than this; it refuses the cache otherwise.
    What `append` returned stays as it is until `reset`, `crop` or `reorder`.
    """

    def __init__(
        self,
        batch: int,
        num_kv_heads: int,
        window: int,
        head_dim: int,
        value_dim: int | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if window < 1:
            raise ValueError(f"RollingKVCache: window={window} must be at least 1 token")
        super().__init__(batch, num_kv_heads, 2 * window, head_dim, value_dim, dtype, device)
        self.window = window

    @property
    def length(self) -> int:
        """Tokens held, pads included: at most `window`."""
        return min(self._end - self._begin, self.window)

    def visible_after(self, length: int) -> int:
        """How many keys a call with `length` new tokens will see, those among them."""
        return min(self._end - self._begin, self.window - 1) + length

    def append(
        self,
        key: Tensor,
        value: Tensor,
        *,
        positions: Tensor | None = None,
        real: Tensor | None = None,
    ) -> Cached:
        """As `KVCache.append`, but returns the last `window - 1` older keys and the new ones."""
        self._check(key, value, real)
        length, columns = key.shape[2], self._keys.shape[2]
        older = min(self._end - self._begin, self.window - 1)
        start = self._end - older
        positions, real = self._note(length, positions, real)
        if start + older + length > columns:
            self._renew(start, max(columns, older + length))
            start = 0
        self._put(start + older, key, value, positions, real)
        self._begin, self._end = start, start + older + length
        seen = self._view(self._begin, self._end)
        if self._keys.shape[2] > columns:
            # A chunk longer than the buffers: the call sees all of it, the cache keeps the last
            # window.
            self._renew(self._end - self.window, columns)
            self._begin, self._end = 0, self.window
        return seen

    def _renew(self, start: int, columns: int) -> None:
        """Move columns [start, end) to the front of fresh buffers, so that earlier views stay "
        "true."""
        held = slice(start, self._end)
        count = self._end - start
        for name in ("_keys", "_values"):
            old = getattr(self, name)
            fresh = old.new_zeros(*old.shape[:2], columns, old.shape[3])
            fresh[:, :, :count] = old[:, :, held]
            setattr(self, name, fresh)
        for name in ("_positions", "_real"):
            old = getattr(self, name)
            if old is not None:
                fresh = old.new_ones(old.shape[0], columns)
                fresh[:, :count] = old[:, held]
                setattr(self, name, fresh)

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens ever seen and forget the newer ones.

        Raises:
            ValueError: the tokens that the window would then reach back to are gone.
        """
        self._want_length(length)
        dropped = self.seen - length
        if self.length - dropped < min(length, self.window - 1):
            raise ValueError(
                f"RollingKVCache.crop: {self.seen} tokens were seen and the last {self.length} "
                "are held; "
                f"going back to {length} would need older ones"
            )
        self._drop(dropped)

    def __repr__(self) -> str:
        batch, heads, _, width = self._keys.shape
        return (
            f"RollingKVCache(last {self.length} of {self.seen} tokens, window {self.window}, "
            f"batch {batch}, "
            f"kv heads {heads}, head dim {width}, {self.dtype}, {self.nbytes} bytes)"
        )
