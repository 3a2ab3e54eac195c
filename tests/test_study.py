"""The study: planted truths, intervals by hand, nothing lost, nothing run twice, clear errors."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headwise.study.trials as trials
from headwise.errors import BadInput
from headwise.record import read
from headwise.study import Outcome, Plan, Results, collect, designs_for, judge, run
from headwise.study.judgement import difference
from headwise.study.picture import draw, front
from headwise.study.plan import multiplications, parameters
from headwise.study.records import records
from headwise.study.speed import measure
from headwise.tasks import Budget, Design, load_task
from studying import Planted, Single, plan_of, planted


def at(path: Path) -> str:
    return f"sqlite:///{path}"


@pytest.fixture(autouse=True)
def _planted_is_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, data: Path | None = None, seed: int = 0) -> object:
        return planted() if name == "planted" else load_task(name, data, seed)

    monkeypatch.setattr(trials, "load_task", load)


def test_two_heads_are_found_to_be_needed(tmp_path: Path) -> None:
    task = planted(Planted)
    results = run(plan_of(task, heads=(1, 2)), at(tmp_path / "s.db"), task=task)
    judged = judge(results)
    assert judged is not None and judged.measurable
    assert results.plan.designs[judged.smallest].num_heads == 2
    one = judged.rows[0].difference
    assert one is not None and one.worse and one.mean < -0.1
    assert (
        "2 heads × 12 is the smallest" in judged.answer or "2 heads × 12: the best" in judged.answer
    )
    assert "1 head × 12 is measurably worse" in judged.answer
    kinds = [r.kind for r in records(results, judged)]
    assert kinds == ["study"] * 2 + ["study_answer"]
    draw(results, judged, tmp_path / "p.svg")
    assert (tmp_path / "p.svg").read_text(encoding="utf-8").lstrip().startswith("<?xml")


def test_where_heads_make_no_difference_it_says_so(tmp_path: Path) -> None:
    task = planted(Single)
    judged = judge(run(plan_of(task), at(tmp_path / "s.db"), task=task))
    assert judged is not None and not judged.measurable
    assert judged.answer.startswith("No measurable difference")
    assert judged.answer.endswith("Nothing here speaks for more than the smallest, 1 head × 12.")


# --- the judgement, by hand -----------------------------------------------------------------------


def results_of(values: list[list[float]], better: str = "higher", examples: int = 4) -> Results:
    designs = tuple(Design(64, 2**n) for n in range(len(values)))
    plan = Plan("planted", designs, tuple(range(len(values[0]))), Budget(10, 1, 1e-3, 1, 5, 3))
    found = [
        Outcome(design, seed, value, np.full(examples, value), 10, 1.0, None)
        for design, row in enumerate(values)
        for seed, value in enumerate(row)
    ]
    return Results(plan, found, "score", better, "t", tuple(1000 for _ in values))


def test_the_interval_over_seeds_is_students() -> None:
    results = results_of([[0.5, 0.6, 0.55], [0.9, 0.9, 0.9]])
    apart = difference(results, 0, 1)
    # Differences −0.4, −0.3, −0.35: mean −0.35, s = 0.05, t(0.975; 2) = 4.302653.
    assert apart.mean == pytest.approx(-0.35)
    assert apart.high - apart.mean == pytest.approx(4.302653 * 0.05 / 3**0.5, rel=1e-5)
    assert apart.worse and not apart.better


def test_the_interval_over_examples_counts_where_it_is_wider() -> None:
    results = results_of([[0.5, 0.5], [0.75, 0.75]])
    right = [np.array([1, 0, 1, 0.0]), np.array([1, 1, 0, 1.0])]
    results.outcomes = [
        Outcome(o.design, o.seed, o.value, right[o.design], 10, 1.0, None) for o in results.outcomes
    ]
    apart = difference(results, 0, 1)
    # Examples differ by 0, −1, 1, −1; s = 0.957427, t(0.975; 3) = 3.182446.
    assert apart.high - apart.mean == pytest.approx(3.182446 * 0.957427 / 2 * 0.5 / 0.5, rel=1e-4)
    assert not apart.worse


def test_less_may_be_better() -> None:
    judged = judge(results_of([[2.0, 2.1, 2.05], [1.0, 1.1, 1.05], [1.0, 1.0, 1.2]], "lower"))
    assert judged is not None and judged.smallest == 1
    assert judged.rows[0].difference is not None and judged.rows[0].difference.mean < -0.9


def test_one_seed_and_short_budgets_are_told() -> None:
    judged = judge(results_of([[0.5], [0.6]]))
    assert judged is not None
    assert any(line.startswith("1 seed: ") for line in judged.limits)
    assert any("ended with the budget" in line for line in judged.limits)


def test_cautions_of_the_literature() -> None:
    results = results_of([[0.5, 0.5], [0.5, 0.5], [0.5, 0.5], [0.5, 0.5], [0.5, 0.5]])
    results.outcomes = [
        Outcome(o.design, o.seed, o.value, o.per_example, 1, 1.0, 0.5 if o.design == 1 else 0.0)
        for o in results.outcomes
    ]
    judged = judge(results)
    assert judged is not None
    assert [c for c in judged.cautions if c.startswith("2 heads × 32: 50% of the pairs")]
    assert [c for c in judged.cautions if c.startswith("8 heads × 8: a head of 8 features")]
    assert [
        c for c in judged.cautions if c.startswith("16 heads × 4: many heads for a width of 64")
    ]


def test_the_front() -> None:
    points = [(1.0, 0.5), (2.0, 0.9), (3.0, 0.8), (2.0, 0.7)]
    assert front(points, "higher") == [0, 1]
    assert front(points, "lower") == [0]


# --- designs --------------------------------------------------------------------------------------


def test_designs_have_one_head_among_them_and_match() -> None:
    task = load_task("vision")
    task.prepare()
    found = designs_for(task, [4, 8], kv_heads=[None, 2])
    assert [d.label for d in found] == [
        "1 head × 64", "4 heads × 16", "4 heads × 16, 2 KV", "8 heads × 8", "8 heads × 8, 2 KV",
    ]  # fmt: skip
    base = task.default_design()
    for match, count in (("parameters", parameters), ("compute", multiplications)):
        for design in designs_for(task, [2, 4], kv_heads=[None, 1], match=match):
            assert count(task, design) == pytest.approx(count(task, base), rel=0.02)
    with pytest.raises(BadInput, match=r"3 heads do not divide embed_dim 64"):
        designs_for(task, [3])
    with pytest.raises(BadInput, match=r"match is one of width, parameters, compute"):
        designs_for(task, [2], match="depth")


def test_speed_is_measured_for_every_design() -> None:
    task = planted()
    found = measure(task, plan_of(task))
    for number, design in enumerate(plan_of(task).designs):
        assert found[number]["kv_bytes"] == design.kv_bytes_per_token(4)
        assert found[number]["decode"] is None
        assert (found[number]["train"] or 0) > 0 and (found[number]["latency"] or 0) > 0


# --- nothing lost, nothing twice ------------------------------------------------------------------


def worker(storage: str, pause: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("studying.py")), storage, str(pause)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def states(storage: str) -> list[tuple[str, tuple[int, int] | None]]:
    import optuna

    backend = optuna.storages.RDBStorage(storage)
    try:
        (summary,) = optuna.get_all_study_summaries(backend)
        study = optuna.load_study(study_name=summary.study_name, storage=backend)
        return [(t.state.name, trials._key(t)) for t in study.get_trials(deepcopy=False)]
    finally:
        backend.remove_session()
        backend.engine.dispose()


def wait_for(storage: str, done: int, limit: float = 120.0) -> None:
    """Until so many trials are complete and another one is running."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        try:
            found = [state for state, _ in states(storage)]
        except Exception:  # the storage is just being made
            found = []
        if found.count("COMPLETE") >= done and "RUNNING" in found:
            return
        time.sleep(0.1)
    raise AssertionError(f"no running trial after {limit} s")


