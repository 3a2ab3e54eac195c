"""for_attention: the whole table of checks against a bare attention function or layer."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from headwise.checks import bare_gradients, bare_masks, bare_values
from headwise.checks.bare_cases import Bare
from headwise.checks.bare_trials import Check, Trial, make_case, told
from headwise.checks.finding import FAILED, NotRunnable, not_run
from headwise.checks.signature import Signature
from headwise.record import Record

BARE_CHECKS: dict[str, Check] = {
    "future leak": bare_masks.future_leak,
    "measured mask": bare_masks.measured_mask,
    "padding": bare_masks.padding,
    "batch": bare_values.batch,
    "cache": bare_masks.cache,
    "alignment": bare_masks.alignment,
    "polarity": bare_masks.polarity,
    "broadcast": bare_masks.broadcast,
    "shapes": bare_values.shapes,
    "agreement": bare_values.agreement,
    "gradients": bare_gradients.gradients,
    "eval": bare_values.evaluation,
}


def for_attention(
    fn: Callable[..., Any], signature: Signature, *, only: Collection[str] | None = None
) -> list[Record]:
    """Every check against an attention function or layer, one record a check.

    Args:
        fn: a function fn(query, key, value, ...) or a layer; an `nn.Module` is copied to the
            CPU, set to eval there, and left as it was.
        signature: how it is called and what it promises: `Signature(...)`, or a ready one
            (`torch_sdpa()`, `torch_mha(module)`, `headwise_attention()`, `headwise_layer(layer)`).
        only: names of checks to run; None runs all (`BARE_CHECKS`).

    Returns:
        Records of kind "check" in the order of the table: passed, failed (with the likely cause
        where the numbers match a known fault), or not run (with the reason).

    Raises:
        ValueError: an unknown name in `only`.
        TypeError: fn cannot be called, or signature is no Signature.
    """
    if not callable(fn) or not isinstance(signature, Signature):
        raise TypeError(
            f"for_attention: wanted a function or layer and a Signature, got {type(fn).__name__} "
            f"and {type(signature).__name__}"
        )
    names = list(BARE_CHECKS) if only is None else list(only)
    unknown = [name for name in names if name not in BARE_CHECKS]
    if unknown:
        raise ValueError(
            f"for_attention: no check named {unknown[0]!r}; there are {', '.join(BARE_CHECKS)}"
        )
    with _one_thread():
        return _table(Bare(fn, signature), names)


@contextmanager
def _one_thread() -> Iterator[None]:
    """The cases are tiny: on a busy machine torch's threads would only wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _table(bare: Bare, names: list[str]) -> list[Record]:
    reason = _first_call(bare)
    if reason is not None:
        return [not_run(name, f"the plainest call does not run: {reason}") for name in names]
    steady = _run("eval", bare)
    random = steady.values["status"] == FAILED
    records = []
    for name in BARE_CHECKS:
        if name not in names:
            continue
        if name == "eval":
            records.append(steady)
        elif random:
            records.append(
                not_run(name, f"eval failed: {steady.values['message']}; mend that first")
            )
        else:
            records.append(_run(name, bare))
    return records


def _first_call(bare: Bare) -> str | None:
    """Find a dtype that runs, float64 if it can be; else why not even float32 does."""
    reason = ""
    for dtype in (torch.float64, torch.float32):
        bare.dtype = dtype
        try:
            bare.call(make_case(bare, 2, 3))
            return None
        except NotRunnable as error:
            return str(error)
        except Exception as error:  # whatever another's code raises
            reason = told(error)
    return reason


def _run(name: str, bare: Bare) -> Record:
    started = time.perf_counter()
    try:
        record = BARE_CHECKS[name](bare)
    except NotRunnable as error:
        return not_run(name, str(error))
    except Exception as error:  # whatever another's code raises is a finding
        trial = Trial(bare, name, started=started)
        trial.wrong.append((f"a declared call failed: {told(error)}", 0.0))
        trial.raised = True
        record = trial.record("")
    seconds = round(time.perf_counter() - started, 3)
    return replace(record, values={**record.values, "seconds": seconds})
