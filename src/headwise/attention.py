"""attention(): the one public operation, a torch.library operator with autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from headwise import again, backends
from headwise.call import AttentionCall, own_precision
from headwise.intervals import CompiledMask, Mask, Sizes

# Called with each call and its output. `headwise.watch` adds and removes them.
observers: list[Callable[[AttentionCall, Tensor], None]] = []


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | None = ...,
    *,
    bias: Tensor | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    dropout: float = ...,
    return_lse: Literal[False] = ...,
    backend: str | None = ...,
) -> Tensor: ...


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | None = ...,
    *,
    bias: Tensor | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    dropout: float = ...,
    return_lse: Literal[True],
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | None = None,
    *,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Scaled dot-product attention over many heads (Vaswani 2017, arXiv 1706.03762, equation 1).

    Args:
        query: (B, Hq, L, D). key: (B, Hkv, S, D). value: (B, Hkv, S, Dv); Dv may differ from D.
            Query head h reads key/value head h // (Hq / Hkv).
        mask: what may attend to what: `causal()`, `window(…)`, `padding(…)`, `documents(…)`,
            `prefix(…)`, `keep(tensor)`, `hide(tensor)`, joined by &, | and ~. None hides nothing;
            nothing is ever causal unless the mask says so.
        bias: added to the scores; (L, S), or (B, Hq, L, S) with axes full or 1. −inf hides.
        scale: multiplies the dot products; None means 1/√D.
        softcap: c caps scores smoothly, c·tanh(score/c), before bias and mask.
        sinks: (Hq,) logits that join the softmax's denominator and carry no value.
        dropout: probability of dropping a weight, drawn from torch's generator. A function cannot
            know whether you train: pass 0 in evaluation (the layer does).
        return_lse: also return the natural log of each row's softmax denominator.
        backend: a backend's name to force it; None takes the first that accepts the call.

    Returns:
        Output (B, Hq, L, Dv) in the inputs' dtype. With `return_lse` also lse (B, Hq, L), float32
        (float64 for float64 inputs); `merge` joins partial results with it. A row with no visible
        key gives output 0 and lse −inf, and no gradient.

    Raises:
        TypeError, ValueError: as `AttentionCall`; or an unknown or refusing backend.
    """
    known = None
    bare = bias is None and softcap is None and sinks is None and not dropout
    if bare and backend is None and not return_lse:
        known = again.signature(query, key, value, mask, scale)
    if known is not None and not observers:
        done = again.run(known, query, key, value)
        if done is not None:
            return done
    call = AttentionCall(query, key, value, mask, bias, scale, softcap, sinks, dropout)
    chosen = backends.choose(call, backend)
    # Drawn as a tensor from torch's generator, so that the backward pass can draw the same again
    # and compiled graphs keep it random.
    seed = torch.randint(2**62, ()) if dropout > 0 else None
    if again.plain(call.query, call.key, call.value, call.bias, call.sinks):
        output, lse = _forward(call, chosen, None if seed is None else int(seed), return_lse)
        if known is not None and chosen.name == "native" and output.numel() and call.key_length:
            again.remember(known, call)
    else:
        visible = call.visible
        output, lse = _attention(
            query,
            key,
            value,
            visible.intervals,
            visible.bits,
            visible.is_full,
            visible.is_causal,
            bias,
            sinks,
            seed,
            call.scale_value,
            softcap,
            float(dropout),
            return_lse,
            chosen.name,
        )
    if observers:
        for observe in tuple(observers):
            observe(call, output)
    return (output, lse) if return_lse else output


