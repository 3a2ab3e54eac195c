"""Measured mask: the Jacobian norms ‖∂y_i/∂x_j‖ beside the mask that the model declares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headwise.checks import blame, declared
from headwise.checks.finding import NotRunnable, exact_bound, failed, gap, not_run, passed, size_of
from headwise.checks.subject import Subject
from headwise.record import Record

MASK = "measured mask"
# Rows of a picture's grid that are measured; each costs a backward pass.
ROWS = 12


def measured_mask(subject: Subject) -> list[Record]:
    """‖∂y_i/∂x_j‖ is 0 wherever the model declares j hidden from i, and not 0 where it is visible.

    A single 0 at a visible place can be chance (a weight that underflows); a whole diagonal of them
    is a mask that hides too much. One record a path: a fault may live in one backend only.
    """
    subject.want_steady()
    return on_each_path(subject, MASK, _measure)


def on_each_path(
    subject: Subject, name: str, judge: Callable[[Subject, str], Record]
) -> list[Record]:
    """What `judge(subject, path)` finds on each of the model's paths, switched on meanwhile."""
    records = []
    for path in subject.paths:
        try:
            with subject.on(path):
                records.append(judge(subject, path))
        except NotRunnable as error:
            records.append(not_run(name, str(error), path=path))
    return records


def _measure(subject: Subject, path: str) -> Record:
    if subject.main.whole:
        return _whole(subject, path)
    tokens = subject.tokens()
    length = tokens.shape[1]
    grid = jacobian(subject, tokens, list(range(length)))
    allowed = subject.declared(length)
    numbers: dict[str, Any] = {
        "path": path,
        "measured": rounded(grid),
        "ran": f"{length} × {length} Jacobian norms",
    }
    if allowed is None:
        reason = (
            "cannot know what the model may see: nothing says whether it is causal; the grid is "
            "measured, pass causal=True or causal=False to judge it"
        )
        return not_run(MASK, reason, **numbers)
    numbers["declared"] = allowed.int().tolist()
    if not bool(grid.isfinite().all()):
        return failed(MASK, "the Jacobian holds NaN or infinities without any padding", **numbers)
    bound = torch.finfo(subject.dtype).eps * float(grid.max())
    numbers |= {"tolerance": bound, "worst": float(grid.masked_fill(allowed, 0.0).max())}
    seen = grid > bound
    if bool((seen & ~allowed).any()):
        return _too_much(subject, tokens, grid, allowed, numbers)
    missing = empty_diagonals(seen, allowed)
    if missing:
        return _too_little(subject, missing, length, numbers)
    share = float((seen & allowed).sum()) / float(allowed.sum())
    message = (
        f"every hidden pair has norm {numbers['worst']:.2g} or less (allowed {bound:.1g}); "
        f"{100 * share:.0f} % of the visible ones are above it"
    )
    if path != subject.paths[0]:  # one grid is drawn; where all is well, the others are alike
        del numbers["measured"], numbers["declared"]
    return passed(MASK, message, **numbers)


def rounded(grid: Tensor) -> list[list[float]]:
    """A grid for a record: four digits of each number."""
    return [[float(f"{value:.4g}") for value in row] for row in grid.tolist()]


def _too_much(
    subject: Subject, tokens: Tensor, grid: Tensor, allowed: Tensor, numbers: dict
) -> Record:
    hidden = grid.masked_fill(allowed, 0.0)
    query, key = divmod(int(hidden.argmax()), grid.shape[1])
    count = int((hidden > numbers["tolerance"]).sum())
    masks = subject.layer_masks(grid.shape[0])
    where = None
    if masks is not None:
        where = blame.first_hidden_weight(
            blame.watched(subject, lambda: subject.run(tokens)), masks
        )
    message = (
        f"token {key} moves output {query}, which may not see it: Jacobian norm "
        f"{float(hidden.max()):.3g}, {count} such pairs in all{blame.words(where)}"
    )
    cause = name_pattern(subject, None, tokens)
    return failed(MASK, message, cause=cause, where=where, **numbers)


