"""ONNX's own node tests of Attention and RotaryEmbedding, as onnx ships them.

Inputs, expected outputs and the comparison are the suite's. Its `_expanded` twins are left out:
they carry the same numbers, with the operator written out as a graph of others.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx.backend.test.case.node.attention
import onnx.backend.test.case.node.rotaryembedding
import pytest
from ledger import Suite, parameters
from onnx.backend.test.case.test_case import TestCase
from onnx.backend.test.runner import Runner
from onnx_adapter import Refused, prepare

from headwise.backends import BACKENDS

pytestmark = pytest.mark.conformance

# Two units in the last place of float16. The suite allows bfloat16 as much; its 1e-3 is about one
# unit of float16, less than the rounding of its own expected outputs (see the last test).
HALF = 2.0**-9


def _base_cases(operator: str) -> list[TestCase]:
    return [
        case
        for case in onnx.backend.test.case.node._NodeTestCases
        if [node.op_type for node in case.model.graph.node] == [operator]
    ]


def _compare(case: TestCase, backend: str | None) -> None:
    node = prepare(case.model, backend)
    for inputs, wanted in case.data_sets:
        got = node.run(inputs)
        half = any(output.dtype == np.float16 for output in wanted)
        rtol = max(case.rtol, HALF) if half else case.rtol
        Runner.assert_similar_outputs(wanted, got, rtol, case.atol)


def _on_every_backend(case: TestCase) -> None:
    # None is what a user gets; the reference backend takes every call.
    for backend in (None, *(backend.name for backend in BACKENDS)):
        _compare(case, backend)


ATTENTION = Suite("ONNX Attention")
ROTARY = Suite("ONNX RotaryEmbedding")
for suite, operator in ((ATTENTION, "Attention"), (ROTARY, "RotaryEmbedding")):
    for case in _base_cases(operator):
        suite.add(case.name.removeprefix("test_"), lambda case=case: _on_every_backend(case))


@pytest.mark.parametrize("case", parameters(ATTENTION, ROTARY))
def test_case_of_the_suite(case):
    case.run()


def test_the_suite_is_whole():
    assert onnx.__version__ == "1.23.2"
    assert (len(ATTENTION.cases), len(ROTARY.cases)) == (93, 8)


def test_the_comparison_can_fail():
    """A suite that compared nothing would pass as well."""
    case = _base_cases("Attention")[0]
    (inputs, wanted), *_ = case.data_sets
    wrong = [output * 1.01 for output in prepare(case.model).run(inputs)]
    with pytest.raises(AssertionError, match=r"Not equal to tolerance rtol=0\.001"):
        Runner.assert_similar_outputs(wanted, wrong, case.rtol, case.atol)


def test_another_operator_is_refused():
    node = onnx.helper.make_node("MatMul", ["a", "b"], ["c"])
    with pytest.raises(Refused, match="headwise has no operator MatMul"):
        prepare(onnx.helper.make_model(onnx.helper.make_graph([node], "g", [], [])))


HALVES = [
    case
    for case in _base_cases("Attention")
    if case.data_sets[0][0][0].dtype.name in ("float16", "bfloat16")
]


@pytest.mark.parametrize("case", HALVES, ids=lambda case: case.name)
def test_half_types_are_as_near_to_the_truth_as_the_suite(case):
    """The suite rounds after every step, headwise once at the end, or twice."""
    (inputs, wanted), *_ = case.data_sets
    half = inputs[0].dtype
    wide = [x.astype(np.float64) if x.dtype == half else x for x in inputs]
    truth = prepare(case.model, "reference").run(wide)[0]
    eps = 2.0 ** (-10 if half == np.float16 else -7)
    unit = eps * 2.0 ** np.floor(np.log2(np.maximum(np.abs(truth), 1e-30)))

    def units_off(output: np.ndarray) -> float:
        return float((np.abs(output.astype(np.float64) - truth) / unit).max())

    assert units_off(prepare(case.model).run(inputs)[0]) <= max(1.0, units_off(wanted[0]))
