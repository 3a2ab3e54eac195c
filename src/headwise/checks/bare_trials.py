"""What the checks of a bare function share: cases to try, visibility by perturbation, verdicts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headwise.checks.bare_cases import Bare, Case, WrongOutput
from headwise.checks.causes import Fault, matching, near, truth
from headwise.checks.finding import NotRunnable, exact_bound, failed, passed, size_of
from headwise.checks.fixes import FIXES
from headwise.record import Record

# Axes that carry a mask for each sample, widest support first.
BATCHED_AXES = ("b11s", "b1ls", "bls", "bhls", "(bh)ls")


def make_case(
    bare: Bare,
    batch: int = 2,
    queries: int = 5,
    keys: int | None = None,
    *,
    seed: int = 0,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    value_dim: int | None = None,
    **features: Any,
) -> Case:
    """Random inputs of these sizes; scores spread enough that the weights differ.

    A signature that is always causal is causal in every case. Without `keys` a layer attends to
    itself.
    """
    signature = bare.signature
    draw = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    features.setdefault("causal", signature.always_causal)
    keys_given = queries if keys is None else keys
    if not signature.is_function:
        width = signature.features
        query = 1.5 * random(batch, queries, width)
        if keys is None:
            return Case(query, query, query, own=True, **features)
        context = 1.5 * random(batch, keys, width)
        return Case(query, context, context, **features)
    heads = signature.heads if heads is None else heads
    kv_heads = heads if kv_heads is None else kv_heads
    head_dim = signature.head_dim if head_dim is None else head_dim
    value_dim = head_dim if value_dim is None else value_dim
    return Case(
        1.3 * random(batch, heads, queries, head_dim),
        1.3 * random(batch, kv_heads, keys_given, head_dim),
        random(batch, kv_heads, keys_given, value_dim),
        **features,
    )


def changed(
    case: Case, name: str, index: int, *, seed: int = 99, sample: int | None = None
) -> Case:
    """The case with token `index` of one input replaced by noise ten times as large."""
    draw = torch.Generator().manual_seed(seed)
    x = getattr(case, name).clone()
    rows = slice(None) if sample is None else slice(sample, sample + 1)
    part = x[rows][..., index, :]
    x[rows][..., index, :] = 10.0 * torch.randn(part.shape, generator=draw, dtype=x.dtype)
    if case.own:
        return case.but(query=x, key=x, value=x)
    if case.query.dim() == 3 and name != "query":
        # A layer's context gives keys and values.
        return case.but(key=x, value=x)
    return case.but(**{name: x})


def told(error: Exception) -> str:
    """An error of another's code, in one line."""
    first = (str(error) or "no message").strip().splitlines()[0][:200]
    if isinstance(error, WrongOutput):
        return first
    return f"the call raised {type(error).__name__}: {first}"


def response(one: Tensor, two: Tensor) -> Tensor:
    """How far each row moved: the last axis's largest difference; NaN against a number is inf."""
    same = (one == two) | (one.isnan() & two.isnan())
    moved = torch.where(same, 0.0, (one - two).abs().double())
    return moved.nan_to_num(nan=torch.inf).amax(-1)


def still(bare: Bare, case: Case, output: Tensor) -> float:
    """Below this, a row counts as unmoved."""
    return exact_bound(bare.dtype, case.sizes[2], 10.0 * max(1.0, size_of(output)))


def measure(bare: Bare, case: Case) -> tuple[Tensor, Tensor]:
    """(output, how far each query's output moves when a key changes).

    The second is (B, H, L, S) for a function, whose values alone change; (B, 1, L, S) for a layer,
    whose context token changes.
    """
    output = bare.call(case)
    moves = []
    for key in range(case.sizes[2]):
        moved = response(bare.call(changed(case, "value", key)), output)
        moves.append(moved if bare.signature.is_function else moved[:, None])
    return output, torch.stack(moves, -1)


