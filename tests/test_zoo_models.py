"""The zoo of faulty models: each is caught by the right check with the right cause, and each
correct twin passes every check."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch

from headwise.checks import CHECKS, check, failures
from headwise.record import Record
from zoo.models_faulty import CASES, Case

TWINS = {case.twin: case for case in CASES}
NAMES = [f"{case.faulty.__name__}-{case.check}" for case in CASES]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Models this small only wait for a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def found(number: int) -> tuple[Record, ...]:
    case = CASES[number]
    return tuple(check(case.faulty(), case.inputs(), only=[case.check], **case.options))


def told(record: Record) -> str:
    return f"{dict(record.where)}: {record.values['cause']}: {record.values['message']}"


@pytest.mark.parametrize("number", range(len(CASES)), ids=NAMES)
def test_the_right_check_names_the_right_cause(number: int) -> None:
    case = CASES[number]
    wrong = failures(found(number))
    assert wrong, f"{case.faulty.__name__} is not caught: {[told(r) for r in found(number)]}"
    assert case.cause in {r.values["cause"] for r in wrong}, [told(r) for r in wrong]
    for record in wrong:
        assert any(letter.isdigit() for letter in record.values["message"]), told(record)
        assert record.values["fix"] or record.values["cause"] is None, told(record)


@pytest.mark.parametrize("case", TWINS.values(), ids=lambda case: case.twin.__name__)
def test_a_correct_twin_passes_every_check(case: Case) -> None:
    needed = {other.check for other in CASES if other.twin is case.twin}
    # Agreement compiles, seconds a model: it runs on the twins of what it catches.
    names = [name for name in CHECKS if name != "agreement" or name in needed]
    records = check(case.twin(), case.inputs(), only=names, **case.options)
    assert not [told(r) for r in failures(records)]
    assert [name for name in CHECKS if name in {r.where["check"] for r in records}] == names
    passed = {r.where["check"] for r in records if r.values["status"] == "passed"}
    assert {"measured mask", "batch", "eval", "gradients"} <= passed
    # The check that catches the faulty one must have run on its twin, or it told nothing.
    assert needed <= passed, [told(r) for r in records if r.values["status"] == "not run"]


# A leak through attention that can be watched is led back to a layer, a head, a query and a key.
PLACES = {
    "OffByOne": lambda where: where["key"] == where["query"] + 1,
    "LeaksWithoutPaddingMask": lambda where: where["key"] > where["query"],
    "DocumentsLeak": lambda where: where["query"] >= 4 > where["key"] or where["query"] >= 9,
    "WindowOneTooLong": lambda where: where["query"] - where["key"] == 4,
    "IgnoresPadding": lambda where: where["key"] >= 6,
}


@pytest.mark.parametrize("name", PLACES)
def test_the_white_box_names_the_first_layer_and_head(name: str) -> None:
    number = next(n for n, case in enumerate(CASES) if case.faulty.__name__ == name)
    where = failures(found(number))[0].values["where"]
    assert where["layer"] == 0 and where["head"] in (0, 1)
    assert 0 < where["weight"] <= 1
    assert PLACES[name](where), where


def test_a_leak_outside_attention_is_said_to_be_outside() -> None:
    number = next(n for n, c in enumerate(CASES) if c.faulty.__name__ == "NormOverTheSequence")
    (record,) = failures(found(number))
    assert record.values["where"] is None
    assert "look for what else mixes tokens" in record.values["message"]


def test_the_zoo_is_large_enough() -> None:
    assert len({case.faulty for case in CASES}) >= 25
    assert len({case.cause for case in CASES}) >= 20
