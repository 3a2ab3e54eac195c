"""The answer: which design is the smallest that is not measurably worse than the best."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from headwise._extras import require
from headwise.study.trials import Results

LEVEL = 0.95


@dataclass(frozen=True)
class Difference:
    """A design less the best one, above 0 where it is better. low … high: the 95 % interval."""

    mean: float
    low: float
    high: float

    @property
    def worse(self) -> bool:
        """Measurably: the whole interval lies below 0."""
        return self.high < 0

    @property
    def better(self) -> bool:
        return self.low > 0


@dataclass(frozen=True)
class Row:
    """One design: the mean over seeds of its test score, their spread (standard deviation, NaN with
    one), and its difference from the best (None: it is the best)."""

    design: int
    mean: float
    spread: float
    seeds: int
    difference: Difference | None


@dataclass(frozen=True)
class Judgement:
    """rows, in the plan's order; best and smallest: places in the plan's designs; measurable: some
    design is worse; answer: one sentence with its evidence; cautions: what else to know; limits:
    what this cannot tell."""

    rows: tuple[Row, ...]
    best: int
    smallest: int
    measurable: bool
    answer: str
    cautions: tuple[str, ...]
    limits: tuple[str, ...]


def judge(results: Results) -> Judgement | None:
    """None before every design has one training at least.

    A difference is paired twice: seed by seed and example by example. Each pairing gives a Student
    interval, over seeds and over examples; the wider of the two is taken, since either sample may
    be the small one.
    """
    designs = results.plan.designs
    trained = [results.of(number) for number in range(len(designs))]
    if not all(trained):
        return None
    sign = 1.0 if results.better == "higher" else -1.0
    means = [float(np.mean([o.value for o in runs])) for runs in trained]
    best = max(range(len(designs)), key=lambda n: (sign * means[n], -_size(results, n)[0], -n))
    rows = []
    for number, runs in enumerate(trained):
        values = [o.value for o in runs]
        spread = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
        apart = None if number == best else difference(results, number, best)
        rows.append(Row(number, means[number], spread, len(values), apart))
    equal = [r.design for r in rows if r.difference is None or not r.difference.worse]
    smallest = min(equal, key=lambda n: _size(results, n))
    measurable = len(equal) < len(rows)
    return Judgement(
        tuple(rows),
        best,
        smallest,
        measurable,
        _answer(results, rows, best, smallest, measurable),
        tuple(_cautions(results)),
        tuple(_limits(results, rows)),
    )


def difference(results: Results, one: int, other: int) -> Difference:
    """`one` less `other` on the seeds that both have; above 0 where `one` is better."""
    stats = require("scipy.stats", extra="study", purpose="headwise study")
    sign = 1.0 if results.better == "higher" else -1.0
    theirs = {o.seed: o for o in results.of(other)}
    pairs = [(o, theirs[o.seed]) for o in results.of(one) if o.seed in theirs]
    by_seed = np.array([sign * (a.value - b.value) for a, b in pairs])
    mean = float(by_seed.mean()) if len(by_seed) else math.nan
    halves = []
    for sample in (by_seed, _by_example(pairs, sign)):
        if sample is not None and len(sample) > 1:
            error = float(np.std(sample, ddof=1)) / math.sqrt(len(sample))
            halves.append(float(stats.t.ppf(0.5 + LEVEL / 2, len(sample) - 1)) * error)
    half = max(halves, default=math.inf)
    return Difference(mean, mean - half, mean + half)


def _by_example(pairs: list, sign: float) -> np.ndarray | None:
    """Differences of each example, the mean over seeds; in the metric's unit only where the metric
    is the mean over examples. Where it is not (bits per byte over unequal documents, say) the
    sample is scaled to the metric's own difference of means."""
    if not pairs or len({len(a.per_example) for a, _ in pairs}) != 1:
        return None
    apart = np.mean([a.per_example - b.per_example for a, b in pairs], axis=0)
    values = np.mean([a.value for a, _ in pairs])
    examples = np.mean([a.per_example.mean() for a, _ in pairs])
    scale = abs(values / examples) if examples else 1.0
    return sign * apart * scale


