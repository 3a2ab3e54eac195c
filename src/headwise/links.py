"""Links: which head lets one token read another most. A link is a clue, not an explanation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headwise.call import AttentionCall
from headwise.errors import BadInput
from headwise.record import Record
from headwise.reference import scores
from headwise.statistics import HeadStatistics

Axes = Mapping[str, Mapping[str, Any]]
# Heads recorded for a link that was asked for, and links recorded of all.
HEADS_SHOWN = 5
LINKS_SHOWN = 20


@dataclass
class Asked:
    """One link that a person asked for: from every place of `query` to every place of `key`.

    A word of several tokens counts as METRICS would join it: the sum over the key's pieces, the
    mean over the query's. Each head counts once, at its strongest place.
    """

    query: str
    key: str
    query_places: dict[str, list[range]]
    key_places: dict[str, list[range]]
    found: dict[tuple[str, int], tuple[float, str, int, str, int, str, int]] = field(
        default_factory=dict
    )

    @classmethod
    def find(cls, axes: Axes, query: str, key: str) -> Asked:
        """Look both texts up among the tokens.

        Raises:
            BadInput: a text is not in the input.
        """
        places: list[dict[str, list[range]]] = []
        for name, text in (("query", query), ("key", key)):
            found = {axis: places_of(values, text) for axis, values in axes.items()}
            found = {axis: spans for axis, spans in found.items() if spans}
            if not found:
                raise BadInput(
                    f"--link: the {name} {text!r} is not in the input; give a token or a word as "
                    "the text has it"
                )
            places.append(found)
        return cls(query, key, places[0], places[1])

    def take(
        self, name: str, call: AttentionCall, stats: HeadStatistics, query_axis: str, key_axis: str
    ) -> None:
        """Measure this link in one call, exactly, from the query's rows alone."""
        for rows in self.query_places.get(query_axis, []):
            if rows.stop > call.query_length:
                continue
            tile = scores(call, slice(rows.start, rows.stop))[0].double()
            lse = stats.row_lse[0, :, rows.start : rows.stop, None].to(tile.device)
            weights = torch.where(lse == -torch.inf, 0.0, torch.exp(tile - lse)).mean(1)
            for keys in self.key_places.get(key_axis, []):
                if keys.stop > call.key_length or (keys == rows and query_axis == key_axis):
                    continue
                share = weights[:, keys.start : keys.stop].sum(-1)
                for head, weight in enumerate(share.tolist()):
                    link = (weight, name, head, query_axis, rows.start, key_axis, keys.start)
                    held = self.found.get((name, head))
                    if held is None or weight > held[0]:
                        self.found[name, head] = link

    def records(self, axes: Axes) -> list[Record]:
        """The heads that link the two most, strongest first."""
        best = sorted(self.found.values(), key=lambda link: -link[0])[:HEADS_SHOWN]
        return [_record(axes, *link, asked=(self.query, self.key)) for link in best]


