"""`headwise whatif` as a person meets it."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from headwise import cli
from headwise.errors import HeadwiseError
from headwise.record import read
from headwise.tasks import Budget, Design, load_task, runs, scripture, sources
from headwise.tasks.training import train
from terminals import colours, on_terminal
from tinymodels import save_llama


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["headwise", "whatif", *args])
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as left:
        cli.main()
    code = left.value.code
    return code if isinstance(code, int) else 0


@pytest.mark.packaged
@pytest.mark.slow
def test_it_measures_variants_beside_the_original_and_writes_what_was_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "book.txt"
    text.write_text("The lamp stood near the door, and the cat slept under it. " * 60)
    out, records = tmp_path / "curve.svg", tmp_path / "rows.jsonl"
    code = run(
        monkeypatch, "smollm2", "--text-file", str(text), "--context", "32", "--windows", "2",
        "--prune", "0.4", "--kv-heads", "1", "--out", str(out), "--records", str(records),
    )  # fmt: skip
    printed = capsys.readouterr().out
    assert code == 0, printed
    rows = read(records)
    assert len(rows) == 3, [row.values for row in rows]
    for word in ("original", "prune 40%", "1 kv head", "perplexity", "↓", "KV", "of book.txt"):
        assert word.lower() in printed.lower()
    assert out.read_text().lstrip().startswith("<?xml")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("smollm2", "--text-file", "none.txt"), "cannot read none.txt"),
        (("smollm2", "--text-file", "none.txt", "--prune", "a"), "--prune: wanted numbers"),
        (("smollm2", "--text-file", "none.txt", "--out", "x.gif"), "must end in .png"),
        (("smollm2", "--context", "1"), "--context: wanted at least 2, got 1"),
        (("smollm2", "--windows", "0"), "--windows: wanted at least 1, got 0"),
        (("smollm2", "--heal", "-1"), "--heal: wanted a number of steps, got -1"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    args: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, *args) == 2
    printed = capsys.readouterr()
    assert said in printed.err and printed.err.count("\n") == 1 and not printed.out
    assert not list(tmp_path.iterdir())


def test_without_a_text_file_the_english_text_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_llama(tmp_path / "m")
    command = (str(tmp_path / "m"), "--context", "8", "--windows", "2", "--prune", "")
    places: list[str] = []

    def fetch(name: str, *, say: Any) -> Path:
        places.append(name)
        raise HeadwiseError("cannot fetch sword-text-web 1: apt-get failed; --data takes a file")

    monkeypatch.setattr(sources, "fetch", fetch)
    assert run(monkeypatch, *command) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == (
        "headwise: cannot fetch sword-text-web 1: apt-get failed; --text-file measures on a text "
        "of your own"
    )
    monkeypatch.setattr(sources, "fetch", lambda name, *, say: places.append(name) or tmp_path)
    monkeypatch.setattr(scripture, "verses", lambda folder: ["", "maya placed the book ,"] * 40)
    assert run(monkeypatch, *command) == 0
    assert places == ["english-text"] * 2
    assert "2 windows of 8 tokens of english-text" in capsys.readouterr().out


def test_a_trained_task_is_measured_by_its_metric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task = load_task("tabular")
    task.prepare()
    design, budget = Design(16, 4, layers=1, dropout=0.0), Budget(4, 64, 1e-3, 1, 4, 1)
    found = train(task, design, budget, 0)
    score = task.evaluate(found.model, "test")
    runs.save(tmp_path / "run", task, design, budget, 0, found, score, {})
    out, records = tmp_path / "c.svg", tmp_path / "r.jsonl"
    code = run(
        monkeypatch, str(tmp_path / "run"), "--prune", "0.5", "--kv-heads", "2", "--heal", "1",
        "--out", str(out), "--records", str(records),
    )  # fmt: skip
    printed = capsys.readouterr().out
    assert code == 0
    assert task.metric in printed and "↑" in printed and "tabular, its test part" in printed
    assert "token ms" not in printed, "nothing is decoded"
    first, *rest = read(records)
    assert first.where["variant"] == "original" and first.values["metric"] == task.metric
    assert first.values["quality"] == pytest.approx(score.value)
    assert [r.where["variant"] for r in rest] == [
        "original + healed", "2 kv heads", "2 kv heads + healed", "prune 50%", "prune 50% + healed"
    ]  # fmt: skip
    assert f"{task.metric} (higher is better)" in out.read_text()
    for option in (("--text-file", "t"), ("--context", "8"), ("--dtype", "bfloat16")):
        assert run(monkeypatch, str(tmp_path / "run"), *option) == 2
        assert f"on its own test part; leave out {option[0]}" in capsys.readouterr().err


def test_a_narrow_terminal_cuts_no_number_and_no_colour_means_none(tmp_path: Path) -> None:
    save_llama(tmp_path / "m")
    text = tmp_path / "t.txt"
    text.write_text("maya placed the book , she left . " * 20)
    records = tmp_path / "r.jsonl"
    lines, styles, code = on_terminal(
        "whatif", str(tmp_path / "m"), "--text-file", str(text), "--context", "12", "--windows",
        "2", "--prune", "0.5", "--kv-heads", "1", "--heal", "2", "--records", str(records),
        columns=60, no_colour=True,
    )  # fmt: skip
    assert code == 0 and not colours(styles)
    assert "…" not in "".join(lines) and max(map(len, lines)) <= 60, lines
    found = [line for line in lines if re.search(r"\d [KM]iB|\d B ", line)]
    assert len(found) == 6
    for line, row in zip(found, read(records), strict=True):
        assert line.startswith(row.where["variant"].split()[0])
        assert f" {row.values['quality']:.4g} " in line
        assert line.rstrip().endswith(f" {row.values['parameters']:,}")