def _size(results: Results, number: int) -> tuple[int, int, int]:
    """What makes a design smaller: parameters, then cache, then heads. Parameters within 2 % count
    as equal, which is what matching promises."""
    design = results.plan.designs[number]
    count = results.parameters[number] if results.parameters else 0
    least = min(results.parameters, default=0)
    step = max(1, round(0.02 * least))
    return (count // step if least else 0, design.kv_bytes_per_token(), design.num_heads)


def _answer(results: Results, rows: list[Row], best: int, smallest: int, measurable: bool) -> str:
    designs, metric = results.plan.designs, results.metric
    if not measurable:
        widest = max((r.difference for r in rows if r.difference), key=lambda d: d.high - d.low)
        return (
            f"No measurable difference: every design's {metric} is within the noise of the best "
            f"({designs[best].label}, {rows[best].mean:.4g}); the widest interval is "
            f"{widest.low:+.3g} to {widest.high:+.3g}. Nothing here speaks for more than the "
            f"smallest, {designs[smallest].label}."
        )
    lost = [r for r in rows if r.difference is not None and r.difference.worse]
    nearest = max(lost, key=lambda r: r.difference.mean if r.difference else -math.inf)
    assert nearest.difference is not None
    worse = (
        f"{designs[nearest.design].label} is measurably worse ({nearest.difference.mean:+.3g}, "
        f"95 % interval {nearest.difference.low:+.3g} to {nearest.difference.high:+.3g})"
    )
    if smallest == best:
        return (
            f"{designs[best].label}: the best {metric}, {rows[best].mean:.4g}, and the smallest "
            f"design that is not measurably worse than the best; {worse}."
        )
    apart = rows[smallest].difference
    assert apart is not None
    return (
        f"{designs[smallest].label} is the smallest design that is not measurably worse than the "
        f"best ({designs[best].label}, {metric} {rows[best].mean:.4g}): {rows[smallest].mean:.4g}, "
        f"a difference of {apart.mean:+.3g}, 95 % interval {apart.low:+.3g} to {apart.high:+.3g}; "
        f"{worse}."
    )


def _cautions(results: Results) -> list[str]:
    found = []
    for number, design in enumerate(results.plan.designs):
        if design.width < 16 and design.num_heads > 1:
            found.append(
                f"{design.label}: a head of {design.width} features can tell few keys apart "
                "(low-rank bottleneck, Bhojanapalli 2020, arXiv 2002.07028)"
            )
        if design.num_heads * 8 > design.embed_dim:
            found.append(
                f"{design.label}: many heads for a width of {design.embed_dim}; most heads of "
                "wide models can be removed with little loss (Michel 2019, arXiv 1905.10650)"
            )
        shares = [o.alike for o in results.of(number) if o.alike is not None]
        if shares and float(np.mean(shares)) > 0.25:
            found.append(
                f"{design.label}: {np.mean(shares):.0%} of the pairs of heads in a layer read "
                "nearly the same keys on the example (cosine above 0.95); a clue, not a proof"
            )
    return found


def _limits(results: Results, rows: list[Row]) -> list[str]:
    found = []
    seeds = min(r.seeds for r in rows)
    if seeds < 3:
        found.append(f"{seeds} seed{'s' * (seeds > 1)}: how much a seed alone changes is not known")
    else:
        found.append(f"{seeds} seeds: differences smaller than their intervals are not seen")
    short = [o for o in results.outcomes if o.steps >= results.plan.budget.steps]
    if len(short) * 2 > len(results.outcomes):
        found.append(
            "most trainings ended with the budget and not because they stopped getting better: a "
            "longer one may rank the designs otherwise"
        )
    found.append(
        "designs are compared on the test examples themselves, so the best one's own score is a "
        "little too good; one task, one size of model, one learning rate for all"
    )
    return found
