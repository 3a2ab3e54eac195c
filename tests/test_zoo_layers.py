"""The zoo of faulty attention: each fault is caught by the right check with the right cause, each
correct twin passes every check."""

from __future__ import annotations

import functools

import pytest

from headwise.checks.bare import BARE_CHECKS, for_attention
from headwise.checks.fixes import FIXES
from headwise.record import Record
from zoo.layers import MASKS, Entry
from zoo.layers_modules import LAYERS
from zoo.layers_values import VALUES

ENTRIES = [*MASKS, *VALUES, *LAYERS]
# Twins serve several faults; each is checked once.
TWINS = {
    (id(entry.twin), id(entry.signature)): pytest.param(
        entry.twin,
        entry.signature,
        id=getattr(entry.twin, "__name__", type(entry.twin).__name__) + "-" + entry.name,
    )
    for entry in ENTRIES
}


@functools.cache
def whole_table(name: str) -> tuple[Record, ...]:
    entry = next(entry for entry in ENTRIES if entry.name == name)
    return tuple(for_attention(entry.faulty, entry.signature))


def told(record: Record) -> str:
    return f"{record.where['check']}: {record.values['cause']}, {record.values['message']}"


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_the_right_check_names_the_right_cause(entry: Entry) -> None:
    (record,) = for_attention(entry.faulty, entry.signature, only=[entry.check])
    assert record.values["status"] == "failed", told(record)
    assert record.values["cause"] == entry.cause, told(record)
    assert record.values["fix"], told(record)
    assert any(letter.isdigit() for letter in record.values["message"]), told(record)


@pytest.mark.parametrize(("twin", "signature"), TWINS.values())
def test_a_correct_twin_passes(twin, signature) -> None:
    records = for_attention(twin, signature)
    assert [record.where["check"] for record in records] == list(BARE_CHECKS)
    assert not [told(r) for r in records if r.values["status"] == "failed"]
    passed = {r.where["check"] for r in records if r.values["status"] == "passed"}
    assert {"alignment", "batch", "shapes", "gradients", "eval"} <= passed


@pytest.mark.slow
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_no_check_blames_a_known_fault_that_is_not_there(entry: Entry) -> None:
    """Where the numbers can be compared, whatever else fails names the same cause or none."""
    general = {None, "future-leak", "mask-misread", "padding-leak", "heads-scrambled", "batch-leak"}
    for record in whole_table(entry.name):
        if record.values["status"] == "failed":
            assert record.values["cause"] in {entry.cause, *general}, told(record)


def test_the_zoo_is_large_and_its_causes_have_fixes() -> None:
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES) >= 45
    known = set(FIXES)
    assert {entry.cause for entry in ENTRIES} <= known
