"""How far designs lie apart, and how much of that is noise: simultaneous intervals for all pairs.

Scores form a table: designs × seeds × test examples. Designs are fixed; seeds and examples are
samples, crossed with the designs and with each other. The variance of a difference of two designs
is estimated from the mean squares of the interactions, pooled over the designs:

    Var = 2 / (S E) · (MS_ds + MS_de − MS_dse)

with d design (D of them), s seed (S), e example (E); its degrees of freedom are Satterthwaite's
(1946, doi 10.2307/3002019). This is the quasi-F of Winer, and of Clark (1973, doi
10.1016/S0022-5371(73)80014-3): a difference must hold for other seeds and for other examples at
once. Without examples it is the residual of the layout design × seed, (D − 1)(S − 1) degrees.

The best design is itself chosen by the data, so every pair is a comparison that might have been
made. Intervals are therefore Tukey's (the studentized range; Hsu 1996, Multiple Comparisons,
chapter 5): with 95 % confidence all pairs lie within theirs together.

Pooling takes the spread over seeds to be alike. A design whose spread stands out (Cochran's C,
1941, doi 10.1111/j.1469-1809.1941.tb02271.x) is left out of the pool; its pairs have intervals
from their own seeds alone, with the same range (Games and Howell 1976, doi
10.3102/10769986001002113).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from headwise._extras import require

LEVEL = 0.95


@dataclass(frozen=True)
class Error:
    """The standard error of a difference of two designs' means, and its degrees of freedom."""

    value: float
    freedom: float


class Differences:
    """Differences of designs with the half-widths of their simultaneous 95 % intervals.

    Args:
        scores: (designs, seeds), each the mean over the test examples.
        examples: (designs, seeds, examples) of which `scores` are the means; None where the metric
            is no such mean: intervals then cover other seeds and not other examples.
    """

    def __init__(self, scores: np.ndarray, examples: np.ndarray | None = None) -> None:
        self.scores = np.asarray(scores, dtype=np.float64)
        self.examples = None if examples is None else np.asarray(examples, dtype=np.float64)
        self.apart = standing_out(self.scores)
        pool = [n for n in range(len(self.scores)) if n not in self.apart]
        self.pooled = self._half(pool)

    def half(self, one: int, other: int) -> float:
        """Half the interval of `one` less `other`; infinite with fewer than two seeds."""
        if one in self.apart or other in self.apart:
            return self._half([one, other])
        return self.pooled

    def _half(self, designs: list[int]) -> float:
        error = standard_error(
            self.scores[designs], None if self.examples is None else self.examples[designs]
        )
        return critical(len(self.scores), error.freedom) * error.value


def standard_error(scores: np.ndarray, examples: np.ndarray | None = None) -> Error:
    """Of the difference of any two rows' means: `scores` (designs, seeds), `examples` (designs,
    seeds, examples) or None. Infinite with fewer than two seeds.

    No source of variance is taken to be below 0, and the seeds' keeps its own few degrees of
    freedom, so the examples can make an interval wider than the seeds alone would, never narrower.
    """
    designs, seeds = scores.shape
    if seeds < 2:
        return Error(math.inf, 1.0)
    by_seed = (designs - 1) * (seeds - 1)
    left = scores - scores.mean(1, keepdims=True) - scores.mean(0) + scores.mean()
    among_seeds = float((left**2).sum()) / by_seed
    if examples is None or examples.shape[2] < 2:
        return Error(math.sqrt(2 / seeds * among_seeds), by_seed)
    count = examples.shape[2]
    mean = examples.mean(1)
    apart = mean - mean.mean(1, keepdims=True) - mean.mean(0) + mean.mean()
    by_example = (designs - 1) * (count - 1)
    among_examples = seeds * float((apart**2).sum()) / by_example
    among_seeds *= count
    # What neither the seeds nor the examples explain.
    rest = examples - examples.mean(2, keepdims=True) - mean[:, None] + mean.mean(1)[:, None, None]
    rest = rest - rest.mean(0)
    by_both = (designs - 1) * (seeds - 1) * (count - 1)
    both = float((rest**2).sum()) / by_both
    total = max(among_seeds, both) + max(among_examples - both, 0.0)
    if total == 0.0:
        return Error(0.0, by_seed)
    parts = max(among_seeds, both) ** 2 / by_seed
    if among_examples > both:
        parts += among_examples**2 / by_example + both**2 / by_both
    return Error(math.sqrt(2 / (seeds * count) * total), total**2 / parts)


def critical(designs: int, freedom: float) -> float:
    """How many standard errors of a difference: the 95 % point of the studentized range over √2."""
    stats = require("scipy.stats", extra="study", purpose="headwise study")
    return float(stats.studentized_range.ppf(LEVEL, designs, freedom)) / math.sqrt(2)


def standing_out(scores: np.ndarray) -> tuple[int, ...]:
    """The designs whose variance over seeds is larger than the others' allow, by Cochran's C at
    5 %, the largest first and again without it; at least two are left."""
    stats = require("scipy.stats", extra="study", purpose="headwise study")
    left, found = list(range(len(scores))), []
    seeds = scores.shape[1]
    if seeds < 2:
        return ()
    variances = scores.var(1, ddof=1)
    while len(left) > 2:
        largest = max(left, key=lambda n: float(variances[n]))
        others = len(left) - 1
        f = float(stats.f.ppf(1 - (1 - LEVEL) / len(left), seeds - 1, others * (seeds - 1)))
        total = float(variances[left].sum())
        if total == 0.0 or variances[largest] / total <= 1 / (1 + others / f):
            break
        found.append(largest)
        left.remove(largest)
    return tuple(found)
