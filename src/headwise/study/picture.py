"""The study's picture: quality against latency, cache and parameters, what nothing beats joined."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from headwise._extras import require
from headwise.study.judgement import Judgement
from headwise.study.trials import Results


def front(points: Sequence[tuple[float, float]], better: str) -> list[int]:
    """Places of the points (cost, quality) that no other beats in one without losing in the other,
    in order of cost (the Pareto front)."""
    sign = 1.0 if better == "higher" else -1.0
    order = sorted(range(len(points)), key=lambda n: (points[n][0], -sign * points[n][1]))
    found: list[int] = []
    for n in order:
        if not found or sign * points[n][1] > sign * points[found[-1]][1]:
            found.append(n)
    return found


def draw(results: Results, judged: Judgement, path: str | Path) -> None:
    """Write .png, .svg or .pdf, whole or not at all.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    matplotlib = require("matplotlib", extra="plots", purpose="the study's picture")
    matplotlib.use("Agg")
    figure = require("matplotlib.figure", extra="plots").Figure(figsize=(12, 4))
    designs = results.plan.designs
    speed = results.speed
    costs = [
        ("parameters", [float(n) for n in results.parameters]),
        ("KV bytes of a token", [float(d.kv_bytes_per_token(4)) for d in designs]),
    ]
    if len(speed) == len(designs):
        late = [1e3 * float(speed[n]["latency"] or 0.0) for n in range(len(designs))]
        costs.insert(0, ("latency of one example, ms", late))
    panels = figure.subplots(1, len(costs), sharey=True, squeeze=False)[0]
    for axes, (name, cost) in zip(panels, costs, strict=True):
        points = list(zip(cost, (row.mean for row in judged.rows), strict=True))
        for row, (x, y) in zip(judged.rows, points, strict=True):
            chosen = row.design == judged.smallest
            axes.errorbar([x], [y], yerr=None if row.spread != row.spread else [row.spread],
                          fmt="o", color="C3" if chosen else "C0", capsize=3)  # fmt: skip
            axes.annotate(designs[row.design].label, (x, y), textcoords="offset points",
                          xytext=(5, 4), fontsize=7)  # fmt: skip
        joined = [points[n] for n in front(points, results.better)]
        axes.plot(*zip(*joined, strict=True), ":", color="grey", linewidth=1)
        axes.set_xlabel(name)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel(f"{results.metric} (mean ± spread over seeds)")
    figure.suptitle(f"{results.plan.task}: red is the smallest not measurably worse than the best",
                    fontsize=9)  # fmt: skip
    figure.tight_layout()
    target = Path(path)
    handle, name = tempfile.mkstemp(dir=target.parent, suffix=target.suffix)
    os.close(handle)
    try:
        figure.savefig(name, dpi=130)
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
