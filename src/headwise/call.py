"""AttentionCall: one attention computation, frozen, validated once where it is made."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from headwise.intervals import CompiledMask, Mask, Sizes
from headwise.masks import check_grid

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """softmax(scale·QKᵀ → softcap → + bias → mask, with sinks) · V, before it is computed.

    Vaswani 2017, arXiv 1706.03762, equation 1; grouped heads: Ainslie 2023, 2305.13245; softcap:
    Gemma 2, 2408.00118; sinks: one learned logit a head joins the denominator.

    query: (B, Hq, L, D). key: (B, Hkv, S, D). value: (B, Hkv, S, Dv). Query head h reads key and
        value head h // (Hq / Hkv).
    mask: a headwise mask; None lets every query see every key.
    bias: added to the scores, (L, S) or (B, Hq, L, S) with axes full or 1; −inf hides.
    visible: the mask compiled for this call's sizes and device; it follows from the rest.
    scale: None means 1/√D. softcap c: c·tanh(score/c). sinks: (Hq,). dropout: probability.

    Raises:
        TypeError: a raw tensor as mask, or tensors that are not floating point.
        ValueError: shapes, dtypes, devices or numbers that do not agree, named with what came.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Mask | None = None
    bias: Tensor | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    dropout: float = 0.0
    visible: CompiledMask = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._check_kinds()
        self._check_shapes()
        self._check_numbers()
        # A mask that does not fit fails here, where the call is made.
        query = self.query
        batch, heads, queries, _ = query.shape
        sizes = Sizes(batch, heads, queries, self.key.shape[2], query.device)
        visible = CompiledMask(sizes, is_full=True) if self.mask is None else self.mask.lower(sizes)
        object.__setattr__(self, "visible", visible)

    @property
    def batch(self) -> int:
        return self.query.shape[0]

    @property
    def num_heads(self) -> int:
        return self.query.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.key.shape[1]

    @property
    def groups(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // max(1, self.num_kv_heads)

    @property
    def query_length(self) -> int:
        return self.query.shape[2]

    @property
    def key_length(self) -> int:
        return self.key.shape[2]

    @property
    def head_dim(self) -> int:
        return self.query.shape[3]

    @property
    def value_dim(self) -> int:
        return self.value.shape[3]

    @property
    def scale_value(self) -> float:
        """The scale as a number: 1/√D when none was given.

        With D = 0 every score is 0 whatever the scale, so it is 1 there.
        """
        return 1.0 / math.sqrt(max(1, self.head_dim)) if self.scale is None else self.scale

    @property
    def accumulate_dtype(self) -> torch.dtype:
        """float64 for float64 inputs, float32 for all others."""
        return torch.float64 if self.query.dtype == torch.float64 else torch.float32

    def to(self, dtype: torch.dtype) -> AttentionCall:
        """The same call with every tensor in another dtype."""
        return self._map(lambda tensor: tensor.to(dtype))

    def detach(self) -> AttentionCall:
        """The same call outside autograd."""
        return self._map(torch.Tensor.detach)

    def part(self, rows: slice = slice(None), keys: slice = slice(None)) -> AttentionCall:
        """The call of some queries upon some keys; mask and bias are cut with them."""
        bias = self.bias
        if bias is not None:
            bias = bias[..., rows if bias.shape[-2] > 1 else slice(None), :]
            bias = bias[..., keys if bias.shape[-1] > 1 else slice(None)]
        return replace(
            self,
            query=self.query[:, :, rows],
            key=self.key[:, :, keys],
            value=self.value[:, :, keys],
            mask=self.visible.part(rows, keys),
            bias=bias,
        )

    def _map(self, change: Callable[[Tensor], Tensor]) -> AttentionCall:
        return replace(
            self,
            query=change(self.query),
            key=change(self.key),
            value=change(self.value),
            bias=None if self.bias is None else change(self.bias),
            sinks=None if self.sinks is None else change(self.sinks),
        )

    def _check_kinds(self) -> None:
        if self.mask is not None and not isinstance(self.mask, Mask):
            raise TypeError(
                f"attention: mask is a {type(self.mask).__name__}, which does not say what it "
                "means; wrap it: keep(mask) if True means visible, hide(mask) if True means hidden"
                " (real-valued scores go into bias=)"
            )
        if self.bias is not None and not self.bias.is_floating_point():
            raise TypeError(
                f"attention: bias is added to the scores, so it is floating point; got "
                f"{self.bias.dtype}. To select keys use mask=keep(...) or mask=hide(...)"
            )
        query, key, value = self.query, self.key, self.value
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if tensor.is_nested:
                raise TypeError(
                    f"attention: {name} is a nested tensor; pad it (to_padded_tensor) and say what "
                    "is padding with mask=padding(lengths=…)"
                )
        dtype, device = query.dtype, query.device
        if dtype not in FLOATS:
            raise TypeError(
                f"attention: wanted float16, bfloat16, float32 or float64, got query {dtype}"
            )
        others = (("key", key), ("value", value), ("bias", self.bias), ("sinks", self.sinks))
        for name, other in others:
            if other is None:
                continue
            if other.dtype != dtype:
                raise ValueError(
                    f"attention: query is {dtype} but {name} is {other.dtype}; "
                    "bring them to one dtype"
                )
            if other.device != device:
                raise ValueError(f"attention: query is on {device} but {name} is on {other.device}")

    def _check_shapes(self) -> None:
        query, key, value = self.query.shape, self.key.shape, self.value.shape
        if not len(query) == len(key) == len(value) == 4:
            for name, shape in (("query", query), ("key", key), ("value", value)):
                if len(shape) != 4:
                    raise ValueError(
                        f"attention: {name} must have 4 axes (batch, heads, length, head "
                        f"dimension), got {len(shape)}: {tuple(shape)}"
                    )
        if not query[0] == key[0] == value[0]:
            raise ValueError(
                f"attention: batch sizes differ: query {query[0]}, key {key[0]}, value {value[0]}"
            )
        if query[3] != key[3]:
            raise ValueError(
                f"attention: query has head dimension {query[3]}, key has {key[3]}; they must agree"
            )
        if key[1] != value[1] or key[2] != value[2]:
            raise ValueError(
                f"attention: key has (heads, length) = {tuple(key[1:3])}, value has "
                f"{tuple(value[1:3])}; they must agree"
            )
        if key[1] == 0 or query[1] % key[1] != 0:
            hint = ""
            if key[1] and query[2] % key[1] == 0 and query[1] == key[2]:
                hint = "; is the layout (batch, length, heads, dimension)? wanted (B, H, L, D)"
            raise ValueError(
                f"attention: {query[1]} query heads cannot share {key[1]} key/value heads evenly; "
                f"the first must be a multiple of the second{hint}"
            )
        if self.bias is not None:
            check_grid("attention: bias", self.bias, query[0], query[1], query[2], key[2])
        if self.sinks is not None and tuple(self.sinks.shape) != (query[1],):
            raise ValueError(
                f"attention: sinks holds one logit a query head, wanted ({query[1]},), "
                f"got {tuple(self.sinks.shape)}"
            )

    def _check_numbers(self) -> None:
        if self.scale is not None and not (self.scale > 0 and math.isfinite(self.scale)):
            raise ValueError(
                f"attention: scale must be a finite number above 0, got {self.scale}; "
                "leave it out for 1/√head_dim"
            )
        if self.softcap is not None and not (self.softcap > 0 and math.isfinite(self.softcap)):
            raise ValueError(
                f"attention: softcap must be a finite number above 0, got {self.softcap}; "
                "leave it out for no cap"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"attention: dropout must lie in [0, 1), got {self.dropout}")
        bias = self.bias
        if bias is not None and not torch.compiler.is_compiling() and _looks_like_selection(bias):
            warnings.warn(
                "attention: bias holds only 0 and 1. Added to the scores it hides nothing; to "
                "select keys use mask=keep(bias > 0) or mask=hide(bias > 0)",
                stacklevel=5,
            )


def own_precision(device: torch.device) -> AbstractContextManager[object]:
    """Autocast off: inside, float32 is a decision, and autocast would round products to half."""
    kind = device.type
    if kind != "cpu" and not torch.amp.is_autocast_available(kind):
        return nullcontext()
    if not torch.is_autocast_enabled(kind):
        return nullcontext()  # entering torch.autocast costs more than a small call
    return torch.autocast(kind, enabled=False)


def _looks_like_selection(bias: Tensor) -> bool:
    """A 0/1 mask passed as scores. A glance first, so that ordinary biases cost nothing."""
    if bias.requires_grad or bias.numel() < 2 or bias.device.type != "cpu":
        return False
    sample = bias[(0,) * (bias.dim() - 2)][:8, :8] if bias.dim() == 4 else bias[:8, :8]
    if not bool(((sample == 0) | (sample == 1)).all()):
        return False
    return (
        bool(((bias == 0) | (bias == 1)).all())
        and bool((bias == 1).any())
        and bool((bias == 0).any())
    )
