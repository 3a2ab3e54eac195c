"""One run of a model under watch, as Records: what `headwise report` draws and prints.

Statistics are taken while the model runs, call by call, so nothing but the records is kept and
memory stays linear in the context length.
"""

from __future__ import annotations

import math
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from typing import Any

import torch
from torch import Tensor

from headwise import statistics, surgery
from headwise.call import AttentionCall
from headwise.errors import BadInput
from headwise.links import Asked, StrongestLinks, places_of
from headwise.masks import causal
from headwise.models import Inputs, Loaded
from headwise.record import Record
from headwise.watch import Seen, SeenCall, watch

# Cells of all pooled maps of a report together: 270 heads get 172 × 172, 72 heads get 256 × 256.
ALL_CELLS = 8_000_000
LARGEST_MAP = 256
# A little more where it spares pooling: a picture of 16 × 16 patches and one special token is 257.
LARGEST_UNPOOLED = 320
# Stacks whose self-attention the model declares causal, by kind of model: weight on a later key
# is hidden mass, and must be exactly 0.
CAUSAL_STACKS = {
    "causal": frozenset({""}),
    "encoder-decoder": frozenset({"decoder"}),
    "speech": frozenset({"decoder"}),
}
Progress = Callable[[int, "int | None", str], None]


def examine(
    loaded: Loaded,
    inputs: Inputs,
    *,
    links: Sequence[tuple[str, str]] = (),
    importance: bool = False,
    rollout: Sequence[str] = (),
    progress: Progress | None = None,
    command: str = "",
) -> list[Record]:
    """Run `loaded` on `inputs` once and describe every attention head, exactly.

    Args:
        loaded, inputs: from `headwise.models.load(…)` and its `prepare(…)`.
        links: (query, key) pairs of token texts; the heads that link them most are recorded.
        importance: also how much the next-token loss on this input leans on each head (Michel et
            al. 2019), by one more pass, forward and backward; causal language models only.
        rollout: token texts; of each, how much of its last vector rolls back to each input token
            through all layers (Abnar & Zuidema 2020); encoders only. All their calls are kept.
        progress: called with (calls done, calls expected or None, what was done last).
        command: how this was asked for, kept in the `run` record.

    Returns:
        Records of the kinds run, axis, attention, head, map, top, received, similarity,
        layer_summary and link; and rollout where it was asked for.

    Raises:
        BadInput: a link or a rollout names a token that the input does not hold; importance of a
            model that is no causal language model, or whose heads surgery does not know; a rollout
            in a model without an encoder.
        NothingToWatch: no attention call could be caught.
    """
    started = time.perf_counter()
    taker = _Taker(inputs, _expected_calls(loaded.model), _map_cells(loaded.model), progress)
    taker.causal_stacks = CAUSAL_STACKS.get(loaded.kind, frozenset())
    taker.asked = [Asked.find(inputs.axes, query, key) for query, key in links]
    rolls = [_Rollout.find(loaded, inputs, text) for text in rollout]
    taker.rolled = {roll.stack: [] for roll in rolls}
    if importance:
        taker.importance = _importance(loaded, inputs)
    with watch(loaded.model, on_call=taker.take, keep=False) as seen:
        loaded.run(inputs)
    run = _run_record(loaded, inputs, seen, time.perf_counter() - started, command)
    axes = [Record("axis", {"axis": name}, values) for name, values in inputs.axes.items()]
    shares = [roll.record(taker.rolled[roll.stack]) for roll in rolls]
    return [run, *axes, *taker.records, *taker.link_records(), *shares]


def records_of(seen: Seen, *, tokens: Sequence[str] | None = None) -> list[Record]:
    """The records of calls that a watch kept, for a page or a notebook.

    `tokens` names the positions of the first batch element; without it they are numbered. Calls
    of other lengths (another text, steps of a generation) are numbered on axes of their own, and
    calls that hold no pair of tokens are named as left out.
    """
    calls = [c for c in seen if c.call.batch and c.call.query_length and c.call.key_length]
    axes: dict[str, dict[str, Any]] = {}
    stacks: dict[str, str] = {}
    for item in calls:
        queries, keys = item.call.query_length, item.call.key_length
        name = f"{item.stack or 'sequence'}"
        if item.kind == "self":
            stacks[item.stack] = name
            axes.setdefault(name, number_axis(max(queries, keys), tokens))
    for item in calls:
        if item.kind == "cross" and "encoder" not in stacks:
            stacks["encoder"] = "context"
            axes["context"] = number_axis(item.call.key_length, None)
        if item.stack not in stacks:
            stacks[item.stack] = item.stack or "sequence"
            axes.setdefault(stacks[item.stack], number_axis(item.call.query_length, tokens))
    taker = _Taker(Inputs("module", axes, stacks), None, 64, None)
    taker.more_axes = axes
    for item in calls:
        taker.take(item)
    left_out = list(seen.not_caught)
    if len(calls) < len(seen):
        left_out.append(f"{len(seen) - len(calls)} calls without tokens: nothing to draw")
    run = Record("run", {}, {**_versions(), "model": seen.model_name, "not_caught": left_out})
    shown = [Record("axis", {"axis": name}, values) for name, values in axes.items()]
    return [run, *shown, *taker.records, *taker.link_records()]


