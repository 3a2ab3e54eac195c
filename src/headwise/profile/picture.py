"""The profile's picture: seconds and bytes against context, both axes logarithmic."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headwise._extras import require

if TYPE_CHECKING:
    from headwise.profile.run import Profile


def draw(profiles: Sequence[Profile], path: str | Path) -> None:
    """Write .png, .svg or .pdf, whole or not at all. Dashes are counted, marks are measured.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    matplotlib = require("matplotlib", extra="plots", purpose="the profile's picture")
    matplotlib.use("Agg")
    figure = require("matplotlib.figure", extra="plots").Figure(figsize=(10, 4.2))
    time, memory = figure.subplots(1, 2)
    for number, profile in enumerate(profiles):
        colour, name = f"C{number}", profile.name
        known = profile.measured
        contexts = [m.context for m in known]
        if known:
            prefill = [m.prefill for m in known]
            share = [m.prefill * m.attention_share for m in known]
            time.plot(contexts, prefill, "o-", color=colour, label=f"{name}, prefill")
            time.plot(contexts, share, "o:", color=colour, label=f"{name}, its attention")
            steps = [(m.context, m.decode) for m in known if m.decode is not None]
            if steps:
                time.plot(*zip(*steps, strict=True), "s-", color=colour, mfc="white",
                          label=f"{name}, one token")  # fmt: skip
            memory.plot(contexts, [m.peak for m in known], "o", color=colour,
                        label=f"{name}, peak measured")  # fmt: skip
        counted = profile.counted
        lengths = [c.context for c in counted]
        memory.plot(lengths, [c.fused_peak for c in counted], "--", color=colour,
                    label=f"{name}, peak counted")  # fmt: skip
        memory.plot(lengths, [max(c.kv_bytes, 1) for c in counted], ":", color=colour,
                    label=f"{name}, KV cache")  # fmt: skip
    time.set_ylabel("seconds")
    memory.set_ylabel("bytes")
    for axes in (time, memory):
        axes.set_xlabel("context, tokens")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7)
        else:
            axes.text(0.5, 0.5, "nothing was measured", ha="center", transform=axes.transAxes)
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
