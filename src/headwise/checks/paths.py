"""The ways in which a model can compute its attention, each switched on for a while."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

OWN = "own"
TORCH = ("fast path", "plain")
_TORCH_STACKS = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


def paths_of(model: nn.Module) -> list[str]:
    """The names of the model's paths: what the model uses now comes first.

    Hugging Face models have "eager", "sdpa" and "headwise"; a model of your own that has
    `set_attn_implementation(name)` lists its names in `attn_implementations`; torch's encoder has
    its fused fast path and the plain one; every other model has its "own".
    """
    own = getattr(model, "attn_implementations", None)
    if callable(getattr(model, "set_attn_implementation", None)):
        if isinstance(own, list | tuple) and own:
            return [str(name) for name in own]
        if hasattr(model, "config"):
            return _huggingface(model)
    if any(isinstance(module, _TORCH_STACKS) for module in model.modules()):
        return list(TORCH)
    return [OWN]


def _huggingface(model: Any) -> list[str]:
    import headwise.hf  # registers "headwise" with transformers

    now = current(model)
    names = [now] if now else []
    names += ["eager"]
    if getattr(model, "_supports_sdpa", False):
        names.append("sdpa")
    # Not `_supports_attention_backend`: Whisper and others deny it and call the interface all the
    # same. What counts is that the model's own file looks implementations up.
    home = sys.modules.get(type(model).__module__)
    if hasattr(home, "ALL_ATTENTION_FUNCTIONS"):
        names.append(headwise.hf.NAME)
    return list(dict.fromkeys(names))


def current(model: Any) -> str | None:
    """The implementation that the model uses now, where it says so."""
    name = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if name is None:
        name = getattr(model, "attn_implementation", None)
    return name if isinstance(name, str) else None


@contextmanager
def on_path(model: Any, path: str | None) -> Iterator[None]:
    """Run on `path` inside the block, and as before after it."""
    if path in (None, OWN):
        yield
        return
    if path in TORCH:
        before = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(path == TORCH[0])
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(before)
        return
    name = current(model)
    if name == path:
        yield
        return
    model.set_attn_implementation(path)
    try:
        yield
    finally:
        if name is not None:
            model.set_attn_implementation(name)
