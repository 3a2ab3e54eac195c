"""The command as a person meets it: what it prints, what it writes, how it fails."""

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import headwise
from headwise import cli, native
from headwise.record import Record, read, write

MODULE = """
import torch
from headwise.layer import MultiHeadAttention
from headwise.masks import causal


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = MultiHeadAttention(8, 2)

    def forward(self, x):
        return self.attn(x, mask=causal())


def make():
    torch.manual_seed(0)
    return Model(), torch.randn(1, 5, 8)


def plain():
    return torch.nn.Linear(8, 8), torch.randn(1, 5, 8)


def broken():
    raise RuntimeError("the factory fell over")
"""


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture):
    """The command, inside this process: what it printed and its exit code."""
    (tmp_path / "toymodel.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "toymodel", raising=False)

    def call(*args: str, columns: int = 80) -> Done:
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys, "argv", ["headwise", *args])
        capfd.readouterr()
        with pytest.raises(SystemExit) as stop:
            cli.main()
        out, err = capfd.readouterr()
        return Done(stop.value.code or 0, out, err)

    call.place = tmp_path
    return call


def files(place: Path) -> set[str]:
    return {path.name for path in place.iterdir()} - {"toymodel.py", "__pycache__"}


def test_a_plain_pytorch_model(run):
    done = run("report", "toymodel:make", "--records", "r.jsonl")
    assert done.returncode == 0, done.stderr
    assert "1 attention modules, 2 heads, 5 positions" in done.stdout
    assert "clues" in done.stdout
    assert "wrote report.html and r.jsonl" in done.stdout
    assert files(run.place) == {"report.html", "r.jsonl"}
    kinds = {record.kind for record in read(run.place / "r.jsonl")}
    assert {"run", "axis", "attention", "head", "map"} <= kinds
    page = (run.place / "report.html").read_text()
    again = run("report", "--from", "r.jsonl", "--out", "again.html")
    assert again.returncode == 0, again.stderr
    assert (run.place / "again.html").read_text() == page


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["report"], "name a model"),
        (["report", "nosuchmodel"], "unknown model 'nosuchmodel'"),
        (["report", "smolm2"], "did you mean smollm2?"),
        (["report", "./nowhere"], "no such file or directory: ./nowhere"),
        (["report", "nomodule:make"], "nomodule"),
        (["report", "toymodel:nothing"], "nothing"),
        (["report", "toymodel:broken"], "the factory fell over"),
        (["report", "toymodel:plain"], "attention"),
        (["report", "toymodel:make", "--text", "x"], "not --text"),
        (["report", "toymodel:make", "--out", "no/such/place.html"], "no such file"),
        (["report", "toymodel:make", "--out", "."], "it is a directory"),
        (["report", "toymodel:make", "--dtype", "int3"], "unknown dtype 'int3'"),
        (["report", "toymodel:make", "--device", "abacus"], "'abacus'"),
        (["report", "toymodel:make", "--link", "she"], "wanted 'QUERY -> KEY'"),
        (["report", "toymodel:make", "--link", "she -> x"], "'she' is not in the input"),
        (["report", "smollm2", "--text", "a", "--file", "b"], "not both"),
        (["report", "smollm2", "--file", "missing.txt"], "missing.txt"),
        (["report", "--from", "missing.jsonl"], "cannot read missing.jsonl"),
        (["report", "--from", "toymodel.py"], "line 2: not a headwise record"),
        (["report", "m", "--from", "x.jsonl"], "leave out m"),
        (["report", "toymodel:make", "--colour"], "--colour"),
        (["nonsense"], "nonsense"),
    ],
)
def test_bad_input_is_one_clear_line(run, args, message):
    before = files(run.place)
    done = run(*args)
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if line.startswith("headwise: ")]
    assert len(lines) == 1 and message in lines[0], done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert files(run.place) == before, "nothing half-written stays behind"


def test_debug_shows_where(run, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["headwise", "report", "toymodel:broken", "--debug"])
    with pytest.raises(Exception, match="the factory fell over"):
        cli.main()


