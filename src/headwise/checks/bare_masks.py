"""Checks of what a bare attention function may see: alignment, polarity, broadcast and the like.

Each measures by perturbation which query reads which key, so that a wrong scale or head order does
not blur a verdict on the mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.checks.bare_cases import Bare, Case
from headwise.checks.bare_trials import (
    BATCHED_AXES,
    Trial,
    changed,
    make_case,
    measure,
    response,
    still,
)
from headwise.checks.causes import name_fault, truth
from headwise.checks.finding import NotRunnable
from headwise.record import Record

# (queries, keys): decoding, chunks, square, and more queries than keys, whose first rows see none.
SHAPES = ((2, 5), (1, 4), (4, 4), (5, 2))


def alignment(bare: Bare) -> Record:
    """The mask measured for L ≠ S, against the truth table of the declared alignment."""
    trial, signature = Trial(bare, "alignment"), bare.signature
    shapes = SHAPES if signature.rectangular else ((4, 4), (6, 6))
    for queries, keys in shapes:
        given = keys if signature.rectangular else None
        size = f"{queries}×{keys}"
        if signature.causal is not None:
            case = make_case(bare, 2, queries, given, causal=True)
            if "window" in signature.arguments:
                case = case.but(window=2)
            with trial.trying(f"causal {size}"):
                trial.grid(case, f"causal {size}")
        if signature.always_causal:
            continue
        with trial.trying(f"nothing hidden {size}"):
            trial.grid(make_case(bare, 2, queries, given), f"nothing hidden {size}")
        if signature.mask is None:
            continue
        for align in ("end", "start"):
            case = make_case(bare, 2, queries, given)
            case = case.but(visible=table(queries, keys, align), axes=signature.mask_axes[0])
            with trial.trying(f"a causal mask at the {align} {size}"):
                trial.grid(case, f"a causal mask at the {align} {size}")
    stands = {
        None: "nothing is causal unless a mask says so",
        "end": "the last query stands at the last key",
        "start": "query 0 stands at key 0",
    }[signature.causal]
    return trial.record(f"{len(trial.ran)} masks measured as declared: {stands}", "mask-misread")


def table(queries: int, keys: int, align: str) -> Tensor:
    """The causal truth table, (1, 1, L, S): key j ≤ i + shift."""
    shift = keys - queries if align == "end" else 0
    rows = torch.arange(queries)[:, None] + shift
    return (torch.arange(keys) <= rows)[None, None]


def polarity(bare: Bare) -> Record:
    """What True, False, 0 and −inf mean, on a hand-built mask."""
    trial, signature = Trial(bare, "polarity"), bare.signature
    if signature.mask is None and signature.padding is None:
        raise NotRunnable("the signature has no mask or padding argument")
    keys = 4 if signature.rectangular else None
    hand = torch.tensor([[1, 0, 0, 1], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]).bool()
    hand = hand[:3] if signature.rectangular else hand
    queries = hand.shape[0]
    said = []
    if signature.mask is not None:
        case = make_case(bare, 2, queries, keys)
        case = case.but(visible=hand[None, None], axes=signature.mask_axes[0])
        words = f"the mask read as “{signature.mask}”"
        with trial.trying(words):
            trial.grid(case, words)
            said.append(f"{words}, as declared")
        if not trial.wrong and signature.mask != "keep01":
            trial.notes.append(_zeros_and_ones(bare, case))
    if signature.padding is not None:
        real = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]]).bool()
        words = f"the padding read as “{signature.padding}”"
        with trial.trying(words):
            trial.grid(make_case(bare, 2, queries, keys, real=real), words)
            said.append(f"{words}, as declared")
    return trial.record("; ".join(said), "mask-misread")


def _zeros_and_ones(bare: Bare, case: Case) -> str:
    """What the function makes of a float mask of 0 and 1."""
    other = Bare(bare.fn, bare.signature.but(mask="keep01"))
    other.dtype = bare.dtype
    try:
        output, moves = measure(other, case)
    except Exception:  # a refusal, whatever its class
        return "a 0/1 float mask is refused"
    seen = moves > still(bare, case, output)
    own = torch.eye(case.sizes[2], dtype=torch.bool) if case.own else torch.tensor(False)
    declared = bare.declared(case)
    declared = declared if bare.signature.is_function else declared.any(1, keepdim=True)
    if torch.equal(seen | own, declared.expand_as(seen) | own):
        return "a 0/1 float mask is read as a selection, 1 visible"
    if bool((seen | own).all()):
        return (
            "beware: a 0/1 float mask is added to the scores and hides nothing "
            "(float-mask-added); pass bool, or 0 and −inf"
        )
    return "a 0/1 float mask is read as something else: never pass one"


def broadcast(bare: Bare) -> Record:
    """Every axis of another prime length, and then all equal, where a wrong axis is silent."""
    trial, signature = Trial(bare, "broadcast"), bare.signature
    if signature.mask is None and signature.padding is None:
        raise NotRunnable("the signature has no mask or padding argument")
    for case, size in _broadcast_sizes(bare):
        heads = bare.heads(case)
        axes_list = signature.mask_axes if signature.mask is not None else ()
        for number, axes in enumerate(axes_list):
            grid = _random_grid(axes, case, heads, seed=number)
            words = f"a mask ({', '.join(axes)}) at {size}"
            with trial.trying(words):
                trial.grid(case.but(visible=grid, axes=axes), words)
        if signature.padding is not None:
            batch, _, keys = case.sizes
            draw = torch.Generator().manual_seed(7)
            real = torch.rand(batch, keys, generator=draw) < 0.5
            real[:, 0] = True
            words = f"padding (b, s) at {size}"
            with trial.trying(words):
                trial.grid(case.but(real=real), words)
    _layer_heads(trial)
    return trial.record(f"{len(trial.ran)} mask shapes laid over the right axes", "mask-misread")


def _broadcast_sizes(bare: Bare) -> list[tuple[Case, str]]:
    signature = bare.signature
    if signature.is_function:
        # One dtype of width for all; heads are free.
        prime = make_case(bare, 2, 5, 7, heads=3, head_dim=signature.head_dim)
        equal = make_case(bare, 3, 3, 3, heads=3, head_dim=signature.head_dim)
        return [(prime, "(b, h, l, s) = (2, 3, 5, 7)"), (equal, "b = h = l = s = 3")]
    primes = [n for n in (2, 3, 5, 7, 11) if n != signature.heads]
    same = max(2, signature.heads)
    if not signature.rectangular:
        prime, equal = make_case(bare, primes[0], primes[1]), make_case(bare, same, same)
        return [(prime, f"(b, l) = ({primes[0]}, {primes[1]})"), (equal, f"b = h = l = {same}")]
    prime, equal = make_case(bare, *primes[:3]), make_case(bare, same, same, same)
    return [
        (prime, f"(b, l, s) = ({primes[0]}, {primes[1]}, {primes[2]})"),
        (equal, f"b = h = l = s = {same}"),
    ]


def _random_grid(axes: str, case: Case, heads: int, seed: int) -> Tensor:
    batch, queries, keys = case.sizes
    shape = (
        batch if "b" in axes else 1,
        heads if "h" in axes else 1,
        queries if "l" in axes else 1,
        keys,
    )
    draw = torch.Generator().manual_seed(seed)
    grid = torch.rand(shape, generator=draw) < 0.35
    # Each row keeps a key, and each key a row.
    first = torch.arange(shape[2])[:, None] % keys == torch.arange(keys)
    return grid | first


def _layer_heads(trial: Trial) -> None:
    """A layer's outputs join its heads: where values tell of a wrong axis, that counts too."""
    bare = trial.bare
    if trial.wrong or bare.signature.is_function or bare.signature.projections is None:
        return
    for case, output in trial.observed:
        fault = name_fault(bare, [(case, output)], bare.dtype)
        if fault is not None and fault.cause == "mask-wrong-axis":
            wanted, limit = truth(bare, case, bare.dtype)
            off = float(response(output.double(), wanted).max())
            trial.wrong.append((f"a mask ({case.axes}): off by {off:.3g}, bound {limit:.2g}", off))
            return


