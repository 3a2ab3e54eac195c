"""What a watch saw: SeenCall, one attention call with its name; Seen, all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headwise.call import AttentionCall
from headwise.reference import attention_steps
from headwise.watch.masks import describe, real_keys

if TYPE_CHECKING:
    from headwise.statistics import HeadStatistics

# Above this many weights a map is refused unless forced: 2²⁶ float32 numbers are 256 MiB, and the
# reference holds about eight tensors of that size while it works.
LARGEST_MAP = 2**26

# Set by whoever can draw a Seen (the report), which this module may not import.
html_view: Callable[[Seen], str] | None = None


@dataclass(frozen=True, eq=False)
class SeenCall:
    """One attention call of the watched model.

    call: the computation, detached, its mask recovered. module: dotted path of the module that
    made it, "" for the model itself. layer: counted from 0. kind: "self" or "cross". stack:
    "encoder" or "decoder" in a model that has both (or another name that tells stacks apart), else
    "". index: how many calls this module and kind had before, so in generation the step. route:
    how it was caught. output: what the original returned, (B, Hq, L, Dv), where `outputs=True`
    was asked for or in `on_call`; None where a fused kernel returns only its projection.
    """

    call: AttentionCall
    module: str
    layer: int
    kind: str
    stack: str
    index: int
    route: str
    output: Tensor | None = None

    @property
    def id(self) -> str:
        """Short name of the attention module: "self/9", "encoder.self/0", "decoder.cross/2"."""
        return (
            f"{self.stack}.{self.kind}/{self.layer}" if self.stack else f"{self.kind}/{self.layer}"
        )

    @property
    def dropout(self) -> float:
        """Probability with which the model dropped weights; the recorded weights are before it."""
        return self.call.dropout

    @cached_property
    def mask_words(self) -> str:
        """The mask for people: "causal", "full", "padding", "causal + window 128" …"""
        return describe(self.call.visible).words()

    @cached_property
    def real_keys(self) -> Tensor:
        """(B, S) bool: keys that some query may see; padding is False."""
        return real_keys(self.call.visible)

    @property
    def real_queries(self) -> Tensor | None:
        """(B, L) bool: queries that are no padding. None in cross-attention: the mask can't say."""
        length, keys = self.call.query_length, self.call.key_length
        if self.kind != "self" or length > keys:
            return None
        return self.real_keys[:, keys - length :]

    def weights(self, *, force: bool = False) -> Tensor:
        """The attention map (B, Hq, L, S), before dropout, from the reference.

        float32, float64 for float64 calls. Maps are clues, never explanations.

        Raises:
            ValueError: the map is larger than 2²⁶ numbers and `force` is False.
        """
        call = self.call
        shape = (call.batch, call.num_heads, call.query_length, call.key_length)
        count = shape[0] * shape[1] * shape[2] * shape[3]
        if count > LARGEST_MAP and not force:
            raise ValueError(
                f"weights: the map of {self.module or 'the model'} is {shape}, {count:,} numbers, "
                f"above the limit of {LARGEST_MAP:,}; statistics() measures it in linear memory, "
                "or pass force=True"
            )
        with torch.no_grad():
            return attention_steps(call)["weights"]

    def statistics(self, **options: Any) -> HeadStatistics:
        """`headwise.statistics.head_statistics` of this call; padding rows do not count.

        `options` go to it as they are.
        """
        from headwise.statistics import head_statistics

        options.setdefault("query_rows", self.real_queries)
        return head_statistics(self.call, **options)

    def __repr__(self) -> str:
        call = self.call
        shape = f"{call.num_heads}×{call.query_length}×{call.key_length}"
        return f"SeenCall({self.id} #{self.index}, {self.module!r}, {shape}, {self.mask_words})"


class Seen:
    """Every attention call that a watch caught, in order, and what it could not catch.

    Iterable, with `len` and indices. `not_caught` (filled when the `with` block ends) says in one
    line each which attention-looking modules gave no call, and why. `count` counts calls also when
    they are not kept.
    """

    def __init__(self, model_name: str, kept: bool) -> None:
        self.model_name = model_name
        self.kept = kept
        self.calls: list[SeenCall] = []
        self.not_caught: list[str] = []
        self.count = 0
        # One line a module: calls, last shape, mask; kept also when the calls are not.
        self._table: dict[tuple[str, str], list[Any]] = {}

    def add(self, call: SeenCall, keep: bool) -> None:
        self.count += 1
        if keep:
            self.calls.append(call)
        row = self._table.setdefault((call.module, call.id), [call, 0, ""])
        if row[1] == 0:
            c = call.call
            heads = f"{c.num_heads}" if c.groups == 1 else f"{c.num_heads}/{c.num_kv_heads}"
            row[2] = (heads, f"{c.query_length}×{c.key_length}", call.mask_words, call.route)
            row[0] = (call.stack, call.kind, call.layer)
        row[1] += 1

    def __len__(self) -> int:
        return len(self.calls)

    def __iter__(self) -> Iterator[SeenCall]:
        return iter(self.calls)

    def __getitem__(self, index: int) -> SeenCall:
        return self.calls[index]

    def weights(self, index: int, *, force: bool = False) -> Tensor:
        """The attention map of the index-th kept call; see `SeenCall.weights`."""
        return self._kept(index).weights(force=force)

    def statistics(self, **options: Any) -> Iterator[HeadStatistics]:
        """Statistics of every kept call, one at a time as they are asked for."""
        if not self.kept:
            self._kept(0)
        return (call.statistics(**options) for call in self.calls)

    def summary(self) -> str:
        """A plain text table: what was caught and what could not be."""
        head = ("attention", "module", "heads", "L×S", "mask", "calls", "caught through")
        rows = [head]
        for (module, name), (_, calls, (heads, shape, mask, route)) in self._table.items():
            rows.append((name, module or "(the model)", heads, shape, mask, str(calls), route))
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = [f"{self.model_name}: {self.count} attention calls caught"]
        if self._table:
            lines += [
                "  "
                + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
                for row in rows
            ]
        if self.not_caught:
            lines.append("not caught:")
            lines += [f"  {line}" for line in self.not_caught]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return self.summary()

    def _repr_html_(self) -> str | None:
        """What a notebook shows: the overview where the report is installed, else the table."""
        return html_view(self) if html_view is not None and self.calls else None

    def _kept(self, index: int) -> SeenCall:
        if not self.kept:
            raise ValueError(
                f"watch: {self.count} calls were seen but none kept (keep=False); "
                "use on_call=, or watch with keep=True"
            )
        return self.calls[index]
