"""A key/value cache in int8: about half the bytes of bf16, and half as many to read in decoding."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from headwise.attention import attention, observers
from headwise.backends import int8
from headwise.cache import Cached, _Cache
from headwise.call import own_precision
from headwise.quantized import (
    BLOCK,
    QUAD,
    Held,
    QuantizedCall,
    from_quads,
    quantise_keys,
    quantise_values,
    to_quads,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class QuantizedKVCache(_Cache):
    """Every key and value of up to `capacity` tokens as int8; used as `KVCache` is.

    Keys have one float32 scale for each feature in a block of 64 tokens, values one a token
    (`headwise.quantized` says why). A token's value is rounded when it comes in. Its key stays as
    it is until its block of 64 is full; then the block is rounded, once: appending never rounds
    old tokens again.

    A layer's call with one token reads int8 in place. A call with more tokens sees its own keys
    and values as they came and the older ones as they are held, so that nothing that comes later
    in the chunk moves an earlier token's scale.

    Args: as `KVCache`; dtype float32, bfloat16 or float16, of the keys that come in.

    Bytes (`nbytes`): B · Hkv · (capacity · (D + Dv + 4) + capacity / 64 · 4 D + 64 · D · itemsize),
    capacity rounded up to whole blocks. With D = Dv = 64 that is 1.06 bytes a number.
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
            raise ValueError(f"QuantizedKVCache: capacity={capacity} must be at least 1 token")
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if dtype not in DTYPES:
            raise ValueError(
                f"QuantizedKVCache: dtype={dtype}; wanted float32, bfloat16 or float16. int8 keeps "
                "two digits, so for float64 use KVCache"
            )
        self.capacity = capacity
        super().__init__(batch, num_kv_heads, capacity, head_dim, value_dim, dtype, device)

    def _make(
        self,
        shape: tuple[int, int, int],
        head_dim: int,
        value_dim: int,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
    ) -> None:
        batch, heads, columns = shape
        blocks, row = -(-columns // BLOCK), (batch, heads)
        quads = -(-head_dim // QUAD)
        self._keys = torch.zeros(*row, blocks, quads, BLOCK, QUAD, dtype=torch.int8, device=device)
        self._key_scales = torch.zeros(*row, blocks, head_dim, device=device, dtype=torch.float32)
        self._tail = torch.zeros(*row, BLOCK, head_dim, dtype=dtype, device=device)
        columns = blocks * BLOCK
        self._values = torch.zeros(
            *row, columns // QUAD, value_dim, QUAD, dtype=torch.int8, device=device
        )
        self._value_scales = torch.zeros(*row, columns, dtype=torch.float32, device=device)

    # Every buffer, and how many tokens one step of its third axis holds.
    _BUFFERS: ClassVar[dict[str, int]] = {
        "_keys": BLOCK,
        "_key_scales": BLOCK,
        "_values": QUAD,
        "_value_scales": 1,
    }

    @property
    def _sizes(self) -> tuple[int, int, int, int]:
        return (*self._tail.shape[:2], self._tail.shape[3], self._values.shape[3])

    @property
    def dtype(self) -> torch.dtype:
        """Of the keys and values that come in."""
        return self._tail.dtype

    @property
    def length(self) -> int:
        """Tokens held, pads included."""
        return self._end

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept of keys and values: int8, scales and the tail."""
        buffers = [self._tail, *(getattr(self, name) for name in self._BUFFERS)]
        return sum(t.numel() * t.element_size() for t in buffers)

    def visible_after(self, length: int) -> int:
        """How many keys a call with `length` new tokens will see, those among them."""
        return self._end + length

    @property
    def held(self) -> Held:
        """What is held, in place; a later append writes into it."""
        return Held(
            self._keys, self._key_scales, self._tail, self._values, self._value_scales, self._end
        )

    def append(
        self,
        key: Tensor,
        value: Tensor,
        *,
        positions: Tensor | None = None,
        real: Tensor | None = None,
    ) -> Cached:
        """As `KVCache.append`: older keys and values as they are held, the new ones as they came.

        The tensors returned are copies, of S tokens; `store` makes none.
        """
        older = self._end
        self._check_room(key, value, real)
        old_keys, old_values = self.held.dequantized(0, older)
        _, seen, real = self.store(key, value, positions=positions, real=real)
        return Cached(torch.cat((old_keys, key), 2), torch.cat((old_values, value), 2), seen, real)

    def store(
        self,
        key: Tensor,
        value: Tensor,
        *,
        positions: Tensor | None = None,
        real: Tensor | None = None,
    ) -> tuple[Held, Tensor, Tensor | None]:
        """Take in tokens as `append` does; return what is held now, positions (1 or B, S), real.

        Raises:
            ValueError: as `KVCache.append`.
        """
        self._check_room(key, value, real)
        start, stop = self._end, self._end + key.shape[2]
        positions, real = self._note(key.shape[2], positions, real)
        self._put_tokens(slice(start, stop), positions, real)
        small, scales = quantise_values(value, key)
        self._put_values(start, small)
        self._value_scales[:, :, start:stop] = scales
        self._put_keys(start, key)
        self._end = stop
        rows = slice(0, 1) if self._same else slice(None)
        seen = None if self._real is None else self._real[:, :stop]
        return self.held, self._positions[rows, :stop], seen

    def _put_keys(self, start: int, key: Tensor) -> None:
        """Keys into the tail; each block that is full leaves it as int8."""
        block, held = divmod(start, BLOCK)
        if held + key.shape[2] < BLOCK:
            self._tail[:, :, held : held + key.shape[2]] = key
            return
        whole = torch.cat((self._tail[:, :, :held], key), 2) if held else key
        count = whole.shape[2] // BLOCK
        done = whole[:, :, : count * BLOCK]
        if self._real is not None:
            # What stands at a pad is never seen; it must not widen the scales of real keys.
            first = block * BLOCK
            real = self._real[:, None, first : first + count * BLOCK, None]
            done = torch.where(real, done, 0.0)
        small, scales = quantise_keys(done)
        self._keys[:, :, block : block + count] = to_quads(small)
        self._key_scales[:, :, block : block + count] = scales
        rest = whole[:, :, count * BLOCK :]
        self._tail[:, :, : rest.shape[2]] = rest

    def _put_values(self, start: int, small: Tensor) -> None:
        first, held = divmod(start, QUAD)
        if small.shape[2] == 1:
            self._values[:, :, first, :, held] = small[:, :, 0]
            return
        if held:
            before = from_quads(self._values[:, :, first : first + 1])[:, :, :held]
            small = torch.cat((before, small), 2)
        quads = to_quads(small)
        self._values[:, :, first : first + quads.shape[2]] = quads

    def _check_room(self, key: Tensor, value: Tensor, real: Tensor | None) -> None:
        self._check(key, value, real)
        if self._end + key.shape[2] > self.capacity:
            raise ValueError(
                f"QuantizedKVCache: capacity={self.capacity} holds {self._end} tokens and "
                f"{key.shape[2]} more came; make it at least {self._end + key.shape[2]}"
            )

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens and forget the newer ones.

        Where that opens a full block again, its keys go back to the tail as they are held, and are
        rounded a second time once the block is full.
        """
        self._want_length(length)
        block, left = divmod(length, BLOCK)
        if left and block < self._end // BLOCK:
            keys, _ = self.held.dequantized(block * BLOCK, length)
            self._tail[:, :, :left] = keys
        self._drop(self.seen - length)

    def grow(self, capacity: int) -> None:
        """Room for `capacity` tokens, in new memory; all that is held stays as it is."""
        if capacity <= self.capacity:
            return
        blocks = -(-capacity // BLOCK)
        for name, tokens in self._BUFFERS.items():
            old = getattr(self, name)
            fresh = old.new_zeros(*old.shape[:2], blocks * BLOCK // tokens, *old.shape[3:])
            fresh[:, :, : old.shape[2]] = old
            setattr(self, name, fresh)
        for name in ("_positions", "_real"):
            old = getattr(self, name)
            if old is not None:
                fresh = old.new_ones(old.shape[0], capacity)
                fresh[:, : old.shape[1]] = old
                setattr(self, name, fresh)
        self.capacity = capacity

    def _pick(self, indices: Tensor) -> None:
        for name in (*self._BUFFERS, "_tail"):
            setattr(self, name, getattr(self, name).index_select(0, indices))

    def __repr__(self) -> str:
        batch, heads, width, _ = self._sizes
        return (
            f"QuantizedKVCache({self._end} of {self.capacity} tokens, batch {batch}, kv heads "
            f"{heads}, head dim {width}, int8 for {self.dtype}, {self.nbytes} bytes)"
        )


def attend(parts: dict[str, Any], dropout: float = 0.0) -> Tensor:
    """`attention(**parts)`, where key and value may be what a quantised cache holds."""
    if not isinstance(parts["key"], Held):
        return attention(**parts, dropout=dropout)
    call = QuantizedCall(
        parts["query"], parts["key"], parts["mask"], parts["bias"], parts["scale"],
        parts["softcap"], parts["sinks"],
    )  # fmt: skip
    if dropout > 0:
        return attention(**plain(parts), dropout=dropout)
    return attend_held(call)[0]


def plain(parts: dict[str, Any]) -> dict[str, Any]:
    """The same parts with keys and values as tensors."""
    if not isinstance(parts["key"], Held):
        return parts
    key, value = parts["key"].dequantized()
    return {**parts, "key": key, "value": value}


def attend_held(call: QuantizedCall, path: str | None = None) -> tuple[Tensor, Tensor]:
    """Output (B, Hq, 1, Dv) in the query's dtype and lse (B, Hq, 1), of the path named or the
    first that accepts the call. Observers see the call that it stands for.

    Raises:
        ValueError: a query that requires grad, which int8 cannot carry; as `int8.choose`.
    """
    if torch.is_grad_enabled() and call.query.requires_grad:
        raise ValueError(
            "attention upon a quantised cache: the query requires grad, but int8 keys and values "
            "carry no gradient; run the model under torch.no_grad()"
        )
    chosen = int8.choose(call, path)
    with own_precision(call.query.device):
        output, lse = chosen.forward(call)
    if observers:
        stands_for = call.dequantized()
        for observe in tuple(observers):
            observe(stands_for, output)
    return output, lse


__all__ = ["QuantizedKVCache", "attend", "attend_held", "plain"]
