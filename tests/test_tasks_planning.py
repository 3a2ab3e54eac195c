"""Planning: its rules against brute force, equivariance, padding, and what it learns."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("scipy")

from headwise.errors import BadInput
from headwise.tasks import RunInput, load_task
from headwise.tasks.planning import (
    LARGEST,
    Planner,
    Planning,
    draw,
    gaps,
    highest_first,
    in_turn,
    largest_regret,
    optimal,
    read_team,
)

RULES = (highest_first, in_turn, largest_regret)


def inputs(count: int = 3, seed: int = 0) -> dict[str, torch.Tensor]:
    teams = draw(np.random.default_rng(seed), count)
    return {name: torch.from_numpy(getattr(teams, name)) for name in ("workers", "places", "real")}


@pytest.fixture(scope="module")
def model() -> Planner:
    task = Planning()
    built = task.build(task.default_design(), seed=0).eval()
    assert isinstance(built, Planner)
    return built


def test_the_best_assignment_is_that_of_trying_all() -> None:
    times = np.random.default_rng(0).random((6, 6))
    rows = np.arange(6)
    least = min(times[rows, list(p)].sum() for p in itertools.permutations(range(6)))
    assert times[rows, optimal(times)].sum() == pytest.approx(least)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("n", [1, 2, 7])
def test_every_rule_gives_each_place_to_one_worker(rule, n: int) -> None:
    scores = np.random.default_rng(n).random((n, n))
    before = scores.copy()
    assert sorted(rule(scores)) == list(range(n))
    assert (scores == before).all()


def test_the_rules_by_hand() -> None:
    scores = -np.array([[1.0, 2.0, 9.0], [1.5, 5.0, 6.0], [2.0, 8.0, 8.5]])
    # In turn: 0 takes place 0, then 1 takes 1, then 2 is left with 2.
    assert list(in_turn(scores)) == [0, 1, 2]
    # Regrets are 1, 3.5 and 6: worker 2 takes place 0; then 7 and 1: worker 0 takes place 1.
    assert list(largest_regret(scores)) == [1, 2, 0]
    assert list(highest_first(-np.array([[3.0, 4.0], [1.0, 2.0]]))) == [1, 0]


def test_gaps_are_zero_for_the_best_and_never_negative() -> None:
    teams = draw(np.random.default_rng(5), 50)
    told = gaps(teams, lambda i: np.eye(LARGEST + 1)[teams.best[i]][:, :LARGEST], highest_first)
    assert told == pytest.approx(0, abs=1e-9)
    for rule in RULES:
        assert (gaps(teams, lambda i: -teams.times(i), rule) >= -1e-9).all()


def test_workers_and_places_in_another_order_give_the_same_scores(model: Planner) -> None:
    given = inputs()
    n = LARGEST
    given["real"] = torch.ones(3, n, dtype=torch.bool)
    rng = np.random.default_rng(1)
    workers, places = (torch.from_numpy(rng.permutation(n)) for _ in range(2))
    with torch.inference_mode():
        plain = model(**given)
        moved = model(given["workers"][:, workers], given["places"][:, places], given["real"])
    assert not torch.allclose(plain, moved, atol=1e-2)
    torch.testing.assert_close(moved, plain[:, workers][:, :, places], atol=2e-5, rtol=1e-5)


def test_padding_changes_nothing(model: Planner) -> None:
    teams = draw(np.random.default_rng(9), 1)
    n = int(teams.real[0].sum())
    assert n < LARGEST, "the seed must draw a team with padding"
    whole = {k: torch.from_numpy(getattr(teams, k)) for k in ("workers", "places", "real")}
    short = {k: v[:, :n] for k, v in whole.items()}
    noisy = {k: v.clone() for k, v in whole.items()}
    noisy["workers"][:, n:], noisy["places"][:, n:] = 0.7, 0.3
    with torch.inference_mode():
        a, b, c = model(**short), model(**whole), model(**noisy)
    torch.testing.assert_close(b[:, :n, :n], a, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(c, b, atol=2e-5, rtol=1e-5)
    assert (b[:, n:] == 0).all() and (b[:, :, n:] == 0).all()


def test_what_others_do_reaches_a_score_only_through_attention() -> None:
    task = Planning()
    given = inputs()
    given["real"] = torch.ones(3, LARGEST, dtype=torch.bool)
    other = {k: v.clone() for k, v in given.items()}
    other["workers"][:, 5] = torch.tensor([0.9, 0.1, 1.0])
    for attends in (True, False):
        model = Planner(task.default_design(), attends=attends).eval()
        with torch.inference_mode():
            moved = (model(**other) - model(**given)).abs()
        assert (moved[:, 5] > 0).any()
        assert bool((moved[:, :5] > 1e-5).any()) is attends


def test_held_out_teams_are_no_training_teams() -> None:
    task = load_task("planning")
    task.prepare()
    assert isinstance(task, Planning)
    again = Planning()
    again.prepare()
    held = {split: task.held_out[split].workers[:, 0] for split in ("validation", "test")}
    for split, rows in held.items():
        assert (rows == again.held_out[split].workers[:, 0]).all()
    trained = torch.cat(
        [task.batch(i, seed)[0]["workers"][:, 0] for i in range(5) for seed in (0, 1)]
    )
    seen = {tuple(row) for row in trained.tolist()}
    assert len(seen) == len(trained)
    assert not seen & {tuple(row) for rows in held.values() for row in rows.tolist()}
    assert torch.equal(task.batch(3, 1)[1], task.batch(3, 1)[1])


def test_the_loss_is_least_for_the_best_assignment() -> None:
    task = Planning()
    given, best = task.batch(0, 0)

    class Told(torch.nn.Module):
        def forward(self, workers, places, real):
            one_hot = torch.nn.functional.one_hot(best, LARGEST + 1)
            return 50.0 * one_hot[..., :LARGEST]

    class Nothing(torch.nn.Module):
        def forward(self, workers, places, real):
            return torch.zeros(len(real), LARGEST, LARGEST)

    assert task.loss(Told(), (given, best)) < 1e-6
    n = given["real"].sum(1).numpy()
    uniform = 2 * (n * np.log(n)).sum() / n.sum()
    assert float(task.loss(Nothing(), (given, best))) == pytest.approx(uniform, rel=1e-5)


@pytest.mark.slow
def test_it_learns_to_coordinate() -> None:
    from headwise.tasks.plain import fit

    task = Planning()
    task.prepare()
    model = fit(
        lambda: task.build(task.default_design(), 0),
        task.loss,
        lambda i: task.batch(i, 0),
        steps=120,
    )
    found = task.evaluate(model, "test")
    assert found.value == pytest.approx(found.per_example.mean())
    assert found.value < 0.6 * task.baselines()["greedy nearest"]().value


def test_a_team_from_a_file(tmp_path: Path, model: Planner) -> None:
    file = tmp_path / "team.csv"
    file.write_text("# metres\nworker,0,0,10\nworker,100,0,20\nplace,100,0\n\nplace,0,0\n")
    teams = read_team(file)
    assert teams.workers.tolist() == [[[0, 0, 1], [1, 0, 2]]]
    assert teams.best.tolist() == [[1, 0]]
    lines = Planning().run(model, RunInput((str(file),))).lines
    assert lines[0].startswith("worker 1 → place")
    assert "the best there is 0.000" in lines[2]
    assert "trained on teams of 5 to 12; this one has 2" in lines[3]
    assert "% above)" in Planning().run(model, RunInput()).lines[-1]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("worker,0,0\nplace,0,0\n", "line 1: wanted worker,x,y,speed or place,x,y, got"),
        ("worker,0,0,1\nplane,0,0\n", "line 2: wanted worker"),
        ("worker,0,0,0\nplace,1,1\n", "line 1: coordinates are finite numbers and a speed is"),
        ("worker,0,0,1\nplace,nan,1\n", "line 2: coordinates are finite"),
        ("worker,0,0,1\nplace,x,1\n", "line 2: coordinates are finite"),
        ("worker,0,0,1\n", "got 1 workers and 0 places"),
        ("", "got 0 workers and 0 places"),
    ],
)
def test_a_bad_team_is_one_line(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "team.csv"
    file.write_text(text)
    with pytest.raises(BadInput, match=says) as raised:
        read_team(file)
    assert "\n" not in str(raised.value)


def test_what_it_does_not_take(tmp_path: Path, model: Planner) -> None:
    with pytest.raises(BadInput, match="takes no --data"):
        load_task("planning", tmp_path)
    with pytest.raises(BadInput, match="no such file"):
        read_team(tmp_path / "none.csv")
    with pytest.raises(BadInput, match="wanted one file"):
        Planning().run(model, RunInput(("a", "b")))
