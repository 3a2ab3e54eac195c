"""What may go into a layer's forward, checked once, in words that carry the numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from headwise.cache import KVCache, RollingKVCache
from headwise.int8_cache import QuantizedKVCache
from headwise.intervals import Mask
from headwise.options import AttentionOptions, Context, ProjectedContext
from headwise.positions import ALiBi, RelativeBias, Rotary

if TYPE_CHECKING:
    from headwise.layer import MultiHeadAttention

Cache = KVCache | RollingKVCache | QuantizedKVCache


def check_parts(num_heads: int, position: object, options: object) -> None:
    """What a layer is built with; else it would fail only at its first call."""
    if position is not None and not isinstance(position, Rotary | ALiBi | RelativeBias):
        raise TypeError(
            "MultiHeadAttention: position is Rotary(...), ALiBi(...), RelativeBias(...) or None, "
            f"got {position!r}"
        )
    if isinstance(position, RelativeBias) and position.num_heads != num_heads:
        raise ValueError(
            f"MultiHeadAttention: position=RelativeBias has num_heads={position.num_heads}, the "
            f"layer has num_heads={num_heads}"
        )
    if not isinstance(options, AttentionOptions):
        raise TypeError(
            f"MultiHeadAttention: options is AttentionOptions(...), got {type(options).__name__}"
        )


def check_arguments(
    layer: MultiHeadAttention,
    x: Tensor,
    context: Context | None,
    mask: object,
    cache: Cache | None,
    positions: Tensor | None,
) -> None:
    _check_tokens("x", x, "embed_dim", layer.embed_dim)
    if mask is not None and not isinstance(mask, Mask):
        raise TypeError(
            f"MultiHeadAttention: mask is a {type(mask).__name__}, which does not say what it "
            "means; wrap it: keep(mask) if True means visible, hide(mask) if True means hidden "
            "(key padding: padding(real))"
        )
    if context is None:
        _check_self_attention(layer, x, cache, positions)
        return
    if isinstance(context, Mask):
        raise TypeError(
            f"MultiHeadAttention: context is a mask ({type(context).__name__}); pass mask= by name"
        )
    given = {
        f"position={type(layer.position).__name__}": layer.position,
        "options.window": layer.options.window,
        "cache=": cache,
        "positions=": positions,
    }
    for name, value in given.items():
        if value is not None:
            hint = (
                "use project_context() once for many steps"
                if name == "cache="
                else ("build the cross-attention layer without it")
            )
            raise ValueError(
                f"MultiHeadAttention: {name} orders the tokens of one sequence, but context= is "
                f"another sequence; {hint}"
            )
    first = (
        context.key if isinstance(context, ProjectedContext) else context_pair(layer, context)[0]
    )
    if first.shape[0] != x.shape[0]:
        raise ValueError(
            f"MultiHeadAttention: x has batch {x.shape[0]} and context has batch "
            f"{first.shape[0]}; both are batch first, (batch, sequence, features): a "
            "sequence-first tensor goes in as tensor.transpose(0, 1)"
        )


def _check_self_attention(
    layer: MultiHeadAttention, x: Tensor, cache: Cache | None, positions: Tensor | None
) -> None:
    for name, width in (("kdim", layer.kdim), ("vdim", layer.vdim)):
        if width != layer.embed_dim:
            raise ValueError(
                f"MultiHeadAttention: {name}={width} differs from embed_dim={layer.embed_dim}, so "
                "this layer attends to another sequence; pass context="
            )
    if positions is not None:
        if layer.position is None:
            raise ValueError(
                "MultiHeadAttention: positions= was given, but the layer has position=None, so "
                "nothing would read them; build it with Rotary(), ALiBi() or RelativeBias(...)"
            )
        length = x.shape[1]
        if tuple(positions.shape) not in ((length,), (1, length), (x.shape[0], length)):
            raise ValueError(
                f"MultiHeadAttention: positions must be (length,) = ({length},) or (batch, length)"
                f" = ({x.shape[0]}, {length}), got {tuple(positions.shape)}"
            )
    if cache is None:
        return
    scaling = layer.position.scaling if isinstance(layer.position, Rotary) else None
    if scaling is not None and scaling.dynamic:
        raise ValueError(
            f"MultiHeadAttention: {scaling} changes the rotary base as the text grows, but cached "
            "keys were turned with the old one; use NTKScaling(factor) without original_length"
        )
    reach = layer.options.reach
    if isinstance(cache, RollingKVCache) and (reach is None or cache.window < reach):
        raise ValueError(
            f"MultiHeadAttention: the RollingKVCache keeps {cache.window} keys, but the layer "
            + ("looks back without a limit" if reach is None else f"looks back over {reach}")
            + f"; build it with options=AttentionOptions(window={cache.window}), or use KVCache"
        )


def context_pair(
    layer: MultiHeadAttention, context: Tensor | tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """The tokens that keys and values are made of, checked."""
    if isinstance(context, Tensor):
        if layer.kdim != layer.vdim:
            raise ValueError(
                f"MultiHeadAttention: kdim={layer.kdim} and vdim={layer.vdim} differ, so context "
                "must be a pair (key context, value context); got one tensor of shape "
                f"{tuple(context.shape)}"
            )
        _check_tokens("context", context, "kdim", layer.kdim)
        return context, context
    given: object = context  # what the annotation says is not what everybody passes
    if not isinstance(given, tuple | list) or len(given) != 2:
        count = f" of {len(given)}" if isinstance(given, tuple | list) else ""
        raise TypeError(
            "MultiHeadAttention: context is one tensor, a pair (key context, value context) or "
            f"what project_context returned; got a {type(given).__name__}{count}"
        )
    keys, values = context
    _check_tokens("key context", keys, "kdim", layer.kdim)
    _check_tokens("value context", values, "vdim", layer.vdim)
    if keys.shape[:2] != values.shape[:2]:
        raise ValueError(
            "MultiHeadAttention: key context and value context must agree in (batch, sequence), "
            f"got {tuple(keys.shape[:2])} and {tuple(values.shape[:2])}"
        )
    return keys, values


def _check_tokens(name: str, tokens: Tensor, width_name: str, width: int) -> None:
    if tokens.is_nested:
        raise TypeError(
            f"MultiHeadAttention: {name} is a nested tensor; pad it (to_padded_tensor) and say "
            "what is padding with mask=padding(lengths=…)"
        )
    shape = tuple(tokens.shape)
    if len(shape) != 3:
        hint = f"; one sequence alone is {name}[None]" if len(shape) == 2 else ""
        if len(shape) == 4:
            hint = "; heads are split inside the layer"
        raise ValueError(
            f"MultiHeadAttention: {name} must be batch first, (batch, sequence, {width_name}), "
            f"got {len(shape)} axes: {shape}{hint}"
        )
    if shape[-1] != width:
        raise ValueError(
            f"MultiHeadAttention: {name} has {shape[-1]} features, wanted {width_name}={width}; "
            f"its shape is {shape}"
        )
