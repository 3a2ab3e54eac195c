"""Keys and values as int8: how they are rounded, what is held of them, a query upon them.

Keys get one scale for each feature (channel) in a block of 64 tokens: a few features are often much
larger than all others, and with one scale a token those few would leave no bits to the rest.
Values have no such features; they get one scale a token. (Liu et al. 2024, "KIVI", arXiv
2402.02750, there with 2 bits.) Rounding is to the nearest of −127 … 127 times the scale, so a
number moves by half a scale at most: 1/254 of the largest that shares it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.functional import pad

from headwise.call import AttentionCall
from headwise.intervals import CompiledMask, Mask, Sizes

# Tokens that share the scales of their keys. The native kernel is built for this number.
BLOCK = 64
STEPS = 127
# Rows of int8 that are kept together: instructions multiply four bytes at a time.
QUAD = 4


def to_quads(rows: Tensor) -> Tensor:
    """(…, n, m) → (…, ⌈n / 4⌉, m, 4): four rows lie side by side; zeros fill the last four."""
    rows = pad(rows, (0, 0, 0, -rows.shape[-2] % QUAD))
    return rows.unflatten(-2, (-1, QUAD)).mT


def from_quads(quads: Tensor) -> Tensor:
    """(…, n, m, 4) → (…, 4 n, m)."""
    return quads.mT.flatten(-3, -2)


def _rounded(x: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """(int8, float32 scales) of x, with one scale wherever `largest` has one number."""
    scale = largest.float() / STEPS
    return (x.float() / torch.where(scale > 0, scale, 1.0)).round().to(torch.int8), scale


def quantise_keys(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Whole blocks of keys (B, H, n · 64, D) → int8 (B, H, n, D, 64) and float32 scales
    (B, H, n, D). What is not finite becomes 0 and does not count for the scale."""
    blocks = torch.nan_to_num(keys.float(), 0.0, 0.0, 0.0).unflatten(2, (-1, BLOCK)).mT
    small, scale = _rounded(blocks, blocks.abs().amax(-1, keepdim=True))
    return small, scale.squeeze(-1)


