"""Cache: prefill and decode, chunked prefill and one full pass give the same outputs."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headwise.checks import culprit, padding, rounding
from headwise.checks.decode import run
from headwise.checks.finding import NotRunnable, failed, not_run, passed
from headwise.checks.subject import Subject
from headwise.record import Record

CACHE = "cache"


def cache(subject: Subject) -> list[Record]:
    """One full pass, prefill and decode by single tokens, and chunked prefill agree, on each path.

    With left padding too, where the model takes a padding mask and its full pass is right with it.
    """
    if subject.causal is False:
        raise NotRunnable(f"bidirectional ({subject.says}): outputs change with every new token")
    if subject.main.cache is None:
        raise NotRunnable("the model takes no cache (no past_key_values, cache or past argument)")
    subject.want_steady()
    records = []
    for path in subject.paths:
        try:
            with subject.on(path):
                records.append(_path(subject, path))
        except NotRunnable as error:
            records.append(not_run(CACHE, str(error), path=path))
    return records


@dataclass(frozen=True, eq=False)
class Way:
    """One way to cut a run: its chunks, and what the calls get beside the tokens."""

    name: str
    chunks: list[int]
    tokens: Tensor
    real: Tensor | None = None
    positions: Tensor | None = None

    def outputs(self, subject: Subject, *, whole: bool) -> Tensor:
        """(B, L, F); rows of padding are left out."""
        tokens = self.tokens.to(subject.dtype) if self.tokens.is_floating_point() else self.tokens
        if whole:
            found = subject.run(tokens, real=self.real, positions=self.positions)
            subject.want_rows(found, tokens)
        else:
            found = run(subject, tokens, self.chunks, real=self.real, positions=self.positions)
        return found if self.real is None else found[self.real][None]

    def leaks(self, subject: Subject, full: Tensor, bound: float) -> bool:
        """Whether the outputs of the first chunk's tokens are others without the tokens after."""
        stop = self.chunks[0]
        cut = [None if x is None else x[:, :stop] for x in (self.real, self.positions)]
        early = Way("", [stop], self.tokens[:, :stop], cut[0], cut[1])
        found = early.outputs(subject, whole=True)
        if self.real is not None:
            inside = torch.arange(self.real.shape[1])[None].expand(self.real.shape)[self.real]
            full = full[:, inside < stop]
        return rounding.apart(found, full[:, : found.shape[1]]) > bound


def _ways(subject: Subject) -> list[Way]:
    tokens = subject.tokens()
    length = tokens.shape[1]
    half, third = length // 2, max(1, length // 3)
    ways = [
        Way("decode", [half] + [1] * (length - half), tokens),
        Way("chunks", [third, third, length - 2 * third], tokens),
    ]
    stream = subject.main
    if stream.padding is not None and stream.kind == "ids" and stream.square is None:
        offset = padding.position_offset(subject, stream)
        short = padding.pad(subject, tokens[:, 2:], 2, "left")
        both = padding.beside(subject, short, tokens)
        positions = None if offset is None else both.positions + offset
        chunks = [half] + [1] * (length - half)
        ways.append(Way("decode, left padding", chunks, both.tokens, both.real, positions))
    return ways


def _path(subject: Subject, path: str) -> Record:
    ran, worst, bound, notes = [], 0.0, 0.0, []
    for way in _ways(subject):
        try:
            verdict = rounding.judge(subject, functools.partial(_differences, way=way))
        except NotRunnable as error:
            notes.append(f"{way.name} not run: {error}")
            continue
        ran.append(way.name)
        numbers = {
            "path": path,
            "ran": ", ".join([*ran, *notes]),
            "tolerance": verdict.bound,
            "worst": verdict.worst,
        }
        if verdict.bug:
            return _failure(subject, way, verdict, numbers)
        worst, bound = max(worst, verdict.worst), max(bound, verdict.bound)
        notes += [f"{way.name}: {verdict.note}"] if verdict.note else []
    if not ran:
        raise NotRunnable("; ".join(notes))
    message = f"cached and full outputs differ by {worst:.2g} at most (allowed {bound:.1g})"
    message += f" ({'; '.join(notes)})" if notes else ""
    return passed(
        CACHE, message, path=path, ran=", ".join(ran) + " against one full pass",
        tolerance=bound, worst=worst,
    )  # fmt: skip


def _differences(subject: Subject, way: Way) -> tuple[float, float]:
    full, parts = way.outputs(subject, whole=True), way.outputs(subject, whole=False)
    return rounding.apart(full, parts), rounding.bound_of(subject, full)


def _failure(
    subject: Subject, way: Way, verdict: rounding.Verdict, numbers: dict[str, Any]
) -> Record:
    full, parts = way.outputs(subject, whole=True), way.outputs(subject, whole=False)
    rows = torch.tensor([rounding.apart(full[:, i], parts[:, i]) for i in range(full.shape[1])])
    first = int((rows > verdict.bound).nonzero()[0]) if bool((rows > verdict.bound).any()) else 0
    cause: str | None
    if way.leaks(subject, full, verdict.bound):
        cause, where = "future-leak", None
        evidence = "; a full pass over fewer tokens differs as much: outputs follow later tokens"
    else:
        cause, where, evidence = culprit.find(subject, way)
    if not bool(full.isfinite().all() and parts.isfinite().all()):
        cause, evidence = "nan-from-empty-row", "; real tokens' outputs hold NaN"
    message = (
        f"{way.name}: output {first} differs from one full pass by {float(rows[first]):.3g}, and "
        f"at most by {verdict.worst:.3g} (allowed {verdict.bound:.1g}; {verdict.note}){evidence}"
    )
    return failed(CACHE, message, cause=cause, where=where, **numbers)
