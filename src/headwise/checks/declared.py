"""What a model ought to be: causal or not, its window, its documents; read from the model, or told.

Nothing here is guessed: where the model does not say it and nobody told it, the answer is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headwise.checks.streams import Stream, holds_mask, two_parts

# What `headwise.models` knows about a kind of model: is the stream that the outputs follow causal?
KINDS = {
    "causal": True,
    "encoder": False,
    "vision": False,
    "encoder-decoder": True,
    "speech": True,
}
_CAUSAL_CLASSES = ("ForCausalLM", "LMHeadModel")


def causal(
    model: nn.Module, kind: str | None, kwargs: Mapping[str, Any]
) -> tuple[bool | None, str]:
    """(causal or not, where that is written). (None, "") where nothing says it."""
    if kind in KINDS:
        return KINDS[kind], f"it was loaded as {kind!r}"
    config = getattr(model, "config", None)
    if two_parts(model):
        return True, "config.is_encoder_decoder"
    for holder, name in ((model, ""), (config, "config.")):
        for word in ("is_causal", "causal"):
            value = getattr(holder, word, None)
            if isinstance(value, bool):
                return value, f"{name}{word}={value}"
    if getattr(config, "is_decoder", None) is True:
        return True, "config.is_decoder"
    if type(model).__name__.endswith(_CAUSAL_CLASSES):
        return True, f"the class {type(model).__name__}"
    if getattr(config, "use_bidirectional_attention", None) is True:
        return False, "config.use_bidirectional_attention"
    words = [getattr(module, "is_causal", None) for module in model.modules()]
    said = {word for word in words if isinstance(word, bool)}
    if len(said) == 1:
        agreed = said.pop()
        return agreed, f"is_causal={agreed} of its attention modules"
    return _torch(model, kwargs)


def _torch(model: nn.Module, kwargs: Mapping[str, Any]) -> tuple[bool | None, str]:
    """torch's own stacks attend to everything but what their arguments hide."""
    names: tuple[str, ...]
    if isinstance(model, nn.TransformerEncoder | nn.TransformerEncoderLayer):
        names = ("is_causal", "mask", "src_mask")
    elif isinstance(model, nn.TransformerDecoder | nn.TransformerDecoderLayer | nn.Transformer):
        names = ("tgt_is_causal", "tgt_mask")
    else:
        return None, ""
    if kwargs.get(names[0]) is True:
        return True, f"{names[0]}=True among its inputs"
    if any(isinstance(kwargs.get(name), Tensor) for name in names[1:]):
        return None, ""  # the mask itself declares more than one word could
    return False, f"torch's {type(model).__name__} hides nothing without a mask"


def windows(model: nn.Module) -> list[int | None] | None:
    """Each layer's window (keys that a query looks back over, its own counted), or None for all.

    None in place of the list where the number of layers is not known and some window is.
    """
    config = getattr(model, "config", None)
    size = None
    for holder in (config, model):
        for name in ("sliding_window", "window", "window_size", "attention_window"):
            value = getattr(holder, name, None)
            if size is None and isinstance(value, int) and not isinstance(value, bool) and value:
                size = value
    if getattr(config, "use_sliding_window", True) is False:
        size = None
    layers = next(
        (
            count
            for holder in (config, model)
            for name in ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
            if isinstance(count := getattr(holder, name, None), int)
        ),
        None,
    )
    kinds = getattr(config, "layer_types", None)
    if size is None:
        return []
    if isinstance(kinds, list | tuple):
        return [size if "sliding" in str(kind) else None for kind in kinds]
    return None if layers is None else [size] * layers


def one_layer(
    length: int, *, is_causal: bool | None, window: int | None, documents: Tensor | None
) -> Tensor:
    """(L, L) bool: what a query of one layer may see. Windows look back where causal."""
    place = torch.arange(length)
    distance = place[:, None] - place[None, :]
    seen = torch.ones(length, length, dtype=torch.bool)
    if is_causal:
        seen &= distance >= 0
    if window is not None:
        seen &= (distance if is_causal else distance.abs()) < window
    if documents is not None:
        seen &= documents[:length, None] == documents[None, :length]
    return seen


def mask_given(stream: Stream, kwargs: Mapping[str, Any], length: int) -> Tensor | None:
    """(L, L) bool from a mask among the inputs, True for visible; None where there is none.

    torch's square masks: True, or −inf in a float mask, hides.
    """
    own = holds_mask(kwargs)
    if own is not None:
        return own.dense(length, length)[0].any(0)
    square = kwargs.get(stream.square or "")
    if not isinstance(square, Tensor):
        return None
    grid = square if square.dtype == torch.bool else square < -1e3
    hidden = grid.reshape(-1, *grid.shape[-2:]).all(0)
    return ~hidden[:length, :length].cpu()


def reach(layers: list[Tensor]) -> Tensor:
    """(L, L) bool: which inputs can move which outputs through all layers and the residual path."""
    length = layers[0].shape[-1]
    total = torch.eye(length, dtype=torch.float64)
    for seen in layers:
        step = (seen | torch.eye(length, dtype=torch.bool)).double()
        total = ((step @ total) > 0).double()
    return total > 0
