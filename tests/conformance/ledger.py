"""What another library expects, case by case, and how many of its cases hold here.

A case passes, or headwise refuses it by name (the message is checked), or headwise means to answer
otherwise and the difference itself is checked. The table of docs/conformance.md is printed from
these lists, and a test compares the two, so no case can be lost in silence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import pytest

Outcome = Literal["passed", "refused", "differs"]


@dataclass(frozen=True)
class Case:
    """One expectation. `run` asserts it; for the other outcomes `reason` says why."""

    name: str
    run: Callable[[], None]
    outcome: Outcome = "passed"
    reason: str = ""

    def __str__(self) -> str:
        return self.name


@dataclass
class Suite:
    """All expectations of one source."""

    title: str
    cases: list[Case] = field(default_factory=list)

    def add(self, case: Case) -> None:
        if any(case.name == other.name for other in self.cases):
            raise ValueError(f"{self.title}: two cases are called {case.name!r}")
        self.cases.append(case)

    def passes(self, name: str, *given: object) -> Callable:
        """Decorator: the function, called with `given`, asserts that headwise agrees."""

        def take(run: Callable) -> Callable:
            self.add(Case(name, lambda: run(*given)))
            return run

        return take

    def differs(self, name: str, reason: str) -> Callable:
        """Decorator: the function asserts both answers, theirs and ours."""

        def take(run: Callable[[], None]) -> Callable:
            self.add(Case(name, run, "differs", reason))
            return run

        return take

    def refuses(self, name: str, reason: str, error: type[Exception], match: str) -> Callable:
        """Decorator: the function must raise `error` with a message that says `match`."""

        def take(run: Callable[[], object]) -> Callable:
            def refused() -> None:
                with pytest.raises(error, match=match):
                    run()

            self.add(Case(name, refused, "refused", reason))
            return run

        return take


def table(suites: Sequence[Suite]) -> str:
    """The counts in Markdown, then each reason with the number of its cases."""
    lines = ["| suite | run | passed | refused by name | differs, stated |", "|---|---|---|---|---|"]
    for suite in suites:
        n = Counter(case.outcome for case in suite.cases)
        counts = (len(suite.cases), n["passed"], n["refused"], n["differs"])
        lines.append(f"| {suite.title} | " + " | ".join(map(str, counts)) + " |")
    for outcome, heading in (("refused", "Refused by name"), ("differs", "Differs, stated")):
        lines += ["", f"| {heading} | suite | cases |", "|---|---|---|"]
        reasons = Counter(
            (case.reason, suite.title)
            for suite in suites
            for case in suite.cases
            if case.outcome == outcome
        )
        lines += [f"| {reason} | {title} | {n} |" for (reason, title), n in reasons.items()]
    return "\n".join(lines) + "\n"
