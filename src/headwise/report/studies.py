"""Records of a study, checked before they are drawn."""

from __future__ import annotations

import math
from typing import Any

from headwise.record import Record

NUMBERS = ("mean", "kv_bytes")
MAYBE = ("spread", "difference", "low", "high", "parameters", "latency", "decode", "train")


def design(record: Record) -> dict[str, Any]:
    """One design of a study.

    Raises:
        ValueError: a number is missing or not finite.
    """
    found = _numbers(record, NUMBERS, MAYBE)
    found |= {
        "task": str(record.where["task"])[:100],
        "design": str(record.where["design"])[:100],
        "metric": str(record.values["metric"])[:100],
        "higher": record.values["better"] == "higher",
        "seeds": int(record.values["seeds"]),
        "best": bool(record.values["best"]),
        "chosen": bool(record.values["chosen"]),
    }
    return found


def baseline(record: Record) -> dict[str, Any]:
    """A simpler model's score."""
    name = str(record.where["model"])[:100]
    return {"task": str(record.where["task"])[:100], "model": name, **_numbers(record, ("mean",))}


def answer(record: Record) -> dict[str, Any]:
    """The sentence, the cautions, the limits.

    Raises:
        ValueError: they are no texts.
    """
    values = record.values
    lists = {}
    for name in ("cautions", "limits"):
        lines = values.get(name, [])
        if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
            raise ValueError(f"{name}: wanted a list of texts")
        lists[name] = [line[:500] for line in lines[:40]]
    if not isinstance(values["answer"], str):
        raise ValueError("answer: wanted a text")
    task = str(record.where["task"])[:100]
    return {"task": task, "answer": values["answer"][:1000], "match": str(values["match"]), **lists}


def _numbers(
    record: Record, wanted: tuple[str, ...], maybe: tuple[str, ...] = ()
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in (*wanted, *maybe):
        value = record.values.get(name)
        if value is None and name in maybe:
            found[name] = None
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name} = {value!r}; wanted a number")
        if not math.isfinite(value):
            raise ValueError(f"{name} = {value}; wanted a finite number")
        found[name] = float(f"{value:.6g}") if isinstance(value, float) else value
    return found