def future_leak(bare: Bare) -> Record:
    """Changing a token leaves earlier outputs alone, with and without another mask."""
    trial, signature = Trial(bare, "future leak"), bare.signature
    if signature.causal is None:
        raise NotRunnable("the signature declares nothing causal")
    length = 7
    case = make_case(bare, 2, length, causal=True)
    ways = {"causal alone": case}
    if signature.mask is not None:
        grid = torch.ones(1, 1, length, length, dtype=torch.bool)
        ways["with an all-visible mask"] = case.but(visible=grid, axes=signature.mask_axes[0])
    if signature.padding is not None:
        ways["with a padding mask"] = case.but(real=torch.ones(2, length, dtype=torch.bool))
    leaks = {}
    for words, way in ways.items():
        with trial.trying(words):
            output = bare.call(way)
            trial.observed.append((way, output))
            limit, moved_any = still(bare, way, output), 0.0
            before = len(trial.wrong)
            for token in range(length):
                other = way
                for name in ("query", "key", "value"):
                    other = changed(other, name, token, seed=token)
                moved = response(bare.call(other), output)
                moved_any = max(moved_any, float(moved[..., token:].max()))
                allowed = (torch.arange(length) >= token).expand_as(moved)
                trial.unmoved(moved, allowed, limit, f"{words}: changing token {token}")
            if moved_any <= limit:
                trial.wrong.append((f"{words}: no output moves whatever token changes", 0.0))
            leaks[words] = len(trial.wrong) > before
    only_bare = leaks.get("causal alone", False) and len(leaks) > 1 and sum(leaks.values()) == 1
    return trial.record(
        f"changing any of {length} tokens leaves earlier outputs alone, {', '.join(ways)}",
        "future-leak",
        certain="leak-without-padding-mask" if only_bare else None,
    )


