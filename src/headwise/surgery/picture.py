"""The curve: quality against the share of heads removed, shared variants beside it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from headwise._extras import require
from headwise.surgery.what_if import Variant


def draw(rows: Sequence[Variant], path: str | Path, *, title: str = "") -> None:
    """Write the curve as .png, .svg or .pdf, whole or not at all.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    matplotlib = require("matplotlib", extra="plots", purpose="the what-if picture")
    matplotlib.use("Agg")
    figure = require("matplotlib.figure", extra="plots").Figure(figsize=(7, 4.5))
    axes = figure.subplots()
    for healed, label, mark in ((False, "pruned", "o-"), (True, "pruned, healed", "s--")):
        line = [
            r
            for r in rows
            if bool(r.healed) == healed and (r.pruned > 0 or r.name.startswith("original"))
        ]
        if line:
            axes.plot([100 * r.pruned for r in line], [r.quality for r in line], mark, label=label)
    for row in rows:
        if "kv head" in row.name:
            axes.plot([0], [row.quality], "D", label=row.name)
    axes.axhline(rows[0].quality, color="grey", linewidth=0.8, label="original")
    if rows[0].metric == "perplexity":
        axes.set_yscale("log")
    axes.set_xlabel("heads removed, % (least important first)")
    axes.set_ylabel(f"{rows[0].metric} ({rows[0].better} is better)")
    axes.set_title(title)
    axes.legend()
    target = Path(path)
    handle, name = tempfile.mkstemp(dir=target.parent, suffix=target.suffix)
    os.close(handle)
    try:
        figure.savefig(name, dpi=130, bbox_inches="tight")
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
