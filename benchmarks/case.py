"""What is compared, and how it is timed: A B A B in one process, the median of the ratios."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import peers

# Units of work in one unit of the table.
SCALE = {"GFLOP/s": 1e9, "GB/s": 1e9, "tokens/s": 1.0}


class Case(NamedTuple):
    """What is computed, by us and by torch; `work` in operations, bytes or tokens."""

    name: str
    ours: Callable[[], Any]
    torchs: Callable[[], Any]
    work: float
    unit: str
    check: Callable[[], None]
    # The other libraries that can compute this, and why the rest can't; called once, untimed.
    others: Callable[[], tuple[dict[str, peers.Run], dict[str, str]]] | None = None


def no_worse(ours: Tensor, torchs: Tensor, exact: Tensor, name: str) -> None:
    """Assert that our largest error is at most torch's, with room for one rounding."""
    mine = float((ours.double() - exact).abs().max())
    its = float((torchs.double() - exact).abs().max())
    room = torch.finfo(ours.dtype).eps * float(exact.abs().max())
    assert mine <= its + room, f"{name}: error {mine:.3g}, torch's {its:.3g}"


def seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def pairs(
    ours: Callable[[], Any], other: Callable[[], Any], budget: float
) -> list[tuple[float, float]]:
    """At least three pairs of times, as many as fit into `budget` seconds; a warm-up first."""
    seconds(ours), seconds(other)
    begin, times = time.perf_counter(), []
    while len(times) < 3 or (time.perf_counter() - begin < budget and len(times) < 400):
        times.append((seconds(ours), seconds(other)))
    return times


# Threads of another library wait for work by spinning: for so long they take the cores from us.
REST = 0.03
# Threads that wake may share a core until the system's next ticks part them.
WARM = 0.02


def peer_pairs(
    ours: Callable[[], Any], other: Callable[[], Any], budget: float
) -> list[tuple[float, float]]:
    """As `pairs`, for a library with threads of its own: before each time a rest, until the other's
    threads sleep, and runs until ours lie on cores of their own."""

    def rested(run: Callable[[], Any]) -> float:
        time.sleep(REST)
        begin = time.perf_counter()
        run()
        while time.perf_counter() - begin < WARM:
            run()
        return seconds(run)

    begin, times = time.perf_counter(), []
    while len(times) < 9 or (time.perf_counter() - begin < budget and len(times) < 400):
        times.append((rested(ours), rested(other)))
    return times


def paired(case: Case, budget: float, with_peers: bool = False) -> dict[str, Any]:
    """One row of the table: rates, and torch's (and each peer's) time over ours."""
    case.check()
    times, work = pairs(case.ours, case.torchs, budget), case.work / SCALE[case.unit]
    row: dict[str, Any] = {
        "name": case.name,
        "unit": case.unit,
        "ours": work / statistics.median(mine for mine, _ in times),
        "torch": work / statistics.median(its for _, its in times),
        "ratio": statistics.median(its / mine for mine, its in times),
        "pairs": len(times),
    }
    if with_peers and case.others is not None:
        runs, row["left_out"] = case.others()
        row["peers"] = {}
        for name, run in runs.items():
            times = peer_pairs(case.ours, run, budget)
            row["peers"][name] = {
                "rate": work / statistics.median(its for _, its in times),
                "ratio": statistics.median(its / mine for mine, its in times),
            }
    return row


def limits() -> dict[str, float]:
    """What this machine can do: matrix products in fp32 and bf16 (GFLOP/s), and reading (GB/s)."""
    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
    half = a.bfloat16()
    long = torch.randn(64 << 20)

    def rate(run: Callable[[], Any], work: float) -> float:
        return work / 1e9 / statistics.median(seconds(run) for _ in range(9))

    return {
        "fp32": rate(lambda: a @ b, 2.0 * 2048**3),
        "bf16": rate(lambda: half @ half, 2.0 * 2048**3),
        "read": rate(lambda: long.sum(), long.numel() * 4.0),
    }


def of_limit(row: dict[str, Any], limit: dict[str, float]) -> float | None:
    """Our rate as a share of what the machine can do; None where that was not measured."""
    if row["unit"] == "tokens/s":
        return None
    kind = "read" if row["unit"] == "GB/s" else "bf16" if "bf16" in row["name"] else "fp32"
    return float(row["ours"] / limit[kind])