def quantise_values(values: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Values (B, H, L, Dv) → int8 of the same shape and float32 scales (B, H, L).

    int8 has no NaN and no infinity: where a token's key or value is not finite its scale is NaN,
    and every query that sees the token gets NaN.
    """
    known = torch.nan_to_num(values.float(), 0.0, 0.0, 0.0)
    small, scale = _rounded(known, known.abs().amax(-1, keepdim=True))
    fine = values.isfinite().all(-1) & keys.isfinite().all(-1)
    return small, torch.where(fine, scale.squeeze(-1), torch.nan)


@dataclass(frozen=True, eq=False)
class Held:
    """What a quantised cache holds of one layer, in place: a later `append` writes into it.

    Four bytes that are multiplied at once, of features or of tokens, lie side by side (`to_quads`).

    keys: int8 (B, Hkv, blocks, ⌈D / 4⌉, 64, 4); feature d of token j is [:, :, j // 64, d // 4,
    j % 64, d % 4].
    key_scales: float32 (B, Hkv, blocks, D).
    tail: (B, Hkv, 64, D) in the layer's dtype, the keys after the last whole block.
    values: int8 (B, Hkv, capacity / 4, Dv, 4); token j is [:, :, j // 4, :, j % 4].
    value_scales: float32 (B, Hkv, capacity).
    length: tokens held, S; the first `length // 64 * 64` have their keys as int8.
    """

    keys: Tensor
    key_scales: Tensor
    tail: Tensor
    values: Tensor
    value_scales: Tensor
    length: int

    @property
    def sealed(self) -> int:
        """Tokens whose keys are int8."""
        return self.length // BLOCK * BLOCK

    @property
    def shape(self) -> torch.Size:
        """Of the keys, as a call sees them: (B, Hkv, S, D)."""
        batch, heads, _, dim = self.tail.shape
        return torch.Size((batch, heads, self.length, dim))

    @property
    def dtype(self) -> torch.dtype:
        return self.tail.dtype

    @property
    def device(self) -> torch.device:
        return self.tail.device

    @property
    def value_dim(self) -> int:
        return self.values.shape[3]

    def dequantized(
        self, start: int = 0, stop: int | None = None, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        """Keys (B, Hkv, n, D) and values (B, Hkv, n, Dv) that tokens start … stop stand for, in
        `dtype` (the layer's, where None)."""
        stop = self.length if stop is None else stop
        dtype = self.dtype if dtype is None else dtype
        wide = torch.promote_types(dtype, torch.float32)
        sealed, first, last = self.sealed, start // BLOCK, -(-min(stop, self.sealed) // BLOCK)
        parts = []
        if first < last:
            some = slice(first, last)
            scales = self.key_scales[:, :, some, :, None].to(wide)
            held = from_quads(self.keys[:, :, some])[..., : self.tail.shape[3], :]
            whole = (held.to(wide) * scales).mT.flatten(2, 3)
            parts.append(whole[:, :, start - first * BLOCK : min(stop, sealed) - first * BLOCK])
        if stop > sealed:
            parts.append(self.tail[:, :, max(0, start - sealed) : stop - sealed].to(wide))
        keys = torch.cat(parts, 2) if parts else self.tail[:, :, :0].to(wide)
        scale = self.value_scales[:, :, start:stop, None].to(wide)
        keys = torch.where(scale.isnan(), torch.nan, keys)
        above = start // QUAD
        values = from_quads(self.values[:, :, above : -(-stop // QUAD)])
        values = values[:, :, start - above * QUAD : stop - above * QUAD].to(wide) * scale
        return keys.to(dtype), values.to(dtype)

    # A model that was not switched to this package's attention would treat it as a tensor.
    def _not_a_tensor(self) -> NoReturn:
        raise TypeError(
            "QuantizedCache: these are int8 keys and values, which only headwise's attention can "
            'read; call model.set_attn_implementation("headwise") before the model runs with it'
        )

    def __getitem__(self, index: object) -> NoReturn:
        self._not_a_tensor()

    @classmethod
    def __torch_function__(
        cls, func: object, types: object, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        cls._not_a_tensor(None)  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class QuantizedCall:
    """One new token's attention upon a quantised cache, before it is computed.

    query: (B, Hq, 1, D) in the dtype of the cache. mask, bias, scale, softcap, sinks: as in
    `AttentionCall`, whose checks they pass. `dequantized()` is the call that it stands for.
    """

    query: Tensor
    held: Held
    mask: Mask | None = None
    bias: Tensor | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    visible: CompiledMask = field(init=False, repr=False)
    scale_value: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.query.dim() != 4 or self.query.shape[2] != 1:
            raise ValueError(
                "attention upon a quantised cache: wanted one query, (batch, heads, 1, head "
                f"dimension), got {tuple(self.query.shape)}; longer chunks go through "
                "Held.dequantized()"
            )
        if self._fits():
            mask, sizes = self.mask, self.sizes
            visible = CompiledMask(sizes, is_full=True) if mask is None else mask.lower(sizes)
            scale = self.scale
            scale = 1.0 / math.sqrt(max(1, self.query.shape[3])) if scale is None else scale
        else:
            # The same checks as for plain tensors, on stand-ins that hold no memory.
            key = self.held.tail.as_strided(self.held.shape, (0, 0, 0, 0))
            value = key.as_strided((*key.shape[:3], self.held.value_dim), (0, 0, 0, 0))
            stands = AttentionCall(
                self.query, key, value,
                self.mask, self.bias, self.scale, self.softcap, self.sinks,
            )  # fmt: skip
            visible, scale = stands.visible, stands.scale_value
        object.__setattr__(self, "visible", visible)
        object.__setattr__(self, "scale_value", scale)

    def _fits(self) -> bool:
        """A query that fits, perhaps a mask and a scale: most calls, and all checks at once."""
        query, tail = self.query, self.held.tail
        batch, heads, _, dim = query.shape
        own_batch, own_heads, _, own_dim = tail.shape
        return (
            self.bias is None
            and self.softcap is None
            and self.sinks is None
            and (self.scale is None or 0 < self.scale < math.inf)
            and (self.mask is None or isinstance(self.mask, Mask))
            and query.dtype == tail.dtype
            and query.device == tail.device
            and batch == own_batch
            and dim == own_dim
            and own_heads > 0
            and heads % own_heads == 0
        )

    @property
    def sizes(self) -> Sizes:
        batch, heads, queries, _ = self.query.shape
        return Sizes(batch, heads, queries, self.held.length, self.query.device)

    def part(self, start: int, stop: int, dtype: torch.dtype | None = None) -> AttentionCall:
        """The plain call upon tokens start … stop, in `dtype`, without sinks."""
        dtype = self.query.dtype if dtype is None else dtype
        keys, values = self.held.dequantized(start, stop, dtype)
        bias = self.bias
        if bias is not None:
            bias = bias.to(dtype)
            bias = bias[..., start:stop] if bias.shape[-1] > 1 else bias
        mask = self.visible.part(slice(None), slice(start, stop))
        query = self.query.to(dtype)
        return AttentionCall(query, keys, values, mask, bias, self.scale_value, self.softcap)

    def dequantized(self, dtype: torch.dtype | None = None) -> AttentionCall:
        """The same call upon the keys and values that the cache stands for."""
        whole = self.part(0, self.held.length, dtype)
        sinks = None if self.sinks is None else self.sinks.to(whole.query.dtype)
        return AttentionCall(
            whole.query, whole.key, whole.value, self.mask, whole.bias, self.scale_value,
            self.softcap, sinks,
        )  # fmt: skip


__all__ = [
    "BLOCK",
    "QUAD",
    "Held",
    "QuantizedCall",
    "from_quads",
    "quantise_keys",
    "quantise_values",
    "to_quads",
]
