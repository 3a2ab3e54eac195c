"""Gradients of a bare attention function: right, finite, and none for a row with no key."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

from headwise.checks.bare_cases import Bare, Case
from headwise.checks.bare_masks import table
from headwise.checks.bare_trials import Trial, make_case
from headwise.checks.finding import NotRunnable, size_of
from headwise.record import Record


def gradients(bare: Bare) -> Record:
    """gradcheck in float64; all finite; a row with no key gives and takes none."""
    trial, signature = Trial(bare, "gradients"), bare.signature
    if bare.dtype != torch.float64:
        raise NotRunnable("float64 is not taken, and gradcheck needs it")
    keys = 4 if signature.rectangular else None
    case = make_case(bare, 1, 3, keys, kv_heads=signature.kv)
    if not _differentiable(bare, case):
        raise NotRunnable("the output carries no gradient")
    with trial.trying("gradcheck, 3 queries"):
        _gradcheck(trial, case, "gradcheck")
    if signature.mask is not None:
        grid = table(3, case.sizes[2], signature.causal or "end")
        masked = case.but(visible=grid, axes=signature.mask_axes[0])
        with trial.trying("gradcheck with a mask"):
            _gradcheck(trial, masked, "gradcheck with a mask")
        with trial.trying("a row with no key"):
            _empty_row(trial, case)
    elif signature.causal == "end" and signature.rectangular:
        with trial.trying("a row with no key"):
            _empty_row(trial, make_case(bare, 1, 4, 2, kv_heads=signature.kv, causal=True))
    else:
        trial.notes.append("no mask argument: no row can be left without a key")
    return trial.record("gradients equal finite differences, and are finite", trial.suspect)


def _leaves(bare: Bare, case: Case) -> dict[str, Tensor]:
    """The tensors that one can take a gradient of, by name."""
    names = ["query", "key", "value"]
    if case.own:
        names = ["query"]
    elif not bare.signature.is_function and bare.signature.inputs == "context":
        names = ["query", "key"]  # one context gives keys and values
    return {name: getattr(case, name).clone().requires_grad_() for name in names}


def _placed(case: Case, leaves: dict[str, Tensor]) -> Case:
    """The case with these tensors in the place of its own."""
    query = leaves["query"]
    key = query if case.own else leaves["key"]
    return case.but(query=query, key=key, value=leaves.get("value", key))


def _differentiable(bare: Bare, case: Case) -> bool:
    return bare.call(_placed(case, _leaves(bare, case)), grad=True).requires_grad


def _gradcheck(trial: Trial, case: Case, words: str) -> None:
    leaves = _leaves(trial.bare, case)

    def run(*tensors: Tensor) -> Tensor:
        given = dict(zip(leaves, tensors, strict=True))
        return trial.bare.call(_placed(case, given), grad=True)

    inputs = tuple(leaves.values())
    try:
        # Fast mode compares random projections of the Jacobian: any wrong entry shows in them.
        torch.autograd.gradcheck(run, inputs, fast_mode=True)
    except GradcheckError as error:
        output = run(*inputs)
        pull = torch.linspace(0.5, 1.5, output.numel(), dtype=output.dtype).view_as(output)
        found = torch.autograd.grad((output * pull).sum(), inputs, allow_unused=True)
        cut = [n for n, g in zip(leaves, found, strict=True) if g is None or not bool(g.any())]
        # float32 inside, 6e-8 of it over steps of 3e-3: 5e-4 in an entry is room enough.
        if not cut and torch.autograd.gradcheck(
            run, inputs, eps=3e-3, atol=5e-4, rtol=1e-3, raise_exception=False
        ):
            trial.notes.append("computes in float32 inside: compared with steps of 3e-3")
            return
        why = " ".join(str(error).split())[:200]
        if cut:
            why = f"{len(cut)} of {len(leaves)} inputs get no gradient: {', '.join(cut)}"
            trial.suspect = "gradient-cut"
        trial.wrong.append((f"{words}: {why}", 0.0))


def _empty_row(trial: Trial, case: Case) -> None:
    """Query 0 sees no key: nothing becomes NaN, and that query gets no gradient."""
    bare = trial.bare
    if bare.signature.empty_rows == "nan":
        trial.notes.append("rows with no key are declared not to give zeros: not tried")
        return
    if not (bool((~bare.declared(case).any(-1)).any())):
        grid = torch.ones(1, 1, case.sizes[1], case.sizes[2], dtype=torch.bool)
        grid[:, :, 0] = False
        case = case.but(visible=grid, axes=bare.signature.mask_axes[0])
    trial.observed.append((case, bare.call(case)))
    leaves = _leaves(bare, case)
    output = bare.call(_placed(case, leaves), grad=True)
    weights = torch.linspace(0.5, 1.5, output.numel(), dtype=output.dtype).view_as(output)
    found = torch.autograd.grad((output * weights)[..., 1:, :].sum(), list(leaves.values()))
    for (name, _), grad in zip(leaves.items(), found, strict=True):
        if not bool(grad.isfinite().all()):
            count = int((~grad.isfinite()).sum())
            trial.wrong.append(
                (f"query 0 sees no key: {count} of {grad.numel()} gradients of {name} are NaN", 0.0)
            )
            trial.suspect = "nan-from-empty-row"
        elif name == "query" and not case.own and bool((grad[..., 0, :] != 0).any()):
            size = size_of(grad[..., 0, :])
            trial.wrong.append((f"query 0 sees no key but has a gradient of {size:.3g}", size))
