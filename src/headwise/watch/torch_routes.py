"""torch's ways to attention: SDPA, nn.MultiheadAttention, the fused encoder layer.

The original always runs on the original arguments and its result is what the model gets. What is
recorded is rebuilt from the arguments beside it.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise import masks
from headwise.call import AttentionCall
from headwise.intervals import Mask
from headwise.reference import split_heads
from headwise.watch.masks import read_grid
from headwise.watch.patches import Target
from headwise.watch.session import (
    Frame,
    Unreadable,
    check_plain,
    local,
    muted,
    record,
    recording,
    same_dtype,
    watchers,
)

SDPA = "F.scaled_dot_product_attention"
MHA = "nn.MultiheadAttention"
FUSED_MHA = "nn.MultiheadAttention fused"
FUSED_LAYER = "nn.TransformerEncoderLayer fused"


def targets(model: nn.Module) -> list[Target]:
    """What to replace for this model: torch's functions, also where they were imported by name."""
    found = [
        Target(F, "scaled_dot_product_attention", wrap_sdpa),
        Target(F, "multi_head_attention_forward", wrap_mha_forward),
        Target(torch, "_native_multi_head_attention", wrap_native_mha),
        Target(torch, "_transformer_encoder_layer_fwd", wrap_encoder_layer),
    ]
    makers = {id(getattr(target.owner, target.name)): target.make for target in found}
    for name in {type(module).__module__ for module in model.modules()}:
        source = sys.modules.get(name)
        if source is None or name.startswith("torch."):
            continue
        for variable, value in list(vars(source).items()):
            # The name may hold a wrapper already when another watch is open.
            maker = makers.get(id(getattr(value, "_headwise_original", value)))
            if maker is not None and callable(value):
                found.append(Target(source, variable, maker))
    return found


def _causal_bias(mask: Any) -> Any:
    """torch's module of causal biases if `mask` is one of them, else None.

    Importing that module takes seconds; a model that uses it has imported it already.
    """
    module = sys.modules.get("torch.nn.attention.bias")
    return module if module is not None and isinstance(mask, module.CausalBias) else None


# --- scaled_dot_product_attention ----------------------------------------------------------------


def wrap_sdpa(original: Callable) -> Callable:
    @functools.wraps(original)
    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        if local.catcher is not None:
            return local.catcher(*args, **kwargs)
        bias = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
        causal_bias = _causal_bias(bias)
        if causal_bias is not None:
            # Its torch function compares with F.scaled_dot_product_attention, which is replaced
            # now. This is the line that it would have run.
            run: Callable = causal_bias.CausalBias._dispatch
        else:
            run = original
        found = watchers(None) if recording() else []
        if not found:
            return run(*args, **kwargs)
        with muted():
            output = run(*args, **kwargs)
        record(found, SDPA, lambda frame: _sdpa_call(frame, output, *args, **kwargs))
        return output

    scaled_dot_product_attention._headwise_original = original  # type: ignore[attr-defined]
    return scaled_dot_product_attention


