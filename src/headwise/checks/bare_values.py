"""Checks of what a bare attention function computes: shapes, agreement, eval, batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from headwise.checks.bare_cases import Bare, Case
from headwise.checks.bare_masks import table
from headwise.checks.bare_trials import Trial, changed, make_case, response, still
from headwise.checks.finding import NotRunnable, failed, passed
from headwise.record import Record

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


# --- shapes --------------------------------------------------------------------------------------


def shapes(bare: Bare) -> Record:
    """Heads are split and merged by transpose: a token moves only its own rows, head by head."""
    trial, signature = Trial(bare, "shapes"), bare.signature
    if signature.is_function:
        _shapes_of_heads(trial)
        good = "a query token moves only its own row, a value head only its own heads"
    elif signature.rectangular:
        case = make_case(bare, 2, 3, 5)
        with trial.trying("3 queries, 5 keys"):
            _own_rows(trial, case, "query")
        _reordered_context(trial)
        good = "a query token moves only its own row; the order of the context does not matter"
    elif signature.mask is not None:
        length = 5
        grid = torch.eye(length, dtype=torch.bool)[None, None]
        case = make_case(bare, 2, length).but(visible=grid, axes=signature.mask_axes[0])
        with trial.trying("5 tokens that see only themselves"):
            _own_rows(trial, case, "query")
        good = "where each token sees only itself, changing one moves only its own row"
    elif signature.causal is not None:
        case = make_case(bare, 2, 5, causal=True)
        with trial.trying("the last of 5 tokens, causal"):
            output = bare.call(case)
            trial.observed.append((case, output))
            moved = response(bare.call(changed(case, "query", 4)), output)
            allowed = (torch.arange(5) == 4).expand_as(moved)
            trial.unmoved(moved, allowed, still(bare, case, output), "changing the last token")
        good = "changing the last token moves only its own row"
    else:
        if signature.projections is not None and signature.projections.rotary is not None:
            raise NotRunnable(
                "the layer attends to itself in full, with positions: nothing separates its tokens"
            )
        _reordered_tokens(trial)
        good = "reordering the tokens reorders the outputs and changes nothing else"
    return trial.record(good, "heads-scrambled")


def _own_rows(trial: Trial, case: Case, name: str) -> None:
    bare = trial.bare
    output = bare.call(case)
    trial.observed.append((case, output))
    limit = still(bare, case, output)
    for token in range(case.sizes[1]):
        moved = response(bare.call(changed(case, name, token)), output)
        allowed = (torch.arange(case.sizes[1]) == token).expand_as(moved)
        trial.unmoved(moved, allowed, limit, f"changing query token {token}")
        if not bool((moved[..., token] > limit).all()):
            trial.wrong.append((f"changing query token {token} does not move its own row", 0.0))


def _shapes_of_heads(trial: Trial) -> None:
    """One head's query, key or value moves only the heads that read it."""
    bare, signature = trial.bare, trial.bare.signature
    case = make_case(bare, 2, 3, 5, kv_heads=signature.kv)
    with trial.trying("3 queries, 5 keys"):
        _own_rows(trial, case, "query")
    groups = signature.heads // signature.kv
    with trial.trying("one head at a time"):
        output = bare.call(case)
        limit = still(bare, case, output)
        for name, count in (("query", signature.heads), ("value", signature.kv)):
            for head in range(count):
                x = getattr(case, name).clone()
                x[:, head] = x[:, head].flip(-1) * 2 + 1
                moved = response(bare.call(case.but(**{name: x})), output)
                reader = torch.arange(signature.heads) // (groups if name == "value" else 1)
                allowed = (reader == head)[None, :, None].expand_as(moved)
                trial.unmoved(moved, allowed, limit, f"changing {name} head {head}")


def _reordered_context(trial: Trial) -> None:
    bare = trial.bare
    where = bare.signature.projections
    if bare.signature.always_causal or (where is not None and where.rotary is not None):
        return
    case = make_case(bare, 2, 3, 5)
    with trial.trying("the context reordered"):
        output = bare.call(case)
        order = torch.tensor([3, 0, 4, 1, 2])
        other = case.but(key=case.key[:, order], value=case.value[:, order])
        moved = response(bare.call(other), output)
        nothing = torch.zeros_like(moved).bool()
        trial.unmoved(moved, nothing, still(bare, case, output), "reordering the context")


