"""The sequences that a model reads: which argument holds them, and what goes beside them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwise.checks.finding import NotRunnable
from headwise.intervals import Mask

# Long enough for offsets, windows and chunks to show, short enough to run dozens of times.
LENGTH = 12
LONGEST = 24

# In the order in which they are looked for.
DECODER_NAMES = ("decoder_input_ids", "decoder_inputs_embeds", "tgt")
STREAM_NAMES = ("input_ids", "inputs_embeds", "pixel_values", "src", "x", "input", "inputs")
# A spectrogram, (batch, bands, frames): the model makes its tokens of it.
SOUND_NAME = "input_features"
# Arguments that say which tokens are real. The second kind marks padding with True, as torch does.
KEEP_NAMES = ("attention_mask", "input_mask")
HIDE_NAMES = ("src_key_padding_mask", "key_padding_mask", "padding_mask")
POSITION_NAMES = ("position_ids", "positions")
DOCUMENT_NAMES = ("document_ids", "documents", "doc_ids", "segment_ids", "seq_idx", "sequence_ids")
SQUARE_NAMES = ("mask", "src_mask", "tgt_mask", "attn_mask")
CACHE_NAMES = ("past_key_values", "past_key_value", "cache", "kv_cache", "past", "layer_past")
# Of the caller's arguments, those that the checks set themselves, or that change the output's form.
DROPPED = ("logits_to_keep", "use_cache", "labels", "past_key_values", "return_dict")


@dataclass(frozen=True, eq=False)
class Stream:
    """One sequence of tokens that the model reads.

    slot: the keyword (or the place among the positional arguments) that holds it. kind: "ids"
    (B, L) int, "features" (B, L, F), "image" (B, C, H, W), "sound" (B, bands, frames), which the
    model makes its tokens of. values: the tokens of one example.
    own_rows: the outputs have a row for each of its positions. padding: the argument that says
    which tokens are real, and `hides`: whether True there means padding. positions, square,
    documents, cache: the names of arguments for positions, an (L, L) mask, document ids, a cache.
    """

    name: str
    slot: str | int
    kind: str
    values: Tensor
    own_rows: bool = True
    padding: str | None = None
    hides: bool = False
    positions: str | None = None
    square: str | None = None
    documents: str | None = None
    cache: str | None = None

    @property
    def length(self) -> int:
        """Tokens; for a picture or a sound there are none to count."""
        return 0 if self.whole else self.values.shape[1]

    @property
    def whole(self) -> bool:
        """Not a row of tokens: it can't be cut, padded or replaced token by token."""
        return self.kind in ("image", "sound")


def parameters(model: nn.Module) -> tuple[list[str], bool]:
    """The names of forward's arguments, and whether it takes any keyword."""
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):
        return [], True
    names, anything = [], False
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            anything = True
        elif parameter.kind is not inspect.Parameter.VAR_POSITIONAL:
            names.append(name)
    return names, anything


def arguments(model: nn.Module, inputs: Any) -> tuple[list[Any], dict[str, Any]]:
    """(positional, keyword) arguments of one call; positional ones by name where they have one.

    Raises:
        NotRunnable: inputs of no known form.
    """
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    if isinstance(inputs, Mapping):
        kwargs = dict(inputs)
    elif isinstance(inputs, Tensor):
        args = [inputs]
    elif isinstance(inputs, tuple | list):
        args = list(inputs)
    elif hasattr(inputs, "kwargs") and hasattr(inputs, "args"):
        args, kwargs = list(inputs.args), dict(inputs.kwargs)
    else:
        raise NotRunnable(
            f"inputs are a {type(inputs).__name__}; wanted a tensor, a tuple of arguments or a "
            "dict of keywords"
        )
    for name in DROPPED:
        kwargs.pop(name, None)
    try:
        kinds = list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):
        return args, kwargs
    named = []
    for parameter in kinds:
        if parameter.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
            break
        named.append(parameter.name)
    if len(args) <= len(named):
        kwargs = {**dict(zip(named, args, strict=False)), **kwargs}
        args = []
    return args, {name: value for name, value in kwargs.items() if value is not None}


def bands_of(model: nn.Module) -> int | None:
    """The bands of a spectrogram that the model takes, (batch, bands, frames); None: no such."""
    bands = getattr(getattr(model, "config", None), "num_mel_bins", None)
    return bands if isinstance(bands, int) else None


def two_parts(model: nn.Module) -> bool:
    """An encoder and a decoder; an encoder alone may share the config that says so."""
    said = getattr(getattr(model, "config", None), "is_encoder_decoder", False) is True
    return said and any(name in parameters(model)[0] for name in DECODER_NAMES)


