"""The reference run over blocks of rows: exact for every feature, memory linear in the length."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from headwise import reference
from headwise.call import AttentionCall

# Scores of one block, all batch elements and heads: 64 MiB in float32.
BLOCK_SCORES = 1 << 24


def row_blocks(call: AttentionCall) -> Iterator[slice]:
    """Slices of the queries such that one block's scores stay below `BLOCK_SCORES`."""
    per_row = max(1, call.batch * call.num_heads * call.key_length)
    rows = max(1, BLOCK_SCORES // per_row)
    for start in range(0, call.query_length, rows):
        yield slice(start, min(start + rows, call.query_length))


def forward(call: AttentionCall, seed: int | None) -> tuple[Tensor, Tensor]:
    """Output (B, Hq, L, Dv) and lse (B, Hq, L), both in the accumulation dtype."""
    shape = (call.batch, call.num_heads, call.query_length)
    output = call.query.new_empty((*shape, call.value_dim), dtype=call.accumulate_dtype)
    lse = call.query.new_empty(shape, dtype=call.accumulate_dtype)
    draw = _Dropout(call, seed)
    for rows in row_blocks(call):
        part = call.rows(rows)
        steps = reference.attention_steps(part)
        lse[:, :, rows] = steps["lse"]
        if seed is None:
            output[:, :, rows] = steps["output"]
        else:
            value = reference.expand_heads(call.value.to(output.dtype), call.groups)
            dropped = steps["weights"] * draw(part)
            output[:, :, rows] = reference.seen_product(
                dropped, value, steps["masked"] != -torch.inf
            )
    return output, lse


def backward(
    call: AttentionCall, seed: int | None, grad_output: Tensor, grad_lse: Tensor | None
) -> dict[str, Tensor]:
    """The gradients of `reference.backward`, in the accumulation dtype; dropout is drawn again."""
    draw = _Dropout(call, seed)
    grads: dict[str, Tensor] = {
        name: torch.zeros_like(tensor, dtype=call.accumulate_dtype)
        for name in ("query", "key", "value", "bias", "sinks")
        if (tensor := getattr(call, name)) is not None
    }
    for rows in row_blocks(call):
        part = call.rows(rows)
        drop = None if seed is None else draw(part)
        d_lse = None if grad_lse is None else grad_lse[:, :, rows]
        found = reference.backward(part, grad_output[:, :, rows], d_lse, drop)
        for name, grad in found.items():
            if name == "query":
                grads[name][:, :, rows] = grad
            elif name == "bias" and grads[name].shape[-2] != 1:
                grads[name][..., rows, :] = grad
            else:
                grads[name] += grad
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
