"""Prints what `make conformance` counts, from the reports of the cases that ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from ledger import OUTCOMES, Case


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator:
    case = getattr(item, "callspec", None) and item.callspec.params.get("case")
    if isinstance(case, Case) and call.when == "call":
        item.user_properties.append(("conformance", [case.suite, case.outcome]))
    report = yield
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    run: dict[str, Counter] = {}
    for name in ("passed", "failed", "xfailed"):
        for report in terminalreporter.stats.get(name, ()):
            for key, value in report.user_properties if report.when == "call" else ():
                if key == "conformance":
                    suite, outcome = value
                    counted = "FAILED" if name == "failed" else OUTCOMES[outcome]
                    run.setdefault(suite, Counter())[counted] += 1
    if not run:
        return
    terminalreporter.section("what other libraries expect")
    for suite, counts in run.items():
        parts = [
            f"{counts[name]} {name}" for name in (*OUTCOMES.values(), "FAILED") if counts[name]
        ]
        terminalreporter.line(f"{suite}: {counts.total()} run: {'; '.join(parts)}")
