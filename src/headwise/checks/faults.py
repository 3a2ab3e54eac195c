"""Known faults of attention code, each as a change of one of the definition's eight steps.

A function here gives the output that the fault would give for a case, or None where the fault
cannot occur in it. `causes` names them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from headwise.call import AttentionCall
from headwise.checks.bare_cases import (
    Bare,
    Case,
    call_of,
    definition,
    joined,
    projected,
)
from headwise.reference import attention_steps, split_heads

Result = Callable[[Bare, Case, torch.dtype], Tensor | None]
# What a fault changes: the scale, the call, or the weights that follow from the steps.
Factor = Callable[[Case, AttentionCall], float | None]
Change = Callable[[Bare, Case, AttentionCall], AttentionCall | None]
Weights = Callable[[dict[str, Tensor], AttentionCall], Tensor | None]


# --- how a fault changes a step ------------------------------------------------------------------


def _finish(bare: Bare, call: AttentionCall, dtype: torch.dtype) -> Tensor:
    return joined(bare, attention_steps(call)["output"], dtype)


def _call(bare: Bare, case: Case, dtype: torch.dtype) -> AttentionCall:
    return call_of(bare, case, dtype, projected(bare, case, dtype))


def scaled(factor: Factor) -> Result:
    """Another scale on the scores."""

    def result(bare: Bare, case: Case, dtype: torch.dtype) -> Tensor | None:
        call = _call(bare, case, dtype)
        scale = factor(case, call)
        if scale is None or math.isclose(scale, call.scale_value):
            return None
        return _finish(bare, replace(call, scale=scale), dtype)

    return result


def masked(
    other: Change,
) -> Result:
    """Another call: its mask, bias, sinks, heads or softcap changed."""

    def result(bare: Bare, case: Case, dtype: torch.dtype) -> Tensor | None:
        call = other(bare, case, _call(bare, case, dtype))
        return None if call is None else _finish(bare, call, dtype)

    return result


def weighed(weights: Weights) -> Result:
    """Another softmax: weights from the steps of the definition."""

    def result(bare: Bare, case: Case, dtype: torch.dtype) -> Tensor | None:
        call = _call(bare, case, dtype)
        found = weights(attention_steps(call), call)
        if found is None:
            return None
        return joined(bare, found @ call.value.repeat_interleave(call.groups, 1), dtype)

    return result


def with_projections(**changes: object) -> Result:
    """Steps 1 and 2 done otherwise."""

    def result(bare: Bare, case: Case, dtype: torch.dtype) -> Tensor | None:
        if bare.signature.projections is None:
            return None
        parts = projected(bare, case, dtype, **changes)  # type: ignore[arg-type]
        return _finish(bare, call_of(bare, case, dtype, parts), dtype)

    return result


# --- the faults ----------------------------------------------------------------------------------


def _view_split(x: Tensor, heads: int) -> Tensor:
    return x.reshape(x.shape[0], heads, x.shape[1], -1)


def _view_merge(x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], x.shape[2], -1)


def split_by_view(bare: Bare, case: Case, dtype: torch.dtype) -> Tensor | None:
    return _viewed(bare, case, dtype, True, False)


def split_and_merged_by_view(bare: Bare, case: Case, dtype: torch.dtype) -> Tensor | None:
    return _viewed(bare, case, dtype, True, True)


def merged_by_view(bare: Bare, case: Case, dtype: torch.dtype) -> Tensor | None:
    return _viewed(bare, case, dtype, False, True)


def _viewed(bare: Bare, case: Case, dtype: torch.dtype, split: bool, merge: bool) -> Tensor | None:
    """Split, merge or both by view where the tensor must be transposed."""
    if bare.signature.is_function:
        if bare.signature.layout != "blhd":
            return None
        parts = projected(bare, case, dtype)
        if split:
            parts = tuple(_relaid(x) for x in parts)  # type: ignore[assignment]
        output = attention_steps(call_of(bare, case, dtype, parts))["output"]
        if merge:
            batch, heads, length, width = output.shape
            output = output.reshape(batch, length, heads, width).transpose(1, 2)
        return output
    if bare.signature.projections is None:
        return None
    parts = projected(bare, case, dtype, split=_view_split if split else split_heads)
    output = attention_steps(call_of(bare, case, dtype, parts))["output"]
    return joined(bare, output, dtype, _view_merge) if merge else joined(bare, output, dtype)


def _relaid(x: Tensor) -> Tensor:
    """(B, L, H, D) in memory, read as (B, H, L, D)."""
    batch, heads, length, width = x.shape
    return x.transpose(1, 2).reshape(batch, heads, length, width)


def swapped_batch(bare: Bare, case: Case, dtype: torch.dtype) -> Tensor | None:
    """Batch and sequence exchanged: each position attends over the samples."""
    if case.query.dim() != 3:
        return None
    turned = case.but(
        query=case.query.transpose(0, 1),
        key=case.key.transpose(0, 1),
        value=case.value.transpose(0, 1),
    )
    return definition(bare, turned, dtype)[0].transpose(0, 1)


def over_heads(bare: Bare, case: Case, dtype: torch.dtype) -> Tensor | None:
    """No transpose before the dot products: each token attends over its own heads."""
    query, key, value = (x.transpose(1, 2) for x in projected(bare, case, dtype))
    return joined(
        bare,
        attention_steps(call_of(bare, case, dtype, (query, key, value)))["output"].transpose(1, 2),
        dtype,
    )


def transposed_value(bare: Bare, case: Case, dtype: torch.dtype) -> Tensor | None:
    """The values' length and width exchanged by a view."""
    query, key, value = projected(bare, case, dtype)
    batch, heads, keys, width = value.shape
    value = value.reshape(batch, heads, width, keys).mT
    return _finish(bare, call_of(bare, case, dtype, (query, key, value)), dtype)


