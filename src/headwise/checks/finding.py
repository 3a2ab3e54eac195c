"""What a check says: one Record of kind "check", passed, failed or not run, with numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.record import Record

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"

# The usual fix for each cause, in one sentence.
FIXES = {
    "future-leak": "build the causal mask in every branch of the forward pass, and draw it once",
    "mask-polarity": "the mask says the opposite of what its reader expects: invert it",
    "leak-without-padding-mask": (
        "build the causal mask also when no padding mask is given, not only to join the two"
    ),
    "leak-in-one-backend": (
        "give every attention implementation the same mask; one of them ignores it or gets none"
    ),
    "cached-chunk-leak": (
        "with a cache, query i of a chunk of L tokens at S keys sees j ≤ i + S − L, and no more"
    ),
    "causal-in-encoder": "an encoder's tokens see each other both ways: drop the causal mask",
    "nothing-connected": "draw the mask: every key is hidden, or the output is not used",
    "window-off-by-one": "a window of W keys counts the query's own: hide keys with i − j ≥ W",
    "causal-off-by-one": "use triu(diagonal=1): the diagonal is the query's own key, and visible",
    "document-leak": "hide keys of other documents: join the causal mask with ids[i] == ids[j]",
    "softmax-axis": "take the softmax over the keys (the last axis), not over the queries",
    "batch-and-sequence-swapped": (
        "the layer reads (sequence, batch, width): pass batch_first=True or transpose"
    ),
    "batch-leak": "something mixes rows of the batch; let each row see only itself",
    "padding-mask-ignored": "pass the padding mask down to every attention call",
    "padding-side": "derive the mask from where the padding is, not from a length and a fixed side",
    "positions-under-padding": (
        "count positions over the real tokens: (mask.cumsum(-1) - 1).clamp(min=0)"
    ),
    "nan-from-empty-row": (
        "a query that sees no key has no softmax: give zeros there, or let it see its own key"
    ),
    "rope-offset-lost": "with a cache, positions go on from the cached length, not from 0",
    "top-left-causal": (
        "with a cache the last query sees the last key: align the causal mask at the end "
        "(is_causal=True of SDPA aligns at the start)"
    ),
    "cache-overwrite": "write new keys behind the cached ones, at the cached length",
    "cache-drops-newest": "read the cache after the new keys are written, with them in it",
    "padding-lost-with-cache": "keep the padding mask of the cached tokens, not only of the new",
    "dropout-in-eval": "tie dropout to self.training (F.dropout(x, p, self.training))",
    "random-in-eval": "draw no random numbers in eval mode",
    "float-mask-added": "a 0/1 mask is not an additive one: use 0 and −inf, or a bool mask",
}


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
