"""How cost grows: a power of the context fitted to measurements, where two powers cross."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Student's t for 95 %, two-sided, by degrees of freedom 1 … 10; 1.96 is its limit.
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@dataclass(frozen=True)
class Power:
    """y ≈ factor · N^exponent. low … high: the exponent's 95 % interval, NaN for two points."""

    factor: float
    exponent: float
    low: float
    high: float

    def at(self, context: float) -> float:
        return self.factor * context**self.exponent

    def words(self) -> str:
        """ "N^1.98 (1.91 to 2.05)"."""
        if math.isnan(self.low):
            return f"N^{self.exponent:.2f}"
        return f"N^{self.exponent:.2f} ({self.low:.2f} to {self.high:.2f})"


def fit(contexts: Sequence[float], values: Sequence[float]) -> Power | None:
    """Least squares of ln y on ln N; None for fewer than two points, or values that are not above
    0."""
    points = [(math.log(n), math.log(v)) for n, v in zip(contexts, values, strict=True) if v > 0]
    if len(points) < 2 or len(points) < len(values):
        return None
    count = len(points)
    mean_x = sum(x for x, _ in points) / count
    mean_y = sum(y for _, y in points) / count
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    if spread == 0:
        return None
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    start = mean_y - slope * mean_x
    if count == 2:
        return Power(math.exp(start), slope, math.nan, math.nan)
    free = count - 2
    error = sum((y - start - slope * x) ** 2 for x, y in points) / free
    half = (T95[free - 1] if free <= len(T95) else 1.96) * math.sqrt(error / spread)
    return Power(math.exp(start), slope, slope - half, slope + half)


def crossing(one: Power | None, other: Power | None) -> float | None:
    """The context at which both are equal; None where they never are, or not within 1 … 10⁹."""
    if one is None or other is None or one.exponent == other.exponent:
        return None
    log = math.log(other.factor / one.factor) / (one.exponent - other.exponent)
    return math.exp(log) if 0 <= log <= math.log(1e9) else None


def reach(power: Power | None, budget: float) -> float | None:
    """The context at which y is `budget`; None where nothing was fitted or y does not grow."""
    if power is None or power.exponent <= 0 or budget <= 0:
        return None
    return math.exp(math.log(budget / power.factor) / power.exponent)
