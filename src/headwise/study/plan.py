"""What a study compares: designs that differ in their heads and are alike in what was matched."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from headwise.errors import BadInput
from headwise.tasks import Budget, Design, Task

MATCHES = ("width", "parameters", "compute")


@dataclass(frozen=True)
class Plan:
    """A task, the designs, the seeds and the budget: all that decides which trainings are run."""

    task: str
    designs: tuple[Design, ...]
    seeds: tuple[int, ...]
    budget: Budget
    data: str | None = None
    match: str = "width"

    def __post_init__(self) -> None:
        if len({d.label for d in self.designs}) < 2:
            raise BadInput("study: wanted at least two different designs to compare")
        if not self.seeds:
            raise BadInput("study: wanted at least one seed")
        if self.budget.steps < 1 or (self.budget.seconds is not None and self.budget.seconds <= 0):
            raise BadInput(
                f"study: the budget must hold one step at least, got {self.budget.steps} steps"
                + ("" if self.budget.seconds is None else f" and {self.budget.seconds:g} s")
            )

    @property
    def name(self) -> str:
        """The task and a digest of the plan: the same plan finds its own trials again."""
        text = json.dumps(self.to_dict(), sort_keys=True)
        return f"{self.task}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "task": self.task,
            "designs": [d.to_dict() for d in self.designs],
            "seeds": list(self.seeds),
            "budget": self.budget.__dict__ | {},
            "data": self.data,
            "match": self.match,
        }

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Plan:
        """From `to_dict`.

        Raises:
            BadInput: something is missing or does not fit.
        """
        try:
            return cls(
                str(fields["task"]),
                tuple(Design.from_dict(d) for d in fields["designs"]),
                tuple(int(seed) for seed in fields["seeds"]),
                Budget(**fields["budget"]),
                fields["data"],
                str(fields["match"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise BadInput(f"study: the stored plan is damaged ({error})") from None

    @property
    def path(self) -> Path | None:
        return None if self.data is None else Path(self.data)


def designs_for(
    task: Task,
    heads: Sequence[int],
    *,
    kv_heads: Sequence[int | None] = (None,),
    head_dim: int | None = None,
    match: str = "width",
) -> tuple[Design, ...]:
    """Designs of a prepared task, one head among them always.

    match: "width": embed_dim is the task's own, and head_dim what is left of it unless given.
    "parameters", "compute": the feedforward is made wider or narrower as well, until the model has
    as many parameters, or as many multiplications a token, as the task's own design; a design for
    which no width comes within 2 % is refused.

    Raises:
        BadInput: heads that do not divide, an unknown match, or one that cannot be had.
    """
    if match not in MATCHES:
        raise BadInput(f"study: match is one of {', '.join(MATCHES)}, got {match!r}")
    base = task.default_design()
    found: list[Design] = []
    for count in dict.fromkeys([1, *heads]):
        for shared in kv_heads:
            if count == 1 and shared not in (None, 1):
                continue
            design = replace(
                base,
                num_heads=count,
                num_kv_heads=None if shared == count else shared,
                head_dim=head_dim,
            )
            if design not in found:
                found.append(design)
    if match == "width":
        return tuple(found)
    measure = parameters if match == "parameters" else multiplications
    wanted = measure(task, base)
    return tuple(_matched(task, design, wanted, measure, match) for design in found)


def parameters(task: Task, design: Design) -> int:
    """Numbers in the weights of the model that the task builds."""
    return sum(p.numel() for p in task.build(design, 0).parameters())


def multiplications(task: Task, design: Design) -> int:
    """Multiplications of one token with the weights of linear layers, and of the attention of the
    example's tokens."""
    linear = sum(
        m.weight.numel() for m in task.build(design, 0).modules() if isinstance(m, nn.Linear)
    )
    tokens = len(task.example()["tokens"])
    return linear + 2 * design.layers * design.num_heads * design.width * tokens


def _matched(
    task: Task,
    design: Design,
    wanted: int,
    measure: Callable[[Task, Design], int],
    match: str,
) -> Design:
    one, two = (measure(task, replace(design, feedforward=n)) for n in (8, 16))
    slope = (two - one) / 8
    width = max(1, round(8 + (wanted - one) / slope)) if slope > 0 else 0
    if width >= 1:
        fitted = replace(design, feedforward=width)
        if abs(measure(task, fitted) - wanted) <= 0.02 * wanted:
            return fitted
    raise BadInput(
        f"study: no feedforward gives {design.label} the {match} of the task's own design "
        f"({wanted:,}); choose other heads or --match width"
    )
