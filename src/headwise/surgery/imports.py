"""Weights of other libraries' attention modules as a headwise layer with equal outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import BadInput
from headwise.layer import MultiHeadAttention
from headwise.options import AttentionOptions
from headwise.positions import Position, RelativeBias
from headwise.rotary import Rotary
from headwise.surgery.families import FAMILIES, Site, _family


def from_hf(module: nn.Module, *, position: Position | None = None) -> MultiHeadAttention:
    """The layer whose outputs equal those of a Hugging Face attention module (Llama-like, GPT-2,
    BERT-like with its output's `dense`, ViT-like, T5, Whisper) or of one with a fused `qkv` and
    `proj` as in timm. Weights are copied; dtype, device and training flag are kept.

    Masks are not part of a module: pass `mask=causal()` where the model is causal. BERT's residual
    and norm stay outside. Rotary positions come from the module's config; `position` replaces them
    where they are scaled (config.rope_parameters of another type than "default").

    Raises:
        BadInput: another kind of module, a weight that is missing, scaled rotary positions
        without `position`. An absent bias becomes zeros.
    """
    kind = type(module).__name__
    if isinstance(getattr(module, "qkv", None), nn.Linear):
        return _fused(module, position)
    family = _family(module)
    if family is None or family == "headwise":
        raise BadInput(f"from_hf: {kind} is not of a family that can be read: {FAMILIES}, timm")
    site = Site("self/0", kind, module, family)
    m = site.inner
    if family == "gpt2":
        q, k, v = m.c_attn.weight.t().chunk(3)
        biases = list(m.c_attn.bias.chunk(3))
        out, out_bias = m.c_proj.weight.t(), m.c_proj.bias
    else:
        parts = [site.projections[name] for name in "qkv"]
        q, k, v = (_weight(kind, p) for p in parts)
        biases = [p.bias for p in parts]
        out, out_bias = _weight(kind, site.output), site.output.bias
    scale = float(m.scaling)
    norms = (m.q_norm, m.k_norm) if getattr(m, "q_norm", None) is not None else None
    if norms is not None and not hasattr(norms[0], "variance_epsilon"):
        raise BadInput(f"from_hf: {kind} has a {type(norms[0]).__name__}, wanted an RMS norm")
    if position is None:
        position = _position(m, family)
    if getattr(m, "sliding_window", None):
        raise BadInput(f"from_hf: {kind} has a sliding window; pass it as mask=window(n) by hand")
    layer = _layer(
        (q, k, v, out), (*biases, out_bias), site.heads, site.kv_heads, site.head_dim, scale,
        position, norms,
    )  # fmt: skip
    return layer.train(module.training)


def _fused(module: Any, position: Position | None) -> MultiHeadAttention:
    kind = type(module).__name__
    proj = getattr(module, "proj", None)
    heads = getattr(module, "num_heads", None)
    if not isinstance(proj, nn.Linear) or not isinstance(heads, int):
        raise BadInput(f"from_hf: {kind} has a fused qkv but lacks proj or num_heads")
    for name in ("q_norm", "k_norm", "norm"):
        if not isinstance(getattr(module, name, nn.Identity()), nn.Identity):
            raise BadInput(f"from_hf: {kind} has {name}, which this layer lacks in that form")
    weights = _weight(kind, module.qkv).chunk(3)
    bias = module.qkv.bias
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    dim = module.qkv.out_features // 3 // heads
    scale = float(getattr(module, "scale", dim**-0.5))
    layer = _layer(
        (*weights, _weight(kind, proj)), (*biases, proj.bias), heads, heads, dim, scale, position,
        None,
    )  # fmt: skip
    return layer.train(module.training)


def _weight(kind: str, linear: Any) -> Tensor:
    weight = getattr(linear, "weight", None)
    if not isinstance(weight, Tensor):
        raise BadInput(f"from_hf: {kind} lacks the weight of a projection ({linear!r})")
    return weight


def _position(module: Any, family: str) -> Position | None:
    if family == "t5" and module.has_relative_attention_bias:
        table = module.relative_attention_bias.weight
        bias = RelativeBias(
            table.shape[1],
            num_buckets=table.shape[0],
            max_distance=module.relative_attention_max_distance,
            bidirectional=not module.is_decoder,
        )
        with torch.no_grad():
            bias.weight.copy_(table)
        return bias
    if family != "llama":
        return None
    rope: Any = getattr(module.config, "rope_parameters", None)
    if not isinstance(rope, dict) or rope.get("rope_type", "default") != "default":
        raise BadInput(
            f"from_hf: {type(module).__name__} has rope_parameters {rope}; pass "
            "position=Rotary(...)"
        )
    return Rotary(
        base=float(rope["rope_theta"]), fraction=float(rope.get("partial_rotary_factor", 1.0))
    )


def _layer(
    weights: tuple[Tensor, ...],
    biases: tuple[Tensor | None, ...],
    heads: int,
    kv_heads: int,
    head_dim: int,
    scale: float,
    position: Position | None,
    norms: Any,
) -> MultiHeadAttention:
    q, k, v, _ = weights
    layer = MultiHeadAttention(
        q.shape[1],
        heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        kdim=k.shape[1],
        vdim=v.shape[1],
        bias=any(b is not None for b in biases[:3]),
        position=position,
        options=AttentionOptions(
            scale=scale,
            out_bias=biases[3] is not None,
            qk_norm=norms is not None,
            qk_norm_eps=1e-6 if norms is None else float(norms[0].variance_epsilon),
        ),
    ).to(q)
    linears = (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj)
    with torch.no_grad():
        for linear, weight, bias in zip(linears, weights, biases, strict=True):
            if linear.weight.shape != weight.shape:
                raise BadInput(
                    f"from_hf: wanted a weight {tuple(linear.weight.shape)}, got "
                    f"{tuple(weight.shape)}"
                )
            linear.weight.copy_(weight)
            if linear.bias is not None and bias is not None:
                linear.bias.copy_(bias)  # an absent bias stays the zeros it was made with
        if norms is not None and layer.q_norm is not None and layer.k_norm is not None:
            layer.q_norm.weight.copy_(norms[0].weight)
            layer.k_norm.weight.copy_(norms[1].weight)
    return layer
