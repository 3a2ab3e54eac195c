"""Agreement: every path, and every exported form, gives the outputs of the float64 definition."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from headwise.checks import padding, rounding
from headwise.checks.finding import NotRunnable, failed, not_run, passed
from headwise.checks.outputs import rows_of
from headwise.checks.subject import Subject
from headwise.record import Record

AGREEMENT = "agreement"
# One input of a form, by name: tokens, and which of them are real where a mask says so.
Inputs = dict[str, tuple[Tensor, Tensor | None]]


def agreement(subject: Subject) -> list[Record]:
    """Each path against the model in float64, and each exported form against the model itself.

    The definition is the model in float64, on its "headwise" path where it has one: transformers'
    own eager path takes the softmax in float32 whatever the model's dtype. Forms: what
    `torch.export` and `torch.compile` (backend "aot_eager": traced and decomposed, not turned into
    new machine code) make of the model; compiling is slow, so only the first path is compiled.
    """
    subject.want_steady()
    records = [_path(subject, path) for path in subject.paths]
    for path in subject.paths:
        if path != "eager" or path == subject.paths[0]:
            records.append(_form(subject, path, "torch.export", _exported))
    records.append(_form(subject, subject.paths[0], "torch.compile", _compiled))
    return records


def _path(subject: Subject, path: str) -> Record:
    double = subject.double()
    base = next((p for p in ("headwise", "eager") if p in subject.paths), subject.paths[0])
    if double is None and path == base:
        reason = (
            "this path is the definition that the others are held against: the model is float64 "
            "already, or its float64 copy would be larger than 4 GiB"
        )
        return not_run(AGREEMENT, reason, path=path)
    exact = subject if double is None else double
    inputs = _inputs(subject)
    worst = bound = 0.0
    where = ""
    try:
        for name, (tokens, real) in inputs.items():
            with subject.on(path):
                mine = _real_rows(subject.run(tokens, real=real), real)
            with exact.in_eval(), exact.on(base):
                given = tokens.double() if tokens.is_floating_point() and double else tokens
                wanted = _real_rows(exact.run(given, real=real), real)
            bound = max(bound, rounding.bound_of(subject, mine))
            off = rounding.apart(mine, wanted)
            if off > worst:
                worst, where = off, name
    except NotRunnable as error:
        return not_run(AGREEMENT, str(error), path=path)
    numbers: dict[str, Any] = {
        "path": path,
        "ran": f"{str(subject.dtype).removeprefix('torch.')} beside {base} in "
        f"{str(exact.dtype).removeprefix('torch.')}; {', '.join(inputs)}",
        "tolerance": bound,
        "worst": worst,
    }
    if worst > bound:
        message = (
            f"outputs are off by {worst:.3g} from the {base} path in float64 (rounding explains "
            f"{bound:.1g}), with {where}"
        )
        cause = "path-differs" if path != base else None
        return failed(AGREEMENT, message, cause=cause, **numbers)
    return passed(AGREEMENT, f"off by {worst:.2g} at most (allowed {bound:.1g})", **numbers)


def _inputs(subject: Subject) -> Inputs:
    """Without padding; and with padding on the right, where the model takes a mask of it."""
    tokens = subject.tokens()
    found: Inputs = {"no padding": (tokens, None)}
    stream = subject.main
    if stream.padding is not None and not stream.whole and subject.documents is None:
        many = tokens.shape[1] // 2
        case = padding.pad(subject, tokens[:, : tokens.shape[1] - many], many, "right")
        found["right padding"] = (case.tokens, case.real)
    return found


def _real_rows(outputs: Tensor, real: Tensor | None) -> Tensor:
    if real is None or outputs.shape[1] != real.shape[1]:
        return outputs
    return outputs[:, real[0]]


# --- exported forms -------------------------------------------------------------------------------


class _Refused(Exception):
    """Why a form can't be made."""


def _form(
    subject: Subject, path: str, name: str, make: Callable[[Subject, Any, Any], Callable[..., Any]]
) -> Record:
    """A form is made from one example and run on another of its shape, so that what was fixed
    while tracing shows."""
    inputs = _inputs(subject) if make is _exported else {"no padding": (subject.tokens(), None)}
    more = {"use_cache": False} if subject.takes("use_cache") else {}
    worst = bound = 0.0
    where = ""
    try:
        with subject.on(path), _quiet():
            for case, (tokens, real) in inputs.items():
                args, kwargs = subject.arguments(tokens, real=real, more=more)
                other = _other(subject, tokens, real)
                changed = subject.arguments(other, real=real, more=more)
                _own(subject, args, kwargs)
                try:
                    form = make(subject, args, kwargs)
                    form(*args, **kwargs)
                except Exception as error:
                    raise _Refused(f"{type(error).__name__}: {_first_line(error)}") from error
                wanted = _rows(subject, _own(subject, *changed), real)
                try:
                    mine = _rows(subject, form(*changed[0], **changed[1]), real)
                except Exception as error:  # it took the example, and not another of its shape
                    message = (
                        f"what {name} makes of the model takes the example that it was made from "
                        f"and fails on another of shape {list(tokens.shape)}, with {case}: "
                        f"{type(error).__name__}: {_first_line(error)}"
                    )
                    return failed(
                        AGREEMENT, message, cause="exported-form-differs", path=path, case=name
                    )
                bound = max(bound, rounding.bound_of(subject, wanted))
                off = rounding.apart(mine, wanted)
                if off > worst:
                    worst, where = off, case
    except _Refused as error:
        return not_run(AGREEMENT, f"{name} does not take the model: {error}", path=path, case=name)
    except NotRunnable as error:
        return not_run(AGREEMENT, str(error), path=path, case=name)
    numbers: dict[str, Any] = {
        "path": path,
        "case": name,
        "ran": f"made from one example, run on another; {', '.join(inputs)}",
        "tolerance": bound,
        "worst": worst,
    }
    if worst > bound:
        message = (
            f"the model and what {name} makes of it differ by {worst:.3g} (rounding explains "
            f"{bound:.1g}), with {where}"
        )
        return failed(AGREEMENT, message, cause="exported-form-differs", **numbers)
    message = f"the same outputs as the model's own, to {worst:.2g} (allowed {bound:.1g})"
    return passed(AGREEMENT, message, **numbers)


def _own(subject: Subject, args: Any, kwargs: Any) -> Any:
    try:
        return subject.model(*args, **kwargs)
    except Exception as error:
        raise NotRunnable(
            f"the model raised {type(error).__name__}: {_first_line(error)}"
        ) from error


def _other(subject: Subject, tokens: Tensor, real: Tensor | None) -> Tensor:
    other = subject.fresh(tokens, 11)
    if real is None:
        return other
    keep = real if tokens.ndim == 2 else real[..., None]
    return torch.where(keep.to(tokens.device), other, tokens)


def _rows(subject: Subject, output: Any, real: Tensor | None) -> Tensor:
    return _real_rows(rows_of(output, 1, subject.batch_first), real)


def _exported(subject: Subject, args: Any, kwargs: Any) -> Callable[..., Any]:
    return torch.export.export(subject.model, tuple(args), kwargs, strict=False).module()


def _compiled(subject: Subject, args: Any, kwargs: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(subject.model, backend="aot_eager")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without gradients, and without what the tracers warn of: a person asked for outputs."""
    import logging

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = logging.root.manager.disable
        logging.disable(logging.ERROR)
        try:
            yield
        finally:
            logging.disable(before)
            torch._dynamo.reset()


def _first_line(error: Exception) -> str:
    return (str(error).strip() or "no message").splitlines()[0][:160]
