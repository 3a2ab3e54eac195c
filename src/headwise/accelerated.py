"""`with headwise.accelerated(): …`: F.scaled_dot_product_attention of any model, natively."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from headwise import backends
from headwise.attention import attention
from headwise.call import FLOATS, AttentionCall
from headwise.intervals import Mask
from headwise.masks import causal, keep


class accelerated:
    """While it is open, calls of F.scaled_dot_product_attention that the native kernel can serve go
    to it; all others go to torch, and the report says why.

    It replaces one name, `torch.nn.functional.scaled_dot_product_attention`, for this process, so
    a module that imported the function under a name of its own before is not reached. What is
    computed is the same, to rounding; where the two would differ, the call is torch's: dropout,
    which draws other weights, and boolean masks in which a row sees nothing (torch gives NaN there
    in some versions, this package 0).

        with headwise.accelerated() as fast:
            model(**inputs)
        print(fast.report())
    """

    def __init__(self) -> None:
        self.served = 0
        self.left: Counter[str] = Counter()
        self._original: Any = None
        self._lock = threading.Lock()

    def __enter__(self) -> accelerated:
        if self._original is not None:
            raise RuntimeError("accelerated: this object is open already; make another")
        original = functional.scaled_dot_product_attention
        self._original = original

        @functools.wraps(original)
        def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Tensor:
            call = _read(*args, **kwargs) if not torch.compiler.is_compiling() else "compiled code"
            if isinstance(call, str):
                with self._lock:
                    self.left[call] += 1
                result: Tensor = original(*args, **kwargs)
                return result
            with self._lock:
                self.served += 1
            query, key, value, mask, bias, scale = call
            return attention(
                query, key, value, mask, bias=bias, scale=scale, backend=backends.native.Native.name
            )

        functional.scaled_dot_product_attention = scaled_dot_product_attention
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        functional.scaled_dot_product_attention = self._original
        self._original = None

    def report(self) -> str:
        """How many calls the native kernel served, how many were left to torch, and why."""
        lines = [f"native kernel: {self.served}", f"torch: {sum(self.left.values())}"]
        lines += [f"  {count} × {reason}" for reason, count in self.left.most_common()]
        return "\n".join(lines)


_Call = tuple[Tensor, Tensor, Tensor, "Mask | None", "Tensor | None", "float | None"]


def _read(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> _Call | str:
    """The call in this package's terms, or why it is left to torch."""
    tensors = (query, key, value)
    if any(type(t) not in (Tensor, torch.nn.Parameter) for t in tensors):
        return "a tensor subclass"
    if any(t.dim() != 4 for t in tensors):
        return "not four axes"
    if any(t.device.type != "cpu" for t in tensors):
        return "not on the CPU"
    if query.dtype not in FLOATS or any(t.dtype != query.dtype for t in tensors):
        return "dtypes that differ, or are not floating point"
    if torch.is_autocast_enabled("cpu"):
        return "autocast"
    if dropout_p > 0:
        return "dropout, which would draw other weights"
    if query.shape[1] != key.shape[1] and not enable_gqa:
        return "heads that differ without enable_gqa"
    if scale is not None and not scale > 0:
        return "a scale that is not above 0"
    mask: Mask | None = None
    bias: Tensor | None = None
    if is_causal:
        if attn_mask is not None:
            return "both is_causal and attn_mask"
        # torch's is_causal counts from the first query and key.
        mask = causal(align="start")
    elif attn_mask is not None:
        full = attn_mask if attn_mask.dim() == 4 else attn_mask[(None,) * (4 - attn_mask.dim())]
        if attn_mask.dtype == torch.bool:
            if not bool(full.any(-1).all()):
                return "a row that sees nothing"
            mask = keep(full)
        elif attn_mask.dtype == query.dtype:
            bias = full
        else:
            return "a mask of another dtype"
    try:
        refused = backends.native.Native().refuse(
            AttentionCall(query, key, value, mask, bias, scale)
        )
    except (TypeError, ValueError):
        return "sizes that this package does not take"
    if refused is not None:
        return refused
    return query, key, value, mask, bias, scale