def _reordered_tokens(trial: Trial) -> None:
    bare = trial.bare
    case = make_case(bare, 2, 5)
    with trial.trying("5 tokens reordered"):
        output = bare.call(case)
        trial.observed.append((case, output))
        order = torch.tensor([3, 0, 4, 1, 2])
        x = case.query[:, order]
        moved = response(bare.call(case.but(query=x, key=x, value=x)), output[:, order])
        nothing = torch.zeros_like(moved).bool()
        trial.unmoved(moved, nothing, still(bare, case, output), "reordering the tokens")


# --- agreement -----------------------------------------------------------------------------------


def agreement(bare: Bare) -> Record:
    """Outputs against the float64 definition: dtypes, masks, heads, scale, strides, widths."""
    trial, signature = Trial(bare, "agreement"), bare.signature
    if not signature.is_function and signature.projections is None:
        raise NotRunnable(
            "the signature names no projections, so the definition does not know the layer's "
            "weights; pass projections=Projections(...)"
        )
    taken = []
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        if not _takes(bare, dtype):
            trial.notes.append(f"{name} is not taken")
            continue
        taken.append(name)
        for words, case in _battery(bare):
            with trial.trying(words):
                trial.compare(case, f"{words}, {name}", dtype)
    if not taken:
        raise NotRunnable("no dtype of float64, float32, bfloat16 is taken")
    cases = len(dict.fromkeys(trial.ran))
    good = f"{cases} cases in {', '.join(taken)} within bounds of the float64 definition"
    # Where only the views were wrong, and nothing else, they were read as if they were contiguous.
    only_strided = bool(trial.wrong) and all(w.startswith("strided") for w, _ in trial.wrong)
    return trial.record(good, "strides-ignored" if only_strided else None)


def _takes(bare: Bare, dtype: torch.dtype) -> bool:
    try:
        bare.call(make_case(bare, 2, 3), dtype)
    except NotRunnable:
        raise
    except Exception:  # a refusal; the dtype that runs is chosen in `for_attention`
        return dtype == bare.dtype
    return True


def _battery(bare: Bare) -> list[tuple[str, Case]]:
    signature = bare.signature
    keys = 7 if signature.rectangular else None
    base = make_case(bare, 2, 5, keys, kv_heads=signature.kv)
    count = 7 if signature.rectangular else 5
    cases = {"plain": base, "strided": base.but(strided=True)}
    if signature.is_function:
        cases["as many key heads"] = make_case(bare, 2, 5, 7)
        if signature.value_dim is not None:
            cases["wider values"] = make_case(bare, 2, 5, 7, value_dim=signature.value_dim)
        # Another number of heads tells √(heads·head_dim) from head_dim.
        cases["two heads more"] = make_case(bare, 2, 5, 7, heads=signature.heads + 2)
    elif signature.rectangular:
        cases["self-attention"] = make_case(bare, 2, 5)
    draw = torch.Generator().manual_seed(5)
    if signature.causal is not None and "causal" in signature.arguments:
        cases["causal"] = base.but(causal=True)
    if signature.mask is not None:
        align = signature.causal or "end"
        cases["mask"] = base.but(visible=table(5, count, align), axes=signature.mask_axes[0])
    if signature.padding is not None:
        real = torch.arange(count) < torch.tensor([[count], [count - 2]])
        cases["padding"] = base.but(real=real)
    if "window" in signature.arguments:
        cases["window"] = base.but(causal=True, window=2)
    if "scale" in signature.arguments:
        cases["scale 0.3"] = base.but(scale=0.3)
    heads = bare.heads(base)
    bias = torch.randn(1, heads, 5, count, generator=draw, dtype=torch.float64)
    if "bias" in signature.arguments:
        cases["bias"] = base.but(bias=bias)
    if "softcap" in signature.arguments:
        cases["softcap 1.5"] = base.but(softcap=1.5)
        if "mask" in cases:
            cases["softcap and mask"] = cases["mask"].but(softcap=1.5)
    if {"bias", "softcap"} <= set(signature.arguments):
        cases["softcap and bias"] = base.but(softcap=1.5, bias=bias)
    if "sinks" in signature.arguments:
        sinks = torch.linspace(-1.0, 1.5, heads, dtype=torch.float64)
        cases["sinks"] = base.but(sinks=sinks)
        if "mask" in cases:
            cases["sinks and mask"] = cases["mask"].but(sinks=sinks)
    return list(cases.items())


