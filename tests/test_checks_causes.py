"""The known faults, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from headwise.checks.bare_cases import Bare, Case, definition
from headwise.checks.causes import FAULTS, name_fault
from headwise.checks.fixes import FIXES
from headwise.checks.signature import Signature


def uniform(values: list[float], queries: int | None = None, **features: object) -> Case:
    """query = key = 0: an output is the mean of the visible values."""
    count = len(values)
    queries = count if queries is None else queries
    zero = torch.zeros(1, 1, count, 1, dtype=torch.float64)
    value = torch.tensor(values, dtype=torch.float64).view(1, 1, count, 1)
    return Case(zero[:, :, :1].expand(1, 1, queries, 1), zero, value, **features)  # type: ignore[arg-type]


LOWER = torch.ones(3, 3, dtype=torch.bool).tril()[None, None]
BLIND = torch.tensor([[True, False], [False, False]])[None, None]
KEEP = Signature(mask="keep", heads=1, head_dim=1, arguments={"mask": "mask"})
AT_END = Signature(causal="end", heads=1, head_dim=1, arguments={"causal": "c"})
NARROW = Signature(causal="end", window=2, heads=1, head_dim=1)


@pytest.mark.parametrize(
    ("cause", "signature", "case", "right", "wrong"),
    [
        ("mask-polarity", KEEP, uniform([1, 2, 4], visible=LOWER), [1, 1.5, 7 / 3], [3, 4, 0]),
        (
            "float-mask-added",
            KEEP,
            uniform([1, 2, 4], visible=LOWER),
            [1, 1.5, 7 / 3],
            [1.847766, 1.888406, 2.333333],
        ),
        ("nan-from-empty-row", KEEP, uniform([1, 3], visible=BLIND), [1, 0], [1, math.nan]),
        ("mean-from-empty-row", KEEP, uniform([1, 3], visible=BLIND), [1, 0], [1, 2]),
        ("top-left-causal", AT_END, uniform([1, 2, 3, 4], 1, causal=True), [2.5], [1]),
        ("top-left-causal", AT_END, uniform([1, 2, 3, 4, 5], 2, causal=True), [2.5, 3], [1, 1.5]),
        (
            "window-off-by-one",
            NARROW,
            uniform([1, 2, 4, 8], causal=True),
            [1, 1.5, 3, 6],
            [1, 1.5, 7 / 3, 14 / 3],
        ),
        ("causal-flag-in-cross", AT_END, uniform([1, 2, 4]), [7 / 3] * 3, [1, 1.5, 7 / 3]),
    ],
)
def test_faults_give_the_numbers_worked_out_by_hand(cause, signature, case, right, wrong) -> None:
    bare = Bare(F.scaled_dot_product_attention, signature)
    dtype = torch.float64
    assert definition(bare, case, dtype)[0].flatten().tolist() == pytest.approx(right, abs=1e-6)
    faults = [fault for fault in FAULTS if fault.cause == cause]
    results = [fault.result(bare, case, dtype) for fault in faults]
    assert any(
        result is not None
        and result.flatten().tolist() == pytest.approx(wrong, abs=1e-6, nan_ok=True)
        for result in results
    )


def test_scale_faults_give_the_weights_worked_out_by_hand() -> None:
    query = torch.tensor([[2.0, 0, 0, 0]]).double()[None, None]
    key = torch.tensor([[2.0, 0, 0, 0], [0, 0, 0, 0]]).double()[None, None]
    case = Case(query, key, torch.eye(2).double()[None, None])
    bare = Bare(F.scaled_dot_product_attention, Signature(heads=1, head_dim=4))
    wanted = {"scale-twice": [0.731059, 0.268941], "no-scale": [0.982014, 0.017986]}
    right = definition(bare, case, torch.float64)[0].flatten().tolist()
    assert right == pytest.approx([0.880797, 0.119203], abs=1e-6)
    for fault in FAULTS:
        if fault.cause in wanted:
            result = fault.result(bare, case, torch.float64)
            assert result is not None
            assert result.flatten().tolist() == pytest.approx(wanted[fault.cause], abs=1e-6)


def test_tiled_heads_and_an_ignored_sink_by_hand() -> None:
    zero = torch.zeros(1, 4, 1, 1, dtype=torch.float64)
    value = torch.tensor([10.0, 20.0], dtype=torch.float64).view(1, 2, 1, 1)
    case = Case(zero, zero[:, :2], value)
    bare = Bare(F.scaled_dot_product_attention, Signature(heads=4, kv_heads=2, head_dim=1))
    assert definition(bare, case, torch.float64)[0].flatten().tolist() == [10, 10, 20, 20]
    tiled = torch.tensor([10.0, 20.0, 10.0, 20.0]).double().view(1, 4, 1, 1)
    named = name_fault(bare, [(case, tiled)], torch.float64)
    assert named is not None
    assert named.cause == "grouped-heads-tiled"
    sunk = uniform([3, 6], 1, sinks=torch.zeros(1, dtype=torch.float64))
    one = Bare(F.scaled_dot_product_attention, KEEP)
    assert definition(one, sunk, torch.float64)[0].item() == pytest.approx(3.0)
    named = name_fault(one, [(sunk, torch.full((1, 1, 1, 1), 4.5).double())], torch.float64)
    assert named is not None
    assert named.cause == "sink-ignored"


def test_right_numbers_and_unknown_ones_name_nothing() -> None:
    bare = Bare(F.scaled_dot_product_attention, KEEP)
    case = uniform([1, 2, 4], visible=LOWER)
    right = definition(bare, case, torch.float64)[0]
    assert name_fault(bare, [(case, right)], torch.float64) is None
    assert name_fault(bare, [(case, right + 0.125)], torch.float64) is None


def test_every_cause_has_a_fix_in_words() -> None:
    for fault in FAULTS:
        assert len(FIXES[fault.cause]) > 15
        assert fault.detail
