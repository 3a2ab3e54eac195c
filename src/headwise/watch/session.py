"""One open watch: which of its model's modules run on this thread, and what they computed."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.call import AttentionCall
from headwise.intervals import unexpand
from headwise.watch.masks import Reader
from headwise.watch.naming import Names, kind_of
from headwise.watch.seen import Seen, SeenCall


class _Local(threading.local):
    """A thread's own: its open watches, and whether recording is off for now."""

    def __init__(self) -> None:
        self.watches: list[Watch] = []
        self.muted = 0
        # Masks read during the model call that goes on.
        self.reader = Reader()
        # Set while a function is run only to see what it passes to SDPA.
        self.catcher: Callable[..., Any] | None = None


local = _Local()


class Frame(NamedTuple):
    """A module of the watched model that is running, and what it was called with."""

    module: nn.Module
    args: tuple
    kwargs: dict


class Unreadable(Exception):
    """A call that was seen but whose meaning cannot be stated; the message is the reason."""


class Watch:
    """Records the attention calls of one model that happen on the thread that made this."""

    def __init__(
        self,
        model: nn.Module,
        seen: Seen,
        names: Names,
        on_call: Callable[[SeenCall], None] | None,
        keep: bool,
        outputs: bool,
    ) -> None:
        self.model = model
        self.seen = seen
        self.names = names
        self.on_call = on_call
        self.keep = keep
        self.outputs = outputs
        self.stack: list[Frame] = []
        self.ran: set[str] = set()
        self.caught: set[str] = set()
        self.unread: dict[tuple[str, str], int] = {}
        self._counts: dict[tuple[str, str], int] = {}
        self._last: tuple[str, str] | None = None
        self._repeat = 0

    def enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if not self.stack:
            self._last, self._repeat = None, 0
            local.reader.forget()
        self.stack.append(Frame(module, args, kwargs))
        self.ran.add(self.names.path[id(module)])

    def frame_of(self, module: nn.Module | None) -> Frame | None:
        """The running frame of `module`, or the innermost one; None outside the model."""
        if not self.stack:
            return None
        if module is None:
            return self.stack[-1]
        if id(module) not in self.names.path:
            return None
        for frame in reversed(self.stack):
            if frame.module is module:
                return frame
        # A fused kernel runs the module's job without calling it.
        return Frame(module, (), {})

    def record(self, call: AttentionCall, frame: Frame, route: str, output: Tensor | None) -> None:
        path = self.names.path[id(frame.module)]
        default = "self" if route == "nn.TransformerEncoderLayer fused" else None
        kind = kind_of(
            frame.module,
            path,
            frame.args,
            frame.kwargs,
            call.query_length,
            call.key_length,
            default=default,
        )
        key = (path, kind)
        # One module that runs several times in a row is layers that share weights (ALBERT).
        self._repeat = self._repeat + 1 if key == self._last else 0
        self._last = key
        index = self._counts.get(key, 0)
        self._counts[key] = index + 1
        with torch.no_grad():
            copies = copied(call, clone=self.keep)
            if output is not None:
                output = output.detach()
                if self.keep and self.outputs:
                    output = output.clone()
        seen_call = SeenCall(
            call=copies,
            module=path,
            layer=self.names.layer(path) + self._repeat,
            kind=kind,
            stack=self.names.stack(path),
            index=index,
            route=route,
            output=output if self.outputs or self.on_call is not None else None,
        )
        self.caught.add(path)
        if self.on_call is not None:
            self.on_call(seen_call)
        if self.keep and not self.outputs and seen_call.output is not None:
            seen_call = SeenCall(
                seen_call.call,
                path,
                seen_call.layer,
                kind,
                seen_call.stack,
                index,
                route,
            )
        self.seen.add(seen_call, self.keep)

    def unreadable(self, frame: Frame, reason: str) -> None:
        key = (self.names.path[id(frame.module)], reason)
        self.unread[key] = self.unread.get(key, 0) + 1