def test_the_installed_command_and_the_module_are_the_same(tmp_path):
    """As a process of its own: no traceback, no escape codes, exit code 2."""
    command = [sys.executable, "-m", "headwise", "report", "nosuchmodel"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "unknown model 'nosuchmodel'" in done.stderr
    script = Path(sys.executable).with_name("headwise")
    same = subprocess.run([script, *command[3:]], cwd=tmp_path, capture_output=True, text=True)
    assert (same.returncode, same.stderr) == (2, done.stderr)
    assert os.listdir(tmp_path) == []


def test_interrupted_work_leaves_nothing(run, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("headwise.examine.examine", interrupt)
    done = run("report", "toymodel:make")
    assert done.returncode == 130
    assert "interrupted; nothing was written" in done.stderr
    assert files(run.place) == set()


def test_out_of_memory_is_one_line(run, monkeypatch):
    def exhaust(*args, **kwargs):
        raise MemoryError

    monkeypatch.setattr("headwise.examine.examine", exhaust)
    done = run("report", "toymodel:make")
    assert done.returncode == 2 and "out of memory" in done.stderr
    assert files(run.place) == set()


def test_an_unwritable_place_is_told_before_the_work(run):
    done = run("report", "toymodel:broken", "--out", "no/such/place.html")
    assert "no such file" in done.stderr and "fell over" not in done.stderr


def test_records_that_make_no_run_are_named(run):
    write(run.place / "odd.jsonl", [Record("head", {"id": "self/0", "head": 0}, {})])
    done = run("report", "--from", "odd.jsonl")
    assert done.returncode == 2
    assert len([x for x in done.stderr.splitlines() if x.startswith("headwise: ")]) == 1
    assert "Traceback" not in done.stderr


def test_info_and_models(run):
    done = run("info")
    assert done.returncode == 0
    assert f"headwise          {headwise.__version__}" in done.stdout
    assert f"native kernel     {native.isa()}, of " in done.stdout and "portable" in done.stdout
    assert "sdpa, reference" in done.stdout
    done = run("models")
    assert done.returncode == 0
    for name in ("smollm2", "minilm", "whisper-tiny", "dino", "Apache-2.0"):
        assert name in done.stdout


def test_help_says_what_there_is(run):
    done = run("--help")
    assert done.returncode == 0
    for command in ("report", "models", "info"):
        assert command in done.stdout
    assert run().returncode in (0, 2)


def test_a_narrow_terminal_breaks_nothing(run):
    done = run("report", "toymodel:make", columns=40)
    assert done.returncode == 0, done.stderr
    assert "weight" in done.stdout


def test_no_escape_codes_without_a_terminal(run):
    done = run("report", "toymodel:make")
    assert "\x1b" not in done.stdout + done.stderr


CHECKED = """

class Leaky(Model):
    def forward(self, x):
        from headwise.masks import everything

        return self.attn(x, mask=everything())


def leaky():
    torch.manual_seed(0)
    return Leaky(), torch.randn(1, 5, 8)
"""


def test_check_passes_a_sound_model(run):
    done = run(
        "check", "toymodel:make", "--causal", "--only", "future leak", "--records", "c.jsonl"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout and "FAILED" not in done.stdout
    assert read(run.place / "c.jsonl")[0].kind == "run"


def test_check_names_the_layer_and_head_that_leak(run):
    (run.place / "toymodel.py").write_text(MODULE + CHECKED)
    done = run("check", "toymodel:leaky", "--causal", "--only", "future leak", "--html", "c.html")
    assert done.returncode == 1
    assert "FAILED" in done.stdout
    assert "first seen in attn" in done.stdout and "usual fix" in done.stdout
    page = (run.place / "c.html").read_text()
    assert "future leak" in page
    assert files(run.place) == {"c.html"}


def test_check_that_cannot_know_is_no_pass(run):
    """Nothing says whether this model is causal: not run, exit code 2."""
    done = run("check", "toymodel:make", "--only", "future leak")
    assert done.returncode == 2
    assert "not run" in done.stdout and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["check", "nosuchmodel"], "unknown model 'nosuchmodel'"),
        (
            ["check", "toymodel:make", "--only", "luck"],
            "no check is named 'luck'; there are future",
        ),
        (["check", "toymodel:make", "--html", "no/such/c.html"], "no such file"),
    ],
)
def test_bad_input_of_check_is_one_line(run, args, message):
    done = run(*args)
    assert done.returncode == 2
    assert message in done.stderr and done.stderr.count("\n") == 1
    assert files(run.place) == set()


def test_brackets_in_a_path_are_printed_as_they_are(run):
    done = run("report", "toymodel:make", "--out", "a[draft].html")
    assert done.returncode == 0 and "wrote a[draft].html" in done.stdout
    assert files(run.place) == {"a[draft].html"}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("toymodel:make", "--out", "x", "--records", "./x"), "--out and --records are both x"),
        (("--from", "r", "--out", "r"), "--out and --from are both r; give each a file"),
        (("--from", "r", "--records", "q"), "runs nothing; leave out --records"),
        (("--from", "r", "--dtype", "float16"), "runs nothing; leave out --dtype"),
        (("--from", "r", "--link", "a -> b"), "runs nothing; leave out --link"),
        (("smollm2", "--from", "r", "--text", "a"), "leave out smollm2, --text"),
    ],
)
def test_no_file_is_lost_and_no_option_ignored(run, args, message):
    (run.place / "r").write_text("kept")
    done = run("report", *args)
    assert done.returncode == 2 and message in done.stderr
    assert (run.place / "r").read_text() == "kept" and files(run.place) == {"r"}


def test_standard_input_that_is_no_text_is_one_clear_line(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"abc\xff")))
    done = run("report", "toymodel:make", "--file", "-")
    assert done.returncode == 2 and "standard input: not UTF-8 text (byte 3)" in done.stderr
    monkeypatch.setattr(sys, "stdin", None)
    done = run("report", "toymodel:make", "--file", "-")
    assert done.returncode == 2 and "standard input is closed" in done.stderr


def test_records_from_elsewhere_cannot_steer_the_terminal(run):
    assert run("report", "toymodel:make", "--records", "r.jsonl").returncode == 0
    records = read(run.place / "r.jsonl")
    odd = {"model": "\x1b[2Jx", "note": "\x1b]0;t\x07", "not_caught": ["\x1b[31m"]}
    write(
        run.place / "odd.jsonl",
        [Record(r.kind, r.where, {**r.values, **odd}) if r.kind == "run" else r for r in records],
    )
    done = run("report", "--from", "odd.jsonl")
    assert done.returncode == 0 and "\x1b" not in done.stdout and "\\x1b[2Jx" in done.stdout