def number_axis(length: int, tokens: Sequence[str] | None, first: int = 0) -> dict[str, Any]:
    """An axis of plain positions from `first` on, named by `tokens` where there is one for each."""
    names = [str(i) for i in range(first, first + length)]
    if tokens is not None and len(tokens) == length:
        names = [str(token) for token in tokens]
    starts, text = [], ""
    for name in names:
        starts.append(len(text))
        text += name + " "
    return {
        "kind": "text",
        "text": text,
        "tokens": names,
        "starts": starts,
        "ends": [start + len(name) for start, name in zip(starts, names, strict=True)],
        "words": list(range(length)),
        "special": [0] * length,
        "real": [1] * length,
    }


@dataclass
class _Taker:
    """Turns each caught call into records, at once."""

    inputs: Inputs
    expected: int | None
    map_cells: int
    progress: Progress | None
    records: list[Record] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    strongest: StrongestLinks = field(default_factory=StrongestLinks)
    causal_stacks: frozenset[str] = frozenset()
    # Self-attention calls by stack, of the stacks that a rollout was asked of.
    rolled: dict[str, list[AttentionCall]] = field(default_factory=dict)
    # By id of the attention module, of each head; empty where it was not asked for.
    importance: Mapping[str, Tensor] = field(default_factory=dict)
    # Where axes may be added for calls whose lengths are not those of the input.
    more_axes: dict[str, dict[str, Any]] | None = None
    taken: int = 0

    def take(self, item: SeenCall) -> None:
        name = item.id if item.index == 0 else f"{item.id}#{item.index}"
        query_axis, key_axis = self._axes(item)
        call = item.call
        longest = max(call.query_length, call.key_length)
        unpooled = min(LARGEST_UNPOOLED, int(self.map_cells * 1.25))
        options: dict[str, Any] = {"map_cells": longest if longest <= unpooled else self.map_cells}
        query, key = self.inputs.axes.get(query_axis), self.inputs.axes.get(key_axis)
        real = item.real_queries
        if real is None and query is not None and len(query["real"]) == call.query_length:
            real = torch.tensor(query["real"], dtype=torch.bool).expand(call.batch, -1)
        options["query_rows"] = real
        if item.kind == "self" and key is not None and key["kind"] == "text":
            options["token_ids"] = self._token_ids(key, call.key_length)
        if item.kind == "self" and item.stack in self.causal_stacks:
            options["declared"] = causal()
        if item.kind == "cross":
            options["query_positions"] = torch.arange(call.query_length)
            options["key_positions"] = torch.arange(call.key_length)
        if item.kind == "self" and item.stack in self.rolled:
            self.rolled[item.stack].append(call)
        found = statistics.head_statistics(call, **options)
        self.records.append(self._attention_record(name, item, query_axis, key_axis))
        own = self.importance.get(name)
        for record in statistics.records(found, {"id": name}):
            if own is not None and record.kind == "head":
                more = {"importance": float(own[int(str(record.where["head"]))])}
                record = Record(record.kind, record.where, {**record.values, **more})
            self.records.append(record)
        for asked in self.asked:
            asked.take(name, call, found, query_axis, key_axis)
        if query is not None and key is not None:
            self.strongest.take(name, found, query_axis, query, key_axis, key)
        self.taken += 1
        if self.progress is not None:
            self.progress(self.taken, self.expected, name)

    def link_records(self) -> list[Record]:
        asked = [record for link in self.asked for record in link.records(self.inputs.axes)]
        return asked + self.strongest.records(self.inputs.axes)

    def _axes(self, item: SeenCall) -> tuple[str, str]:
        stacks = self.inputs.stacks
        query = stacks.get(item.stack) or next(iter(stacks.values()), "sequence")
        key = stacks.get("encoder", query) if item.kind == "cross" else query
        queries, keys = item.call.query_length, item.call.key_length
        before = max(0, keys - queries) if item.kind == "self" else 0
        return self._sized(query, before, queries), self._sized(key, 0, keys)

    def _sized(self, name: str, first: int, length: int) -> str:
        """The axis, or one of its own for positions first … first + length − 1."""
        axis = self.inputs.axes.get(name)
        fits = axis is not None and first == 0 and len(axis["tokens"]) == length
        if fits or self.more_axes is None:
            return name
        own = f"{name} {first}…{first + length - 1}"
        self.more_axes.setdefault(own, number_axis(length, None, first))
        return own

    def _token_ids(self, axis: dict[str, Any], length: int) -> Tensor | None:
        """The tokenizer's ids where the input holds them; else equal texts are equal tokens."""
        for value in self.inputs.kwargs.values():
            if (
                isinstance(value, Tensor)
                and value.dtype == torch.long
                and tuple(value.shape) == (1, length)
                and len(axis["tokens"]) == length
                and int(value.max()) > 1
            ):
                return value[0].cpu()
        if len(axis["tokens"]) != length:
            return None
        numbers: dict[str, int] = {}
        return torch.tensor([numbers.setdefault(t, len(numbers)) for t in axis["tokens"]])

    def _attention_record(
        self, name: str, item: SeenCall, query_axis: str, key_axis: str
    ) -> Record:
        call = item.call
        values = {
            "module": item.module,
            "layer": item.layer,
            "attention": item.kind,
            "stack": item.stack,
            "heads": call.num_heads,
            "kv_heads": call.num_kv_heads,
            "head_dim": call.head_dim,
            "queries": call.query_length,
            "keys": call.key_length,
            "query_axis": query_axis,
            "key_axis": key_axis,
            "mask": item.mask_words,
            "scale": call.scale_value,
            "softcap": call.softcap,
            "key_offset": call.key_length - call.query_length if item.kind == "self" else 0,
        }
        return Record("attention", {"id": name}, values)


