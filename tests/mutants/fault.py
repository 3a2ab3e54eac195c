"""What one fault is."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """Where `old` stands in src/headwise/`file`, `new` is written; `tests` ought to notice."""

    what: str
    old: str
    new: str
    tests: str = ""
    file: str = ""


def faults(file: str, tests: str, *mutants: Mutant) -> list[Mutant]:
    """Faults of one file; `tests` are those of a fault that names none itself."""
    return [mutant._replace(file=file, tests=mutant.tests or tests) for mutant in mutants]