def copied(call: AttentionCall, clone: bool) -> AttentionCall:
    """The call outside autograd; with `clone` on its own memory.

    A model may write into a cache that the tensors lie in, so what is kept is copied. The compiled
    mask replaces the mask: it holds runs or bits of its own, never the caller's grid.
    """

    def own(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        x = unexpand(x.detach()) if x.dim() == 4 else x.detach()
        return x.clone() if clone else x

    query, key, value = (x.detach() for x in (call.query, call.key, call.value))
    if clone:
        query, key, value = query.clone(), key.clone(), value.clone()
    return replace(
        call,
        query=query,
        key=key,
        value=value,
        mask=None if call.mask is None else call.visible,
        bias=own(call.bias),
        sinks=own(call.sinks),
    )


def recording() -> bool:
    """Whether a call made now on this thread may belong to an open watch."""
    if torch.compiler.is_compiling() or not local.watches or local.muted:
        return False
    # Checkpointing runs layers a second time while the backward pass goes on: no new calls.
    return torch._C._current_graph_task_id() == -1


@contextmanager
def muted() -> Iterator[None]:
    """Calls made inside belong to a call that is recorded as a whole, or to the watcher itself."""
    local.muted += 1
    try:
        yield
    finally:
        local.muted -= 1


def watchers(module: nn.Module | None) -> list[tuple[Watch, Frame]]:
    """The open watches of this thread that `module`, or the innermost one running, belongs to."""
    found = []
    for watch in local.watches:
        frame = watch.frame_of(module)
        if frame is not None:
            found.append((watch, frame))
    return found


def record(
    found: list[tuple[Watch, Frame]],
    route: str,
    build: Callable[[Frame], tuple[AttentionCall, Tensor | None]],
) -> None:
    """Read the call once and hand it to every watch that it belongs to.

    `build` gives the call and the original's output (B, Hq, L, Dv), if that is known.
    """
    if not found:
        return
    with muted():
        try:
            with torch.no_grad():
                call, output = build(found[0][1])
        except (Unreadable, TypeError, ValueError) as error:
            for watch, frame in found:
                watch.unreadable(frame, str(error))
            return
        for watch, frame in found:
            watch.record(call, frame, route, output)


def wrap_module_call(original: Callable) -> Callable:
    """`nn.Module.__call__` that keeps each watch's stack of running modules.

    Hooks on the modules would do the same, but `nn.TransformerEncoderLayer` leaves its fast path
    when a submodule has a hook, which changes its bits.
    """

    @functools.wraps(original)
    def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not local.watches:
            return original(module, *args, **kwargs)
        entered = [watch for watch in local.watches if id(module) in watch.names.path]
        if not entered:
            return original(module, *args, **kwargs)
        for watch in entered:
            watch.enter(module, args, kwargs)
        try:
            return original(module, *args, **kwargs)
        finally:
            for watch in entered:
                watch.stack.pop()

    return __call__


def same_dtype(query: Tensor, *others: Tensor | None) -> list[Tensor | None]:
    """Tensors as the operation saw them: autocast's dtype where it is on, else one common dtype.

    A bias that is finer than the query (float32 on bfloat16) lifts all to its dtype: nothing is
    rounded that the model did not round.
    """
    tensors = [query, *others]
    kind = query.device.type
    if torch.is_autocast_enabled(kind) and query.dtype != torch.float64:
        wanted = torch.get_autocast_dtype(kind)
        return [None if x is None else x.to(wanted) for x in tensors]
    wanted = query.dtype
    for x in others:
        if x is not None:
            wanted = torch.promote_types(wanted, x.dtype)
    return [None if x is None else x.to(wanted) for x in tensors]


def check_plain(*tensors: Tensor) -> None:
    """Raise Unreadable for tensors that hold no numbers of their own."""
    for x in tensors:
        if x.device.type == "meta" or torch._C._functorch.is_functorch_wrapped_tensor(x):
            raise Unreadable("its tensors hold no values here (meta device or torch.func)")