@dataclass(frozen=True)
class _Rollout:
    """One token that a rollout was asked of: a span of tokens of an encoder's axis."""

    text: str
    stack: str
    axis: str
    place: range

    @classmethod
    def find(cls, loaded: Loaded, inputs: Inputs, text: str) -> _Rollout:
        causal_stacks = CAUSAL_STACKS.get(loaded.kind, frozenset())
        stacks = [stack for stack in inputs.stacks if stack not in causal_stacks]
        if not stacks:
            raise BadInput(
                "--rollout: wanted a model with an encoder, whose tokens see each other both ways; "
                f"{loaded.name} is of kind {loaded.kind}"
            )
        for stack in stacks:
            axis = inputs.stacks[stack]
            found = places_of(inputs.axes[axis], text)
            if found:
                return cls(text, stack, axis, found[0])
        raise BadInput(
            f"--rollout: {text!r} is not in the input; give a token or a word as the text has it"
        )

    def record(self, calls: Sequence[AttentionCall]) -> Record:
        """Of a word of several tokens, their mean."""
        rows = [statistics.rollout_row(calls, row)[0] for row in self.place]
        shares = torch.stack(rows).mean(0)
        where: dict[str, str | int | None] = {"axis": self.axis, "query": self.place.start}
        values = {
            "text": self.text, "tokens": len(self.place), "layers": len(calls),
            "shares": [float(f"{share:.6g}") for share in shares.tolist()],
        }  # fmt: skip
        return Record("rollout", where, values)


def _importance(loaded: Loaded, inputs: Inputs) -> Mapping[str, Tensor]:
    """{id: (heads,)}, ℓ2-normalised in each layer, on this one input."""
    if loaded.kind != "causal":
        raise BadInput(
            "importance: it is of the next-token loss, so of causal language models; "
            f"{loaded.name} is of kind {loaded.kind}"
        )
    ids = inputs.kwargs["input_ids"]
    if ids.shape[1] < 2:
        raise BadInput(f"importance: wanted at least 2 tokens to predict one, got {ids.shape[1]}")
    return surgery.importance(loaded.model, [ids], surgery.token_losses).heads


def _run_record(loaded: Loaded, inputs: Inputs, seen: Seen, seconds: float, command: str) -> Record:
    values = {
        **model_facts(loaded),
        "seconds": round(seconds, 3),
        "input_kind": inputs.kind,
        "note": inputs.note,
        "thresholds": {
            name: value
            for name, value in asdict(statistics.Thresholds()).items()
            if isinstance(value, int | float)
        },
        "not_caught": list(seen.not_caught),
        "command": command,
    }
    return Record("run", {}, values)


def model_facts(loaded: Loaded) -> dict[str, Any]:
    """What a `run` record says of a model, whatever was done with it."""
    config = getattr(loaded.model, "config", None)
    return {
        **_versions(),
        "model": loaded.name,
        "source": loaded.source,
        "kind": loaded.kind,
        "about": loaded.about,
        "licence": loaded.licence,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "device": str(loaded.device),
        "backend": getattr(config, "_attn_implementation", None) or "the model's own",
    }


def _versions() -> dict[str, Any]:
    from headwise import __version__

    transformers = sys.modules.get("transformers")
    return {
        "headwise": __version__,
        "torch": torch.__version__,
        "transformers": getattr(transformers, "__version__", None),
        "python": platform.python_version(),
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _expected_calls(model: torch.nn.Module) -> int | None:
    """How many attention calls one pass makes, where the model's config says so."""
    config = getattr(model, "config", None)
    if config is None:
        return None
    if getattr(config, "is_encoder_decoder", False):
        encoder = getattr(config, "encoder_layers", None) or getattr(config, "num_layers", None)
        decoder = getattr(config, "decoder_layers", None) or getattr(
            config, "num_decoder_layers", None
        )
        return None if not encoder or not decoder else encoder + 2 * decoder
    return getattr(config, "num_hidden_layers", None)


def _map_cells(model: torch.nn.Module) -> int:
    """The side of each head's pooled map, so that all maps together stay readable in one page."""
    config = getattr(model, "config", None)
    heads = getattr(config, "num_attention_heads", None) or 8
    calls = _expected_calls(model) or 12
    if not isinstance(heads, int):
        return LARGEST_MAP
    return min(LARGEST_MAP, int(math.sqrt(ALL_CELLS / (heads * calls))))
