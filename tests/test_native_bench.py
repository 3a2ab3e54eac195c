"""What may go wrong in silence in the kernel's benchmark: its checks, its ratios, its picture."""

from __future__ import annotations

import time
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import case

    return case


def test_a_row_is_checked_then_timed_in_pairs(case: ModuleType) -> None:
    done: list[str] = []

    def run(name: str, seconds: float) -> None:
        done.append(name)
        time.sleep(seconds)

    one = case.Case(
        "x", lambda: run("ours", 0.002), lambda: run("torch", 0.006), 4e9, "GFLOP/s",
        lambda: done.append("check"),
    )  # fmt: skip
    row = case.paired(one, 0.0)
    assert done == ["check", *["ours", "torch"] * 4]  # a warm-up and three pairs
    assert row["pairs"] == 3 and 1.5 < row["ratio"] < 5
    assert 400 < row["ours"] < 2000 and row["torch"] < row["ours"]


def test_a_wrong_answer_stops_the_benchmark(case: ModuleType) -> None:
    exact = torch.ones(4, dtype=torch.float64)
    near, off = torch.full((4,), 1.0 + 1e-7), torch.full((4,), 1.001)
    case.no_worse(near, near, exact, "fine")
    with pytest.raises(AssertionError, match=r"attention x: error 0\.001, torch's 1\.19e-07"):
        case.no_worse(off, near, exact, "attention x")


def test_each_row_is_held_to_its_own_limit(case: ModuleType) -> None:
    limit = {"fp32": 200.0, "bf16": 400.0, "read": 50.0}
    for name, unit, wanted in (
        ("fp32 full", "GFLOP/s", 0.5),
        ("bf16 full", "GFLOP/s", 0.25),
        ("bf16 decode", "GB/s", 2.0),
        ("SmolLM2 prefill", "tokens/s", None),
    ):
        assert case.of_limit({"name": name, "unit": unit, "ours": 100.0}, limit) == wanted


def test_the_picture_shows_every_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import picture

    rows = [
        {"name": "fp32 full", "ratio": 1.31, "of_limit": 0.9, "peers": {"a": {"ratio": 1.1}}},
        {"name": "SmolLM2 prefill", "ratio": 1.62, "of_limit": None},
    ]
    limit = {"fp32": 200.0, "bf16": 400.0, "read": 50.0}
    found = {"isa": "avx2", "threads": 2, "torch": "2", "limits": limit, "rows": rows}
    picture.draw(found, tmp_path / "drawn.svg")
    drawn = (tmp_path / "drawn.svg").read_text()
    for text in ("fp32 full", "SmolLM2 prefill", "1.31", "1.62", "the best other library"):
        assert f"<!-- {text} -->" in drawn, text


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells the peak")
def test_peak_memory_is_the_childs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.chdir(ROOT)
    from benchmarks import maps

    held = torch.ones(300_000_000)  # what this process holds must not hide the child's growth
    whole, linear = maps.peak("maps"), maps.peak("headwise")
    del held
    assert whole is not None and linear is not None
    assert whole > 8 * 2048**2 * 4 and 0 < linear < whole / 5
