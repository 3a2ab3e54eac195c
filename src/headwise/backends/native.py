"""This package's own kernels for the CPU (native/): what they take, and how they are told of it.

Tiled online softmax (Dao 2022, arXiv 2205.14135) over row intervals. Only this file calls them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headwise import native
from headwise.call import AttentionCall

CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
# The longest query, key or value vector of one head.
MOST_DIM = 512


class Native:
    name = "native"

    def refuse(self, call: AttentionCall) -> str | None:
        if call.query.device.type != "cpu":
            return f"it runs on the CPU, and the call is on {call.query.device}"
        for what, width in (("head dimension", call.head_dim), ("value dimension", call.value_dim)):
            if not 1 <= width <= MOST_DIM:
                return f"it takes a {what} of 1 to {MOST_DIM}, got {width}"
        try:
            native.module()
        except ImportError as error:
            return str(error)
        return None

    def forward(
        self, call: AttentionCall, seed: int | None, need_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        query = call.query
        shape = (call.batch, call.num_heads, call.query_length)
        output = torch.empty((*shape, call.value_dim), dtype=query.dtype)
        lse = torch.empty(shape, dtype=call.accumulate_dtype) if need_lse else None
        told = _Told(call, seed)
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
        raise NotImplementedError("attention: the native backend has no backward pass yet")


class _Told:
    """The arguments that every kernel takes, and the tensors that must live while it runs."""

    def __init__(self, call: AttentionCall, seed: int | None) -> None:
        query, key, value = (_rows(tensor) for tensor in (call.query, call.key, call.value))
        visible = call.visible
        runs = bits = bias = None
        kept: list[Tensor | None] = [query, key, value]
        if visible.intervals is not None:
            intervals = visible.intervals
            if intervals.stride()[3:] != (2, 1):
                intervals = intervals.contiguous()
            kept.append(intervals)
            runs = (intervals.data_ptr(), *_strides(intervals), intervals.shape[3])
        if visible.bits is not None:
            octets = visible.bits if visible.bits.stride(3) == 1 else visible.bits.contiguous()
            kept.append(octets)
            bits = (octets.data_ptr(), *_strides(octets))
        if call.bias is not None:
            added = call.bias if call.bias.dim() == 4 else call.bias[None, None]
            kept.append(added)
            key_stride = 0 if added.shape[3] == 1 else added.stride(3)
            bias = (added.data_ptr(), *_strides(added), key_stride)
        sinks = None if call.sinks is None else call.sinks.contiguous()
        kept.append(sinks)
        self.kept = kept
        self.arguments = (
            CODES[query.dtype],
            (
                *query.shape[:2],
                call.num_kv_heads,
                call.query_length,
                call.key_length,
                call.head_dim,
                call.value_dim,
            ),
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