@pytest.mark.slow
def test_a_killed_study_goes_on_with_nothing_lost_or_run_twice(tmp_path: Path) -> None:
    storage = at(tmp_path / "s.db")
    first = worker(storage, 0.1)
    wait_for(storage, 1)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    before = [key for state, key in states(storage) if state == "COMPLETE"]
    second = worker(storage, 0.0)
    out, err = second.communicate(timeout=120)
    assert second.returncode == 0, err
    assert out.strip() == "6"
    after = [key for state, key in states(storage) if state == "COMPLETE"]
    assert sorted(after) == [(d, s) for d in range(2) for s in range(3)]
    assert after[: len(before)] == before
    again = collect(storage)
    assert again.left == 0 and judge(again) is not None


def test_an_interrupted_training_waits_again(tmp_path: Path, monkeypatch) -> None:
    task, storage = planted(), at(tmp_path / "s.db")
    plan, fit, calls = plan_of(task, steps=5, seeds=1), trials.train, []

    def interrupted(*given: Any, **more: Any) -> Any:
        calls.append(given[1].num_heads)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return fit(*given, **more)

    monkeypatch.setattr(trials, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(plan, storage, task=task)
    assert collect(storage).left == 1
    assert run(plan, storage, task=task).left == 0
    assert calls == [1, 2, 2]


def test_a_finished_study_runs_nothing_again(tmp_path: Path, monkeypatch) -> None:
    task = planted()
    plan = plan_of(task, steps=5, seeds=1)
    storage = at(tmp_path / "s.db")
    first = run(plan, storage, task=task)
    monkeypatch.setattr(trials, "train", None)
    second = run(plan, storage, task=task)
    assert [o.value for o in second.outcomes] == [o.value for o in first.outcomes]
    assert len(states(storage)) == 2
    assert collect(storage).plan == plan


# --- bad input ------------------------------------------------------------------------------------


def headwise(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "headwise", "study", *arguments],
        capture_output=True, text=True, timeout=120, cwd=cwd,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "name a task, or --from STORAGE"),
        (("visoin",), "did you mean vision?"),
        (("vision", "--heads", "two"), "--heads: wanted whole numbers from 1"),
        (("vision", "--heads", "2,3"), "3 heads do not divide embed_dim 64"),
        (("vision", "--seeds", "0"), "--seeds: wanted at least 1, got 0"),
        (("vision", "--budget", "0"), "--budget: wanted more than 0 seconds, got 0"),
        (("vision", "--budget", "long"), "wanted quick, full or seconds, got 'long'"),
        (("vision", "--steps", "0"), "--steps: wanted at least 1, got 0"),
        (("vision", "--match", "depth"), "match is one of width, parameters, compute"),
        (("vision", "--data", "nowhere"), "no such file or folder: nowhere"),
        (("--from", "sqlite:///nowhere.db"), "no such storage: nowhere.db"),
        (("vision", "--steps", "1", "--storage", "postgresql+psycopg://u:secret@127.0.0.1:1/x"),
         "the storage …@127.0.0.1:1/x cannot be used"),
        (("vision", "--steps", "1", "--storage", "there"), "the storage there cannot be used"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(arguments: tuple[str, ...], says: str, tmp_path: Path) -> None:
    out = headwise(*arguments, cwd=tmp_path)
    assert out.returncode == 2, out.stderr
    assert says in out.stderr and "secret" not in out.stderr
    assert len(out.stderr.strip().splitlines()) <= 2, out.stderr
    assert "Traceback" not in out.stderr


def test_the_command_answers_and_draws_again(tmp_path: Path) -> None:
    more = ("--heads", "2", "--seeds", "1", "--steps", "3", "--no-baselines")
    first = headwise("vision", *more, "--html", "a.html", "--records", "a.jsonl", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert "2 designs × 1 seeds" in first.stdout and "cannot tell: 1 seed" in first.stdout
    second = headwise("--from", "sqlite:///headwise-study.db", "--records", "b.jsonl", cwd=tmp_path)
    assert second.returncode == 0, second.stderr

    def numbers(name: str) -> list:
        return [r.values for r in read(tmp_path / name) if r.kind == "study"]

    assert numbers("a.jsonl") == numbers("b.jsonl")
    assert "smallest" in (tmp_path / "a.html").read_text(encoding="utf-8")
