"""The white box: which layer and head first gives weight to a key that it must not see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from headwise.checks.subject import Subject
from headwise.reference import attention_steps
from headwise.watch import SeenCall, watch


def watched(subject: Subject, run: Callable[[], Any]) -> list[SeenCall]:
    """The attention calls of the stack that the outputs follow, self-attention only, in order.

    Empty where none can be caught (attention written by hand, compiled models).
    """
    with torch.no_grad(), watch(subject.model, allow_nothing=True) as seen:
        run()
    own = [call for call in seen if call.kind == "self"]
    stacks = {call.stack for call in own}
    return [call for call in own if call.stack == "decoder" or "decoder" not in stacks]


def first_hidden_weight(
    calls: list[SeenCall], masks: list[Tensor], *, rows: Tensor | None = None
) -> dict[str, Any] | None:
    """Where weight first falls on a hidden key: the largest such weight of the first layer.

    Args:
        calls: from `watched`.
        masks: what each layer may see: (L, S) or (B, L, S) bool; one mask stands for all layers.
        rows: (B, L) bool, the queries that count; padding rows do not.
    """
    for place, seen in enumerate(calls):
        allowed = masks[min(place, len(masks) - 1)]
        weights = weights_of(seen)
        if allowed.shape[-2:] != weights.shape[-2:]:
            continue
        allowed = allowed.expand(weights.shape[0], *allowed.shape[-2:]).to(weights.device)
        hidden = weights.masked_fill(allowed[:, None], 0.0)
        if rows is not None:
            hidden = hidden * rows[:, None, :, None].to(hidden)
        if float(hidden.max()) > 0:
            return _place(seen, hidden)
    return None


def weights_of(seen: SeenCall) -> Tensor:
    """(B, H, L, S) from the float64 definition; 0 in rows that see nothing."""
    return attention_steps(seen.call)["weights"].nan_to_num(nan=0.0)


class _Softmaxes(TorchFunctionMode):
    """Writes down over which axis each square of scores is normalised, by softmax's own calls."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length
        self.axes: list[int] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == "softmax":
            scores = args[0] if args else kwargs.get("input")
            axis = kwargs.get("dim", args[1] if len(args) > 1 else None)
            square = isinstance(scores, Tensor) and scores.shape[-2:] == (self.length,) * 2
            if square and scores is not None and isinstance(axis, int):
                self.axes.append(axis - scores.ndim if axis >= 0 else axis)
        return func(*args, **kwargs)


def softmax_over_queries(subject: Subject, tokens: Tensor) -> bool:
    """Whether some softmax over L × L scores runs over the axis before the last."""
    with _Softmaxes(tokens.shape[1]) as seen:
        subject.run(tokens)
    return -2 in seen.axes


def _place(seen: SeenCall, hidden: Tensor) -> dict[str, Any]:
    flat = int(hidden.argmax())
    _, heads, queries, keys = hidden.shape
    return {
        "module": seen.module,
        "layer": seen.layer,
        "head": flat // (queries * keys) % heads,
        "query": flat // keys % queries,
        "key": flat % keys,
        "weight": round(float(hidden.reshape(-1)[flat]), 6),
    }


def words(where: dict[str, Any] | None) -> str:
    """The place, for the end of a sentence."""
    if where is None:
        return ""
    return (
        f"; first in layer {where['layer']} ({where['module'] or 'the model'}): head "
        f"{where['head']} gives key {where['key']} weight {where['weight']:.3g} for query "
        f"{where['query']}"
    )