def empty_diagonals(seen: Tensor, allowed: Tensor) -> list[int]:
    """Distances i − j that are declared visible somewhere and measured nowhere."""
    length = seen.shape[0]
    missing = []
    for distance in range(1 - length, length):
        may, does = allowed.diagonal(-distance), seen.diagonal(-distance)
        if bool(may.any()) and not bool((may & does).any()):
            missing.append(distance)
    return missing


def _too_little(subject: Subject, missing: list[int], length: int, numbers: dict) -> Record:
    others = {d for d in range(1 - length, length) if d}
    cause = None
    if others & set(missing) == {d for d in others if d > 0 or not subject.causal}:
        cause = "batch-and-sequence-swapped" if swapped(subject) else "nothing-connected"
        what = "no token moves any other's output"
    elif all(d < 0 for d in missing) and len(missing) == length - 1:
        cause, what = "causal-in-encoder", "no token moves an output before it"
    else:
        shown = ", ".join(str(d) for d in missing[:5])
        what = f"no output follows a token at distance {shown}"
        if declared.windows(subject.model):
            cause = "window-off-by-one"
    message = (
        f"{what}, though the model declares it visible: {len(missing)} of {2 * length - 1} "
        "diagonals of the measured mask are 0, so a mask hides too much"
    )
    return failed(MASK, message, cause=cause, **numbers)


def _whole(subject: Subject, path: str) -> Record:
    """Every patch of a picture, every moment of a sound moves every output: its gradients, summed
    over each patch or moment."""
    leaf = subject.tokens().detach().clone().requires_grad_()
    outputs = subject.run(leaf, grad=True)
    count = outputs.shape[1]
    parts, pool = _patches(subject) if subject.main.kind == "image" else _moments(leaf, count)
    queries = sorted({round(n * (count - 1) / (ROWS - 1)) for n in range(ROWS)})
    rows = [pool(row.double().square()) for row in _rows(outputs, leaf, queries)]
    grid = torch.stack(rows).sqrt()
    blind = int((grid == 0).sum())
    few = sorted({round(n * (grid.shape[1] - 1) / (ROWS - 1)) for n in range(ROWS)})
    small = grid[:, few]
    numbers: dict[str, Any] = {
        "path": path,
        "ran": f"{len(queries)} of {count} outputs by {grid.shape[1]} {parts}",
        "measured": rounded(small),
        "declared": torch.ones_like(small).int().tolist(),
        "worst": float(grid.min()),
    }
    if not bool(grid.isfinite().all()):
        return failed(MASK, "the Jacobian holds NaN or infinities", **numbers)
    if blind > grid.numel() // 100:
        message = (
            f"{blind} of {grid.numel()} pairs of one output and one of the {parts} are not "
            "connected at all"
        )
        return failed(MASK, message, **numbers)
    message = f"every output follows the {parts}: {grid.numel() - blind} of {grid.numel()} pairs"
    if path != subject.paths[0]:
        del numbers["measured"], numbers["declared"]
    return passed(MASK, message, **numbers)


Pool = Callable[[Tensor], Tensor]


