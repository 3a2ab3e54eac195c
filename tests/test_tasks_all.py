"""What holds for every task: its protocol, its batches, its attention, its saved state.

Whether a task's model learns what it should is measured by `make tasks`, not here.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from dataclasses import astuple, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from headwise import MultiHeadAttention, cli, record, watch
from headwise.checks import check, failures
from headwise.errors import BadInput
from headwise.tasks import TASKS, Design, RunInput, Score, Task, load_task, runs
from headwise.tasks.training import Trained

# These make their data or find it in scikit-learn; the others fetch theirs once.
AT_HAND = {"vision", "tabular", "planning"}
TAKES_A_FILE = {"vision", "fashion", "tabular", "multimodal"}
SMALL = Design(embed_dim=16, num_heads=4, num_kv_heads=2, layers=2, dropout=0.1)

every_task = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in AT_HAND else pytest.mark.packaged) for name in TASKS],
)


@cache
def ready(name: str) -> Task:
    task = load_task(name)
    task.prepare(lambda line: None)
    return task


def flat(value: Any) -> list[np.ndarray]:
    """Every tensor, array and number in a batch, in order."""
    if isinstance(value, Tensor):
        return [value.detach().numpy()]
    if is_dataclass(value) and not isinstance(value, type):
        return flat(astuple(value))
    if isinstance(value, dict):
        return [leaf for key in sorted(value) for leaf in flat(value[key])]
    if isinstance(value, (tuple, list)):
        return [leaf for part in value for leaf in flat(part)]
    return [np.asarray(value)]


def equal(one: Any, other: Any) -> bool:
    first, second = flat(one), flat(other)
    assert first
    return len(first) == len(second) and all(
        a.shape == b.shape and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
        for a, b in zip(first, second, strict=True)
    )


@pytest.mark.parametrize("name", TASKS)
def test_a_task_says_what_it_is(name: str) -> None:
    task = load_task(name)
    assert task.name == name
    assert task.better in ("higher", "lower")
    for words in (task.title, task.metric, task.source, task.licence):
        assert words.strip() == words != ""
    quick, full = task.budget("quick"), task.budget("full")
    assert 0 < quick.warmup < quick.steps < full.steps
    assert 0 < quick.evaluate_every <= quick.steps
    assert quick.batch_size > 0 and quick.learning_rate > 0 and quick.patience > 0
    # A study of 1, 2, 4 and 8 heads must be possible at the default width.
    for heads in (1, 2, 4, 8):
        assert task.default_design().embed_dim % heads == 0


def test_an_unknown_task_is_named_with_all_that_there_are() -> None:
    with pytest.raises(BadInput, match=r"unknown task 'visoin': did you mean vision\? .*tabular"):
        load_task("visoin")


@every_task
def test_a_batch_is_a_function_of_its_number_and_the_seed(name: str) -> None:
    task, again = ready(name), load_task(name)
    again.prepare(lambda line: None)
    first = task.batch(3, 1)
    task.batch(9, 1)
    torch.manual_seed(5)
    assert equal(first, task.batch(3, 1))
    assert equal(first, again.batch(3, 1))
    assert not equal(first, task.batch(4, 1))
    assert not equal(first, task.batch(3, 2))


@every_task
def test_training_lowers_the_loss_and_evaluation_changes_nothing(name: str) -> None:
    task = ready(name)
    before = torch.get_rng_state()
    model = task.build(SMALL, seed=0)
    assert torch.equal(before, torch.get_rng_state()), "build must leave torch's generator alone"
    same = task.build(SMALL, seed=0)
    other = task.build(SMALL, seed=1)
    assert equal(list(model.parameters()), list(same.parameters()))
    assert not equal(list(model.parameters()), list(other.parameters()))
    batch = task.batch(0, 0)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(12):
        torch.manual_seed(step)
        loss = task.loss(model.train(), batch)
        assert loss.shape == ()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    idle = [name for name, weight in model.named_parameters() if weight.grad is None]
    assert not idle, f"no gradient reaches {idle}"
    kept = [weight.detach().clone() for weight in model.parameters()]
    score = task.evaluate(model.train(), "validation")
    assert equal(kept, list(model.parameters()))
    assert np.isfinite(score.value) and np.isfinite(score.per_example).all()
    assert score.per_example.ndim == 1 and len(score.per_example) > 1


@every_task
def test_every_attention_is_ours_and_follows_the_design(name: str) -> None:
    task = ready(name)
    model = task.build(SMALL, seed=0).eval()
    layers = [part for part in model.modules() if isinstance(part, MultiHeadAttention)]
    assert len(layers) >= SMALL.layers
    assert {(layer.num_heads, layer.num_kv_heads, layer.head_dim) for layer in layers} == {
        (4, 2, 4)
    }
    assert not [part for part in model.modules() if isinstance(part, nn.MultiheadAttention)]
    example = task.example()
    with watch(model) as seen, torch.inference_mode():
        model(**example["inputs"])
    calls = list(seen)
    assert len(calls) == len(layers)
    assert {call.route for call in calls} == {"headwise.attention"}
    assert example["tokens"] and all(isinstance(token, str) for token in example["tokens"])


@every_task
def test_its_model_passes_the_checks(name: str) -> None:
    task = ready(name)
    model = task.build(SMALL, seed=0)
    # Some last layers begin at zero, where nothing that is wrong before them could show.
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(3):
        optimiser.zero_grad()
        task.loss(model, task.batch(step, 0)).backward()
        optimiser.step()
    only = ["batch", "padding", "eval", "gradients"]
    if task.causal:
        only.append("future leak")
    records = check(model, task.example()["inputs"], only=only, causal=task.causal)
    assert not failures(records), [record.values["message"] for record in failures(records)]
    ran = {record.where["check"] for record in records if record.values["status"] == "passed"}
    assert ran >= set(only) - {"batch", "padding"}, [record.values["message"] for record in records]


@every_task
def test_the_saved_state_is_all_that_using_a_model_needs(name: str) -> None:
    task = ready(name)
    model = task.build(SMALL, seed=0).eval()
    saved = json.loads(json.dumps(task.state()))
    fresh = load_task(name)
    fresh.restore(saved)
    other = fresh.build(SMALL, seed=1).eval()
    other.load_state_dict(model.state_dict())
    inputs = task.example()["inputs"]
    with torch.inference_mode():
        assert equal(model(**inputs), other(**inputs))
    assert json.loads(json.dumps(fresh.state())) == saved


@every_task
def test_a_kept_run_is_used_reported_and_checked(name: str, tmp_path: Path, monkeypatch) -> None:
    task = ready(name)
    model = task.build(SMALL, seed=0).eval()
    score = Score(0.0, np.zeros(2))
    trained = Trained(model, score, 1, 0.1, (), "the budget's steps")
    runs.save(tmp_path / "run", task, SMALL, task.budget(), 0, trained, score, {})
    read = runs.load(tmp_path / "run")
    if task.name in TAKES_A_FILE:
        with pytest.raises(BadInput, match=r"give one file or more|one CSV file"):
            read.task.run(read.model, RunInput())
    else:
        assert read.task.run(read.model, RunInput()).lines

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["headwise", "report", "run", "--out", "page.html"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code
    page = (tmp_path / "page.html").read_text("utf-8")
    assert all(token in page for token in ("</html>", "blocks.0.attention"))
    words = ["headwise", "check", "run", "--only", "batch,eval", "--records", "found.jsonl"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code
    found = [line for line in record.read(tmp_path / "found.jsonl") if line.kind == "check"]
    statuses = {line.values["status"] for line in found}
    assert "passed" in statuses and "failed" not in statuses


def test_the_page_has_a_section_for_every_task() -> None:
    page = (Path(__file__).resolve().parent.parent / "docs" / "tasks.md").read_text("utf-8")
    sections = re.findall(r"^## ([a-z]+)$", page, re.MULTILINE)
    assert sorted(sections) == sorted(TASKS)
    assert page.count("<!-- measured: begin ") == page.count("<!-- measured: end -->") == 1


def measured() -> Any:
    """The module that `make tasks` runs; benchmarks are no part of the package."""
    path = Path(__file__).resolve().parent.parent / "benchmarks" / "tasks.py"
    spec = importlib.util.spec_from_file_location("measured_tasks", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(name: str, better: str, value: float, *others: tuple[str, float]) -> dict[str, Any]:
    baselines = [{"name": label, "value": found} for label, found in others]
    return {
        "task": name,
        "metric": "points",
        "better": better,
        "value": value,
        "examples": 1234,
        "cpu": 56.7,
        "baselines": baselines,
    }


def test_the_table_says_who_wins() -> None:
    text = measured().told(
        [
            row("up", "higher", 0.75, ("guess", 0.5), ("tree", 0.75)),
            row("down", "lower", 0.75, ("guess", 1.5), ("line", 0.5)),
            row("ahead", "lower", 0.25, ("guess", 0.5)),
        ],
        "this machine",
    )
    assert "| up | points ↑ | **0.75** | guess 0.5, tree **0.75** | 1,234 | 57 |" in text
    assert "| down | points ↓ | 0.75 | guess 1.5, line **0.5** | 1,234 | 57 |" in text
    assert "- up: attention is not better than tree at this budget." in text
    assert "- down: attention is not better than line at this budget." in text
    assert "- ahead" not in text
    assert text.endswith("Measured on this machine, one seed, one thread a task.")


def test_the_table_is_written_between_its_marks_and_nowhere_else(tmp_path, monkeypatch) -> None:
    module = measured()
    page = tmp_path / "tasks.md"
    monkeypatch.setattr(module, "DOCS", page)
    page.write_text(f"before\n{module.BEGIN}\nold\n{module.END}\nafter\n", "utf-8")
    module.write_docs("new")
    module.write_docs("newer")
    assert page.read_text("utf-8") == (f"before\n{module.BEGIN}\n\nnewer\n\n{module.END}\nafter\n")
    page.write_text(f"before\n{module.END}\n{module.BEGIN}\n", "utf-8")
    with pytest.raises(SystemExit, match="wanted the two marks"):
        module.write_docs("new")
    assert [path.name for path in tmp_path.iterdir()] == ["tasks.md"]
