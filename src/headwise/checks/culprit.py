"""Which fault a cache has: layer by layer, the cached calls' queries, keys and mask beside those of
one full pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headwise.checks import blame
from headwise.checks.finding import exact_bound, gap, size_of
from headwise.checks.subject import Subject
from headwise.watch import SeenCall

if TYPE_CHECKING:
    from headwise.checks.cached import Way

Answer = tuple["str | None", "dict[str, Any] | None", str]


def find(subject: Subject, way: Way) -> Answer:
    """(cause, where, evidence): the first call whose inputs or mask are not the full pass's.

    Without a call that can be watched the cause stays open.
    """
    full = blame.watched(subject, lambda: way.outputs(subject, whole=True))
    parts = blame.watched(subject, lambda: way.outputs(subject, whole=False))
    if not full or len(parts) != len(full) * len(way.chunks):
        return None, None, "; the attention calls could not be watched, so the cause is open"
    start = 0
    for number, size in enumerate(way.chunks):
        step = parts[number * len(full) : (number + 1) * len(full)]
        for place, (whole, part) in enumerate(zip(full, step, strict=True)):
            found = _compare(whole, part, start, size, way.real, first=place == 0)
            if found is not None:
                return found
        start += size
    return None, None, "; no layer's queries, keys or masks differ: look behind the attention"


def _compare(
    whole: SeenCall, part: SeenCall, start: int, size: int, real: Tensor | None, *, first: bool
) -> Answer | None:
    """What is wrong with one layer's call for tokens start … start + size − 1, or None."""
    stop = start + size
    rows = slice(start, stop)
    live = torch.ones(whole.call.batch, stop, dtype=torch.bool) if real is None else real[:, :stop]
    limit = 64 * exact_bound(whole.call.query.dtype, whole.call.head_dim, size_of(whole.call.key))
    query = _apart(whole.call.query[:, :, rows], part.call.query, live[:, rows])
    if query > limit:
        text = (
            f"; layer {part.layer} ({part.module or 'the model'}): the queries of tokens {start} "
            f"to {stop - 1} differ from the full pass's by {query:.3g}"
        )
        if not first:
            return None, _where(part, start, stop - 1), text + "; look at the layer before it"
        # Nothing but the token and its position has gone into the first layer's queries.
        return "rope-offset-lost", _where(part, start, stop - 1), text + ": their positions differ"
    wanted, got = whole.call.key[:, :, :stop], part.call.key
    places = _places(wanted, got, live, limit)
    lost = [token for token, place in enumerate(places) if place is None]
    moved = [(token, place) for token, place in enumerate(places) if place not in (None, token)]
    if lost or moved:
        return _lost_keys(part, start, stop, lost, moved, got.shape[2])
    return _mask(whole, part, start, stop, live)


def _lost_keys(
    part: SeenCall, start: int, stop: int, lost: list[int], moved: list, held: int
) -> Answer:
    where = _where(part, start, (lost or [moved[0][0]])[0])
    at = f"; layer {part.layer} ({part.module or 'the model'}), tokens {start} to {stop - 1}: "
    if moved and held >= stop:
        token, slot = moved[0]
        text = f"the key of token {token} lies in slot {slot}, over token {slot}'s"
        return "cache-overwrite", where, at + text
    if lost and held < stop:
        text = f"{held} keys for {stop} tokens; those of tokens {lost} are not there"
        newest = min(lost) >= start - 1
        return ("cache-drops-newest" if newest else "cache-overwrite"), where, at + text
    if lost and min(lost) >= start:
        text = f"the new keys of tokens {lost} differ from the full pass's: their positions do"
        return "rope-offset-lost", where, at + text
    return "cache-overwrite", where, at + f"the keys of tokens {lost} are overwritten"


def _mask(whole: SeenCall, part: SeenCall, start: int, stop: int, live: Tensor) -> Answer | None:
    heads, batch = whole.call.num_heads, whole.call.batch
    wanted = whole.call.visible.tile().expand(batch, heads, -1, -1)[:, :, start:stop, :stop]
    got = part.call.visible.tile().expand(batch, heads, -1, -1)
    if got.shape[-2:] != (stop - start, stop):
        wanted_shape = (stop - start, stop)
        text = f"; layer {part.layer}: a mask of {tuple(got.shape[-2:])}, wanted {wanted_shape}"
        return None, _where(part, start, stop - 1), text
    wrong = (wanted != got) & live[:, None, start:stop, None]
    if not bool(wrong.any()):
        return None
    _, _, row, key = (int(n) for n in wrong.nonzero()[0])
    where = _where(part, start + row, key)
    place = torch.arange(stop)
    top_left = place[None, :] <= torch.arange(stop - start)[:, None]
    at = f"; layer {part.layer} ({part.module or 'the model'}): "
    if bool((got == (wanted & top_left)).all()) and start:
        text = f"query {start + row} sees keys 0 to {row} only: its mask is aligned at the start"
        return "top-left-causal", where, at + text
    hidden = ~live[:, None, None, :]
    if bool(((got & ~wanted) & hidden).any()):
        return "padding-lost-with-cache", where, at + f"query {start + row} sees the padding {key}"
    return None, where, at + f"query {start + row} and key {key}: cached and full masks differ"


def _apart(one: Tensor, two: Tensor, live: Tensor) -> float:
    if one.shape != two.shape:
        return float("inf")
    keep = live[:, None, :, None].expand_as(one)
    return gap(one[keep], two[keep])


def _places(wanted: Tensor, got: Tensor, live: Tensor, limit: float) -> list[int | None]:
    """For each token the slot that holds its key, its own first; None where no slot does."""
    found: list[int | None] = []
    for token in range(wanted.shape[2]):
        slots = [token, *(s for s in range(got.shape[2]) if s != token)]
        row, use = wanted[:, :, token], live[:, token]
        found.append(
            next(
                (
                    slot
                    for slot in slots
                    if slot < got.shape[2] and gap(row[use], got[:, :, slot][use]) <= limit
                ),
                None,
            )
        )
    return found


def _where(part: SeenCall, query: int, key: int) -> dict[str, Any]:
    return {
        "module": part.module,
        "layer": part.layer,
        "head": None,
        "query": query,
        "key": key,
        "weight": None,
    }