def kind_of(value: Any, batch_first: bool) -> str | None:
    """What a tensor can be as a sequence of tokens, by its dtype and rank; None: it cannot."""
    if not isinstance(value, Tensor):
        return None
    if value.dtype in (torch.long, torch.int32) and value.ndim == 2:
        return "ids"
    if value.is_floating_point() and value.ndim == 3:
        return "features"
    if value.is_floating_point() and value.ndim == 4 and batch_first:
        return "image"
    return None


def find(
    model: nn.Module, args: list[Any], kwargs: dict[str, Any], *, batch_first: bool, cross: bool
) -> list[Stream]:
    """The model's streams: the one that its outputs follow first.

    `cross`: the model has an encoder and a decoder. Values come out batch first, one example, at
    most 24 positions.

    Raises:
        NotRunnable: no argument is a sequence of tokens.
    """
    slots: list[str | int] = []
    named = (*DECODER_NAMES, *STREAM_NAMES) if cross else (*STREAM_NAMES, *DECODER_NAMES)
    slots += [name for name in named if kind_of(kwargs.get(name), batch_first)]
    slots += list(range(len(args)))
    skipped = {*KEEP_NAMES, *HIDE_NAMES, *POSITION_NAMES, *DOCUMENT_NAMES, *SQUARE_NAMES}
    skipped |= {"token_type_ids", "memory", "encoder_hidden_states", SOUND_NAME}
    slots += [name for name in kwargs if name not in (*named, *skipped)]
    values = {slot: args[slot] if isinstance(slot, int) else kwargs[slot] for slot in slots}
    usable = [slot for slot in slots if kind_of(values[slot], batch_first)]
    if not usable and kind_of(kwargs.get(SOUND_NAME), batch_first) == "features":
        usable, values = [SOUND_NAME], {SOUND_NAME: kwargs[SOUND_NAME]}
    if not usable:
        shapes = {
            str(name): f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
            if isinstance(value, Tensor)
            else type(value).__name__
            for name, value in (*enumerate(args), *kwargs.items())
        }
        raise NotRunnable(
            f"no input is a sequence of tokens: wanted ids (batch, tokens), features (batch, "
            f"tokens, width) or an image (batch, channels, height, width), got {shapes or 'none'}"
        )
    streams = [_stream(model, usable[0], values[usable[0]], kwargs, batch_first, cross)]
    encoder = [s for s in usable[1:] if s in ("input_ids", "src") and s != usable[0]]
    if cross and encoder:
        streams.append(
            _stream(model, encoder[0], values[encoder[0]], kwargs, batch_first, False, "encoder")
        )
    return streams


def _stream(
    model: nn.Module,
    slot: str | int,
    value: Tensor,
    kwargs: dict[str, Any],
    batch_first: bool,
    cross: bool,
    name: str = "",
) -> Stream:
    kind = kind_of(value, batch_first)
    # (batch, bands, frames) where the model's config says so, else tokens like any others.
    if slot == SOUND_NAME and bands_of(model) == value.shape[1]:
        kind = "sound"
    assert kind is not None
    if kind not in ("image", "sound"):
        value = value if batch_first else value.transpose(0, 1)
        value = value[:1, :LONGEST]
    names, _ = parameters(model)
    prefix = {"tgt": "tgt_", "src": "src_"}.get(str(slot), "")
    if str(slot).startswith("decoder_"):
        prefix = "decoder_"

    def first(own: tuple[str, ...], more: tuple[str, ...] = ()) -> str | None:
        wanted = [prefix + name for name in own] + list(more)
        return next((name for name in wanted if name in names), None)

    keep = first(KEEP_NAMES)
    hide = first(("key_padding_mask",), () if prefix else HIDE_NAMES)
    square = first(("mask",), {"": SQUARE_NAMES, "src_": ("mask",)}.get(prefix, ()))
    if square is not None and not isinstance(kwargs.get(square), Tensor):
        square = None
    return Stream(
        name or ("decoder" if cross else ""),
        slot,
        kind,
        value.detach(),
        own_rows=name != "encoder",
        padding=keep or hide,
        hides=keep is None,
        positions=first(POSITION_NAMES),
        square=square,
        documents=next((n for n in DOCUMENT_NAMES if isinstance(kwargs.get(n), Tensor)), None),
        cache=next((n for n in CACHE_NAMES if n in names), None) if name != "encoder" else None,
    )


def holds_mask(kwargs: Mapping[str, Any]) -> Mask | None:
    """A headwise mask among the arguments, which then declares who may see whom."""
    return next((value for value in kwargs.values() if isinstance(value, Mask)), None)
