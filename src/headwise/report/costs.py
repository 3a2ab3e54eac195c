"""Records of what attention costs, checked before they are drawn."""

from __future__ import annotations

import math
from typing import Any

from headwise.record import Record

# Numbers of a "cost" record that the page shows; what is not there was not measured.
COUNTED = ("attention_flops", "other_flops", "kv_bytes", "fused_peak")
MEASURED = (
    "measured_peak", "prefill_seconds", "attention_share", "decode_seconds", "of_matrix_rate",
    "of_read_rate",
)  # fmt: skip


def cost(record: Record) -> dict[str, Any]:
    """One context length of one model.

    Raises:
        ValueError: a number is missing, negative or not finite.
    """
    context = record.where["context"]
    if isinstance(context, bool) or not isinstance(context, int) or context < 1:
        raise ValueError(f"context = {context!r}; wanted a whole number above 0")
    found: dict[str, Any] = {"model": str(record.where["model"])[:200], "context": context}
    found["beyond"] = bool(record.values.get("beyond_trained"))
    for name in (*COUNTED, *MEASURED):
        value = record.values.get(name)
        if value is None and name in MEASURED:
            found[name] = None
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name} = {value!r}; wanted a number")
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"{name} = {value}; wanted a finite number, not below 0")
        found[name] = float(f"{value:.6g}") if isinstance(value, float) else value
    return found


def growth(record: Record) -> dict[str, Any]:
    """What was fitted to one model's measurements, in sentences.

    Raises:
        ValueError: there are no sentences.
    """
    lines = record.values["lines"]
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise ValueError("lines: wanted a list of texts")
    return {"model": str(record.where["model"])[:200], "lines": [line[:500] for line in lines[:20]]}
