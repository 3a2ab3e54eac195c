"""Rounding or bug? A difference that float64 does not shrink is a bug."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.checks import paths
from headwise.checks.finding import exact_bound, gap, shape_bound, size_of
from headwise.checks.subject import Subject


@dataclass(frozen=True)
class Verdict:
    """worst: the largest difference. bound: what rounding explains. bug: rounding does not."""

    worst: float
    bound: float
    bug: bool
    note: str = ""


def bound_of(subject: Subject, reference: Tensor) -> float:
    """What two runs of different shapes may differ by in the outputs."""
    terms = max(subject.width, reference.shape[1])
    return shape_bound(reference.dtype, terms, subject.depth, size_of(reference))


def equal_bound(reference: Tensor) -> float:
    """What two runs of equal shapes may differ by where nothing has changed."""
    return exact_bound(reference.dtype, reference.shape[1], size_of(reference))


def judge(subject: Subject, measure: Callable[[Subject], tuple[float, float]]) -> Verdict:
    """Measure (worst, bound); where worst is above it, or the dtype is coarse, ask float64 as well.

    Rounding shrinks in float64 by the ratio of the two eps, a bug not at all; the line between them
    is the geometric mean.
    """
    worst, bound = measure(subject)
    coarse = torch.finfo(subject.dtype).eps > torch.finfo(torch.float32).eps
    if worst <= bound and not coarse:
        return Verdict(worst, bound, False)
    double = subject.double() if math.isfinite(worst) else None
    if double is None:
        return Verdict(worst, bound, worst > bound)
    path = paths.current(subject.model)
    with double.in_eval(), double.on(path):
        exact, fine = measure(double)
    ratio = torch.finfo(torch.float64).eps / torch.finfo(subject.dtype).eps
    if exact <= max(fine, worst * math.sqrt(ratio)):
        return Verdict(worst, bound, False, f"rounding: {worst:.2g}, and {exact:.1g} in float64")
    return Verdict(worst, bound, True, f"{exact:.3g} in float64 too, so it is no rounding")


def apart(one: Tensor, two: Tensor) -> float:
    """`gap`, with any NaN counted as infinite: nothing that is compared here may be NaN."""
    if not bool(one.isfinite().all() and two.isfinite().all()):
        return math.inf
    return gap(one, two)
