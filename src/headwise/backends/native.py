"""This package's own kernels for the CPU (native/): what they take, and how they are told of it.

Tiled online softmax (Dao 2022, arXiv 2205.14135) over row intervals. Only this file calls them.
"""

from __future__ import annotations

import warnings
from functools import lru_cache

import torch
from torch import Tensor

from headwise import native
from headwise.backends import exact
from headwise.call import AttentionCall
from headwise.masks import CompiledMask

CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
# The longest query, key or value vector of one head.
MOST_DIM = 512


class Native:
    name = "native"

    def refuse(self, call: AttentionCall) -> str | None:
        # On the meta device nothing is computed, so any backend will do.
        query = call.query
        if not (query.is_cpu or query.is_meta):
            return f"it runs on the CPU, and the call is on {query.device}"
        for what, tensor in (("head dimension", query), ("value dimension", call.value)):
            if tensor.shape[3] > MOST_DIM:
                return f"it takes a {what} of up to {MOST_DIM}, got {tensor.shape[3]}"
        try:
            native.module()
        except ImportError as error:
            _say_once(str(error))
            return str(error)
        return None

    def forward(
        self, call: AttentionCall, seed: int | None, need_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        batch, heads, length, _ = call.query.shape
        width = call.value.shape[3]
        output = call.query.new_empty((batch, heads, length, width))
        lse = None
        if need_lse:
            lse = torch.empty((batch, heads, length), dtype=call.accumulate_dtype)
        told = Told(call, seed)
        native.module().forward(*told.arguments, _at(output), 0 if lse is None else lse.data_ptr())
        return output, lse

    def backward(
        self,
        call: AttentionCall,
        seed: int | None,
        output: Tensor,
        lse: Tensor,
        grad_output: Tensor,
        grad_lse: Tensor | None,
        need_bias: bool,
    ) -> dict[str, Tensor]:
        wide = call.accumulate_dtype
        grads = {
            name: torch.empty(getattr(call, name).shape, dtype=wide)
            for name in ("query", "key", "value")
        }
        if call.sinks is not None:
            grads["sinks"] = torch.empty(call.sinks.shape, dtype=wide)
        told, grad_bias = Told(call, seed), None
        if need_bias and call.bias is not None:
            grads["bias"] = torch.zeros(call.bias.shape, dtype=wide)
            grad_bias = tell_bias(grads["bias"])
        out, grad_out = _rows(output), _rows(grad_output)
        lse = lse.contiguous()
        d_lse = None if grad_lse is None else grad_lse.to(wide).contiguous()
        done = native.module().backward(
            *told.arguments,
            _at(out),
            _at(grad_out),
            (lse.data_ptr(), 0 if d_lse is None else d_lse.data_ptr()),
            tuple(
                grads[name].data_ptr() if name in grads else 0
                for name in ("query", "key", "value", "sinks")
            ),
            grad_bias,
        )
        if done:
            return grads

        # A NaN or an infinity came in. The definition knows which rows it reaches.
        def factors(rows: slice, keys: slice) -> Tensor:
            return draws(call, seed or 0, rows, keys)

        return exact.backward(call, seed, grad_output, grad_lse, factors)


def draws(call: AttentionCall, seed: int, rows: slice, keys: slice) -> Tensor:
    """What this backend's dropout multiplies a tile's weights by: (B, Hq, rows, keys) float32.

    A function of (seed, batch, head, query, key) alone: 0, or 1/(1 − p).
    """
    first, last, _ = rows.indices(call.query_length)
    start, stop, _ = keys.indices(call.key_length)
    out = torch.empty(call.batch, call.num_heads, last - first, stop - start)
    native.module().draws(
        call.batch,
        call.num_heads,
        call.query_length,
        call.dropout,
        seed,
        first,
        last - first,
        start,
        stop - start,
        out.data_ptr(),
    )
    return out


@lru_cache(maxsize=1)
def _say_once(reason: str) -> None:
    warnings.warn(
        f"{reason}. Until then torch's kernels compute: the same answers, more slowly",
        RuntimeWarning,
        stacklevel=2,
    )


class Told:
    """The arguments that every kernel takes, and the tensors that must live while it runs."""

    def __init__(self, call: AttentionCall, seed: int | None) -> None:
        query, key, value = _rows(call.query), _rows(call.key), _rows(call.value)
        runs, bits, masks = tell_mask(call.visible)
        bias = None if call.bias is None else tell_bias(call.bias)
        sinks = None if call.sinks is None else call.sinks.contiguous()
        self.masks = masks
        self.kept = (query, key, value, sinks)
        batch, heads, length, dim = query.shape
        _, kv_heads, keys, _ = key.shape
        self.arguments = (
            CODES[query.dtype],
            (batch, heads, kv_heads, length, keys, dim, value.shape[3]),
            _at(query),
            _at(key),
            _at(value),
            runs,
            bits,
            bias,
            0 if sinks is None else sinks.data_ptr(),
            (call.scale_value, call.softcap or 0.0, call.dropout if seed is not None else 0.0),
            seed or 0,
            torch.get_num_threads(),
        )


def tell_mask(
    mask: CompiledMask, item: int | None = None
) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None, list[Tensor]]:
    """Where a mask's runs and bits lie, and the tensors to keep meanwhile; of one batch element
    where `item` says which."""
    runs = bits = None
    kept = []

    def part(tensor: Tensor) -> Tensor:
        return tensor if item is None or tensor.shape[0] == 1 else tensor[item : item + 1]

    if mask.intervals is not None:
        intervals = part(mask.intervals)
        if intervals.stride()[3:] != (2, 1):
            intervals = intervals.contiguous()
        kept.append(intervals)
        runs = (intervals.data_ptr(), *_strides(intervals), intervals.shape[3])
    if mask.bits is not None:
        octets = part(mask.bits)
        octets = octets if octets.stride(3) == 1 else octets.contiguous()
        kept.append(octets)
        bits = (octets.data_ptr(), *_strides(octets))
    return runs, bits, kept


def tell_bias(bias: Tensor) -> tuple[int, int, int, int, int]:
    """Where a bias, or the gradient of one, lies: (L, S) or (b, h, l, s) with axes full or 1."""
    bias = bias if bias.dim() == 4 else bias[None, None]
    return bias.data_ptr(), *_strides(bias), 0 if bias.shape[3] == 1 else bias.stride(3)


def _rows(tensor: Tensor) -> Tensor:
    """Kernels read in place where the last axis is contiguous."""
    return tensor if tensor.stride(3) == 1 or tensor.shape[3] == 1 else tensor.contiguous()


def _at(tensor: Tensor) -> tuple[int, int, int, int]:
    stride = tensor.stride()
    return tensor.data_ptr(), stride[0], stride[1], stride[2]


def _strides(tensor: Tensor) -> tuple[int, int, int]:
    """Strides of a mask or bias; an axis of 1 stands for all, so it does not step."""
    (b, h, r), sizes = tensor.stride()[:3], tensor.shape
    return (
        0 if sizes[0] == 1 else b,
        0 if sizes[1] == 1 else h,
        0 if sizes[2] == 1 else r,
    )
