"""`headwise whatif` as a person meets it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from headwise import cli
from headwise.record import read


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
    for word in ("original", "prune 40%", "1 kv head", "perplexity", "KV MiB"):
        assert word.lower() in printed.lower()
    assert out.read_text().lstrip().startswith("<?xml")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("smollm2", "--text-file", "none.txt"), "cannot read none.txt"),
        (("smollm2", "--text-file", "none.txt", "--prune", "a"), "--prune: wanted numbers"),
        (("smollm2", "--text-file", "none.txt", "--out", "x.gif"), "must end in .png"),
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
