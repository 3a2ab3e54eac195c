"""watch(): every attention call of any model, recorded while the model runs unchanged."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from headwise.attention import observers
from headwise.errors import NothingToWatch
from headwise.watch import hf_routes, torch_routes
from headwise.watch.missing import attention_paths, not_caught
from headwise.watch.naming import Names
from headwise.watch.patches import Target, acquire, release
from headwise.watch.seen import Seen, SeenCall
from headwise.watch.session import Watch, local, wrap_module_call

__all__ = ["Seen", "SeenCall", "watch"]

LOOKED_FOR = (
    "headwise.attention, F.scaled_dot_product_attention, nn.MultiheadAttention and "
    "nn.TransformerEncoderLayer, Hugging Face attention functions"
)

_open = 0
_lock = threading.Lock()


@contextmanager
def watch(
    model: nn.Module,
    *,
    on_call: Callable[[SeenCall], None] | None = None,
    keep: bool = True,
    outputs: bool = False,
    allow_nothing: bool = False,
) -> Iterator[Seen]:
    """Catch each attention call that `model` makes on this thread inside the `with` block.

    `with headwise.watch(model) as seen: model(**inputs)`. The model computes exactly what it would
    compute unwatched, bit for bit: the original functions run on the original inputs, and calls
    are read off beside them. Caught are headwise.attention, F.scaled_dot_product_attention,
    nn.MultiheadAttention, nn.TransformerEncoder/Decoder (fused kernels too) and Hugging Face
    attention functions of any implementation.

    A row whose every key is hidden (padding) is recorded as seeing nothing; some models spread it
    evenly over the hidden keys. Under autocast the tensors are recorded in autocast's dtype.

    Args:
        model: any module. Watches may be nested, and open in several threads at once.
        on_call: called with each SeenCall as it happens. With keep=False its tensors are the
            model's own memory: read them in the callback, or clone them.
        keep: keep a copy of every call in the returned Seen.
        outputs: keep what each call returned as well.
        allow_nothing: do not raise when no call was caught.

    Raises:
        TypeError: model is no nn.Module.
        NothingToWatch: at the end, if no call was caught and the block raised nothing itself.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"watch: wanted a torch.nn.Module, got {type(model).__name__}")
    candidates = attention_paths(model)
    seen = Seen(type(model).__name__, keep)
    own = Watch(model, seen, Names(model, candidates), on_call, keep, outputs)
    targets = [Target(nn.Module, "__call__", wrap_module_call)]
    targets += torch_routes.targets(model) + hf_routes.targets(model)
    _observe(True)
    acquire(targets)
    local.watches.append(own)
    try:
        yield seen
    finally:
        local.watches.remove(own)
        local.reader.forget()
        release(targets)
        _observe(False)
        seen.not_caught = not_caught(own, candidates)
    if not seen.count and not allow_nothing:
        raise NothingToWatch(_nothing(own))


def _observe(on: bool) -> None:
    """Listen to `headwise.attention` while any watch is open."""
    global _open
    with _lock:
        _open += 1 if on else -1
        if on and _open == 1:
            observers.append(torch_routes.observe)
        elif not on and _open == 0:
            observers.remove(torch_routes.observe)


def _nothing(own: Watch) -> str:
    name = own.seen.model_name
    if not own.ran:
        return (
            f"watch: no attention call was caught: {name} did not run inside the `with` block on "
            "this thread"
        )
    text = f"watch: no attention call was caught in {name}. Looked for: {LOOKED_FOR}."
    if own.seen.not_caught:
        text += " " + "; ".join(own.seen.not_caught[:3])
    return text
