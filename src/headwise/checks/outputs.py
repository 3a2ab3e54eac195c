"""What goes in and comes out of a model: embeddings changed on the way, outputs in one form."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headwise.checks.finding import NotRunnable


def rows_of(output: Any, batch: int, batch_first: bool) -> Tensor:
    """The tensor to compare, (B, L, F), out of whatever a model returned; (B, 1, F) if it pools.

    Raises:
        NotRunnable: there is none of this batch.
    """
    found = _tensor(output)
    if found is None:
        raise NotRunnable(
            f"the model returned a {type(output).__name__} with no floating tensor in it; "
            "wanted a tensor, or an output with logits or last_hidden_state"
        )
    if found.ndim == 3 and not batch_first:
        found = found.transpose(0, 1)
    if found.ndim == 2 and found.shape[0] == batch:
        found = found[:, None]
    if found.ndim < 3 or found.shape[0] != batch:
        raise NotRunnable(
            f"the output has shape {list(found.shape)} for a batch of {batch}; wanted rows of "
            f"positions, ({batch}, tokens, width)"
        )
    return found.flatten(2)


def _tensor(output: Any) -> Tensor | None:
    """The floating tensor that an output is about."""
    if isinstance(output, Tensor):
        return output if output.is_floating_point() else None
    for name in ("logits", "last_hidden_state", "prediction_logits"):
        found = getattr(output, name, None)
        if found is None and isinstance(output, Mapping):
            found = output.get(name)
        if isinstance(found, Tensor):
            return found
    items = list(output.values()) if isinstance(output, Mapping) else output
    if isinstance(items, list | tuple):
        for item in items:
            if isinstance(item, Tensor) and item.is_floating_point():
                return item
    return None


def lift(value: Any, dtype: torch.dtype) -> Any:
    """An argument in another dtype."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(dtype)
    if hasattr(value, "last_hidden_state"):
        return type(value)(last_hidden_state=value.last_hidden_state.to(dtype))
    return value


def _reads(args: Any, tokens: Tensor) -> bool:
    given = args[0] if args else None
    return isinstance(given, Tensor) and given.shape == tokens.shape and torch.equal(given, tokens)


@contextlib.contextmanager
def embedding(
    model: nn.Module, tokens: Tensor, change: Callable[[Tensor], Tensor]
) -> Iterator[None]:
    """Change what the embedding gives for exactly these ids, while the block runs.

    Raises:
        NotRunnable: at the end, if no nn.Embedding read these ids.
    """
    used: list[int] = []

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        if not used and _reads(args, tokens):
            used.append(1)
            return change(output)
        return None

    handles = [m.register_forward_hook(hook) for m in model.modules() if _is_table(m)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    if not used:
        raise NotRunnable(
            "no nn.Embedding of the model reads the token ids, so noise can't be added"
        )


@contextlib.contextmanager
def tables(model: nn.Module, tokens: Tensor) -> Iterator[list[int]]:
    """The sizes of the embeddings that read exactly these ids while the block runs."""
    sizes: list[int] = []

    def hook(module: Any, args: Any) -> None:
        if _reads(args, tokens):
            sizes.append(int(module.num_embeddings))

    handles = [m.register_forward_pre_hook(hook) for m in model.modules() if _is_table(m)]
    try:
        yield sizes
    finally:
        for handle in handles:
            handle.remove()


def _is_table(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding)
