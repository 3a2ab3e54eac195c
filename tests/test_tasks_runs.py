"""The folder of a run, and the commands that write and use it."""

from __future__ import annotations

import json
import shutil
import sys

import numpy as np
import pytest
import torch

from headwise import cli, models
from headwise.checks import check, failures
from headwise.errors import BadFile, BadInput
from headwise.tasks import load_task, runs


def headwise(monkeypatch, capsys, *words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    monkeypatch.setattr(sys, "argv", ["headwise", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    printed = capsys.readouterr()
    return int(end.value.code or 0), printed.out, printed.err


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("runs") / "table"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            sys, "argv", ["headwise", "train", "tabular", "--steps", "12", "--out", str(place)]
        )
        with pytest.raises(SystemExit) as end:
            cli.main()
    assert not end.value.code
    return place


def test_training_prints_the_metric_beside_every_baseline(monkeypatch, capsys, tmp_path):
    out = tmp_path / "deep" / "run"
    code, printed, _ = headwise(
        monkeypatch, capsys, "train", "tabular", "--steps", 4, "--heads", 2, "--out", out
    )
    assert code == 0
    for name in ("attention, 2 heads × 16", "accuracy ↑", *load_names("tabular")):
        assert name in printed
    about = json.loads((out / "run.json").read_text("utf-8"))
    assert about["design"]["num_heads"] == 2 and about["steps"] == 4
    assert set(about["baselines"]) == load_names("tabular")
    assert f"{about['test']['value']:.4g}" in printed
    assert not list(out.rglob("*.partial"))


def load_names(name: str) -> set[str]:
    task = load_task(name)
    task.prepare()
    return set(task.baselines())


def test_a_run_is_read_back_as_it_was(folder):
    read = runs.load(folder)
    task = load_task("tabular")
    task.prepare()
    assert task.evaluate(read.model, "test").value == read.about["test"]["value"]
    assert task.evaluate(read.model, "validation").value == read.about["validation"]["value"]
    assert torch.equal(read.inputs["values"], task.example()["inputs"]["values"])
    assert read.tokens == tuple(task.example()["tokens"])


def test_report_and_check_take_a_run(folder):
    loaded = models.load(folder)
    inputs = loaded.prepare()
    assert inputs.axes["tokens"]["tokens"][:2] == ["[row]", "mean radius"]
    found = check(loaded, inputs, only=["batch", "eval", "gradients"])
    assert not failures(found)
    assert {record.values["status"] for record in found} == {"passed"}


def test_run_predicts_the_rows_of_a_file(folder, monkeypatch, capsys, tmp_path):
    columns = runs.load(folder).task.columns
    rows = tmp_path / "rows.csv"
    means = ",".join(str(column.mean) for column in columns)
    rows.write_text(f"{','.join(column.name for column in columns)}\n{means}\n{',' * 29}\n")
    code, printed, _ = headwise(monkeypatch, capsys, "run", folder, rows)
    assert code == 0
    lines = printed.splitlines()
    assert [line.split(":")[0] for line in lines] == ["line 2", "line 3"]
    assert all(line.split()[2] in ("benign", "malignant") for line in lines)


@pytest.mark.parametrize(
    "words, message",
    [
        (["train", "visoin"], "unknown task 'visoin': did you mean vision?"),
        (["train", "tabular", "--heads", "3"], "3 heads do not divide embed_dim 32"),
        (["train", "tabular", "--heads", "0"], "num_heads must be a whole number from 1, got 0"),
        (["train", "tabular", "--steps", "0"], "the budget must hold one step at least"),
        (["train", "tabular", "--seconds", "0"], "the budget must hold one step at least"),
        (["train", "tabular", "--budget", "huge"], "--budget: wanted quick or full, got 'huge'"),
        (["train", "tabular", "--data", "nowhere.csv"], "no such file or folder: nowhere.csv"),
        (["run", "nowhere"], "nowhere: no finished run is here"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(monkeypatch, capsys, tmp_path, words, message):
    monkeypatch.chdir(tmp_path)
    code, printed, error = headwise(monkeypatch, capsys, *words)
    assert code == 2 and printed == ""
    last = error.strip().splitlines()[-1]
    assert last.startswith("headwise: ") and message in last
    assert not list(tmp_path.rglob("run.json"))


def test_a_damaged_run_is_said_to_be(folder, tmp_path):
    for name, content, message in (
        ("run.json", b"{", "run.json is damaged"),
        ("run.json", b'{"form": 7}', "form 7 is not known"),
        ("model.safetensors", b"nonsense", "the weights do not fit run.json, or are damaged"),
    ):
        copy = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        shutil.copytree(folder, copy)
        (copy / name).write_bytes(content)
        with pytest.raises(BadFile, match=message):
            runs.load(copy)
    begun = tmp_path / "begun"
    (begun / "checkpoints").mkdir(parents=True)
    with pytest.raises(BadInput, match="its training was stopped"):
        runs.load(begun)


def test_run_writes_a_file_only_where_it_is_told(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    words = ["train", "series", "--steps", 2, "--no-baselines", "--out", "run"]
    assert headwise(monkeypatch, capsys, *words)[0] == 0
    before = set(tmp_path.iterdir())
    code, printed, _ = headwise(monkeypatch, capsys, "run", "run")
    assert code == 0 and "forecast.svg is made too: --out FOLDER keeps it" in printed
    assert set(tmp_path.iterdir()) == before
    code, printed, _ = headwise(monkeypatch, capsys, "run", "run", "--out", "new/folder")
    assert code == 0 and "written: new/folder/forecast.svg" in printed
    assert [path.name for path in (tmp_path / "new/folder").iterdir()] == ["forecast.svg"]
    code, _, error = headwise(monkeypatch, capsys, "run", "run", "--out", "run/log.csv")
    assert code == 2 and "--out: cannot write run/log.csv/forecast.svg: " in error


def write_pictures(place, count=8):
    """Two classes that brightness tells apart, each picture another."""
    from PIL import Image

    random = np.random.default_rng(0)
    for name, light in (("dark", 60), ("light", 190)):
        (place / name).mkdir(parents=True)
        for number in range(count):
            pixels = random.integers(light - 50, light + 50, (20, 30, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(place / name / f"{number}.png")


def test_a_folder_of_pictures_is_learned_and_used(monkeypatch, capsys, tmp_path):
    write_pictures(tmp_path / "data")
    words = ["train", "vision", "--data", tmp_path / "data", "--steps", 15, "--no-baselines"]
    code, printed, _ = headwise(monkeypatch, capsys, *words, "--out", tmp_path / "run")
    assert code == 0 and "logistic" not in printed
    shutil.rmtree(tmp_path / "data" / "light")
    picture = tmp_path / "data" / "dark" / "0.png"
    code, printed, _ = headwise(monkeypatch, capsys, "run", tmp_path / "run", picture)
    assert code == 0 and printed.startswith(f"{picture}: dark ")
    axis = models.load(tmp_path / "run").prepare().axes["tokens"]
    assert axis["grid"] == [8, 8] and len(axis["tokens"]) == 64
    code, _, error = headwise(monkeypatch, capsys, "run", tmp_path / "run")
    assert code == 2 and "give one file or more" in error


def test_a_copy_of_a_picture_counts_once(tmp_path):
    write_pictures(tmp_path / "data")
    for number in range(3):
        shutil.copy(
            tmp_path / "data" / "dark" / "0.png", tmp_path / "data" / "dark" / f"c{number}.png"
        )
    task = load_task("vision", tmp_path / "data")
    task.prepare()
    assert np.bincount(task.pictures.labels).tolist() == [8, 8]
    assert sum(map(len, task.pictures.rows.values())) == 16


def test_bad_pictures_are_named(tmp_path):
    def refused(message: str) -> None:
        with pytest.raises(BadInput, match=message):
            load_task("vision", tmp_path / "data").prepare()

    (tmp_path / "data").mkdir()
    refused("two at least; it holds 0 folders")
    write_pictures(tmp_path / "data" / "all", 3)
    shutil.move(tmp_path / "data" / "all" / "dark", tmp_path / "data" / "dark")
    refused("all: .* picture|dark: 3 different pictures")
    shutil.rmtree(tmp_path / "data")
    write_pictures(tmp_path / "data")
    shutil.copy(tmp_path / "data" / "dark" / "0.png", tmp_path / "data" / "light" / "copy.png")
    refused("are the same picture in two classes")
    (tmp_path / "data" / "light" / "copy.png").write_bytes(b"no picture")
    refused(r"copy\.png: not a picture that can be read")


def table(path, rows: int = 80, header: str = "size,colour,target"):
    random = np.random.default_rng(0)
    lines = [header]
    for number in range(rows):
        colour = ("red", "blue", "")[number % 3]
        lines.append(f"{random.normal():.4f},{colour},{'yes' if number % 2 else 'no'}")
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return lines


def test_a_table_of_words_and_gaps_is_read(tmp_path):
    table(tmp_path / "t.csv")
    task = load_task("tabular", tmp_path / "t.csv")
    task.prepare()
    size, colour = task.columns
    assert size.values == () and colour.values == ("blue", "red")
    values = task.table.values
    assert np.isnan(values[2::3, 1]).all() and not np.isnan(values[:, 0]).any()
    assert task.names == ("no", "yes")
    train = task.table.rows["train"]
    assert abs(values[train, 0].mean()) < 1e-5 and abs(values[train, 0].std() - 1) < 1e-5
    rows = np.concatenate([task.table.rows[name] for name in ("train", "validation", "test")])
    assert sorted(rows) == list(range(80))


@pytest.mark.parametrize(
    "line, text, message",
    [
        (5, "1.0,red", r"t\.csv, line 6: wanted 3 cells as in the header, got 2"),
        (5, "1.0,red,", r"t\.csv, line 6: the target 'target' is empty"),
        (0, "size,size,target", r"t\.csv, line 1: two columns are named 'size'"),
    ],
)
def test_bad_tables_are_named_by_line(tmp_path, line, text, message):
    lines = table(tmp_path / "t.csv")
    lines[line] = text
    (tmp_path / "t.csv").write_text("\n".join(lines), "utf-8")
    with pytest.raises(BadInput, match=message):
        load_task("tabular", tmp_path / "t.csv").prepare()


def test_tables_that_are_none_are_refused(tmp_path):
    path = tmp_path / "t.csv"
    for text, message in (
        ("", "the file is empty"),
        ("one\n" + "1\n" * 60, "got one column, 'one'"),
        ("a,b\n1,2\n", r"1 rows; wanted 50 at least"),
        ("a,b\n" + "".join(f"1,{n}\n" for n in range(60)), "has 60 different values"),
    ):
        path.write_text(text, "utf-8")
        with pytest.raises(BadInput, match=message):
            load_task("tabular", path).prepare()
    path.write_bytes(b"a,b\n\xff\xfe,1\n")
    with pytest.raises(BadInput, match="no csv in utf-8"):
        load_task("tabular", path).prepare()


def test_a_class_that_never_trains_is_refused(tmp_path):
    lines = table(tmp_path / "t.csv")
    known = load_task("tabular", tmp_path / "t.csv")
    known.prepare()
    row = int(known.table.rows["test"][0]) + 1
    lines[row] = lines[row].rsplit(",", 1)[0] + ",maybe"
    (tmp_path / "t.csv").write_text("\n".join(lines), "utf-8")
    with pytest.raises(BadInput, match=rf"line {row + 1}: class 'maybe' is so rare"):
        load_task("tabular", tmp_path / "t.csv").prepare()


def test_equal_rows_are_never_on_both_sides(tmp_path):
    lines = ["a,b"] + [
        f"{number % 20},{'yes' if number % 20 > 9 else 'no'}" for number in range(100)
    ]
    (tmp_path / "t.csv").write_text("\n".join(lines), "utf-8")
    task = load_task("tabular", tmp_path / "t.csv")
    task.prepare()
    sides = [set(task.table.values[rows, 0]) for rows in task.table.rows.values()]
    assert not (sides[0] & sides[1] or sides[0] & sides[2] or sides[1] & sides[2])


def test_digits_are_split_by_runs_of_writers():
    for seed in (0, 5):
        task = load_task("vision", seed=seed)
        task.prepare()
        rows = task.pictures.rows
        every = np.concatenate([rows["train"], rows["validation"], rows["test"]])
        assert sorted(every) == list(range(1797))
        for name in rows:
            # A run on the ring of rows: at most one step that is not to the next row.
            assert ((np.diff(rows[name]) != 1).sum()) <= 1