def measured_mask(bare: Bare) -> Record:
    """The mask as perturbation finds it, drawn beside the declared one."""
    trial, signature = Trial(bare, "measured mask"), bare.signature
    case = make_case(bare, 1, 6, causal=signature.causal is not None)
    if "window" in signature.arguments:
        case = case.but(window=3)
    with trial.trying("6 queries, 6 keys"):
        trial.grid(case, "6 queries, 6 keys")
    shown = sum(sum(row) for row in trial.grids.get("declared", []))
    return trial.record(f"each query reads the {shown:g} of 36 pairs declared, no other", None)


def padding(bare: Bare) -> Record:
    """What stands in hidden keys changes nothing: left, right, one and many, a batch of one."""
    trial, signature = Trial(bare, "padding"), bare.signature
    axes = [name for name in BATCHED_AXES if name in signature.mask_axes]
    by_mask = signature.mask is not None and (axes or signature.mask_axes)
    if signature.padding is None and not by_mask:
        raise NotRunnable("the signature has no mask or padding argument")
    length = 6
    keys = length if signature.rectangular else None
    for batch, side, pads in ((2, "right", 1), (2, "left", 4), (1, "right", 3), (1, "left", 0)):
        places = torch.arange(length).expand(batch, length)
        real = places < length - pads if side == "right" else places >= pads
        words = f"batch {batch}, {pads} pads {side}"
        case = make_case(bare, batch, length, keys)
        if signature.padding is not None:
            case = case.but(real=real)
        else:
            shared = axes[0] if axes else signature.mask_axes[0]
            grid = real[:, None, None, :] if axes else real[None, None, :1].expand(1, 1, length, -1)
            case = case.but(
                visible=grid if shared == "b11s" else grid.expand(-1, -1, length, -1), axes=shared
            )
        with trial.trying(words):
            output = bare.call(case)
            trial.observed.append((case, output))
            other = case
            for token in (~real[0]).nonzero().flatten().tolist():
                for name in ("key", "value"):
                    other = changed(other, name, token, seed=token)
            moved = response(bare.call(other), output)
            queries = real if case.own else torch.ones_like(real)
            free = ~queries if moved.dim() == 2 else ~queries[:, None].expand_as(moved)
            limit = still(bare, case, output)
            trial.unmoved(moved, free, limit, f"{words}: changing the padding")
    return trial.record("what stands in hidden keys changes no output", "padding-leak")


def cache(bare: Bare) -> Record:
    """Decoding one query at a time, and in chunks, gives the rows of one full pass."""
    trial, signature = Trial(bare, "cache"), bare.signature
    if signature.causal is None:
        raise NotRunnable("the signature declares nothing causal, so nothing decodes")
    if not signature.is_function:
        raise NotRunnable("the signature has no cache; a model's cache is checked by check(model)")
    if signature.causal == "start":
        raise NotRunnable(
            "causality stands at the start: with cached keys this function needs a mask of its own"
        )
    length = 6
    case = make_case(bare, 2, length, causal=True)
    if "window" in signature.arguments:
        case = case.but(window=3)
    full = bare.call(case)
    trial.observed.append((case, full))
    for cut in (1, 2):
        words = f"{cut} token{'s' if cut > 1 else ''} a step"
        with trial.trying(words):
            for end in range(cut, length + 1, cut):
                part = case.but(
                    query=case.query[:, :, end - cut : end],
                    key=case.key[:, :, :end],
                    value=case.value[:, :, :end],
                )
                output = bare.call(part)
                trial.observed.append((part, output))
                _, limit = truth(bare, part, bare.dtype)
                moved = response(output, full[:, :, end - cut : end])
                words_now = f"{words}: the step to token {end - 1}"
                trial.unmoved(moved, torch.zeros_like(moved).bool(), limit, words_now)
    return trial.record("decoding in steps gives the rows of one full pass")
