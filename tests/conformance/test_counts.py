"""No case is lost in silence: the published counts are those of the cases that run."""

from __future__ import annotations

import pytest
import torch
from ledger import Suite, table
from publish import PAGE, wanted

pytestmark = pytest.mark.conformance


def test_the_page_shows_what_runs():
    assert PAGE.read_text("utf-8") == wanted(), "run python tests/conformance/publish.py"


def _suite() -> Suite:
    suite = Suite("theirs")
    suite.passes("a")(lambda: None)
    suite.refuses("b", "not ours", ValueError, "no b")(lambda: torch.zeros(2).reshape(3))
    suite.differs("c", "on purpose")(lambda: None)
    suite.known_fault("d", "to do", ValueError)(lambda: None)
    return suite


def test_the_table_counts_each_outcome():
    assert table([_suite()]).splitlines()[2] == "| theirs | 4 | 1 | 1 | 1 | 1 |"
    assert "| not ours | theirs | 1 |" in table([_suite()])


def test_a_name_is_used_once():
    with pytest.raises(ValueError, match="theirs: two cases are called 'a'"):
        _suite().passes("a")(lambda: None)


def test_a_refusal_needs_its_own_message():
    suite = Suite("theirs")

    @suite.refuses("says something else", "", ValueError, "the reason")
    def _() -> None:
        raise ValueError("another reason")

    @suite.refuses("does not refuse", "", ValueError, "the reason")
    def _() -> None:
        pass

    with pytest.raises(AssertionError, match="Regex pattern did not match"):
        suite.cases[0].run()
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        suite.cases[1].run()
