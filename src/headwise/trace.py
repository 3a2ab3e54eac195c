"""Trace: every intermediate of the eight steps, by name, with its axes; printed, a table.

Here too: the weights of one call, for whoever asks a layer for them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwise.call import AttentionCall
from headwise.intervals import Mask
from headwise.options import Context, ProjectedContext
from headwise.reference import attention_steps, scores

if TYPE_CHECKING:
    from headwise.layer import MultiHeadAttention

#: The eight steps of multi-head attention (Vaswani et al. 2017, arXiv 1706.03762, section 3.2).
STEPS = {
    0: "input",
    1: "project to query, key, value",
    2: "split into heads",
    3: "dot-product scores",
    4: "scale",
    5: "mask",
    6: "softmax",
    7: "weigh the values",
    8: "join the heads and project out",
}

BATCH, HEAD, QUERY, KEY, DIM, WIDTH = (
    "batch",
    "head",
    "query sequence",
    "key sequence",
    "head dim",
    "features",
)
COLUMNS = (BATCH, HEAD, QUERY, KEY, DIM, WIDTH)

#: name → (step, axes, what it is). The order is that of the computation.
_TABLE: dict[str, tuple[int, tuple[str, ...], str]] = {
    "x": (0, (BATCH, QUERY, WIDTH), "tokens that ask"),
    "key_context": (0, (BATCH, KEY, WIDTH), "what keys are made of"),
    "value_context": (0, (BATCH, KEY, WIDTH), "what values are made of"),
    "query_projected": (1, (BATCH, QUERY, WIDTH), "q_proj(x)"),
    "key_projected": (1, (BATCH, KEY, WIDTH), "k_proj(key_context)"),
    "value_projected": (1, (BATCH, KEY, WIDTH), "v_proj(value_context)"),
    "query": (2, (BATCH, HEAD, QUERY, DIM), "head h: features from h*D on"),
    "key": (2, (BATCH, HEAD, KEY, DIM), ""),
    "value": (2, (BATCH, HEAD, KEY, DIM), ""),
    "query_normed": (2, (BATCH, HEAD, QUERY, DIM), "RMS norm over the head dim"),
    "key_normed": (2, (BATCH, HEAD, KEY, DIM), ""),
    "query_turned": (2, (BATCH, HEAD, QUERY, DIM), "rotary, at each token's position"),
    "key_turned": (2, (BATCH, HEAD, KEY, DIM), ""),
    "scores": (3, (BATCH, HEAD, QUERY, KEY), "query . key"),
    "scaled": (4, (BATCH, HEAD, QUERY, KEY), "times the scale, 1/sqrt(head dim) by default"),
    "capped": (4, (BATCH, HEAD, QUERY, KEY), "softcap * tanh(score / softcap)"),
    "biased": (4, (BATCH, HEAD, QUERY, KEY), "plus the position bias"),
    "masked": (5, (BATCH, HEAD, QUERY, KEY), "-inf where hidden"),
    "lse": (6, (BATCH, HEAD, QUERY), "ln of the denominator"),
    "weights": (6, (BATCH, HEAD, QUERY, KEY), "each row sums to 1"),
    "head_outputs": (7, (BATCH, HEAD, QUERY, DIM), "weights @ value"),
    "concatenated": (8, (BATCH, QUERY, WIDTH), "heads side by side"),
    "gate": (8, (BATCH, QUERY, WIDTH), "sigmoid(gate_proj(x))"),
    "gated": (8, (BATCH, QUERY, WIDTH), "concatenated * gate"),
    "output": (8, (BATCH, QUERY, WIDTH), "out_proj(...)"),
}


@dataclass(frozen=True)
class Entry:
    """One intermediate: its step (0 is the input), name, the names of its axes, and a remark."""

    step: int
    name: str
    axes: tuple[str, ...]
    remark: str
    tensor: Tensor


class Trace(Mapping[str, Tensor]):
    """The intermediates of one attention layer on one input: trace["weights"], in order of the
    steps.

    All tensors are float64 and detached. `print(trace)` shows a table of their axes.
    """

    def __init__(self, layer: str, steps: Mapping[str, Tensor], remarks: Mapping[str, str]) -> None:
        unknown = set(steps) - set(_TABLE)
        if unknown:
            raise ValueError(f"Trace: no such step: {', '.join(sorted(unknown))}")
        self.layer = layer
        self._entries = {
            name: Entry(step, name, axes, remarks.get(name, remark), steps[name])
            for name, (step, axes, remark) in _TABLE.items()
            if name in steps
        }
        for entry in self._entries.values():
            if entry.tensor.dim() != len(entry.axes):
                raise ValueError(
                    f"Trace: {entry.name} has shape {tuple(entry.tensor.shape)}, "
                    f"wanted axes ({', '.join(entry.axes)})"
                )

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._entries:
            raise KeyError(f"{name}; this trace has {', '.join(self._entries)}")
        return self._entries[name].tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def entries(self) -> list[Entry]:
        """Each intermediate with its step, axes and remark, in order."""
        return list(self._entries.values())

    def axes(self, name: str) -> dict[str, int]:
        """Axis name → size: trace.axes("query") == {"batch": 1, "head": 2, …}."""
        self[name]
        entry = self._entries[name]
        return dict(zip(entry.axes, entry.tensor.shape, strict=True))

    def __str__(self) -> str:
        rows = [["", "", "", "", "sequence", "sequence", "", "", ""]]
        rows.append(["", "tensor", *(axis.removesuffix(" sequence") for axis in COLUMNS), "what"])
        step = -1
        for entry in self.entries:
            if entry.step != step:
                step = entry.step
                rows.append([f"{step} {STEPS[step]}"])
            sizes = self.axes(entry.name)
            cells = (str(sizes.get(axis, "")) for axis in COLUMNS)
            rows.append(["", entry.name, *cells, entry.remark])
        full = [row for row in rows if len(row) > 1]
        widths = [max(len(row[i]) for row in full) for i in range(1, len(full[0]))]
        lines = [self.layer]
        for row in rows:
            if len(row) == 1:  # the name of a step, over all columns
                lines.append(row[0])
                continue
            name = row[1].ljust(widths[0])
            sizes_ = (cell.rjust(width) for cell, width in zip(row[2:-1], widths[1:], strict=False))
            lines.append("  ".join(("  " + name, *sizes_, row[-1])).rstrip())
        return "\n".join(lines)

    __repr__ = __str__


@torch.no_grad()
def trace_layer(
    layer: MultiHeadAttention,
    x: Tensor,
    context: Context | None,
    mask: Mask | None,
    positions: Tensor | None,
) -> Trace:
    """What `MultiHeadAttention.trace` returns: a float64 copy of the layer, by the definition."""
    twin = copy.deepcopy(layer).double().eval()
    steps: dict[str, Tensor] = {}

    def note(name: str, tensor: Tensor) -> None:
        steps[name] = tensor.detach()

    call = AttentionCall(**twin.parts(x.double(), _double(context), mask, None, positions, note))
    done = attention_steps(call)
    if call.softcap is None:
        del done["capped"]
    if call.bias is None:
        del done["biased"]
    done["head_outputs"] = done.pop("output")
    steps |= done
    note("output", twin.join(x.double(), done["head_outputs"], note))
    remarks = {"scaled": f"times {call.scale_value:.6g}"}
    if context is None:
        remarks |= {"x": "the tokens"} | dict.fromkeys(("key_context", "value_context"), "x")
    if call.sinks is not None:
        remarks["weights"] = "each row sums to 1 less the share of the sink logit"
    return Trace(f"MultiHeadAttention({layer.extra_repr()})", steps, remarks)


def _double(context: Context | None) -> Context | None:
    if context is None or isinstance(context, Tensor):
        return None if context is None else context.double()
    if isinstance(context, ProjectedContext):
        return ProjectedContext(context.key.double(), context.value.double())
    return context[0].double(), context[1].double()


def attention_weights(call: AttentionCall) -> Tensor:
    """Attention weights before dropout, (B, Hq, L, S), in a form that has gradients everywhere."""
    final = scores(call)
    if not call.key_length:
        return final
    top = final.amax(-1, keepdim=True).detach()
    empty = top == -torch.inf
    extra = torch.zeros((), dtype=final.dtype, device=final.device)
    if call.sinks is not None:
        sinks = call.sinks.to(final.dtype)[:, None, None]
        top = torch.maximum(top, sinks.detach())
        extra = torch.exp(sinks - top)
    exponents = torch.exp(final - torch.where(empty, 0.0, top))
    total = exponents.sum(-1, keepdim=True) + extra
    # An empty row divides zeros by one: 0/0 would put NaN into the gradient.
    return exponents / torch.where(empty, 1.0, total)