# --- eval and batch ------------------------------------------------------------------------------


class _RandomOps(TorchFunctionMode):
    """Names the dropouts and random draws of a call."""

    def __init__(self) -> None:
        super().__init__()
        self.dropouts: list[str] = []
        self.draws: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if "dropout" in name:
            rate = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
            on = kwargs.get("training", args[2] if len(args) > 2 else True)
            if on and isinstance(rate, float) and rate > 0:
                self.dropouts.append(f"{name} with p = {rate:g}")
        elif name == "scaled_dot_product_attention":
            rate = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
            if rate:
                self.dropouts.append(f"{name} with dropout_p = {rate:g}")
        elif name.startswith(("rand", "bernoulli")):
            self.draws.append(name)
        return func(*args, **kwargs)


def evaluation(bare: Bare) -> Record:
    """Two runs in eval are bit-equal; where not, what draws random numbers is named."""
    trial = Trial(bare, "eval")
    case = make_case(bare, 2, 8)
    with torch.random.fork_rng(devices=[]):
        runs = [bare.call(case) for _ in range(3)]
        moved = max(float(response(run, runs[0]).max()) for run in runs[1:])
        ran = "three runs on 8 tokens, batch 2"
        if moved == 0.0:
            return passed("eval", "three runs in eval are bit-equal", ran=ran, worst=0.0)
        with _RandomOps() as seen:
            bare.call(case)
    message = f"two runs on the same input differ by {moved:.3g}"
    names = seen.dropouts or _modules_left_on(bare)
    common = {"ran": ran, "worst": moved, "tolerance": 0.0}
    common["seconds"] = trial.record("").values["seconds"]
    if names:
        message += f": {', '.join(dict.fromkeys(names))} runs in eval"
        return failed("eval", message, cause="dropout-in-eval", **common)
    if seen.draws:
        message += f": {', '.join(dict.fromkeys(seen.draws))} is drawn"
    return failed("eval", message, cause="random-in-eval", **common)


def _modules_left_on(bare: Bare) -> list[str]:
    module = bare.at(bare.dtype)
    if not isinstance(module, nn.Module):
        return []
    return [
        f"{name} ({type(part).__name__}, p = {part.p:g})"
        for name, part in module.named_modules()
        if isinstance(part, nn.modules.dropout._DropoutNd) and part.training and part.p > 0
    ]


def batch(bare: Bare) -> Record:
    """No sample touches another: other content beside a sample, or no neighbour at all."""
    trial = Trial(bare, "batch")
    case = make_case(bare, 3, 4, kv_heads=bare.signature.kv)
    with trial.trying("3 samples of 4 tokens, sample 1 changed"):
        output = bare.call(case)
        trial.observed.append((case, output))
        limit = still(bare, case, output)
        other = case
        for token in range(4):
            for name in ("query", "key", "value"):
                other = changed(other, name, token, seed=token, sample=1)
        moved = response(bare.call(other), output)
        allowed = torch.zeros_like(moved).bool()
        allowed[1] = True
        trial.unmoved(moved, allowed, limit, "changing sample 1")
        if not bool((moved[1] > limit).all()):
            trial.wrong.append(("changing sample 1 does not change its own outputs", 0.0))
    swapped = bool(trial.wrong) and not trial.raised and _attends_over_batch(bare, case, limit)
    fallback = "batch-and-sequence-swapped" if swapped else "batch-leak"
    return trial.record("changing sample 1 moves no other sample", fallback)


def _attends_over_batch(bare: Bare, case: Case, limit: float) -> bool:
    """The fingerprint of exchanged axes: a token moves its position in every sample, no other."""
    output = bare.call(case)
    other = case
    for name in ("query", "key", "value"):
        other = changed(other, name, 2, sample=1)
    moved = response(bare.call(other), output) > limit
    same_place = (torch.arange(4) == 2).expand_as(moved)
    return bool(torch.equal(moved, same_place))
