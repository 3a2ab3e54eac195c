"""The study's picture: quality against latency, cache and parameters, what nothing beats joined."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headwise._extras import require
from headwise.study.judgement import Judgement
from headwise.study.trials import Results

MARKS = "osD^vPX*"  # one for each number of key/value heads
SMALLEST = "the smallest not measurably\nworse than the best"


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

    A panel for each cost in which the designs differ; costs in which all are alike are named in the
    title. The best of the simpler models is a broken line.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    matplotlib = require("matplotlib", extra="plots", purpose="the study's picture")
    matplotlib.use("Agg")
    designs = results.plan.designs
    costs, alike = _costs(results)
    columns = -(-(len(designs) + 3) // 30)  # of the legend
    width = 3.4 * max(len(costs), 2) + 1.9 * columns
    figure = require("matplotlib.figure", extra="plots").Figure(
        figsize=(width, max(3.6, 0.19 * min(len(designs) + 3, 30) + 1.2)), layout="constrained"
    )
    panels = figure.subplots(1, len(costs), sharey=True, squeeze=False)[0]
    colours = _colours(matplotlib, results)
    shared = sorted({d.kv_heads for d in designs if d.kv_heads != d.num_heads})
    for axes, (name, cost) in zip(panels, costs, strict=True):
        points = list(zip(cost, (row.mean for row in judged.rows), strict=True))
        joined = [points[n] for n in front(points, results.better)]
        if len(joined) > 1:
            axes.plot(*zip(*joined, strict=True), ":", color="grey", linewidth=1.2, zorder=1)
        for row, (x, y) in zip(judged.rows, points, strict=True):
            design = designs[row.design]
            own = design.kv_heads == design.num_heads
            mark = MARKS[0 if own else 1 + shared.index(design.kv_heads) % (len(MARKS) - 1)]
            axes.errorbar([x], [y], yerr=None if row.spread != row.spread else [row.spread],
                          fmt=mark, color=colours[row.design], markersize=6, capsize=3,
                          elinewidth=1, label=design.label)  # fmt: skip
            if row.design == judged.smallest:
                axes.plot([x], [y], "o", markersize=14, fillstyle="none", color="C3",
                          markeredgewidth=1.5, label=SMALLEST)  # fmt: skip
        _baseline(axes, results)
        _ticks(matplotlib, axes, name, cost)
    panels[0].set_ylabel(
        f"{results.metric}, {results.better} is better\n(mean ± spread over seeds)", fontsize=9
    )
    handles, names = panels[0].get_legend_handles_labels()
    labels = {design.label for design in designs}  # these first, then what else is drawn
    first = sorted(range(len(names)), key=lambda n: (names[n] not in labels, n))
    figure.legend([handles[n] for n in first], [names[n] for n in first], fontsize=8, ncols=columns,
                  loc="outside right center", frameon=False)  # fmt: skip
    same = f"; alike in all: {', '.join(alike)}" if alike else ""
    figure.suptitle(f"{results.plan.task} (dotted: designs that no other beats){same}", fontsize=9)
    _save(figure, Path(path))


def _costs(results: Results) -> tuple[list[tuple[str, list[float]]], list[str]]:
    """Costs of the designs, by name; those that are the same for all as words."""
    designs, speed = results.plan.designs, results.speed
    found = [("KV bytes of a token", [float(d.kv_bytes_per_token(4)) for d in designs])]
    if results.parameters:
        found.append(("parameters", [float(n) for n in results.parameters]))
    if len(speed) == len(designs):
        late = [1e3 * float(speed[n]["latency"] or 0.0) for n in range(len(designs))]
        found.insert(0, ("latency of one example, ms", late))
    differ = [pair for pair in found if len(set(pair[1])) > 1]
    alike = [f"{cost[0]:,.0f} {name}" for name, cost in found if len(set(cost)) == 1]
    return (differ, alike) if differ else (found[:1], alike[1:])


def _colours(matplotlib: Any, results: Results) -> list[Any]:
    """Of few heads dark, of many heads bright."""
    counts = sorted({d.num_heads for d in results.plan.designs})
    scale = matplotlib.colormaps["viridis"]
    most = max(1, len(counts) - 1)
    return [scale(0.85 * counts.index(d.num_heads) / most) for d in results.plan.designs]


def _baseline(axes: Any, results: Results) -> None:
    if results.baselines:
        pick = max if results.better == "higher" else min
        name = pick(results.baselines, key=lambda label: results.baselines[label])
        axes.axhline(results.baselines[name], linestyle="--", linewidth=1, color="grey", zorder=0,
                     label=name)  # fmt: skip


def _ticks(matplotlib: Any, axes: Any, name: str, cost: list[float]) -> None:
    ticker = require("matplotlib.ticker", extra="plots")
    if max(cost) > 20 * min(cost) > 0:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(ticker.LogLocator(base=2, numticks=6))
        axes.xaxis.set_minor_locator(ticker.NullLocator())
    else:
        axes.xaxis.set_major_locator(ticker.MaxNLocator(4))
    axes.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,g}"))
    axes.margins(x=0.12, y=0.12)
    axes.set_xlabel(name, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _save(figure: Any, target: Path) -> None:
    handle, name = tempfile.mkstemp(dir=target.parent, suffix=target.suffix)
    os.close(handle)
    try:
        figure.savefig(name, dpi=150)
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