def merge(outputs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Join attention over parts of the keys into attention over all of them, exactly.

    Args:
        outputs: partial outputs (B, H, L, Dv), one for each part of the keys.
        lses: their lse (B, H, L). With a sink, only one part may count it.

    Returns:
        (output, lse) as if the parts had been one call: o = Σ oₖ·e^{lseₖ − lse},
        lse = ln Σ e^{lseₖ} (Dao 2022, arXiv 2205.14135, section 3.1).

    Raises:
        ValueError: no parts, unequal counts, or shapes that do not agree.
    """
    if len(outputs) != len(lses) or not outputs:
        raise ValueError(
            f"merge: wanted as many outputs as lses, at least one; got {len(outputs)} and "
            f"{len(lses)}"
        )
    for part, (output, lse) in enumerate(zip(outputs, lses, strict=True)):
        if output.shape != outputs[0].shape or lse.shape != output.shape[:-1]:
            raise ValueError(
                f"merge: part {part} has output {tuple(output.shape)} and lse {tuple(lse.shape)}; "
                f"wanted {tuple(outputs[0].shape)} and {tuple(outputs[0].shape[:-1])}"
            )
    all_lse = torch.stack(tuple(lses))
    # A row that saw nothing in any part: −inf − (−inf) must not put NaN into its gradient.
    empty = (all_lse == -torch.inf).all(0)
    total_lse = torch.logsumexp(torch.where(empty, 0.0, all_lse), dim=0)
    lse = torch.where(empty, -torch.inf, total_lse)
    weights = torch.exp(all_lse - total_lse)  # 0 for a part in which a row saw nothing
    total = sum(
        torch.where(weight[..., None] == 0, 0.0, weight[..., None] * output.to(lse.dtype))
        for weight, output in zip(weights, outputs, strict=True)
    )
    assert isinstance(total, Tensor)
    return total.to(outputs[0].dtype), lse


def _forward(
    call: AttentionCall, chosen: backends.Backend, seed: int | None, need_lse: bool
) -> tuple[Tensor, Tensor]:
    shape = call.query.shape[:3]
    if 0 in shape or not call.key.shape[2]:
        output = call.query.new_zeros((*shape, call.value_dim))
        return output, call.query.new_full(shape, -torch.inf, dtype=call.accumulate_dtype)
    with own_precision(call.query.device):
        output, lse = chosen.forward(call, seed, need_lse)
    # Where nobody asked for it, what stands in its place is never read.
    return output, output if lse is None else lse


def _rebuild(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    intervals: Tensor | None,
    bits: Tensor | None,
    is_full: bool,
    is_causal: bool,
    bias: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
    dropout: float,
) -> AttentionCall:
    """The call again, from what travels through the operator."""
    sizes = Sizes(query.shape[0], query.shape[1], query.shape[2], key.shape[2], query.device)
    mask = CompiledMask(sizes, intervals, bits, is_full, is_causal)
    return AttentionCall(query, key, value, mask, bias, scale, softcap, sinks, dropout)


@torch.library.custom_op("headwise::attention", mutates_args=())
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    intervals: Tensor | None,
    bits: Tensor | None,
    is_full: bool,
    is_causal: bool,
    bias: Tensor | None,
    sinks: Tensor | None,
    seed: Tensor | None,
    scale: float,
    softcap: float | None,
    dropout: float,
    need_lse: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    call = _rebuild(
        query, key, value, intervals, bits, is_full, is_causal, bias, sinks, scale, softcap, dropout
    )
    # lse is always computed here: the backward pass needs it.
    drawn = None if seed is None else int(seed)
    output, lse = _forward(call, backends.get(backend), drawn, True)
    return output.contiguous(), lse.contiguous()


@_attention.register_fake
def _attention_fake(
    query: Tensor, key: Tensor, value: Tensor, *rest: object
) -> tuple[Tensor, Tensor]:
    shape = (query.shape[0], query.shape[1], query.shape[2])
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    return query.new_empty((*shape, value.shape[3])), query.new_empty(shape, dtype=wide)


@torch.library.custom_op("headwise::attention_backward", mutates_args=())
def _backward(
    grad_output: Tensor,
    grad_lse: Tensor | None,
    output: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    intervals: Tensor | None,
    bits: Tensor | None,
    is_full: bool,
    is_causal: bool,
    bias: Tensor | None,
    sinks: Tensor | None,
    seed: Tensor | None,
    scale: float,
    softcap: float | None,
    dropout: float,
    need_bias: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    call = _rebuild(
        query, key, value, intervals, bits, is_full, is_causal, bias, sinks, scale, softcap, dropout
    )
    like = {"query": query, "key": key, "value": value, "bias": bias, "sinks": sinks}
    if 0 in (*query.shape[:3], key.shape[2]):
        grads: dict[str, Tensor] = {}
    else:
        drawn = None if seed is None else int(seed)
        with own_precision(query.device):
            grads = backends.get(backend).backward(
                call, drawn, output, lse, grad_output, grad_lse, need_bias
            )
    # What has no gradient to give is an empty tensor: an operator returns tensors only.
    results = []
    for name, tensor in like.items():
        if tensor is None or (name == "bias" and not need_bias):
            results.append(query.new_empty(0))
        elif name in grads:
            results.append(grads[name].to(tensor.dtype).contiguous())
        else:
            results.append(torch.zeros_like(tensor, memory_format=torch.contiguous_format))
    return results[0], results[1], results[2], results[3], results[4]


@_backward.register_fake
def _backward_fake(
    grad_output: Tensor,
    grad_lse: Tensor | None,
    output: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    intervals: Tensor | None,
    bits: Tensor | None,
    is_full: bool,
    is_causal: bool,
    bias: Tensor | None,
    sinks: Tensor | None,
    seed: Tensor | None,
    scale: float,
    softcap: float | None,
    dropout: float,
    need_bias: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    def like(tensor: Tensor | None) -> Tensor:
        return query.new_empty(0) if tensor is None else tensor.new_empty(tensor.shape)

    return like(query), like(key), like(value), like(bias if need_bias else None), like(sinks)


def _keep_for_backward(
    ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: tuple
) -> None:
    query, key, value, intervals, bits, is_full, is_causal, bias, sinks, seed, *numbers = inputs
    tensors = (query, key, value, intervals, bits, bias, sinks, seed, *output)
    ctx.save_for_backward(*tensors)
    ctx.flags = (is_full, is_causal)  # type: ignore[attr-defined]
    ctx.numbers = tuple(numbers)  # type: ignore[attr-defined]


def _gradients(ctx: object, grad_output: Tensor, grad_lse: Tensor | None) -> tuple:
    query, key, value, intervals, bits, bias, sinks, seed, output, lse = ctx.saved_tensors  # type: ignore[attr-defined]
    is_full, is_causal = ctx.flags  # type: ignore[attr-defined]
    scale, softcap, dropout, need_lse, backend = ctx.numbers  # type: ignore[attr-defined]
    need_bias = bias is not None and ctx.needs_input_grad[7]  # type: ignore[attr-defined]
    d_query, d_key, d_value, d_bias, d_sinks = _backward(
        grad_output,
        grad_lse if need_lse else None,
        output,
        lse,
        query,
        key,
        value,
        intervals,
        bits,
        is_full,
        is_causal,
        bias,
        sinks,
        seed,
        scale,
        softcap,
        dropout,
        need_bias,
        backend,
    )
    grads = (d_query, d_key, d_value, None, None, None, None)
    ends = (d_bias if need_bias else None, None if sinks is None else d_sinks)
    return (*grads, *ends, None, None, None, None, None, None)


def _no_second_derivative(ctx: object, *grads: Tensor) -> tuple:
    raise RuntimeError(
        "headwise.attention has no second derivative; build it from torch operations "
        "(headwise.reference.attention_steps) where you need one"
    )


_attention.register_autograd(_gradients, setup_context=_keep_for_backward)
_backward.register_autograd(_no_second_derivative)