def _patches(subject: Subject) -> tuple[str, Pool]:
    """What squares of pixels' gradients, (1, C, H, W), are summed over."""
    patch = getattr(getattr(subject.model, "config", None), "patch_size", None)
    if patch is None:
        raise NotRunnable("the model's config has no patch_size, so patches can't be told apart")
    high, wide = (patch, patch) if isinstance(patch, int) else (int(patch[0]), int(patch[1]))

    def pool(squares: Tensor) -> Tensor:
        squares = squares.sum(1)[0]
        squares = squares[: squares.shape[0] // high * high, : squares.shape[1] // wide * wide]
        return squares.unflatten(1, (-1, wide)).unflatten(0, (-1, high)).sum((1, 3)).flatten()

    return "patches", pool


def _moments(sound: Tensor, outputs: int) -> tuple[str, Pool]:
    """The same for a spectrogram, (1, bands, frames): the frames of one output are a moment."""
    step = max(1, sound.shape[2] // outputs)

    def pool(squares: Tensor) -> Tensor:
        frames = squares.sum(1)[0]
        return frames[: frames.shape[0] // step * step].unflatten(0, (-1, step)).sum(1)

    return "moments", pool


def _rows(outputs: Tensor, leaf: Tensor, queries: list[int]) -> list[Tensor]:
    """vᵀ ∂y_i/∂leaf for each query i, with one Gaussian probe v."""
    generator = torch.Generator().manual_seed(2)
    probe = torch.randn(outputs.shape[-1], generator=generator, dtype=torch.float64).to(outputs)
    rows = []
    for number, query in enumerate(queries):
        target = (outputs[0, query] * probe).sum()
        keep = number + 1 < len(queries)
        if not target.requires_grad:
            raise NotRunnable("the model's outputs carry no gradient (detached, or no_grad inside)")
        (gradient,) = torch.autograd.grad(target, leaf, retain_graph=keep, allow_unused=True)
        rows.append(torch.zeros_like(leaf) if gradient is None else gradient.detach())
    return rows


def swapped(subject: Subject) -> bool:
    """Alone no token moves any other, and in a batch a neighbour does: the axes are swapped."""
    tokens = subject.tokens()
    pairs = [torch.cat([tokens, subject.fresh(tokens, seed)]) for seed in (3, 4)]
    one, two = (subject.run(pair)[:1] for pair in pairs)
    if gap(one, two) <= exact_bound(one.dtype, one.shape[1], size_of(one)):
        return False
    if subject.main.whole or one.shape[1] != tokens.shape[1]:
        return False
    place = tokens.shape[1] // 2
    others = torch.arange(tokens.shape[1]) != place
    base, changed = subject.run(tokens), subject.run(subject.replaced(tokens, place))
    bound = exact_bound(base.dtype, base.shape[1], size_of(base))
    return gap(base[:, others], changed[:, others]) <= bound


def name_pattern(subject: Subject, path: str | None, tokens: Tensor) -> str:
    """The cause, from the pattern of who sees whom: measured on one layer, or on the whole."""
    length = tokens.shape[1]
    masks = subject.layer_masks(length)
    with subject.on(path):
        if blame.softmax_over_queries(subject, tokens):
            return "softmax-axis"
        calls = blame.watched(subject, lambda: subject.run(tokens))
        if calls and masks is not None:
            weights = blame.weights_of(calls[0])[0].amax(0)
            if weights.shape == masks[0].shape:
                return pattern_cause(weights > 0, masks[0], subject)
        seen = jacobian(subject, tokens, list(range(length))) > 0
    allowed = subject.declared(length)
    assert allowed is not None
    return pattern_cause(seen, allowed, subject)


def pattern_cause(seen: Tensor, allowed: Tensor, subject: Subject) -> str:
    """Name what (L, L) `seen` has wrong against `allowed`."""
    length = seen.shape[0]
    place = torch.arange(length)
    distance = place[:, None] - place[None, :]
    past, future = distance > 0, distance < 0
    leaks = seen & ~allowed
    if subject.causal and bool(leaks[future].any()):
        if not bool(seen[past].any()):
            return "mask-polarity"
        if not bool(leaks[distance < -1].any()) and bool(leaks[distance == -1].all()):
            return "causal-off-by-one"
        return "future-leak"
    if subject.documents is not None:
        ids = subject.documents[:length].to(seen.device)
        if bool(leaks[ids[:, None] != ids[None, :]].any()):
            return "document-leak"
    if bool(leaks.any()):
        return "window-off-by-one"
    return "future-leak"


def jacobian(subject: Subject, tokens: Tensor, queries: list[int]) -> Tensor:
    """(len(queries), L): ‖∂y_i/∂x_j‖, y the outputs of position i, x the embedding of token j.

    One Gaussian probe v for each row gives ‖vᵀ ∂y_i/∂x_j‖: 0 exactly where the Jacobian is, and
    its square is the squared Frobenius norm on average (Hutchinson 1990).
    """
    held: list[Tensor] = []

    def leaf(embedded: Tensor) -> Tensor:
        held.append(embedded.detach().requires_grad_())
        return held[0]

    outputs = subject.run(tokens, embed=leaf, grad=True)
    subject.want_rows(outputs, tokens)
    rows = [row[0].double().norm(dim=-1) for row in _rows(outputs, held[0], queries)]
    return torch.stack(rows)
