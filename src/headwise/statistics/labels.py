"""Short names for what a head does, each with the threshold that gave it. A name is a clue too."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from torch import Tensor

from headwise.statistics.heads import HeadStatistics


@dataclass(frozen=True)
class Thresholds:
    """When a head gets a name. Where a source is given the number is the source's, otherwise it is
    headwise's choice, made so that on ordinary text the names stay rare enough to mean something.

    sink: α_1 above this (Gu 2024, arXiv 2410.10781, ε = 0.3).
    previous_token, duplicate_token, induction: mean weight above this (the statistics' sources:
        see HeadStatistics; the numbers are headwise's choice). The last two are means over rows
        whose token occurred before, and give no name where those are fewer than matched_rows.
    local: weight at distances below 8 above this, and a distance ratio below local_ratio, so that
        in a short text, where all is near, a head that spreads evenly is not called local.
    broad: relative entropy above this: near uniform attention (Clark 2019, arXiv 1906.04341,
        section 3.1 names such heads; the number is headwise's choice).
    redundant: the average Bhattacharyya coefficient between clusters of heads that are joined.
        JS ≤ 1 − BC, so 0.95 means a Jensen–Shannon divergence of at most 0.05 nats.
    collapse: a layer is warned of when its mean entropy is at most 1 + this times the lower bound
        for its score norms (Zhai 2023, arXiv 2303.06296, theorem 3.1).
    """

    sink: float = 0.3
    previous_token: float = 0.4
    duplicate_token: float = 0.3
    induction: float = 0.3
    matched_rows: float = 8
    local: float = 0.6
    local_ratio: float = 0.5
    broad: float = 0.8
    redundant: float = 0.95
    collapse: float = 0.05

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def sink_rate(statistics: HeadStatistics, place: int = 1, threshold: float = 0.3) -> float:
    """Percentage of (text, head) pairs of the batch whose α_place is above the threshold.

    Gu 2024 (arXiv 2410.10781) uses 0.3 on texts of 64 tokens. place: 1 to 4. For a model, pool the
    layers: the mean of the layers' rates, as each has the same number of heads.

    Raises:
        ValueError: place is not 1, 2, 3 or 4.
    """
    if place not in (1, 2, 3, 4):
        raise ValueError(f"sink_rate: place counts tokens from 1 to 4, got {place}")
    return 100.0 * float((statistics.sink[..., place - 1] > threshold).double().mean())


def clusters(similarity: np.ndarray, threshold: float) -> list[int]:
    """Average linkage: join the two most similar clusters while that similarity is ≥ threshold.

    similarity: (H, H), symmetric, for example the Bhattacharyya coefficients of a layer's heads.
    Returns each head's cluster, numbered by first member. A head with NaN stays alone.
    """
    groups = [[head] for head in range(len(similarity))]
    while len(groups) > 1:
        # The mean over all pairs of members, one from each cluster.
        mean = np.full((len(groups), len(groups)), -np.inf)
        for a, one in enumerate(groups):
            for b in range(a):
                value = similarity[np.ix_(one, groups[b])].mean()
                mean[a, b] = -np.inf if np.isnan(value) else value
        a, b = divmod(int(mean.argmax()), len(groups))
        if mean[a, b] < threshold:
            break
        groups[b] += groups.pop(a)
    groups.sort(key=min)
    return [next(n for n, group in enumerate(groups) if head in group)
            for head in range(len(similarity))]  # fmt: skip


def labels(
    statistics: HeadStatistics, item: int = 0, thresholds: Thresholds | None = None
) -> list[list[str]]:
    """The names of each head of one batch element, by `thresholds`.

    A NaN statistic gives no name. "redundant" marks each head of a cluster of two or more.
    """
    limit = thresholds or Thresholds()
    names: list[list[str]] = [[] for _ in range(statistics.entropy.shape[1])]

    def give(name: str, heads: np.ndarray) -> None:
        for head in np.flatnonzero(heads):
            names[head].append(name)

    def of(values: Tensor | None) -> np.ndarray:
        assert values is not None
        return values[item].numpy().astype(np.float64)

    give("sink", of(statistics.sink)[:, 0] > limit.sink)
    give("previous-token", of(statistics.previous_token) > limit.previous_token)
    near = of(statistics.distance_histogram)[:, :4].sum(-1)  # {0}, {1}, {2, 3}, {4 … 7}
    give("local", (near > limit.local) & (of(statistics.distance_ratio) < limit.local_ratio))
    give("broad", of(statistics.relative_entropy) > limit.broad)
    if statistics.bhattacharyya is not None:
        member = np.array(clusters(of(statistics.bhattacharyya), limit.redundant), dtype=int)
        give("redundant", np.bincount(member)[member] > 1)
    if statistics.matched_rows is not None:
        enough = of(statistics.matched_rows) >= limit.matched_rows
        give("induction", enough & (of(statistics.induction) > limit.induction))
        give("duplicate-token", enough & (of(statistics.duplicate_token) > limit.duplicate_token))
    return names


def collapse_warning(
    statistics: HeadStatistics, item: int = 0, thresholds: Thresholds | None = None
) -> dict[str, float] | None:
    """Numbers of an entropy-collapse warning for the layer, or None where none is due.

    Due when the layer's mean entropy has fallen to the lower bound that its measured score norms
    allow (Zhai 2023, arXiv 2303.06296). With learned sinks rows do not sum to 1 and the bound does
    not hold, so none is given.
    """
    limit = thresholds or Thresholds()
    heads = statistics.relative_entropy[item].isfinite()
    if statistics.sink_logit_mass is not None or not bool(heads.any()):
        return None
    entropy = float(statistics.entropy[item][heads].mean())
    bound = float(statistics.entropy_bound[item][heads].mean())
    if not entropy <= bound * (1 + limit.collapse):
        return None
    norm = float(statistics.score_norm[item][heads].mean())
    return {"mean_entropy": entropy, "lower_bound": bound, "score_norm": norm}
