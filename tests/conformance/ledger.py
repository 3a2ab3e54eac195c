"""What another library expects, case by case, and how many of its cases hold here.

A case passes, or headwise refuses it by name (the message is checked), or headwise means to answer
otherwise and the difference itself is checked, or it is a known fault, which must still fail. The
table of docs/conformance.md is made from these lists and a test compares the two, so that no case
is lost in silence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import pytest

Outcome = Literal["passed", "refused", "differs", "fault"]
# Each outcome, and what the table calls it.
OUTCOMES: dict[Outcome, str] = {
    "passed": "passed",
    "refused": "refused by name",
    "differs": "differs, stated",
    "fault": "known fault",
}


@dataclass(frozen=True)
class Case:
    """One expectation. `run` asserts it; for the other outcomes `reason` says why."""

    suite: str
    name: str
    run: Callable[[], None]
    outcome: Outcome = "passed"
    reason: str = ""
    error: type[Exception] | None = None  # what a known fault raises


@dataclass
class Suite:
    """All expectations of one source."""

    title: str
    cases: list[Case] = field(default_factory=list)

    def add(
        self,
        name: str,
        run: Callable[[], None],
        outcome: Outcome = "passed",
        reason: str = "",
        error: type[Exception] | None = None,
    ) -> None:
        if any(name == other.name for other in self.cases):
            raise ValueError(f"{self.title}: two cases are called {name!r}")
        self.cases.append(Case(self.title, name, run, outcome, reason, error))

    def passes(self, name: str, *given: object) -> Callable:
        """Decorator: the function, called with `given`, asserts that headwise agrees."""

        def take(run: Callable) -> Callable:
            self.add(name, lambda: run(*given))
            return run

        return take

    def differs(self, name: str, reason: str) -> Callable:
        """Decorator: the function asserts both answers, theirs and ours."""

        def take(run: Callable[[], None]) -> Callable:
            self.add(name, run, "differs", reason)
            return run

        return take

    def known_fault(self, name: str, reason: str, error: type[Exception]) -> Callable:
        """Decorator: the function asserts what ought to hold; until then it raises `error`."""

        def take(run: Callable[[], None]) -> Callable:
            self.add(name, run, "fault", reason, error)
            return run

        return take

    def refuses(self, name: str, reason: str, error: type[Exception], match: str) -> Callable:
        """Decorator: the function must raise `error` with a message that says `match`."""

        def take(run: Callable[[], object]) -> Callable:
            def refused() -> None:
                with pytest.raises(error, match=match):
                    run()

            self.add(name, refused, "refused", reason)
            return run

        return take


def parameters(*suites: Suite) -> list:
    """The cases for `pytest.mark.parametrize`. A known fault that holds after all is a failure."""
    return [
        pytest.param(
            case,
            id=case.name,
            marks=[pytest.mark.xfail(strict=True, raises=case.error, reason=case.reason)]
            if case.outcome == "fault"
            else [],
        )
        for suite in suites
        for case in suite.cases
    ]


def table(suites: Sequence[Suite]) -> str:
    """The counts in Markdown, then each reason with the number of its cases."""
    lines = [
        f"| suite | run | {' | '.join(OUTCOMES.values())} |",
        "| --- " * (2 + len(OUTCOMES)) + "|",
    ]
    for suite in suites:
        n = Counter(case.outcome for case in suite.cases)
        counts = [len(suite.cases), *(n[outcome] for outcome in OUTCOMES)]
        lines.append(f"| {suite.title} | {' | '.join(map(str, counts))} |")
    for outcome, heading in OUTCOMES.items():
        reasons = Counter(
            (case.reason, suite.title)
            for suite in suites
            for case in suite.cases
            if case.outcome == outcome and case.reason
        )
        if reasons:
            lines += ["", f"| {heading} | suite | cases |", "| --- | --- | --- |"]
            lines += [f"| {reason} | {title} | {n} |" for (reason, title), n in reasons.items()]
    return "\n".join(lines) + "\n"
