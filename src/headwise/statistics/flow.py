"""Where a token's vector comes from, tile by tile: the rollout row and gradient × attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from headwise.call import AttentionCall
from headwise.errors import BadInput
from headwise.masks import keep
from headwise.reference import attention_steps


def _tiles(call: AttentionCall, rows: int) -> Iterator[tuple[int, Tensor]]:
    """(first row, weights (B, H, rows, S) in float64), `rows` queries at a time."""
    seen, bias = call.visible, call.bias
    for start in range(0, call.query_length, rows):
        end = min(start + rows, call.query_length)
        part = bias
        if bias is not None and bias.shape[-2] == call.query_length:
            part = bias[..., start:end, :]
        dense = seen.tile(slice(start, end))
        tile = AttentionCall(
            query=call.query[:, :, start:end].double(),
            key=call.key.double(),
            value=call.value.double(),
            mask=keep(dense),
            bias=None if part is None else part.double(),
            scale=call.scale,
            softcap=call.softcap,
            sinks=None if call.sinks is None else call.sinks.double(),
        )
        with torch.no_grad():
            yield start, attention_steps(tile)["weights"]


def rollout_row(calls: Sequence[AttentionCall], row: int, *, rows: int = 64) -> Tensor:
    """(B, N): how much of token `row`'s last vector rolls back to each input token.

    r ← ½ r + ½ mean_h A_hᵀ r from the last layer down (Abnar & Zuidema 2020, arXiv 2005.00928),
    holding `rows` × N weights at a time. Encoders only: calls in layer order, self-attention over
    the same N tokens. float64.

    Raises:
        BadInput: no call, a row out of range, calls that are not over the same tokens, or causal.
    """
    if not calls:
        raise BadInput("rollout_row: no attention calls")
    n = calls[0].query_length
    if not 0 <= row < n:
        raise BadInput(f"rollout_row: row={row} is not one of the {n} tokens")
    for call in calls:
        if (call.query_length, call.key_length) != (n, n):
            raise BadInput(
                f"rollout_row: wanted self-attention over {n} tokens, got "
                f"{call.query_length}×{call.key_length}"
            )
        if n > 1 and not bool(call.visible.tile(slice(0, 1))[..., 1:].any()):
            raise BadInput("rollout_row: the first token sees no later one: encoders only")
    r = torch.zeros(calls[0].batch, n, dtype=torch.float64, device=calls[0].query.device)
    r[:, row] = 1
    for call in reversed(calls):
        moved = torch.zeros_like(r)
        for start, weights in _tiles(call, rows):
            part = r[:, start : start + weights.shape[2]]
            moved += torch.einsum("bhls,bl->bs", weights, part) / call.num_heads
        r = 0.5 * r + 0.5 * moved
    return r


def gradient_attention(call: AttentionCall, grad: Tensor, *, rows: int = 64) -> Tensor:
    """(B, Hq, S): Σ_i (p_ij · ⟨∂L/∂O_i, V_j⟩)⁺, what each key received of gradient × attention
    (Chefer et al. 2021, arXiv 2103.15679), tiled like the backward pass. float64.

    grad: ∂L/∂O, (B, Hq, L, Dv).

    Raises:
        BadInput: a gradient of another shape.
    """
    wanted = (call.batch, call.num_heads, call.query_length, call.value.shape[-1])
    if tuple(grad.shape) != wanted:
        raise BadInput(f"gradient_attention: wanted grad {wanted}, got {tuple(grad.shape)}")
    value = call.value.double().repeat_interleave(call.groups, 1)
    total = value.new_zeros(call.batch, call.num_heads, call.key_length)
    for start, weights in _tiles(call, rows):
        part = grad[:, :, start : start + weights.shape[2]].double()
        total += (weights * (part @ value.transpose(-1, -2))).clamp(min=0).sum(2)
    return total
