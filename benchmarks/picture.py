"""The benchmark's picture: each row's ratio to torch, to the best peer and to the limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

matplotlib.use("Agg")

TORCH, PEER, LIMIT = "#1b6ca8", "#c2571a", "#777777"


def draw(found: dict[str, Any], path: Path) -> None:
    """Write .png, .svg or .pdf from what `benchmarks.kernel` measured."""
    rows = found["rows"]
    figure = Figure(figsize=(10, 0.26 * len(rows) + 1.6))
    ratios, shares = figure.subplots(1, 2, sharey=True, width_ratios=(3, 1))
    at = range(len(rows))
    ratios.barh(at, [row["ratio"] for row in rows], color=TORCH, label="torch")
    best = [(i, min(p["ratio"] for p in row["peers"].values()))
            for i, row in enumerate(rows) if row.get("peers")]  # fmt: skip
    if best:
        ratios.plot([ratio for _, ratio in best], [i for i, _ in best], "D", color=PEER,
                    label="the best other library")  # fmt: skip
    for i, row in enumerate(rows):
        ratios.annotate(f"{row['ratio']:.2f}", (row["ratio"], i), (3, 0),
                        textcoords="offset points", va="center", fontsize=7)  # fmt: skip
    ratios.axvline(1, color="black", linewidth=0.8)
    ratios.set_xscale("log")
    ratios.set_xlabel("times as fast as …")
    ratios.set_yticks(list(at), [row["name"] for row in rows], fontsize=8)
    ratios.invert_yaxis()
    ratios.legend(fontsize=8)
    known = [(i, row["of_limit"]) for i, row in enumerate(rows) if row["of_limit"] is not None]
    shares.barh([i for i, _ in known], [100 * share for _, share in known], color=LIMIT)
    shares.axvline(100, color="black", linewidth=0.8)
    shares.set_xlabel("% of this machine's limit")
    limit = found["limits"]
    figure.suptitle(
        f"{found['isa']}, {found['threads']} threads, torch {found['torch']}: "
        f"{limit['fp32']:.0f} (fp32) and {limit['bf16']:.0f} (bf16) GFLOP/s, "
        f"{limit['read']:.0f} GB/s",
        fontsize=9,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)
