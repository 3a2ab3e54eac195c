"""The checks as assertions for pytest. Installing headwise is enough; no conftest line is needed.

def test_my_model(headwise_model):
    model = headwise_model(MyModel())
    assert_causal(model, inputs)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from headwise.checks import Signature
    from headwise.record import Record

__all__ = [
    "assert_batch_invariant",
    "assert_cache_consistent",
    "assert_causal",
    "assert_heads_split_right",
    "assert_matches_reference",
    "assert_padding_invariant",
]


def assert_causal(model: Any, inputs: Any = None, **options: Any) -> None:
    """No output depends on a later token, with and without a padding mask, cached and not.

    Args:
        model, inputs, options: as for `headwise.checks.check`.

    Raises:
        AssertionError: a later token changes an output; the layer and head are named.
        pytest.fail: the check could not run: an assertion that proves nothing is no pass.
    """
    __tracebackhide__ = True
    options.setdefault("causal", True)
    _assert_checks(["future leak"], model, inputs, options)


def assert_padding_invariant(model: Any, inputs: Any = None, **options: Any) -> None:
    """Padding on either side changes nothing for real tokens. Arguments as `assert_causal`."""
    __tracebackhide__ = True
    _assert_checks(["padding"], model, inputs, options)


def assert_batch_invariant(model: Any, inputs: Any = None, **options: Any) -> None:
    """A neighbour in the batch changes nothing. Arguments as `assert_causal`."""
    __tracebackhide__ = True
    _assert_checks(["batch"], model, inputs, options)


def assert_cache_consistent(model: Any, inputs: Any = None, **options: Any) -> None:
    """Prefill and decode, chunks, and one full pass agree. Arguments as `assert_causal`."""
    __tracebackhide__ = True
    _assert_checks(["cache"], model, inputs, options)


def assert_heads_split_right(function: Callable, signature: Signature) -> None:
    """Heads are split and joined by transposition: a token moves only its own rows.

    Args:
        function: an attention function or layer.
        signature: how it is called, a `headwise.checks.Signature`.
    """
    __tracebackhide__ = True
    _assert_bare(["shapes"], function, signature)


def assert_matches_reference(function: Callable, signature: Signature) -> None:
    """The whole table of checks of an attention function against the float64 definition.

    Args: as `assert_heads_split_right`. What the signature lacks is not asked for.
    """
    __tracebackhide__ = True
    _assert_bare(None, function, signature)


@pytest.fixture
def headwise_model() -> Iterator[Callable[[Any], Any]]:
    """Prepares a module for a check: eval mode, and its mode given back after the test."""
    prepared: list[tuple[Any, list[tuple[Any, bool]]]] = []

    def prepare(model: Any) -> Any:
        module = getattr(model, "model", model) if not hasattr(model, "training") else model
        prepared.append((module, [(part, part.training) for part in module.modules()]))
        module.eval()
        return model

    yield prepare
    for _, modes in prepared:
        for part, training in modes:
            part.training = training


def _assert_checks(names: Sequence[str], model: Any, inputs: Any, options: dict[str, Any]) -> None:
    __tracebackhide__ = True
    from headwise.checks import check

    _judge(check(model, inputs, only=names, **options))


def _assert_bare(names: Sequence[str] | None, function: Callable, signature: Signature) -> None:
    __tracebackhide__ = True
    from headwise.checks import for_attention

    records = for_attention(function, signature)
    _judge([r for r in records if names is None or r.where["check"] in names])


def _judge(records: Sequence[Record]) -> None:
    """Fail with what failed, short; or when nothing could run."""
    __tracebackhide__ = True
    failed = [r for r in records if r.values["status"] == "failed"]
    if failed:
        raise AssertionError("\n".join(line for record in failed for line in _lines(record)))
    if not any(r.values["status"] == "passed" for r in records):
        reasons = "; ".join(dict.fromkeys(r.values["message"] for r in records))
        pytest.fail(f"the check could not run: {reasons}", pytrace=False)


def _lines(record: Record) -> list[str]:
    values, where = record.values, record.where
    name = ", ".join(str(where[part]) for part in ("check", "path", "case") if where.get(part))
    lines = [f"{name}: {values['message']}"]
    place = values.get("where")
    if place:
        parts = [str(place.get("module") or "")]
        parts += [f"{n} {place[n]}" for n in ("layer", "head") if place.get(n) is not None]
        lines.append(f"  first seen in {', '.join(part for part in parts if part)}")
    if values.get("cause"):
        lines.append(f"  likely cause: {values['cause']}; usual fix: {values.get('fix')}")
    return lines
