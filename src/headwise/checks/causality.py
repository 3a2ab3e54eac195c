"""Future leak: a token moves no output that may not see it.

One token is changed at a time, and every output that must not follow it is looked at: on each path,
with and without a padding mask, whole and in cached chunks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headwise.checks import blame, decode, measured
from headwise.checks.finding import (
    NotRunnable,
    exact_bound,
    failed,
    gap,
    not_run,
    passed,
    size_of,
)
from headwise.checks.subject import Subject
from headwise.record import Record

LEAK = "future leak"


@dataclass(frozen=True)
class Leak:
    """One change that moved an output that it must not move."""

    path: str
    mode: str
    change: str
    place: int
    output: int
    moved: float
    bound: float

    def words(self) -> str:
        return (
            f"{self.change} token {self.place} moves output {self.output} by {self.moved:.3g} "
            f"(allowed {self.bound:.1g})"
        )


@dataclass
class _Found:
    """What all the runs of one path gave."""

    leaks: list[Leak] = field(default_factory=list)
    modes: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    worst: float = 0.0
    bound: float = 0.0
    reached: float = 0.0
    broken: list[str] = field(default_factory=list)


def places_of(length: int) -> list[int]:
    """Tokens to change: the second, the middle, the last; with neighbours, where offsets show."""
    middle = length // 2
    return sorted({p for p in (1, 2, middle, length - 2, length - 1) if 0 < p < length})


def future_leak(subject: Subject) -> list[Record]:
    """Changing token j, or adding noise to its embedding, moves no output that may not see it.

    One record a path. Equal shapes run on both sides, so the outputs must be equal but for rounding
    (8·eps·√L·size); and some earlier token must move a later output, or nothing was tested.
    """
    tokens = subject.tokens()
    if subject.main.kind == "image":
        raise NotRunnable("a picture has no order: no patch is the future of another")
    if subject.main.whole:
        raise NotRunnable("a sound is heard whole: no token of it can be replaced")
    allowed = subject.declared(tokens.shape[1])
    if allowed is None:
        raise NotRunnable(
            "cannot know whether the model is causal: neither its config nor its modules say it; "
            "pass causal=True or causal=False (--causal or --bidirectional)"
        )
    if bool(allowed.all()):
        raise NotRunnable(f"bidirectional ({subject.says}): every token may move every output")
    subject.want_steady()
    subject.want_rows(subject.run(tokens), tokens)
    found: dict[str, _Found] = {}
    records = []
    for path in subject.paths:
        try:
            with subject.on(path):
                subject.run(tokens)
                found[path] = _look(subject, path, tokens, allowed)
        except NotRunnable as error:
            records.append(not_run(LEAK, str(error), path=path))
    for path, one in found.items():
        records.append(_judge(subject, path, one, found, tokens))
    return records


def _modes(subject: Subject) -> list[str]:
    modes = ["no padding mask"]
    if subject.main.padding is not None:
        modes.append("padding mask")
    if subject.main.cache is not None:
        modes.append("cached")
    return modes


def _look(subject: Subject, path: str, tokens: Tensor, allowed: Tensor) -> _Found:
    found = _Found()
    length = tokens.shape[1]
    for mode in _modes(subject):
        try:
            base = _outputs(subject, tokens, mode)
        except NotRunnable as error:
            found.skipped.append(f"{mode}: {error}")
            continue
        found.modes.append(mode)
        if not bool(base.isfinite().all()):
            found.broken.append(mode)
        bound = exact_bound(base.dtype, length, size_of(base))
        found.bound = max(found.bound, bound)
        for place in places_of(length):
            changed = _outputs(subject, subject.replaced(tokens, place), mode)
            _compare(found, base, changed, allowed, (path, mode, "changing", place, bound))
        place = length // 2
        if mode != "cached":
            try:
                noisy = _outputs(subject, tokens, mode, noise=place)
            except NotRunnable as error:
                found.skipped.append(f"noise: {error}")
            else:
                _compare(found, base, noisy, allowed, (path, mode, "noise on", place, bound))
    return found


def _outputs(subject: Subject, tokens: Tensor, mode: str, *, noise: int | None = None) -> Tensor:
    if mode == "cached":
        half = tokens.shape[1] // 2
        return decode.run(subject, tokens, [half - 1, tokens.shape[1] - half + 1])
    real, end = None, tokens.shape[1]
    if mode == "padding mask":
        # The last token becomes a pad: some models drop a mask of ones before they use it.
        end -= 1
        real = torch.ones(tokens.shape[:2], dtype=torch.bool)
        real[:, end] = False
    if noise is None:
        return subject.run(tokens, real=real)[:, :end]

    def disturb(embedded: Tensor) -> Tensor:
        out = embedded.clone()
        generator = torch.Generator().manual_seed(1)
        shock = torch.randn(out.shape[-1], generator=generator, dtype=torch.float64)
        out[:, noise] += shock.to(out) * out[:, noise].std()
        return out

    return subject.run(tokens, real=real, embed=disturb)[:, :end]


def _compare(
    found: _Found,
    base: Tensor,
    changed: Tensor,
    allowed: Tensor,
    about: tuple[str, str, str, int, float],
) -> None:
    path, mode, change, place, bound = about
    moved = torch.tensor([gap(base[:, i], changed[:, i]) for i in range(base.shape[1])])
    may = allowed[: len(moved), place].clone()
    later = may.clone()
    later[place : place + 1] = False
    if bool(later.any()):
        found.reached = max(found.reached, float(moved[later].max()))
    if bool((~may).any()):
        hidden = moved.masked_fill(may, 0.0)
        found.worst = max(found.worst, float(hidden.max()))
        if float(hidden.max()) > bound:
            output = int(hidden.argmax())
            moved_by = float(hidden.max())
            found.leaks.append(Leak(path, mode, change, place, output, moved_by, bound))


def _judge(
    subject: Subject, path: str, one: _Found, all_found: dict[str, _Found], tokens: Tensor
) -> Record:
    length = tokens.shape[1]
    ran = f"{length} tokens, {len(places_of(length))} changed one by one; {', '.join(one.modes)}"
    if one.skipped:
        ran += f" (not run: {'; '.join(one.skipped)})"
    numbers: dict[str, Any] = {"path": path, "ran": ran, "tolerance": one.bound, "worst": one.worst}
    if one.leaks:
        # An uncached leak first: its attention can be watched as it is.
        leak = max(one.leaks, key=lambda found: (found.mode != "cached", found.moved))
        where, outside = _where(subject, path, leak, tokens)
        named = _cause(subject, one, all_found, leak, tokens)
        message = f"{leak.words()}, {leak.mode}; it must not{blame.words(where)}{outside}"
        return failed(LEAK, message, cause=named, where=where, **numbers)
    if one.broken:
        message = f"the outputs hold NaN or infinities ({', '.join(one.broken)}), so none is right"
        return failed(LEAK, message, cause="nan-from-empty-row", **numbers)
    if one.reached <= one.bound:
        message = (
            f"positive control: no earlier token moves any later output (most {one.reached:.2g}); "
            "nothing is connected, so no leak could show"
        )
        cause = "batch-and-sequence-swapped" if measured.swapped(subject) else None
        return failed(LEAK, message, cause=cause, **numbers)
    message = (
        f"no output moves by more than {one.worst:.2g} for a token that it may not see (allowed "
        f"{one.bound:.1g}); a visible one moves it by {one.reached:.2g}"
    )
    return passed(LEAK, message, **numbers)


def _where(subject: Subject, path: str, leak: Leak, tokens: Tensor) -> tuple[dict | None, str]:
    """(the first layer and head with weight on a hidden key, what to say where there is none)."""
    masks = subject.layer_masks(tokens.shape[1])
    if masks is None or leak.mode == "cached":
        return None, ""
    with subject.on(path):
        calls = blame.watched(subject, lambda: _outputs(subject, tokens, leak.mode))
    rows = torch.ones(1, tokens.shape[1], dtype=torch.bool)
    rows[:, -1] = leak.mode != "padding mask"
    where = blame.first_hidden_weight(calls, masks, rows=rows)
    if where is not None:
        return where, ""
    if not calls:
        return None, "; its attention could not be watched, so no head is named"
    return None, "; no watched attention gives a hidden key weight: look for what else mixes tokens"


def _cause(
    subject: Subject,
    one: _Found,
    all_found: dict[str, _Found],
    leak: Leak,
    tokens: Tensor,
) -> str:
    sound = [path for path, other in all_found.items() if not other.leaks]
    if sound:
        return "leak-in-one-backend"
    modes = {found.mode for found in one.leaks}
    if "no padding mask" in modes and "padding mask" in set(one.modes) - modes:
        return "leak-without-padding-mask"
    if modes == {"cached"}:
        return "cached-chunk-leak"
    return measured.name_pattern(subject, leak.path, tokens)
