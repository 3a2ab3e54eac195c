"""Checks: is a model's attention right? Black box on any module, white box to name the culprit.

for record in headwise.checks.check(model, inputs):
    print(record.where["check"], record.values["status"], record.values["message"])
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headwise.checks import agreement, batch, cached, causality, measured, modes, padding
from headwise.checks.bare import for_attention
from headwise.checks.finding import NotRunnable, failures, not_run
from headwise.checks.parts import parts_of
from headwise.checks.signature import (
    Projections,
    Signature,
    headwise_attention,
    headwise_layer,
    torch_mha,
    torch_sdpa,
)
from headwise.checks.subject import Subject
from headwise.record import Record

__all__ = [
    "CHECKS",
    "NotRunnable",
    "Projections",
    "Signature",
    "Subject",
    "check",
    "failures",
    "for_attention",
    "headwise_attention",
    "headwise_layer",
    "torch_mha",
    "torch_sdpa",
]

Progress = Callable[[int, int, str], None]

# The checks of a model, in the order in which they run.
CHECKS: dict[str, Callable[[Subject], list[Record]]] = {
    "future leak": causality.future_leak,
    "measured mask": measured.measured_mask,
    "padding": padding.padding,
    "batch": batch.batch,
    "cache": cached.cache,
    "eval": modes.eval_runs,
    "gradients": modes.gradients,
    "agreement": agreement.agreement,
}


def check(
    model: Any,
    inputs: Any = None,
    *,
    only: Iterable[str] | None = None,
    causal: bool | None = None,
    padding_side: str | None = None,
    pad_token_id: int | None = None,
    batch_first: bool | None = None,
    documents: Tensor | None = None,
    progress: Progress | None = None,
) -> list[Record]:
    """Run the checks on a model and say what each found; nothing that a model does raises here.

    Args:
        model: an nn.Module, or what `headwise.models.load` returned. It runs in eval mode, and is
            left as it was.
        inputs: one call's arguments: a tensor, a tuple, keywords, or what `loaded.prepare` gave.
        only: names of checks, from CHECKS; all when None.
        progress: called with (checks done, checks to do, name of the next).
        Others: see `Subject.of`.

    Returns:
        Records of kind "check", at least one for each check: "passed", "failed" or "not run".

    Raises:
        ValueError: an unknown name in `only`, or an unknown padding_side.
    """
    names = list(CHECKS) if only is None else list(only)
    unknown = [name for name in names if name not in CHECKS]
    if unknown:
        raise ValueError(
            f"check: no check is named {unknown[0]!r}; choose from {', '.join(CHECKS)}"
        )
    try:
        subject = Subject.of(
            model,
            inputs,
            causal=causal,
            padding_side=padding_side,
            pad_token_id=pad_token_id,
            batch_first=batch_first,
            documents=documents,
        )
    except NotRunnable as error:
        return [not_run(name, str(error)) for name in names]
    records: list[Record] = []
    with subject.in_eval(), torch.random.fork_rng(devices=[]):
        parts = parts_of(subject, names)
        work = [(part, name) for part in parts for name in part.checks]
        for done, (part, name) in enumerate(work):
            if progress is not None:
                progress(done, len(work), f"{name}, {part.name}" if part.name else name)
            if isinstance(part.subject, NotRunnable):
                found = [not_run(name, str(part.subject))]
            else:
                with part.subject.in_eval():
                    found = run_check(part.subject, name)
            records += map(part.label, found)
    if progress is not None:
        progress(len(work), len(work), "")
    return records


def run_check(subject: Subject, name: str) -> list[Record]:
    """One check by name; what keeps it from running becomes its "not run" record."""
    started = time.perf_counter()
    try:
        found = CHECKS[name](subject)
    except NotRunnable as error:
        found = [not_run(name, str(error))]
    except Exception as error:  # whatever a stranger's model does, the other checks go on
        reason = (str(error).strip() or "no message").splitlines()[0][:200]
        found = [not_run(name, f"the check stopped with {type(error).__name__}: {reason}")]
    spent = round((time.perf_counter() - started) / max(1, len(found)), 3)
    return [replace(record, values={**record.values, "seconds": spent}) for record in found]
