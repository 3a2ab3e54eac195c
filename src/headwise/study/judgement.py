"""The answer: which design is the smallest that is not measurably worse than the best."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from headwise.study.differences import Differences
from headwise.study.heads import ALIKE
from headwise.study.trials import Results

# Below so many features a head tells few keys apart; below so many a head, heads are many.
NARROW, CROWDED = 16, 8
# A larger share of pairs of heads that read the same keys is worth a caution.
MANY_ALIKE = 0.25
# Rounds of one speed that differ by more than this share were not alone on the machine.
UNSTEADY = 0.25


@dataclass(frozen=True)
class Difference:
    """A design less the best one, above 0 where it is better. low … high: the 95 % interval, which
    holds for all pairs of designs together; infinite with one seed."""

    mean: float
    low: float
    high: float

    @property
    def worse(self) -> bool:
        """Measurably: the whole interval lies below 0."""
        return self.high < 0


@dataclass(frozen=True)
class Row:
    """One design: the mean of its test score over the seeds that all designs have, their spread
    (standard deviation, NaN with one), and its difference from the best (None: it is the best)."""

    design: int
    mean: float
    spread: float
    seeds: int
    difference: Difference | None


@dataclass(frozen=True)
class Judgement:
    """rows, in the plan's order; best and smallest: places in the plan's designs (smallest is None
    with one seed, which speaks for no design); measurable: some design is worse; answer: one
    sentence with its evidence; cautions: what else to know; limits: what this cannot tell."""

    rows: tuple[Row, ...]
    best: int
    smallest: int | None
    measurable: bool
    answer: str
    cautions: tuple[str, ...]
    limits: tuple[str, ...]


def judge(results: Results) -> Judgement | None:
    """None before all designs have one seed in common. What intervals are: study/differences.py."""
    designs = results.plan.designs
    trained = [{o.seed: o for o in results.of(number)} for number in range(len(designs))]
    seeds = sorted(set.intersection(*(set(runs) for runs in trained)))
    if not seeds:
        return None
    sign = 1.0 if results.better == "higher" else -1.0
    scores = np.array([[runs[seed].value for seed in seeds] for runs in trained])
    examples = _examples([[runs[seed].per_example for seed in seeds] for runs in trained], scores)
    means = scores.mean(1)
    best = max(
        range(len(designs)), key=lambda n: (sign * means[n], *(-k for k in _size(results, n)))
    )
    noise = Differences(scores, examples)
    rows = []
    for number, mean in enumerate(means.tolist()):
        spread = float(scores[number].std(ddof=1)) if len(seeds) > 1 else math.nan
        apart = None
        if number != best:
            middle, half = sign * (mean - float(means[best])), noise.half(number, best)
            apart = Difference(middle, middle - half, middle + half)
        rows.append(Row(number, mean, spread, len(seeds), apart))
    uneven = _uneven(rows)
    able = [
        r.design for r in rows
        if r.difference is None or not (r.difference.worse or r.design in uneven)
    ]  # fmt: skip
    smallest = min(able, key=lambda n: _size(results, n)) if len(seeds) > 1 else None
    return Judgement(
        tuple(rows),
        best,
        smallest,
        any(r.difference is not None and r.difference.worse for r in rows),
        _answer(results, rows, best, smallest, uneven),
        tuple(_cautions(results)),
        tuple(_limits(results, rows, len(seeds), noise, uneven)),
    )


def _uneven(rows: list[Row]) -> list[int]:
    """Designs that escape being measurably worse only by their wide intervals: another one, which
    is better than they are on average, is measurably worse than the best. They are not
    recommended."""
    lost = [r.difference.mean for r in rows if r.difference is not None and r.difference.worse]
    return [
        r.design for r in rows
        if r.difference is not None and not r.difference.worse
        and r.difference.mean < max(lost, default=-math.inf)
    ]  # fmt: skip


def _examples(parts: list[list[np.ndarray]], scores: np.ndarray) -> np.ndarray | None:
    """(designs, seeds, examples), where the score is the mean over examples, the same for all."""
    if len({len(part) for row in parts for part in row}) != 1:
        return None
    examples = np.array(parts, dtype=np.float64)
    # They are kept in single precision.
    alike = np.allclose(examples.mean(2), scores, rtol=1e-5, atol=1e-6 * np.abs(examples).max())
    return examples if alike else None


def _size(results: Results, number: int) -> tuple[int, int, int]:
    """What makes a design smaller: parameters, then cache, then heads. Parameters within 4 % of the
    smallest model's count as equal: matching promises 2 % to either side."""
    design = results.plan.designs[number]
    steps = 0
    if results.parameters:
        least = min(results.parameters)
        steps = int((results.parameters[number] - least) / (0.04 * least))
    return steps, design.kv_bytes_per_token(), design.num_heads


