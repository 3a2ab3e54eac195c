"""A call like others made before: checked then, told to the native kernel at once now.

Checking a call and telling a kernel of it takes longer than a small call's arithmetic, and a model
makes the same call in every layer. What is remembered is numbers, never a tensor of the caller.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from headwise import native
from headwise.backends.native import Told
from headwise.call import AttentionCall
from headwise.intervals import Mask

# Calls that are remembered; then all are forgotten, so that growing keys cost no memory.
MOST = 64
KINDS = (Tensor, torch.nn.Parameter)

Signature = tuple[object, ...]


class Plan(NamedTuple):
    """What the kernel is told, less the addresses; and the mask's tensors, kept alive."""

    dtype: int
    sizes: tuple[int, ...]
    runs: tuple[int, ...] | None
    bits: tuple[int, ...] | None
    numbers: tuple[float, float, float]
    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    output: tuple[int, ...]
    output_at: tuple[int, ...]
    kept: object


# None: made once. A call is told anew until it comes a second time: where keys grow by a token a
# call, and nothing comes again, there is nothing to prepare.
_known: dict[Signature, Plan | None] = {}


def plain(*tensors: Tensor | None) -> bool:
    """Whether a backend may be called on these directly, without the operator's machinery."""
    if torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None:
        return False
    grad = torch.is_grad_enabled()
    for tensor in tensors:
        if tensor is None:
            continue
        if type(tensor) not in KINDS or (grad and tensor.requires_grad):
            return False
        if tensor.is_meta:  # shapes only: what the operator's fake kernel is for
            return False
    return True


def signature(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, scale: float | None
) -> Signature | None:
    """All that the checks and the kernel's arguments follow from; None: from more than that."""
    if not plain(query, key, value) or not (query.is_cpu and key.is_cpu and value.is_cpu):
        return None
    origin = None
    if mask is not None:
        origin = mask.origin() if isinstance(mask, Mask) else None
        if origin is None:
            return None
    if scale is not None and type(scale) is not float:
        return None
    try:
        return (
            query.shape, key.shape, value.shape,
            query.stride(), key.stride(), value.stride(),
            query.dtype, key.dtype, value.dtype,
            origin, scale,
        )  # fmt: skip
    except RuntimeError:  # nested and sparse tensors have no strides
        return None


def run(known: Signature, query: Tensor, key: Tensor, value: Tensor) -> Tensor | None:
    """The output of a call that is known, else None."""
    plan = _known.get(known)
    if plan is None:
        return None
    output = query.new_empty(plan.output)
    native.module().forward(
        plan.dtype,
        plan.sizes,
        (query.data_ptr(), *plan.query),
        (key.data_ptr(), *plan.key),
        (value.data_ptr(), *plan.value),
        plan.runs,
        plan.bits,
        None,
        0,
        plan.numbers,
        0,
        torch.get_num_threads(),
        (output.data_ptr(), *plan.output_at),
        0,
    )
    return output


def remember(known: Signature, call: AttentionCall) -> None:
    """Remember a call that the native kernel has computed, none of whose sizes is 0."""
    query, key, value = call.query, call.key, call.value
    if not query.stride(3) == key.stride(3) == value.stride(3) == 1:
        return
    if known not in _known:
        if len(_known) >= MOST:
            _known.clear()
        _known[known] = None
        return
    told = Told(call, None)
    dtype, sizes, at_query, at_key, at_value, runs, bits, _, _, numbers, _, _ = told.arguments
    batch, heads, length, _ = query.shape
    width = value.shape[3]
    _known[known] = Plan(
        dtype,
        sizes,
        runs,
        bits,
        numbers,
        at_query[1:],
        at_key[1:],
        at_value[1:],
        (batch, heads, length, width),
        (heads * length * width, length * width, width),
        told.masks,
    )