def _sdpa_call(
    frame: Frame,
    output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[AttentionCall, Tensor | None]:
    check_plain(query, key, value)
    if query.is_nested or key.is_nested or value.is_nested:
        raise Unreadable("SDPA on nested tensors: their rows have no common length")
    mask: Mask | None = None
    causal_bias = _causal_bias(attn_mask)
    if causal_bias is not None:
        variant: Any = getattr(attn_mask, "variant")  # noqa: B009 - a subclass mypy can't see
        upper = variant is causal_bias.CausalVariant.UPPER_LEFT
        mask, attn_mask = masks.causal(align="start" if upper else "end"), None
    elif is_causal:
        # torch's flag lets query 0 see key 0 only, whatever the lengths are.
        same = query.shape[-2] == key.shape[-2]
        mask = masks.causal(align="end" if same else "start")
    heads_of = getattr(frame.module, "num_heads", None)
    query, key, value = (_four_axes(x, heads_of) for x in (query, key, value))
    batch = max(x.shape[0] for x in (query, key, value))
    query, key, value = (x.expand(batch, *x.shape[1:]) for x in (query, key, value))
    if not enable_gqa:
        heads = max(x.shape[1] for x in (query, key, value))
        query, key, value = (x.expand(-1, heads, -1, -1) for x in (query, key, value))
        key, value = _ungroup(frame.module, query, key, value)
    if attn_mask is not None and attn_mask.dim() == 3 and output.dim() == 3:
        attn_mask = _four_axes(attn_mask.expand(output.shape[0], -1, -1), heads_of)
    read = local.reader(attn_mask, batch, query.shape[1], query.shape[2], key.shape[2])
    if read.mask is not None:
        mask = read.mask if mask is None else mask & read.mask
    q, k, v, bias = same_dtype(query, key, value, read.bias)
    assert q is not None and k is not None and v is not None
    call = AttentionCall(q, k, v, mask, bias, scale, dropout=dropout_p)
    return call, _four_axes(output, heads_of)


def _four_axes(x: Tensor, heads: object) -> Tensor:
    """(…, L, D) as (B, H, L, D). Heads folded into the batch come apart by the module's count."""
    if x.dim() == 4:
        return x
    if x.dim() == 2:
        return x[None, None]
    if x.dim() == 3:
        if isinstance(heads, int) and heads > 1 and x.shape[0] % heads == 0:
            return x.unflatten(0, (-1, heads))
        return x[:, None]
    return x.flatten(0, x.dim() - 4)


def _ungroup(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys that were repeated for grouped heads, once a group again, where the module says so."""
    groups = getattr(module, "num_key_value_groups", None) or getattr(module, "n_rep", None)
    if groups is None:
        for name in ("num_kv_heads", "n_kv_heads", "num_key_value_heads"):
            count = getattr(module, name, None)
            if isinstance(count, int) and 0 < count < query.shape[1]:
                groups = query.shape[1] // count
                break
    if not isinstance(groups, int) or groups < 2 or key.shape[1] != query.shape[1]:
        return key, value
    if key.shape[1] % groups:
        return key, value
    split = [x.unflatten(1, (-1, groups)) for x in (key, value)]
    if all(bool((x == x[:, :, :1]).all()) for x in split):
        return split[0][:, :, 0], split[1][:, :, 0]
    return key, value


# --- nn.MultiheadAttention -----------------------------------------------------------------------


class _Caught(Exception):
    """Leaves a function at the point where it would have called SDPA."""


def wrap_mha_forward(original: Callable) -> Callable:
    @functools.wraps(original)
    def multi_head_attention_forward(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not recording():
            return original(*args, **kwargs)
        found = watchers(None)
        if not found or not _needs_weights(args, kwargs):
            return original(*args, **kwargs)  # it calls SDPA, which is watched
        with muted():
            result = original(*args, **kwargs)
        record(found, MHA, lambda frame: _weights_call(original, frame, args, kwargs))
        return result

    multi_head_attention_forward._headwise_original = original  # type: ignore[attr-defined]
    return multi_head_attention_forward


def _needs_weights(args: tuple, kwargs: dict) -> bool:
    return bool(kwargs.get("need_weights", args[15] if len(args) > 15 else True))


def _weights_call(
    original: Callable, frame: Frame, args: tuple, kwargs: dict
) -> tuple[AttentionCall, Tensor | None]:
    """torch's own code up to its SDPA call, whose arguments are what need_weights=True computes.

    `is_causal` is only a hint beside a mask, and this branch of torch uses the mask.
    """
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    dropout = float(given["dropout_p"]) if given["training"] else 0.0
    given.update(need_weights=False, is_causal=False, training=False)
    caught: list[tuple] = []

    def catch(*args: Any, **kwargs: Any) -> Any:
        caught.append(args)
        raise _Caught

    local.catcher = catch
    try:
        original(**given)
    except _Caught:
        pass
    finally:
        local.catcher = None
    if not caught:
        raise Unreadable("F.multi_head_attention_forward did not come to its attention step")
    query, key, value, mask = caught[0][:4]
    call, _ = _sdpa_call(frame, query, query, key, value, mask, dropout)
    return call, None


def wrap_native_mha(original: Callable) -> Callable:
    @functools.wraps(original)
    def _native_multi_head_attention(*args: Any, **kwargs: Any) -> Any:
        found = watchers(None) if recording() else []
        if not found:
            return original(*args, **kwargs)
        with muted():
            result = original(*args, **kwargs)

        def build(frame: Frame) -> tuple[AttentionCall, Tensor | None]:
            query, key, value, _, heads, weight, bias, _, _, mask, *rest = args
            kind = rest[2] if len(rest) > 2 else kwargs.get("mask_type")
            if query is not key or key is not value:
                raise Unreadable("the fused kernel ran on different query, key and value tensors")
            return _fused_call(query, heads, weight, bias, mask, kind), None

        record(found, FUSED_MHA, build)
        return result

    _native_multi_head_attention._headwise_original = original  # type: ignore[attr-defined]
    return _native_multi_head_attention


# --- nn.TransformerEncoderLayer's fused kernel ---------------------------------------------------


def wrap_encoder_layer(original: Callable) -> Callable:
    @functools.wraps(original)
    def _transformer_encoder_layer_fwd(*args: Any, **kwargs: Any) -> Any:
        found = watchers(None) if recording() else []
        if not found:
            return original(*args, **kwargs)
        with muted():
            output = original(*args, **kwargs)

        def build(frame: Frame) -> tuple[AttentionCall, Tensor | None]:
            source, _, heads, weight, bias = args[:5]
            norm_first, eps, norm_weight, norm_bias = args[8], *args[9:12]
            mask, kind = args[18], args[19]
            if norm_first:
                source = F.layer_norm(source, norm_weight.shape, norm_weight, norm_bias, eps)
            return _fused_call(source, heads, weight, bias, mask, kind), None

        inner = [
            (watch, Frame(part, (), {}) if isinstance(part, nn.Module) else frame)
            for watch, frame in found
            for part in [getattr(frame.module, "self_attn", None)]
        ]
        record(inner, FUSED_LAYER, build)
        return output

    _transformer_encoder_layer_fwd._headwise_original = original  # type: ignore[attr-defined]
    return _transformer_encoder_layer_fwd


def _fused_call(
    source: Tensor,
    heads: int,
    weight: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    mask_type: int | None,
) -> AttentionCall:
    """q, k and v again from a fused kernel's arguments.

    mask_type 0: mask is (L, L); 1: (B, L), keys; 2: (B, H, L, L). The kernel reads any of them as
    bool, True hides: a float mask hides wherever it is not 0.
    """
    visible: Mask | None = None
    if source.is_nested:
        lengths = torch.tensor([part.shape[0] for part in source.unbind()])
        source = torch.nested.to_padded_tensor(source, 0.0)
        if int(lengths.min()) < source.shape[1]:
            # Rows past an element's end do not exist in the model: they see no key here.
            place = torch.arange(source.shape[1])[None]
            past = (place >= lengths[:, None]).long().to(source.device)
            visible = masks.documents(past, query_ids=2 * past)
    if mask is not None:
        hidden = mask.bool()
        if mask_type == 1:
            own = masks.padding(~hidden)
        else:
            grid = hidden if hidden.dim() == 4 else hidden[None, None]
            read = read_grid(~grid, source.shape[0], heads, source.shape[1], source.shape[1])
            own = read.mask if read.mask is not None else masks.everything()
        visible = own if visible is None else visible & own
    check_plain(source)
    q, k, v = (split_heads(x, heads) for x in F.linear(source, weight, bias).chunk(3, dim=-1))
    return AttentionCall(q, k, v, visible)


# --- headwise.attention --------------------------------------------------------------------------


def observe(call: AttentionCall, output: Tensor) -> None:
    """What `headwise.attention` calls with each of its calls."""
    if not recording():
        return
    record(watchers(None), "headwise.attention", lambda frame: (call, output))
