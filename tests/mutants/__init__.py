"""The faults that `mutations.py` puts into a copy of the package, one at a time.

Each is a small fault that people make in attention code. `old` stands exactly once in its file, so
that the list cannot rot in silence; `tests` names the files that ought to turn red, cheapest first:
"masks" is tests/test_masks.py, "attention::TestDropout" a class or a test in it.
"""

from mutants.backends import BACKENDS
from mutants.checks import CHECKS
from mutants.definition import DEFINITION
from mutants.fault import Mutant
from mutants.layer import LAYER
from mutants.uses import USES

__all__ = ["MUTANTS", "Mutant"]

MUTANTS = DEFINITION + BACKENDS + LAYER + USES + CHECKS
