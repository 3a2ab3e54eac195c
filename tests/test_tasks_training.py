"""The training loop: the same after a kill, the best weights kept, an end in time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headwise.errors import BadFile, BadInput
from headwise.tasks import Design, Score, load_task
from headwise.tasks.training import CHECKPOINT, train

DESIGN = Design(embed_dim=16, num_heads=2, dropout=0.2)


@pytest.fixture(scope="module")
def task():
    found = load_task("tabular")
    found.prepare()
    return found


def budget(task, **changes):
    return replace(task.budget(), **{"steps": 30, "evaluate_every": 10, "warmup": 5, **changes})


def same(one, other) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


class Killed(BaseException):
    pass


def kill_at(step):
    def progress(done, total, line):
        assert total == 30 and line.startswith("tabular: loss ")
        if done == step:
            raise Killed

    return progress


def test_a_killed_training_goes_on_to_the_same_weights_bit_for_bit(task, tmp_path):
    whole = train(task, DESIGN, budget(task))
    assert whole.steps == 30 and [step for step, *_ in whole.history] == [10, 20, 30]
    for step in (3, 14, 25):
        with pytest.raises(Killed):
            train(task, DESIGN, budget(task), folder=tmp_path, progress=kill_at(step))
    steps = []
    resumed = train(
        task,
        DESIGN,
        budget(task),
        folder=tmp_path,
        progress=lambda done, total, line: steps.append(done),
    )
    assert steps == list(range(21, 31)), "it goes on from step 20, not from the start"
    assert same(whole.model, resumed.model)
    assert whole.history == resumed.history
    assert not list(tmp_path.rglob("*.partial"))
    log = (tmp_path / "log.csv").read_text().splitlines()
    assert log[0] == "step,loss,accuracy" and len(log) == 4
    # What is complete stays as it is.
    again = train(task, DESIGN, budget(task), folder=tmp_path)
    assert same(whole.model, again.model) and again.steps == 30


def test_another_seed_is_another_training(task):
    one, other = (train(task, DESIGN, budget(task, steps=3), seed=seed) for seed in (0, 1))
    assert not same(one.model, other.model)


def test_torch_s_own_generator_is_left_alone(task):
    torch.manual_seed(7)
    before = torch.get_rng_state()
    train(task, DESIGN, budget(task, steps=2))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("better, best", [("higher", 20), ("lower", 10)])
def test_it_ends_when_nothing_gets_better_and_keeps_the_best(task, monkeypatch, better, best):
    """Validation scores are set by hand; the weights kept are those of the best one."""
    given = iter([0.5, 0.7, 0.6, 0.65, 0.9, 0.9])
    weights = []

    def evaluate(model, split):
        assert split == "validation"
        weights.append({name: part.clone() for name, part in model.state_dict().items()})
        return Score(next(given), torch.zeros(2).numpy())

    monkeypatch.setattr(task, "evaluate", evaluate)
    monkeypatch.setattr(task, "better", better)
    trained = train(task, DESIGN, budget(task, steps=100, patience=2))
    assert trained.steps == best + 20
    assert trained.stopped == "nothing better in 2 evaluations"
    kept = weights[best // 10 - 1]
    assert all(torch.equal(part, kept[name]) for name, part in trained.model.state_dict().items())


def test_a_training_that_ended_early_is_not_gone_on_with(task, tmp_path, monkeypatch):
    short = budget(task, steps=100, patience=1)
    monkeypatch.setattr(task, "evaluate", lambda model, split: Score(0.5, torch.zeros(2).numpy()))
    first = train(task, DESIGN, short, folder=tmp_path)
    assert first.steps == 20 and first.stopped == "nothing better in 1 evaluations"
    again = train(task, DESIGN, short, folder=tmp_path)
    assert again.steps == 20 and again.history == first.history and same(first.model, again.model)


def test_it_ends_when_the_time_is_over(task):
    trained = train(task, DESIGN, budget(task, steps=100_000, seconds=0.5))
    assert 0 < trained.steps < 100_000
    assert trained.stopped == "the budget's time"
    assert trained.history[-1][0] == trained.steps


def test_a_budget_must_hold_a_step(task):
    with pytest.raises(BadInput, match=r"must hold one step at least, got steps=0"):
        train(task, DESIGN, budget(task, steps=0))
    with pytest.raises(BadInput, match=r"one step at least, got steps=30, seconds=0"):
        train(task, DESIGN, budget(task, seconds=0.0))


def test_a_checkpoint_that_does_not_fit_is_refused(task, tmp_path):
    train(task, DESIGN, budget(task, steps=10), folder=tmp_path)
    with pytest.raises(BadInput, match="belongs to another training"):
        train(task, replace(DESIGN, num_heads=4), budget(task, steps=10), folder=tmp_path)
    (tmp_path / CHECKPOINT).write_bytes(b"nonsense")
    with pytest.raises(BadFile, match="cannot go on from this checkpoint"):
        train(task, DESIGN, budget(task, steps=10), folder=tmp_path)
