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

Pooling takes the spread to be alike. Where it is not, the pool is too narrow for a design that
varies much from seed to seed, so an interval is never narrower than Student's for that pair alone.
Simulated without any true difference, three seeds, 4 to 8 designs, spreads alike or one 3 to 10
times the others': some interval is wrong in 3 to 7 of 100 studies (pooled alone: in 5 to 16).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

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
        self.pooled = self._half(list(range(len(self.scores))))

    def half(self, one: int, other: int) -> float:
        """Half the interval of `one` less `other`; infinite with fewer than two seeds."""
        return max(self.pooled, self._half([one, other]))

    def _half(self, designs: list[int]) -> float:
        """Simultaneous for all pairs of these designs; of two it is Student's paired interval."""
        examples = None if self.examples is None else self.examples[designs]
        error = standard_error(self.scores[designs], examples)
        return critical(len(designs), error.freedom) * error.value


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


@lru_cache(maxsize=64)  # the range is integrated: a tenth of a second
def critical(designs: int, freedom: float) -> float:
    """How many standard errors of a difference: the 95 % point of the studentized range over √2,
    which for two designs is Student's."""
    stats = require("scipy.stats", extra="study", purpose="headwise study")
    if designs == 2:
        return float(stats.t.ppf(0.5 + LEVEL / 2, freedom))
    return float(stats.studentized_range.ppf(LEVEL, designs, freedom)) / math.sqrt(2)