@dataclass
class Trial:
    """What one check saw: outputs for naming the cause, and what was wrong with them."""

    bare: Bare
    check: str
    observed: list[tuple[Case, Tensor]] = field(default_factory=list)
    wrong: list[tuple[str, float]] = field(default_factory=list)
    ran: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tolerance: float | None = None
    worst: float = 0.0
    raised: bool = False
    suspect: str | None = None  # a cause that a check has seen with its own eyes
    grids: dict[str, list[list[float]]] = field(default_factory=dict)
    odd_grid: bool = False  # the grids kept are of the first mask that was wrong
    started: float = field(default_factory=time.perf_counter)

    @contextmanager
    def trying(self, words: str) -> Iterator[None]:
        """Count a part as run; a call that raises is a finding, not a traceback."""
        try:
            yield
        except NotRunnable:
            raise
        except Exception as error:  # whatever another's code raises
            self.wrong.append((f"{words}: {told(error)}", 0.0))
            self.raised = True
        self.ran.append(words)

    def grid(self, case: Case, words: str) -> None:
        """Compare the mask measured by perturbation with the declared one."""
        output, moves = measure(self.bare, case)
        self.observed.append((case, output))
        limit = still(self.bare, case, output)
        self.tolerance = max(self.tolerance or 0.0, limit)
        declared = self.bare.declared(case)
        if not self.bare.signature.is_function:
            declared = declared.any(1, keepdim=True)
        measured = moves > limit
        odd = measured != declared
        if case.own:
            # A token's own output moves with it anyhow.
            odd = odd & ~torch.eye(case.sizes[2], dtype=torch.bool)
        finite = torch.where(moves.isfinite(), moves, 0.0)
        if bool(odd.any()):
            sample, head, query, key = (int(n) for n in odd.nonzero()[0])
            size = float(moves[sample, head, query, key])
            place = f"query {query}" + (f" of sample {sample}" if sample else "")
            place += f", head {head}" if head else ""
            what = (
                f"reads key {key}, which is hidden: changing it moves the output by {size:.3g}"
                if measured[sample, head, query, key]
                else f"does not read key {key}, which is visible"
            )
            self.wrong.append((f"{words}: {place} {what}", size))
            if not self.odd_grid:
                self.odd_grid = True
                self.grids = {
                    "declared": declared[sample, head].int().tolist(),
                    "measured": finite[sample, head].tolist(),
                }
        elif not self.grids:
            self.grids = {
                "declared": declared[0, 0].int().tolist(),
                "measured": finite[0, 0].tolist(),
            }
        self.empty_rows(case, output, words)

    def empty_rows(self, case: Case, output: Tensor, words: str) -> None:
        """A row with no key gives zeros, before any output projection."""
        empty = ~self.bare.declared(case).any(-1)
        empty = empty if self.bare.signature.is_function else empty.all(1)
        if not bool(empty.any()):
            return
        if self.bare.signature.empty_rows == "nan":
            self.notes.append("rows with no key are declared not to give zeros: not compared")
            return
        rows = output[empty]
        if self.bare.signature.is_function:
            wanted, limit = torch.zeros_like(rows), 0.0
        elif self.bare.signature.projections is not None:
            right, limit = truth(self.bare, case, self.bare.dtype)
            wanted = right[empty]
        else:
            wanted, limit = rows.nan_to_num(), 0.0
        off = float(response(rows.double(), wanted.double()).max())
        if off > limit:
            row = int(empty.nonzero()[0][-1])
            found = "NaN" if bool(rows.isnan().any()) else f"numbers up to {size_of(rows):.3g}"
            self.wrong.append((f"{words}: query {row} sees no key and gives {found}, not 0", off))

    def compare(self, case: Case, words: str, dtype: torch.dtype) -> None:
        """Compare an output with the float64 definition."""
        output = self.bare.call(case, dtype)
        wanted, limit = truth(self.bare, case, dtype)
        if output.shape != wanted.shape:
            raise WrongOutput(
                f"wanted an output of {tuple(wanted.shape)}, got {tuple(output.shape)}"
            )
        if dtype == self.bare.dtype:
            self.observed.append((case, output))
        off = float(response(output.double(), wanted).max())
        single = truth(self.bare, case, dtype, torch.float32)[1]
        if dtype == torch.float64 and limit < off <= single:
            # Softmax or rotary in float32 whatever came in: rounding, and no fault.
            self.notes.append(f"computes in float32 inside: off by {off:.2g} in float64")
            return
        if off / limit >= self.worst / (self.tolerance or 1.0):
            self.worst, self.tolerance = off, limit
        if off > limit:
            self.wrong.append(
                (f"{words}: off by {off:.3g} from the float64 definition, bound {limit:.2g}", off)
            )

    def unmoved(self, moved: Tensor, allowed: Tensor, limit: float, words: str) -> None:
        """Rows outside `allowed` must not have moved."""
        self.tolerance = max(self.tolerance or 0.0, limit)
        size = torch.where(allowed, 0.0, moved)
        self.worst = max(self.worst, float(size.max()))
        if bool((size > limit).any()):
            place = (size > limit).nonzero()[0].tolist()
            names = ("sample", "head", "token") if moved.dim() == 3 else ("sample", "token")
            where = ", ".join(f"{n} {i}" for n, i in zip(names, place, strict=True))
            self.wrong.append((f"{words} moves {where} by {float(size[tuple(place)]):.3g}", 0.0))

    def record(self, good: str, fallback: str | None = None, certain: str | None = None) -> Record:
        """Passed with `good`; or failed, with the cause that the numbers match, else `fallback`.

        `certain`: a cause that the check itself has seen, more exact than the numbers.
        """
        ran = "; ".join(dict.fromkeys(self.ran))
        common: dict[str, Any] = {
            "ran": ran,
            "tolerance": self.tolerance,
            "worst": self.worst,
            "seconds": time.perf_counter() - self.started,
            **self.grids,
        }
        notes = "".join(f" ({note})" for note in dict.fromkeys(self.notes))
        if not self.wrong:
            return passed(self.check, good + notes, **common)
        if self.worst == 0.0:
            common["worst"] = max(size for _, size in self.wrong)
        message = self.wrong[0][0]
        if len(self.wrong) > 1:
            message += f"; {len(self.wrong) - 1} more like it"
        found = self.causes()
        fault = found[0] if found else None
        if fault is not None:
            others = [f.detail for f in found if f.cause != fault.cause]
            message += f"; {fault.detail}" + "".join(f" (or {other})" for other in others[:2])
        if fault is not None and certain is None:
            return failed(self.check, message + notes, cause=fault.cause, fix=fault.fix, **common)
        # Where nothing came back at all, nothing points to a cause.
        fallback = None if self.raised and not self.observed else certain or fallback
        return failed(
            self.check, message + notes, cause=fallback, fix=FIXES.get(str(fallback)), **common
        )

    def causes(self) -> list[Fault]:
        """The known faults that explain all that was seen, or else the parts that were wrong."""
        bare = self.bare
        if not bare.signature.is_function and bare.signature.projections is None:
            return []
        for choice in _choices(bare, self.observed, self.raised):
            found = matching(bare, choice, bare.dtype)
            if found:
                return found
        return []


def _choices(
    bare: Bare, observed: Sequence[tuple[Case, Tensor]], raised: bool
) -> Iterator[Sequence[tuple[Case, Tensor]]]:
    yield observed
    off = []
    for case, output in observed:
        if not near(output.double(), *truth(bare, case, bare.dtype)):
            off.append((case, output))
    if 0 < len(off) < len(observed):
        yield off
    for one in off:
        yield [one]
    if raised:
        # The plainest call tells what the one that raised cannot.
        plain = make_case(bare, 3, 5)
        try:
            yield [(plain, bare.call(plain))]
        except Exception:  # nothing to learn from it
            return


Check = Callable[[Bare], Record]
