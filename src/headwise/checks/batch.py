"""Batch: a row's outputs do not depend on which rows stand beside it."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.checks import measured, rounding
from headwise.checks.finding import failed, gap, passed
from headwise.checks.subject import Subject
from headwise.record import Record

BATCH = "batch"


def batch(subject: Subject) -> list[Record]:
    """A neighbour's content changes nothing; joining a batch moves outputs by rounding only.

    Two records a path. An argmax must stay where its margin is more than twice what rounding
    explains.
    """
    subject.want_steady()
    return [
        *measured.on_each_path(subject, BATCH, _neighbour),
        *measured.on_each_path(subject, BATCH, _joining),
    ]


def _neighbour(subject: Subject, path: str) -> Record:
    tokens = subject.tokens()
    pairs = [torch.cat([tokens, subject.fresh(tokens, seed)]) for seed in (3, 4)]
    one, two = (subject.run(pair)[0] for pair in pairs)
    worst, bound = gap(one, two), rounding.equal_bound(one[None])
    numbers = {
        "case": "neighbour",
        "path": path,
        "ran": "a batch of 2, its second row changed",
        "tolerance": bound,
        "worst": worst,
    }
    if worst <= bound:
        message = f"another neighbour moves a row's outputs by {worst:.2g} (allowed {bound:.1g})"
        return passed(BATCH, message, **numbers)
    message = (
        f"changing the second row of a batch moves the first row's outputs by {worst:.3g} "
        f"(allowed {bound:.1g})"
    )
    cause = "batch-leak"
    if measured.swapped(subject):
        cause = "batch-and-sequence-swapped"
        message += "; in a batch of one no token moves any other: the two axes are swapped"
    return failed(BATCH, message, cause=cause, **numbers)


def _joining(subject: Subject, path: str) -> Record:
    moved = [0, 0]

    def measure(one: Subject) -> tuple[float, float]:
        tokens = one.tokens()
        rows = [one.fresh(tokens, 8), tokens, one.fresh(tokens, 9)]
        with one.on(path):
            alone = one.run(tokens)
            joined = one.run(torch.cat(rows))[1:2]
        bound = rounding.bound_of(one, alone)
        moved[:] = _argmaxes(alone, joined, bound)
        return rounding.apart(alone, joined), bound

    verdict = rounding.judge(subject, measure)
    numbers = {
        "case": "joining",
        "path": path,
        "ran": "alone, and as the second row of a batch of 3",
        "tolerance": verdict.bound,
        "worst": verdict.worst,
    }
    if verdict.bug or moved[0]:
        too = ", and an argmax with a clear margin" if moved[0] else ""
        message = (
            f"joining a batch of 3 moves a row's outputs by {verdict.worst:.3g} (allowed "
            f"{verdict.bound:.1g}; {verdict.note}){too}"
        )
        cause = "batch-and-sequence-swapped" if measured.swapped(subject) else "batch-leak"
        return failed(BATCH, message, cause=cause, **numbers)
    message = (
        f"joining a batch moves outputs by {verdict.worst:.2g}, no argmax with a clear margin"
        + (f" ({verdict.note})" if verdict.note else "")
        + (f"; {moved[1]} within rounding" if moved[1] else "")
    )
    return passed(BATCH, message, **numbers)


def _argmaxes(alone: Tensor, joined: Tensor, bound: float) -> tuple[int, int]:
    """How many argmaxes moved: (with a margin above twice the bound, below it)."""
    if alone.shape[-1] < 2:
        return 0, 0
    best = alone.topk(2, dim=-1).values
    clear = best[..., 0] - best[..., 1] > 2 * bound
    differs = alone.argmax(-1) != joined.argmax(-1)
    return int((differs & clear).sum()), int((differs & ~clear).sum())
