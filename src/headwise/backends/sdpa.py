"""torch's own kernels, held to this package's semantics. Only this file knows torch's conventions.

What torch does otherwise, and what is done about it: is_causal aligns at the start (blocks of rows
with an explicit mask instead, unless L = S); a NaN or an overflow becomes 0 or leaks through hidden
keys (inputs are looked at first, and such calls take the exact path); a row with no key has no
defined lse (it is computed unmasked, then set to 0 and −inf); softcap, dropout and gradients of a
bias have no fused kernel (the exact path); Dv ≠ D (zero columns are added and cut off again).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from headwise.backends import exact
from headwise.call import AttentionCall
from headwise.reference import expand_heads

# Mask entries of one block of rows: 16 MiB in float32, small beside the work they guard.
BLOCK_MASK = 1 << 22
# Fused kernels multiply before they scale; above this bound the products could overflow float32.
SAFE_PRODUCT = 1e37


class Block(NamedTuple):
    """Rows computed together, the keys they need, and their additive mask (None: every key)."""

    rows: slice
    keys: slice
    mask: Tensor | None
    causal: bool
    empty: Tensor | None


class Sdpa:
    name = "sdpa"

    def refuse(self, call: AttentionCall) -> str | None:
        return None

    def forward(
        self, call: AttentionCall, seed: int | None, need_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        need_lse = need_lse or call.sinks is not None
        if seed is not None or not _fused_can(call, need_lse):
            wide, lse = exact.forward(call, seed)
            return wide.to(call.query.dtype), lse
        outputs, lses = [], []
        for block in _blocks(call):
            output, lse = _fused(call, block, need_lse)
            outputs.append(output)
            lses.append(lse)
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
        if not need_lse:
            return output, None
        lse = lses[0] if len(lses) == 1 else torch.cat(lses, dim=2)
        if call.sinks is not None:
            # A sink only adds to the denominator: o·σ(lse − sink) is exact.
            sink = call.sinks.to(lse.dtype)[:, None]
            share = torch.sigmoid(lse - sink).unsqueeze(-1)
            output = (output.to(lse.dtype) * share).to(output.dtype)
            lse = torch.where(lse == -torch.inf, lse, torch.logaddexp(lse, sink))
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
        plain = seed is None and grad_lse is None and call.sinks is None and not need_bias
        finite = plain and bool(torch.isfinite(grad_output.sum(dtype=call.accumulate_dtype)))
        if not finite or not _fused_can(call, need_lse=True):
            return exact.backward(call, seed, grad_output, grad_lse)
        grads = {
            name: torch.zeros_like(getattr(call, name), dtype=call.accumulate_dtype)
            for name in ("query", "key", "value")
        }
        for block in _blocks(call):
            parts = _fused_backward(call, block, output, lse, grad_output)
            grads["query"][:, :, block.rows] = parts[0]
            for name, part in zip(("key", "value"), parts[1:], strict=True):
                grads[name][:, :, block.keys] += part
        return grads


def _fused_can(call: AttentionCall, need_lse: bool) -> bool:
    """Whether torch's kernels give section 3's answer for this call. Looks at the numbers."""
    if call.softcap is not None or not call.head_dim or not call.value_dim:
        return False
    if need_lse and not _is_cpu(call):
        return False  # the public function returns no lse
    largest = [_largest(tensor) for tensor in (call.query, call.key, call.value)]
    if call.bias is not None:
        # −inf is a hidden key; NaN and +inf are not.
        total = float(call.bias.sum(dtype=call.accumulate_dtype))
        if not total < torch.inf:
            return False
    limit = SAFE_PRODUCT if call.accumulate_dtype == torch.float32 else 1e300
    product = largest[0] * largest[1] * call.head_dim * max(1.0, call.scale_value)
    # Comparisons with NaN are false, so a NaN anywhere refuses.
    return product <= limit and largest[2] * call.key_length <= limit


def _largest(tensor: Tensor) -> float:
    if not tensor.numel():
        return 0.0
    low, high = torch.aminmax(tensor)
    return max(abs(float(low)), abs(float(high))) if low == low else float("nan")


def _is_cpu(call: AttentionCall) -> bool:
    return call.query.device.type == "cpu"


def _blocks(call: AttentionCall) -> Iterator[Block]:
    """Blocks of rows whose masks stay small, clipped to the keys that they see."""
    visible, length, keys = call.visible, call.query_length, call.key_length
    whole, every = slice(0, length), slice(0, keys)
    if call.bias is None and visible.is_full:
        yield Block(whole, every, None, False, None)
        return
    if call.bias is None and visible.is_causal and length == keys:
        yield Block(whole, every, None, True, None)
        return
    shapes = [tuple(t.shape) for t in (visible.intervals, visible.bits) if t is not None]
    if call.bias is not None:
        shapes.append((1,) * (4 - call.bias.dim()) + tuple(call.bias.shape))
    planes = max(shape[0] for shape in shapes) * max(shape[1] for shape in shapes)
    same_for_rows = all(shape[2] == 1 for shape in shapes)
    size = length if same_for_rows else max(1, min(1024, BLOCK_MASK // max(1, planes * keys)))
    for start in range(0, length, size):
        rows = slice(start, min(start + size, length))
        low, high = visible.hull(rows) if _is_cpu(call) else (0, keys)
        span = slice(low, max(high, low + 1)) if keys else every
        yield Block(rows, span, *_additive(call, rows, span, same_for_rows))


def _additive(
    call: AttentionCall, rows: slice, keys: slice, same_for_rows: bool
) -> tuple[Tensor, bool, Tensor]:
    """The mask as torch adds it, (b, h, rows or 1, keys); rows with no key are left open."""
    dtype = call.query.dtype
    some = slice(rows.start, rows.start + 1) if same_for_rows else rows
    mask = torch.zeros((), dtype=dtype, device=call.query.device)
    if call.bias is not None:
        bias = call.bias if call.bias.dim() == 4 else call.bias[None, None]
        mask = bias[
            :,
            :,
            some if bias.shape[2] > 1 else slice(None),
            keys if bias.shape[3] > 1 else slice(None),
        ]
    mask = torch.where(call.visible.tile(some, keys), mask, -torch.inf)
    empty = mask.amax(-1, keepdim=True) == -torch.inf
    mask = torch.where(empty, torch.zeros((), dtype=dtype, device=mask.device), mask)
    return mask, False, empty


def _inputs(
    call: AttentionCall, block: Block, grouped: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Query, key, value of a block as torch wants them, and its mask with full axes.

    `grouped`: the kernel reads shared key/value heads itself, so they are not repeated.
    """
    query = call.query[:, :, block.rows]
    key, value = call.key[:, :, block.keys], call.value[:, :, block.keys]
    if not grouped:
        key, value = expand_heads(key, call.groups), expand_heads(value, call.groups)
    width = max(call.head_dim, call.value_dim)
    tensors = [_widen(tensor, width) for tensor in (query, key, value)]
    mask = block.mask
    if mask is not None:
        mask = mask.expand(call.batch, call.num_heads, query.shape[2], key.shape[2])
    return tensors[0], tensors[1], tensors[2], mask