def _answer(
    results: Results, rows: list[Row], best: int, smallest: int | None, uneven: list[int]
) -> str:
    designs, metric = results.plan.designs, results.metric
    if smallest is None:
        return (
            "No difference can be measured with 1 seed: how much a seed alone changes is not "
            f"known. The best {metric} is {rows[best].mean:.4g} ({designs[best].label}); "
            "--seeds 3 tells whether that is noise."
        )
    others = [(r.design, r.difference) for r in rows if r.difference is not None]
    lost = [(number, apart) for number, apart in others if apart.worse]
    if not lost:
        widest = max((apart for _, apart in others), key=lambda d: d.high - d.low)
        return (
            f"No measurable difference: every design's {metric} is within the noise of the best "
            f"({designs[best].label}, {rows[best].mean:.4g}); the widest 95 % interval is "
            f"{widest.low:+.3g} to {widest.high:+.3g}. Nothing here speaks for more than the "
            f"smallest, {designs[smallest].label}."
        )
    number, apart = max(lost, key=lambda pair: pair[1].mean)
    worse = f"{designs[number].label} is measurably worse ({_told(apart)})"
    passed = any(_size(results, n) < _size(results, smallest) for n in uneven)
    which = (
        f"the smallest design{' with even seeds' if passed else ''} that is not measurably worse"
    )
    if smallest == best:
        return (
            f"{designs[best].label}: the best {metric}, {rows[best].mean:.4g}, and {which}; "
            f"{worse}."
        )
    mine = rows[smallest].difference
    assert mine is not None
    return (
        f"{designs[smallest].label} is {which} than the "
        f"best ({designs[best].label}, {metric} {rows[best].mean:.4g}): "
        f"{rows[smallest].mean:.4g} ({_told(mine)}); {worse}."
    )


def _told(apart: Difference) -> str:
    return f"{apart.mean:+.3g}, 95 % interval {apart.low:+.3g} to {apart.high:+.3g}"


def _cautions(results: Results) -> list[str]:
    """Each with the designs that it is about."""
    found: dict[str, list[str]] = {}
    tokens = results.tokens or NARROW
    for number, design in enumerate(results.plan.designs):
        # A head as wide as there are tokens can have any weights (Bhojanapalli's theorem 1).
        if design.width < min(NARROW, tokens):
            of = f" of {results.tokens}" if results.tokens else ""
            text = (
                f"a head of {_count(design.width, 'feature')} can tell few keys{of} apart "
                "(low-rank bottleneck, Bhojanapalli 2020, arXiv 2002.07028)"
            )
            found.setdefault(text, []).append(design.label)
        if design.num_heads > 1 and design.num_heads * CROWDED > design.embed_dim:
            text = (
                f"many heads for a width of {design.embed_dim}; most heads of trained models can "
                "be removed with little loss (Michel 2019, arXiv 1905.10650)"
            )
            found.setdefault(text, []).append(design.label)
        shares = [o.alike for o in results.of(number) if o.alike is not None]
        if shares and float(np.mean(shares)) > MANY_ALIKE:
            text = (
                f"{np.mean(shares):.0%} of the pairs of heads in a layer read nearly the same keys "
                f"of the example (cosine above {ALIKE}); redundant heads, maybe: a clue, not a "
                "proof (Michel 2019, arXiv 1905.10650)"
            )
            found.setdefault(text, []).append(design.label)
    return [f"{'; '.join(labels)}: {text}" for text, labels in found.items()]


def _limits(
    results: Results, rows: list[Row], seeds: int, noise: Differences, uneven: list[int]
) -> list[str]:
    designs, budget = results.plan.designs, results.plan.budget
    found = []
    if seeds == 1:
        found.append("1 seed: how much a seed alone changes is not known")
    else:
        found.append(
            f"{_count(seeds, 'seed')}: a difference from the best of less than "
            f"{noise.pooled:.2g} is not seen"
        )
    for number in uneven:
        apart = rows[number].difference
        assert apart is not None
        found.append(
            f"{designs[number].label}: its seeds are too uneven to place it ({_told(apart)}), and "
            "a design that is better on average is measurably worse than the best"
        )
    if noise.examples is None:
        found.append(
            "the score is no mean over test examples: the intervals cover other seeds, and not "
            "other examples"
        )
    full = [
        o for o in results.outcomes
        if o.steps >= budget.steps or (budget.seconds is not None and o.seconds >= budget.seconds)
    ]  # fmt: skip
    if len(full) * 2 > len(results.outcomes):
        found.append(
            "most trainings ended with the budget and not because they stopped getting better: a "
            "longer one may rank the designs otherwise"
        )
    unsteady = max((s.get("unsteady") or 0.0 for s in results.speed.values()), default=0.0)
    if unsteady > UNSTEADY:
        found.append(
            f"speed: rounds of one measurement differed by {unsteady:.0%}, so something else may "
            "have run on the machine"
        )
    found.append(
        "designs are compared on the test examples themselves, so the best one's own score is a "
        "little too good; one task, one size of model, one learning rate for all"
    )
    return found


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
