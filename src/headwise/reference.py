"""The definition of attention, in the plainest form: every step visible, one after the other.

The eight steps of multi-head attention (Vaswani 2017, arXiv 1706.03762, section 3.2): 1 project to
queries, keys, values; 2 split into heads; 3 scores; 4 scale (softcap, bias); 5 mask; 6 softmax;
7 weigh the values; 8 join the heads and project. Steps 1 and 8's projections are linear layers;
the rest is here. Run in float64 it is the truth that every backend is tested against; run in a
call's own precision on a block of rows it is the exact path for what fused kernels cannot do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.call import AttentionCall, own_precision

ALL = slice(None)


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """Step 2. (B, L, H·D) → (B, H, L, D): head h takes features h·D … h·D + D − 1 of each token."""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """Step 8, the inverse of `split_heads`: (B, H, L, D) → (B, L, H·D)."""
    return x.transpose(1, 2).flatten(-2)


def attention_steps(call: AttentionCall) -> dict[str, Tensor]:
    """Steps 3 to 7 without dropout: name → tensor, scores and weights (B, Hq, L, S).

    Arithmetic is float64 for float64 calls, float32 for all others: `call.to(torch.float64)` gives
    the definition. `lse` (B, Hq, L) is natural and counts the sink logit; a row with no key has
    lse −inf, weights 0 and output 0.
    """
    with own_precision(call.query.device):
        return _steps(call)


def _steps(call: AttentionCall) -> dict[str, Tensor]:
    steps = _score_steps(call)
    final = steps["masked"]
    top = (
        final.amax(-1, keepdim=True)
        if final.shape[-1]
        else final.new_full((*final.shape[:3], 1), -torch.inf)
    )
    empty = top == -torch.inf
    if call.sinks is not None:
        sink = call.sinks.to(final.dtype)[:, None, None]
        top = torch.maximum(top, sink)
    shift = torch.where(top == -torch.inf, 0.0, top)
    exponents = torch.exp(final - shift)  # 6: softmax, shifted by the row's largest score
    total = exponents.sum(-1, keepdim=True)
    if call.sinks is not None:
        total = total + torch.exp(sink - shift)
    seen = final != -torch.inf
    weights = torch.where(seen, exponents / total, 0.0)
    steps["weights"] = weights
    steps["lse"] = torch.where(empty, -torch.inf, shift + torch.log(total)).squeeze(-1)
    value = expand_heads(call.value.to(final.dtype), call.groups)
    steps["output"] = seen_product(weights, value, seen)  # 7: weigh the values
    return steps


def scores(call: AttentionCall, rows: slice = ALL, keys: slice = ALL) -> Tensor:
    """A tile's final scores (B, Hq, rows, keys), −inf at hidden keys. Sinks are not in them."""
    with own_precision(call.query.device):
        return _score_steps(call.part(rows, keys))["masked"]


def _score_steps(call: AttentionCall) -> dict[str, Tensor]:
    dtype = call.accumulate_dtype
    query, key = call.query.to(dtype), expand_heads(call.key.to(dtype), call.groups)
    steps = {"scores": query @ key.mT}  # 3: dot products
    # 4: scale. A scale below 1 goes onto the query first, so that a large product cannot overflow.
    scale = call.scale_value
    s = (query * scale) @ key.mT if scale < 1 else steps["scores"] * scale
    steps["scaled"] = s
    if call.softcap is not None:
        s = call.softcap * torch.tanh(s / call.softcap)
    steps["capped"] = s
    if call.bias is not None:
        bias = call.bias
        # A bias of −inf hides, whatever stands at the hidden key.
        s = torch.where(bias == -torch.inf, -torch.inf, s + bias.to(dtype))
    steps["biased"] = s
    if not call.visible.is_full:
        s = torch.where(call.visible.tile(), s, -torch.inf)  # 5: mask
    steps["masked"] = s
    return steps


def backward(
    call: AttentionCall, grad_output: Tensor, grad_lse: Tensor | None, drop: Tensor | None = None
) -> dict[str, Tensor]:
    """Gradients of query, key, value, bias and sinks, given those of output and lse.

    With p the weights, o = Σ z·p·v (z = dropout) and δ = Σ p·z·⟨dO, v⟩ (Dao 2022, arXiv
    2205.14135, appendix B.2): ds = p·(z·⟨dO, v⟩ − δ + dlse), dsink = p_sink·(dlse − δ).
    `drop`: what dropout multiplies the weights by, 0 or 1/(1 − p).
    """
    steps = attention_steps(call)
    p, dtype = steps["weights"], call.accumulate_dtype
    value = expand_heads(call.value.to(dtype), call.groups)
    key = expand_heads(call.key.to(dtype), call.groups)
    query, d_out = call.query.to(dtype), grad_output.to(dtype)
    # A row outside the loss adds nothing, not even the NaN that it may hold.
    pulled = (d_out != 0).any(-1, keepdim=True)
    if grad_lse is not None:
        pulled = pulled | (grad_lse != 0).unsqueeze(-1)
    seen = pulled & (steps["masked"] != -torch.inf)
    p = torch.where(pulled, p, 0.0)
    dropped = p if drop is None else p * drop
    d_value = seen_product(dropped.mT, d_out, seen.mT)
    d_weights = torch.where(seen, d_out @ value.mT, 0.0)
    if drop is not None:
        d_weights = d_weights * drop
    delta = torch.where(pulled, (p * d_weights).sum(-1, keepdim=True), 0.0)
    pull = -delta if grad_lse is None else grad_lse.to(dtype).unsqueeze(-1) - delta
    d_scores = torch.where(seen, p * (d_weights + pull), 0.0)
    grads = {"value": d_value}
    if call.bias is not None:
        grads["bias"] = d_scores.sum_to_size(call.bias.shape)
    if call.sinks is not None:
        lse = steps["lse"].unsqueeze(-1)
        share = torch.exp(call.sinks.to(dtype)[:, None, None] - lse)
        grads["sinks"] = torch.where(pulled & (lse != -torch.inf), share * pull, 0.0).sum((0, 2, 3))
    if call.softcap is not None:
        d_scores = torch.where(seen, d_scores * (1 - (steps["capped"] / call.softcap) ** 2), 0.0)
    grads["query"] = call.scale_value * seen_product(d_scores, key, seen)
    grads["key"] = call.scale_value * seen_product(d_scores.mT, query, seen.mT)
    for name in ("key", "value"):
        grads[name] = grads[name].unflatten(1, (call.num_kv_heads, call.groups)).sum(2)
    return grads


def expand_heads(x: Tensor, groups: int) -> Tensor:
    """(B, Hkv, S, D) → (B, Hkv·groups, S, D): query head h reads head h // groups."""
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)


def seen_product(weights: Tensor, x: Tensor, seen: Tensor) -> Tensor:
    """weights @ x, where a hidden pair adds nothing even if x is NaN or infinite there.

    Weights are 0 at hidden pairs, but 0·NaN is NaN: rows of x that are not finite are added one by
    one, and only where they are seen.
    """
    finite = x.isfinite()
    if bool(finite.all()):
        return weights @ x
    product = weights @ torch.where(finite, x, 0.0)
    for j in (~finite).any(-1).flatten(0, 1).any(0).nonzero().flatten().tolist():
        odd = torch.where(finite[:, :, j], 0.0, x[:, :, j])[:, :, None]
        visible = seen[..., j, None] & ~finite[:, :, j, None]
        product = product + torch.where(visible, weights[..., j, None] * odd, 0.0)
    return product
