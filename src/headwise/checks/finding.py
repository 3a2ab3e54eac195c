"""What a check says: one Record of kind "check", passed, failed or not run, with numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from headwise.checks.fixes import FIXES
from headwise.errors import HeadwiseError
from headwise.record import Record

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"


class NotRunnable(HeadwiseError):
    """Why a check cannot run here. `check()` turns it into a "not run" record."""


def passed(check: str, message: str, **values: Any) -> Record:
    """A check that ran and found nothing. Takes `finding`'s keywords."""
    return finding(check, PASSED, message, **values)


def failed(check: str, message: str, **values: Any) -> Record:
    """A check that ran and found a fault. Takes `finding`'s keywords."""
    return finding(check, FAILED, message, **values)


def not_run(check: str, message: str, **values: Any) -> Record:
    """A check that could not run, and why. Takes `finding`'s keywords."""
    return finding(check, NOT_RUN, message, **values)


def finding(
    check: str,
    status: str,
    message: str,
    *,
    path: str | None = None,
    case: str | None = None,
    cause: str | None = None,
    fix: str | None = None,
    where: dict[str, Any] | None = None,
    ran: str = "",
    tolerance: float | None = None,
    worst: float | None = None,
    seconds: float = 0.0,
    declared: list[list[int]] | None = None,
    measured: list[list[float]] | None = None,
) -> Record:
    """The record of one check. `fix` defaults to the usual fix of `cause`."""
    return Record(
        "check",
        {"check": check, "path": path, "case": case},
        {
            "status": status,
            "message": message,
            "cause": cause,
            "fix": FIXES.get(cause) if fix is None and cause is not None else fix,
            "where": where,
            "ran": ran,
            "tolerance": tolerance,
            "worst": worst,
            "seconds": round(seconds, 3),
            "declared": declared,
            "measured": measured,
        },
    )


def failures(records: Iterable[Record]) -> list[Record]:
    """The failed checks, in order."""
    return [r for r in records if r.kind == "check" and r.values["status"] == FAILED]


def exact_bound(dtype: torch.dtype, length: int, size: float) -> float:
    """What may differ where nothing should: two runs of equal shapes, `length` keys a row.

    A sum over L keys of results up to `size` is off by about eps·√L·size; 8 is room for the few
    such sums that follow one another.
    """
    return 8 * torch.finfo(dtype).eps * math.sqrt(max(1, length)) * size


def shape_bound(dtype: torch.dtype, terms: int, depth: int, size: float) -> float:
    """What two runs of other shapes may differ by: kernels then add in another order.

    Each of `depth` layers adds the error of a sum of `terms` products; errors of layers add like
    square roots.
    """
    return 8 * torch.finfo(dtype).eps * math.sqrt(max(1, terms) * max(1, depth)) * size


def gap(one: Tensor, two: Tensor) -> float:
    """The largest absolute difference; NaN or an infinity on one side only counts as infinite."""
    if one.numel() == 0:
        return 0.0
    one, two = one.detach().double(), two.detach().double()
    same = (one == two) | (one.isnan() & two.isnan())
    difference = torch.where(same, 0.0, (one - two).abs())
    return float(difference.nan_to_num(nan=math.inf, posinf=math.inf).max())


def size_of(*tensors: Tensor) -> float:
    """The largest finite magnitude, at least the smallest normal number."""
    largest = 0.0
    for x in tensors:
        finite = x.detach()[x.detach().isfinite()]
        largest = max(largest, float(finite.abs().max()) if finite.numel() else 0.0)
    return max(largest, torch.finfo(torch.float32).tiny)
