"""What a model's attention layers are: read from the layers themselves, or from options.

A Hugging Face model is built on the meta device (shapes without memory) and run once on eight
tokens; its attention layers then say what they compute, whatever the config calls it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from headwise._extras import require
from headwise.errors import BadInput
from headwise.models.quiet import first_line, quiet

NAME = "headwise_shapes"
# Tokens of the run on the meta device; a cross layer's keys are told from queries by their number.
TOKENS = 8


@dataclass(frozen=True)
class Layer:
    """One attention layer.

    heads, kv_heads; dim of a query and key, value_dim of a value. causal; window: keys that a query
    looks back over, its own counted, or None. cross: its keys are the encoder's. encoder: it stands
    in the encoder of an encoder-decoder, or in an encoder alone: it keeps no cache. latent: numbers
    that a cache keeps of one token in place of keys and values (DeepSeek-V2, arXiv 2405.04434,
    section 2.1: the compressed vector and the shared rotary key), or None.
    """

    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    causal: bool = True
    window: int | None = None
    cross: bool = False
    encoder: bool = False
    latent: int | None = None


@dataclass(frozen=True)
class Shape:
    """A model, as far as cost goes.

    parameters: numbers in its weights. per_token: weights that one token is multiplied with, in the
    stack that reads it (experts by how many of them a token visits; the vocabulary's matrix not
    counted: logits are computed for the last token only), decoder and encoder apart. head: weights
    of the vocabulary's matrix. width, inner: features of a token, and inside the feedforward.
    positions: the context that the model was made for, or None. source: tokens of the encoder,
    where their number is fixed. logits: numbers that come out for every token of a decoder beside
    an encoder, whose forward gives all logits; 0 where only the last token's are asked for.
    """

    name: str
    layers: tuple[Layer, ...]
    parameters: int
    per_token: int
    encoder_per_token: int = 0
    head: int = 0
    width: int = 0
    inner: int = 0
    gated: bool = True
    positions: int | None = None
    source: int | None = None
    logits: int = 0
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        if not self.layers:
            raise BadInput(f"profile: {self.name} has no attention layer, so nothing grows here")


def from_options(
    *,
    num_heads: int,
    layers: int = 1,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    embed_dim: int | None = None,
    window: int | None = None,
    causal: bool = True,
) -> Shape:
    """Attention layers alone, all alike: their four projections and nothing else.

    Raises:
        BadInput: numbers that do not fit together.
    """
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    for name, value in (
        ("num_heads", num_heads),
        ("num_kv_heads", kv_heads),
        ("layers", layers),
        ("head_dim", head_dim),
        ("embed_dim", embed_dim),
        ("window", window),
    ):
        if value is not None and value < 1:
            raise BadInput(f"profile: {name} must be at least 1, got {value}")
    if num_heads % kv_heads:
        raise BadInput(f"profile: {kv_heads} key/value heads do not divide {num_heads} heads")
    if head_dim is None:
        if embed_dim is None:
            raise BadInput("profile: give --head-dim or --embed-dim, to know a head's size")
        if embed_dim % num_heads:
            raise BadInput(
                f"profile: {num_heads} heads do not divide embed_dim {embed_dim}; give --head-dim"
            )
        head_dim = embed_dim // num_heads
    width = num_heads * head_dim if embed_dim is None else embed_dim
    projections = width * head_dim * 2 * (num_heads + kv_heads)
    layer = Layer(num_heads, kv_heads, head_dim, head_dim, causal, window)
    return Shape(
        name=f"{layers} × {num_heads} heads × {head_dim}"
        + (f", {kv_heads} KV" if kv_heads != num_heads else ""),
        layers=(layer,) * layers,
        parameters=layers * projections,
        per_token=layers * projections,
        width=width,
    )


# --- Hugging Face ---------------------------------------------------------------------------------


@dataclass
class _Seen:
    module: nn.Module
    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    window: int | None


def from_config(config: Any, name: str = "") -> Shape:
    """The shape of any Hugging Face model from its config; no weights are made or read.

    Raises:
        BadInput: the config has no attention that transformers' interface computes.
    """
    transformers = require("transformers", extra="models", purpose="headwise profile")
    name = name or getattr(config, "model_type", type(config).__name__)
    causal = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "is_decoder", None) is False:
        causal = causal and not hasattr(config, "type_vocab_size")
        causal = causal and not getattr(config, "is_encoder_decoder", False)
    kind = transformers.AutoModelForCausalLM if causal else transformers.AutoModel
    try:
        with quiet(), torch.device("meta"):
            # bfloat16: experts' grouped products take nothing wider, not even on meta.
            model = kind.from_config(config, dtype=torch.bfloat16)
    except (ValueError, KeyError, AttributeError) as error:
        raise BadInput(
            f"profile: {name} can't be built from its config: {first_line(error)}"
        ) from None
    return from_model(model.eval(), name)


def from_model(model: Any, name: str) -> Shape:
    """The shape of a Hugging Face model, on the meta device or not; it is run there.

    Raises:
        BadInput: no attention layer called transformers' interface.
    """
    if any(p.device.type != "meta" for p in model.parameters()):
        return from_config(model.config, name)
    config = model.config
    seen = _run(model, name)
    both = bool(getattr(config, "is_encoder_decoder", False))
    inside = set(model.get_encoder().modules()) if both else set()
    layers = []
    for call in seen:
        encoder = call.module in inside if both else not _is_causal(call)
        cross = both and not encoder and not _is_causal(call)
        layers.append(
            Layer(
                heads=call.query[1],
                kv_heads=call.key[1],
                dim=call.query[3],
                value_dim=call.value[3],
                causal=_is_causal(call),
                window=call.window,
                cross=cross,
                encoder=encoder,
                latent=_latent(call.module, config),
            )
        )
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    per_token, encoder_per_token, head = _weights(model, text, inside)
    width = int(getattr(text, "hidden_size", 0) or getattr(text, "d_model", 0) or 0)
    inner, gated = _inner(model, width)
    source = getattr(config, "max_source_positions", None) if both else None
    return Shape(
        name=name,
        layers=tuple(layers),
        parameters=sum(p.numel() for p in model.parameters()),
        per_token=per_token,
        encoder_per_token=encoder_per_token,
        head=head,
        width=width,
        inner=inner,
        gated=gated,
        positions=_positions(text, config),
        source=source if isinstance(source, int) else None,
        logits=int(getattr(text, "vocab_size", 0) or 0) if both else 0,
    )


def _is_causal(call: _Seen) -> bool:
    return bool(getattr(call.module, "is_causal", False))


def _run(model: Any, name: str) -> list[_Seen]:
    from transformers import AttentionInterface, AttentionMaskInterface

    seen: list[_Seen] = []

    def attend(module: nn.Module, query: Any, key: Any, value: Any, mask: Any = None, **more: Any):  # type: ignore[no-untyped-def]
        window = more.get("sliding_window")
        seen.append(_Seen(module, tuple(query.shape), tuple(key.shape), tuple(value.shape), window))
        return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
    before = getattr(model.config, "_attn_implementation", None)
    try:
        model.set_attn_implementation(NAME)
        with torch.no_grad():
            model(**_inputs(model))
    except Exception as error:
        raise BadInput(
            f"profile: {name} could not be run for its shapes: {first_line(error)}"
        ) from None
    finally:
        if before is not None:
            model.config._attn_implementation = before
    if not seen:
        raise BadInput(
            f"profile: no attention layer of {name} calls transformers' attention interface, so "
            "there is nothing to profile"
        )
    return seen


def _inputs(model: Any) -> dict[str, Any]:
    config, first = model.config, next(model.parameters())

    def ids(count: int) -> torch.Tensor:
        return torch.zeros(1, count, dtype=torch.long, device="meta")

    main = getattr(model, "main_input_name", "input_ids")
    if main == "pixel_values":
        size = config.image_size
        high, wide = (size, size) if isinstance(size, int) else size
        channels = getattr(config, "num_channels", 3)
        return {"pixel_values": first.new_empty(1, channels, high, wide)}
    given: dict[str, Any] = {"input_ids": ids(TOKENS + 1)}
    if main == "input_features":
        frames = 2 * config.max_source_positions
        given = {"input_features": first.new_empty(1, config.num_mel_bins, frames)}
    if getattr(config, "is_encoder_decoder", False):
        given["decoder_input_ids"] = ids(TOKENS)
    return given


def _latent(module: nn.Module, config: Any) -> int | None:
    """Multi-head latent attention keeps one compressed vector and one rotary key of a token."""
    joint: Any = getattr(module, "kv_a_proj_with_mqa", None)
    return None if joint is None else int(joint.weight.shape[0])


def _weights(model: nn.Module, config: Any, inside: set[nn.Module]) -> tuple[int, int, int]:
    """(weights that a token of the decoder meets, of the encoder, of the vocabulary's matrix)."""
    output = getattr(model, "get_output_embeddings", lambda: None)()
    head = output.weight.numel() if output is not None else 0
    tables = {id(m) for m in model.modules() if isinstance(m, nn.Embedding)}
    visited = getattr(config, "num_experts_per_tok", None) or getattr(config, "moe_topk", None)
    sums = [0, 0]
    for module in model.modules():
        if id(module) in tables or module is output:
            continue
        for weight in module.parameters(recurse=False):
            if weight.ndim == 2:
                count = weight.numel()
            elif weight.ndim == 3 and visited:  # (experts, in, out)
                count = weight.numel() // weight.shape[0] * int(visited)
            else:
                continue
            sums[module in inside] += count
    return sums[0], sums[1], head


def _inner(model: nn.Module, width: int) -> tuple[int, bool]:
    """(features inside the widest feedforward, whether it is gated), from its matrices."""
    inner, gated = 0, False
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, torch.Tensor) or weight.ndim != 2 or "embed" in name:
            continue
        if isinstance(module, nn.Embedding) or name.endswith(("lm_head", "score")):
            continue
        last = name.rsplit(".", 1)[-1]
        if last in (
            "up_proj",
            "gate_proj",
            "wi_0",
            "wi_1",
            "fc1",
            "c_fc",
            "wi",
            "gate_up_proj",
        ) or (last == "dense" and "intermediate" in name):
            size = max(weight.shape)
            inner = max(inner, size // 2 if last == "gate_up_proj" else size)
            gated = gated or last in ("gate_proj", "wi_1", "gate_up_proj")
    return inner or 4 * width, gated


def _positions(text: Any, config: Any) -> int | None:
    for holder in (text, config):
        for name in ("max_position_embeddings", "n_positions", "max_target_positions"):
            value = getattr(holder, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return None


def by_kind(layers: tuple[Layer, ...]) -> Mapping[Layer, int]:
    """How many layers there are of each kind, in order."""
    found: dict[Layer, int] = {}
    for layer in layers:
        found[layer] = found.get(layer, 0) + 1
    return found