def tiled(bare: Bare, case: Case, call: AttentionCall) -> AttentionCall | None:
    if call.groups == 1 or call.num_kv_heads == 1:
        return None
    key, value = (x.repeat(1, call.groups, 1, 1) for x in (call.key, call.value))
    return replace(call, key=key, value=value)


def first_kv_head(bare: Bare, case: Case, call: AttentionCall) -> AttentionCall | None:
    if call.groups == 1 or call.num_kv_heads == 1:
        return None
    return replace(call, key=call.key[:, :1], value=call.value[:, :1])


def no_sinks(bare: Bare, case: Case, call: AttentionCall) -> AttentionCall | None:
    return None if call.sinks is None else replace(call, sinks=None)


def double_sinks(bare: Bare, case: Case, call: AttentionCall) -> AttentionCall | None:
    return None if call.sinks is None else replace(call, sinks=call.sinks + math.log(2.0))


def no_softcap(bare: Bare, case: Case, call: AttentionCall) -> AttentionCall | None:
    return None if call.softcap is None else replace(call, softcap=None)


def no_bias(bare: Bare, case: Case, call: AttentionCall) -> AttentionCall | None:
    return None if call.bias is None else replace(call, bias=None)


def bias_before_cap(steps: dict[str, Tensor], call: AttentionCall) -> Tensor | None:
    """cap·tanh((score + bias) / cap): the bias is capped with the score."""
    if call.softcap is None or call.bias is None:
        return None
    capped = call.softcap * torch.tanh((steps["scaled"] + call.bias) / call.softcap)
    return _plain_softmax(torch.where(steps["masked"] == -torch.inf, -torch.inf, capped), call)


def mask_before_cap(steps: dict[str, Tensor], call: AttentionCall) -> Tensor | None:
    """tanh makes a finite −cap of the −inf of the mask: hidden keys keep a weight."""
    if call.softcap is None or call.visible.is_full:
        return None
    s = torch.where(steps["masked"] == -torch.inf, -call.softcap, steps["biased"])
    return _plain_softmax(s, call)


def cap_before_scale(steps: dict[str, Tensor], call: AttentionCall) -> Tensor | None:
    if call.softcap is None:
        return None
    s = call.softcap * torch.tanh(steps["scores"] / call.softcap) * call.scale_value
    s = s + (steps["biased"] - steps["capped"])
    return _plain_softmax(torch.where(steps["masked"] == -torch.inf, -torch.inf, s), call)


def _plain_softmax(s: Tensor, call: AttentionCall) -> Tensor:
    """Softmax over keys with the sinks of the call; empty rows give zeros."""
    if call.sinks is not None:
        sink = call.sinks[None, :, None, None].expand(*s.shape[:3], 1)
        s = torch.cat((s, sink), -1)
    weights = torch.softmax(s, -1)[..., : call.key_length]
    return torch.where((s[..., : call.key_length] != -torch.inf).any(-1, keepdim=True), weights, 0)


def softmax_over(axis: int) -> Weights:
    def weights(steps: dict[str, Tensor], call: AttentionCall) -> Tensor | None:
        return torch.softmax(steps["masked"], axis)

    return weights


def over_queries_zeroed(steps: dict[str, Tensor], call: AttentionCall) -> Tensor:
    """Over the queries, where a key that no query sees gives nothing."""
    return torch.softmax(steps["masked"], -2).nan_to_num(0.0)


def softmax_before_mask(steps: dict[str, Tensor], call: AttentionCall) -> Tensor | None:
    """Hidden weights set to 0 after the softmax, so that rows sum to less than 1."""
    if call.visible.is_full:
        return None
    weights = _plain_softmax(steps["biased"], call)
    return torch.where(steps["masked"] == -torch.inf, 0.0, weights)


def scale_after(steps: dict[str, Tensor], call: AttentionCall) -> Tensor:
    s = steps["scores"] + (steps["biased"] - steps["capped"])
    s = torch.where(steps["masked"] == -torch.inf, -torch.inf, s)
    return _plain_softmax(s, call) * call.scale_value


def nan_rows(steps: dict[str, Tensor], call: AttentionCall) -> Tensor | None:
    empty = (steps["masked"] == -torch.inf).all(-1, keepdim=True)
    return torch.where(empty, torch.nan, steps["weights"]) if bool(empty.any()) else None


def uniform_rows(steps: dict[str, Tensor], call: AttentionCall) -> Tensor | None:
    empty = (steps["masked"] == -torch.inf).all(-1, keepdim=True)
    if not bool(empty.any()):
        return None
    return torch.where(empty, 1.0 / call.key_length, steps["weights"])


def raw_rows(steps: dict[str, Tensor], call: AttentionCall) -> Tensor | None:
    """A large number taken off every score of an empty row changes no weight of it."""
    empty = (steps["masked"] == -torch.inf).all(-1, keepdim=True)
    if not bool(empty.any()):
        return None
    return torch.where(empty, torch.softmax(steps["biased"], -1), steps["weights"])