@dataclass
class StrongestLinks:
    """For each query token its strongest link over all heads, then the strongest of these.

    Each head and key appears once, so that one head that sends every query to one key does not
    fill the list. Left out: padding, special tokens, the first token (where weight gathers that has
    nowhere to go), the token itself and its neighbour before.
    """

    best: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)

    def take(
        self,
        name: str,
        stats: HeadStatistics,
        query_axis: str,
        query: Mapping[str, Any],
        key_axis: str,
        key: Mapping[str, Any],
    ) -> None:
        """Fold one call in. Works on the top keys of each row, so in linear memory."""
        weights, keys = stats.top_weights[0].double(), stats.top_keys[0]
        length = weights.shape[1]
        if len(query["tokens"]) < length or not weights.numel():
            return
        barred = torch.tensor(key["special"], dtype=torch.bool)
        if query_axis == key_axis and bool((~barred).any()):
            barred[int((~barred).nonzero()[0])] = True
        offset = len(key["tokens"]) - length if query_axis == key_axis else 0
        row = torch.arange(length)[None, :, None] + offset
        usable = (keys >= 0) & ~barred[keys.clamp(0, len(barred) - 1)]
        if query_axis == key_axis:
            usable &= (keys != row) & (keys != row - 1)
        asking = torch.tensor(
            [
                bool(real and not special)
                for real, special in zip(query["real"], query["special"], strict=True)
            ][offset : offset + length]
        )
        usable &= asking[None, :, None]
        share = torch.where(usable, weights, -1.0).permute(1, 0, 2).flatten(1)
        top, place = share.max(1)
        head, slot = place // weights.shape[2], place % weights.shape[2]
        key_of = keys[head, torch.arange(length), slot]
        self._fold(name, (query_axis, key_axis), top, head, key_of, offset)

    def _fold(
        self, name: str, axes: tuple[str, str], top: Tensor, head: Tensor, key: Tensor, offset: int
    ) -> None:
        now: dict[str, Any] = {"weight": top, "head": head, "key": key, "name": [name] * len(top)}
        held = self.best.get(axes)
        if held is None or len(held["weight"]) != len(top):
            self.best[axes] = {**now, "offset": offset}
            return
        better = top > held["weight"]
        for part in ("weight", "head", "key"):
            held[part] = torch.where(better, now[part], held[part])
        for row in better.nonzero().flatten().tolist():
            held["name"][row] = name

    def records(self, axes: Axes) -> list[Record]:
        """The strongest links, one a query token, strongest first."""
        found = []
        for (query_axis, key_axis), held in self.best.items():
            rows = zip(
                held["weight"].tolist(),
                held["name"],
                held["head"].tolist(),
                held["key"].tolist(),
                strict=True,
            )
            for row, (weight, name, head, key) in enumerate(rows):
                if weight > 0:
                    place = row + held["offset"]
                    found.append((weight, name, head, query_axis, place, key_axis, key))
        found.sort(key=lambda link: -link[0])
        once: dict[tuple[str, int, int], tuple] = {}
        for link in found:
            once.setdefault((link[1], link[2], link[6]), link)
        return [_record(axes, *link, asked=None) for link in list(once.values())[:LINKS_SHOWN]]


def _record(
    axes: Axes,
    weight: float,
    name: str,
    head: int,
    query_axis: str,
    query: int,
    key_axis: str,
    key: int,
    *,
    asked: tuple[str, str] | None,
) -> Record:
    values = {
        "query": query,
        "key": key,
        "query_axis": query_axis,
        "key_axis": key_axis,
        "query_token": axes[query_axis]["tokens"][query] if asked is None else asked[0],
        "key_token": axes[key_axis]["tokens"][key] if asked is None else asked[1],
        "weight": weight,
        "asked": asked is not None,
    }
    return Record("link", {"id": name, "head": head}, values)


def places_of(axis: Mapping[str, Any], text: str) -> list[range]:
    """Where `text` stands among an axis' tokens: as a token, else as a word, else as a phrase."""
    wanted = text.strip()
    if not wanted:
        return []
    tokens = axis["tokens"]
    exact = [range(i, i + 1) for i, token in enumerate(tokens) if token == text]
    exact = exact or [range(i, i + 1) for i, token in enumerate(tokens) if token.strip() == wanted]
    if exact or "text" not in axis:
        return exact
    found, source = [], axis["text"]
    for folded in (False, True):
        # A model that lowers its text shows "maya" where the person reads "Maya".
        hay, needle = (source.lower(), wanted.lower()) if folded else (source, wanted)
        begin = hay.find(needle)
        while begin >= 0:
            end = begin + len(needle)
            inside = [
                i
                for i, (a, b) in enumerate(zip(axis["starts"], axis["ends"], strict=True))
                if 0 <= a < b and b > begin and a < end
            ]
            # Whole words only: "he" is not in "she".
            left = begin == 0 or not hay[begin - 1].isalnum()
            right = end == len(hay) or not hay[end].isalnum()
            if inside and left and right:
                found.append(range(inside[0], inside[-1] + 1))
            begin = hay.find(needle, begin + 1)
        if found:
            break
    return found
