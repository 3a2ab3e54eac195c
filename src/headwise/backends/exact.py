"""The reference run over blocks of rows: exact for every feature, memory linear in the length."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from headwise import reference
from headwise.call import AttentionCall

# Scores of one block, all batch elements and heads: 64 MiB in float32.
BLOCK_SCORES = 1 << 24


def blocks(call: AttentionCall) -> Iterator[tuple[slice, slice]]:
    """Rows and the keys they may see, such that one block's scores stay below `BLOCK_SCORES`."""
    per_row = max(1, call.batch * call.num_heads * call.key_length)
    size = max(1, BLOCK_SCORES // per_row)
    if not call.visible.is_full:
        # Short blocks of a window see few keys; 512 rows keep the matrix product efficient.
        size = min(size, 512)
    for start in range(0, call.query_length, size):
        rows = slice(start, min(start + size, call.query_length))
        keys = slice(0, call.key_length)
        if call.query.device.type == "cpu":  # elsewhere, looking at the mask would wait for it
            keys = slice(*call.visible.hull(rows))
        yield rows, keys


def forward(call: AttentionCall, seed: int | None) -> tuple[Tensor, Tensor]:
    """Output (B, Hq, L, Dv) and lse (B, Hq, L), both in the accumulation dtype."""
    shape = (call.batch, call.num_heads, call.query_length)
    output = call.query.new_empty((*shape, call.value_dim), dtype=call.accumulate_dtype)
    lse = call.query.new_empty(shape, dtype=call.accumulate_dtype)
    draw = _Dropout(call, seed)
    for rows, keys in blocks(call):
        part = call.part(rows, keys)
        steps = reference.attention_steps(part)
        lse[:, :, rows] = steps["lse"]
        if seed is not None:
            value = reference.expand_heads(part.value.to(output.dtype), call.groups)
            dropped, seen = steps["weights"] * draw(part), steps["masked"] != -torch.inf
            steps["output"] = reference.seen_product(dropped, value, seen)
        output[:, :, rows] = steps["output"]
    return output, lse


def backward(
    call: AttentionCall,
    seed: int | None,
    grad_output: Tensor,
    grad_lse: Tensor | None,
    factors: Callable[[slice, slice], Tensor] | None = None,
) -> dict[str, Tensor]:
    """The gradients of `reference.backward`, in the accumulation dtype; dropout is drawn again.

    `factors(rows, keys)`: what a forward pass elsewhere multiplied these weights by in dropout.
    """
    draw = _Dropout(call, seed)
    tensors = {name: getattr(call, name) for name in ("query", "key", "value", "bias", "sinks")}
    grads: dict[str, Tensor] = {
        name: torch.zeros_like(tensor, dtype=call.accumulate_dtype)
        for name, tensor in tensors.items()
        if tensor is not None
    }
    for rows, keys in blocks(call):
        part = call.part(rows, keys)
        drop = None
        if seed is not None:
            drop = draw(part) if factors is None else factors(rows, keys)
        d_lse = None if grad_lse is None else grad_lse[:, :, rows]
        for name, grad in reference.backward(part, grad_output[:, :, rows], d_lse, drop).items():
            whole = grads[name]
            if name == "query":
                whole = whole[:, :, rows]
            elif name in ("key", "value"):
                whole = whole[:, :, keys]
            elif name == "bias":
                whole = whole[..., rows if whole.shape[-2] > 1 else slice(None), :]
                whole = whole[..., keys if whole.shape[-1] > 1 else slice(None)]
            whole += grad
    return grads


class _Dropout:
    """Draws the blocks' dropout factors in order, the same for the same seed."""

    def __init__(self, call: AttentionCall, seed: int | None) -> None:
        self.generator = torch.Generator(device=call.query.device)
        if seed is not None:
            self.generator.manual_seed(seed)

    def __call__(self, part: AttentionCall) -> Tensor:
        shape = (part.batch, part.num_heads, part.query_length, part.key_length)
        draws = torch.rand(shape, generator=self.generator, device=part.query.device)
        return (draws >= part.dropout).to(part.accumulate_dtype) / (1 - part.dropout)