def _widen(tensor: Tensor, width: int) -> Tensor:
    """Zero columns up to `width`, and the last axis contiguous: what fused kernels ask for."""
    if tensor.shape[-1] < width:
        return pad(tensor, (0, width - tensor.shape[-1]))
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _fused(call: AttentionCall, block: Block, need_lse: bool) -> tuple[Tensor, Tensor]:
    query, key, value, mask = _inputs(call, block, grouped=_is_cpu(call))
    scale = call.scale_value
    if _is_cpu(call):
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, block.causal, attn_mask=mask, scale=scale
        )
    else:
        output = scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=block.causal, scale=scale
        )
        lse = output.new_empty(0)
    output = output[..., : call.value_dim]
    if block.empty is not None:
        output = torch.where(block.empty, 0.0, output)
        if need_lse:
            lse = torch.where(block.empty.squeeze(-1), -torch.inf, lse)
    return output, lse


def _fused_backward(
    call: AttentionCall, block: Block, output: Tensor, lse: Tensor, grad_output: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value, mask = _inputs(call, block, grouped=False)
    grad = grad_output[:, :, block.rows]
    if block.empty is not None:
        grad = torch.where(block.empty, 0.0, grad)
    grad = _widen(grad, value.shape[-1])
    if _is_cpu(call):
        out = _widen(output[:, :, block.rows], value.shape[-1])
        row_lse = lse[:, :, block.rows].contiguous()
        if block.empty is not None:
            row_lse = torch.where(block.empty.squeeze(-1), 0.0, row_lse)
        d_query, d_key, d_value = (
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad,
                query,
                key,
                value,
                out,
                row_lse,
                0.0,
                block.causal,
                attn_mask=mask,
                scale=call.scale_value,
            )
        )
    else:
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in (query, key, value)]
            again = scaled_dot_product_attention(
                leaves[0],
                leaves[1],
                leaves[2],
                attn_mask=mask,
                is_causal=block.causal,
                scale=call.scale_value,
            )
        d_query, d_key, d_value = torch.autograd.grad(again, leaves, grad)
    groups = (call.num_kv_heads, call.groups)
    wide = call.accumulate_dtype
    return (
        d_query[..., : call.head_dim].to(wide),
        d_key[..., : call.head_dim].to(wide).unflatten(1, groups).sum(2),
        d_value[..., : call.value_dim].to(wide).unflatten(1, groups).sum(2),
    )
