"""The study: planted truths, intervals by hand, nothing lost, nothing run twice, clear errors."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import optuna
import pytest
import torch
from scipy import stats

import headwise.study.trials as trials
from headwise import cli
from headwise.errors import BadInput
from headwise.record import read
from headwise.study import Outcome, Plan, Results, collect, designs_for, heads, judge, run
from headwise.study.differences import Differences, critical, standard_error
from headwise.study.picture import draw, front
from headwise.study.plan import multiplications, parameters
from headwise.study.records import records
from headwise.study.speed import measure
from headwise.study.storage import enqueue, key_of, open_study
from headwise.tasks import Budget, Design, load_task
from studying import Generating, Planted, Single, plan_of, planted, worker


def at(path: Path) -> str:
    return f"sqlite:///{path}"


@pytest.fixture(autouse=True)
def _planted_is_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, data: Path | None = None, seed: int = 0) -> object:
        return planted() if name == "planted" else load_task(name, data, seed)

    monkeypatch.setattr(trials, "load_task", load)


def test_two_heads_are_found_to_be_needed(tmp_path: Path) -> None:
    task = planted(Planted)
    results = run(plan_of(task, heads=(1, 2, 4)), at(tmp_path / "s.db"), task=task)
    judged = judge(results)
    assert judged is not None and judged.measurable
    assert judged.smallest == 1 and results.plan.designs[1].num_heads == 2
    one, more = judged.rows[0].difference, judged.rows[2].difference
    assert one is not None and one.worse and one.mean < -0.3
    assert more is None or not more.worse
    assert judged.answer.startswith("2 heads × 12")
    assert "1 head × 12 is measurably worse" in judged.answer
    assert results.baselines == {"chance": pytest.approx(1 / 6)}
    kinds = [r.kind for r in records(results, judged)]
    assert kinds == ["study"] * 3 + ["study_baseline", "study_answer"]
    draw(results, judged, tmp_path / "p.svg")
    assert (tmp_path / "p.svg").read_text(encoding="utf-8").lstrip().startswith("<?xml")


def test_where_heads_make_no_difference_it_says_so(tmp_path: Path) -> None:
    task = planted(Single)
    judged = judge(run(plan_of(task), at(tmp_path / "s.db"), task=task))
    assert judged is not None and not judged.measurable
    assert judged.answer.startswith("No measurable difference")
    assert judged.answer.endswith("Nothing here speaks for more than the smallest, 1 head × 12.")


# --- the intervals, by hand -----------------------------------------------------------------------


def test_the_error_is_that_of_the_layout_of_designs_and_seeds() -> None:
    scores = np.array([[1.0, 2.0, 3.0], [2.0, 3.0, 5.0], [4.0, 4.0, 5.0]])
    # Means of rows 2, 10/3, 13/3, of columns 7/3, 3, 13/3, of all 29/9; the residuals by hand, ×9:
    by_hand = np.array([[-1, 2, -1], [-4, -1, 5], [5, -1, -4]]) / 9
    error = standard_error(scores)
    assert error.freedom == 4
    assert error.value == pytest.approx((2 / 3 * (by_hand**2).sum() / 4) ** 0.5)
    # A seed that is good for all designs is no noise.
    assert standard_error(scores + np.array([10.0, 0.0, -10.0])).value == pytest.approx(error.value)


def test_two_designs_have_the_paired_student_interval() -> None:
    found = Differences(np.array([[0.5, 0.6, 0.55], [0.9, 0.9, 0.9]]))
    # Differences −0.4, −0.3, −0.35: s = 0.05, t(0.975; 2) = 4.302653.
    assert found.half(0, 1) == pytest.approx(4.302653 * 0.05 / 3**0.5, rel=1e-5)


def test_several_comparisons_cost_what_tukeys_range_says() -> None:
    # q(0.95; 4, 6) = 4.896, q(0.95; 3, 20) = 3.578 (Tukey's tables).
    assert critical(4, 6) == pytest.approx(4.896 / 2**0.5, rel=2e-4)
    assert critical(3, 20) == pytest.approx(3.578 / 2**0.5, rel=2e-4)
    assert critical(2, 7.5) == pytest.approx(stats.t.ppf(0.975, 7.5), rel=1e-6)


def test_without_a_difference_all_intervals_hold_together_in_95_of_100() -> None:
    draw = np.random.default_rng(0)
    wrong = []
    for _ in range(1500):
        scores = draw.normal(size=(4, 3)) + draw.normal(size=3)
        means = scores.mean(1)
        wide = 3.46171 * standard_error(scores).value
        wrong.append(means.max() - means.min() > wide)
    assert critical(4, 6) == pytest.approx(3.46171, rel=1e-5)
    # Each Student interval alone would be wrong in about 16 of 100: 5 ± 4 standard errors.
    assert abs(np.mean(wrong) - 0.05) < 4 * (0.05 * 0.95 / 1500) ** 0.5


def test_the_intervals_hold_for_other_seeds_and_other_examples() -> None:
    draw = np.random.default_rng(1)
    found, shape = [], (3, 4, 60)
    for _ in range(300):
        seeds, examples = draw.normal(size=(3, 4, 1)), draw.normal(size=(3, 1, 60))
        table = (
            0.05 * seeds + 0.5 * examples + draw.normal(size=shape) + draw.normal(size=(1, 1, 60))
        )
        error = standard_error(table.mean(2), table)
        found.append((table.mean((1, 2)), error.value))
    # The truth: 2 (0.05² / 4 + 0.5² / 60 + 1 / 240).
    truth = (2 * (0.0025 / 4 + 0.25 / 60 + 1 / 240)) ** 0.5
    apart = np.array([means[0] - means[1] for means, _ in found])
    assert apart.std() == pytest.approx(truth, rel=0.15)
    assert np.sqrt(np.mean([error**2 for _, error in found])) == pytest.approx(truth, rel=0.1)


def test_examples_widen_an_interval_and_never_narrow_it() -> None:
    scores = np.array([[0.5, 0.5], [0.75, 0.75]])
    right = np.array([[[1, 0, 1, 0.0]] * 2, [[1, 1, 0, 1.0]] * 2])
    error = standard_error(scores, right)
    # Examples differ by 0, −1, 1, −1: s = 0.957427; seeds do not differ, and are no noise.
    assert error.value == pytest.approx(0.957427 / 4**0.5, rel=1e-5)
    assert error.freedom == 3
    seeds = np.array([[0.2, 0.8], [0.75, 0.75]])
    alone = standard_error(seeds)
    both = standard_error(seeds, np.repeat(seeds[:, :, None], 50, 2))
    assert both.value == pytest.approx(alone.value) and both.freedom == alone.freedom == 1


def test_an_interval_is_never_narrower_than_the_pairs_own() -> None:
    quiet = [[0.9, 0.91, 0.9], [0.93, 0.92, 0.93], [0.94, 0.94, 0.95]]
    scores = np.array([*quiet, [0.2, 0.9, 0.6]])
    found = Differences(scores)
    assert found.half(0, 2) == found.pooled
    own = (scores[3] - scores[2]).std(ddof=1) / 3**0.5
    assert found.half(3, 2) == pytest.approx(4.302653 * own, rel=1e-5)
    assert found.half(3, 2) > 1.3 * found.pooled


def test_one_uneven_design_does_not_make_the_intervals_wrong() -> None:
    """No design differs in truth, and one varies ten times as much as the others."""
    draw = np.random.default_rng(2)
    wrong, pooled = [], []
    for _ in range(400):
        scores = draw.normal(size=(4, 3)) * np.array([[10.0], [1.0], [1.0], [1.0]])
        means, found = scores.mean(1), Differences(scores)
        best = int(means.argmax())
        gaps = [(means[best] - means[n], found.half(n, best)) for n in range(4) if n != best]
        wrong.append(any(gap > half for gap, half in gaps))
        pooled.append(any(gap > found.pooled for gap, _ in gaps))
    assert np.mean(wrong) < 0.1 < np.mean(pooled)


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


def test_a_small_uneven_design_is_not_recommended_past_a_better_one_that_is_worse() -> None:
    """Seen: 2 heads at −0.076 … +0.038 were recommended, while 4 heads, better on average, were
    "measurably worse"."""
    rows = [[0.862, 0.962, 0.912], [0.93] * 3, *[[0.99, 0.991, 0.99]] * 3, [0.992, 0.992, 0.992]]
    judged = judge(results_of(rows))
    assert judged is not None
    uneven, worse = judged.rows[0].difference, judged.rows[1].difference
    assert uneven is not None and uneven.high > 0 > uneven.mean
    assert worse is not None and worse.worse and worse.mean > uneven.mean
    assert judged.smallest == 2 and judged.answer.startswith(
        "4 heads × 16 is the smallest design with even seeds"
    )
    assert [c for c in judged.limits if c.startswith("1 head × 64: its seeds are too uneven")]
    rows[1] = [0.99] * 3  # nothing is measurably worse any more
    level = judge(results_of(rows))
    assert level is not None and level.smallest == 0 and not level.measurable
    assert not any("uneven" in line for line in level.limits)


def test_with_one_seed_nothing_is_recommended(tmp_path: Path) -> None:
    results = results_of([[0.1], [0.9]], examples=400)
    judged = judge(results)
    assert judged is not None and not judged.measurable and judged.smallest is None
    assert judged.answer.startswith("No difference can be measured with 1 seed")
    assert not any(r.values.get("chosen") for r in records(results, judged))
    draw(results, judged, tmp_path / "p.svg")
    assert "smallest" not in (tmp_path / "p.svg").read_text(encoding="utf-8")


def test_only_seeds_that_all_designs_have_are_compared() -> None:
    results = results_of([[0.5, 0.52, 0.9], [0.6, 0.63, 0.9]])
    results.outcomes = [o for o in results.outcomes if (o.design, o.seed) != (1, 2)]
    judged = judge(results)
    assert judged is not None and [row.seeds for row in judged.rows] == [2, 2]
    assert judged.rows[0].mean == pytest.approx(0.51)
    results.outcomes = [o for o in results.outcomes if (o.design, o.seed) in ((0, 1), (1, 0))]
    assert judge(results) is None


def test_a_score_that_is_no_mean_over_examples_is_said_to_be_one() -> None:
    results = results_of([[0.5, 0.6, 0.55], [0.9, 0.9, 0.9]])
    found = judge(results)
    results.outcomes = [
        Outcome(o.design, o.seed, o.value, o.per_example + np.eye(4)[0], 10, 1.0, None)
        for o in results.outcomes
    ]
    judged = judge(results)
    assert judged is not None and found is not None
    assert any("the score is no mean over test examples" in line for line in judged.limits)
    assert not any("is no mean" in line for line in found.limits)
    assert judged.rows == found.rows


def test_less_may_be_better() -> None:
    judged = judge(results_of([[2.0, 2.1, 2.05], [1.0, 1.1, 1.05], [1.0, 1.0, 1.2]], "lower"))
    assert judged is not None and judged.smallest == 1
    assert judged.rows[0].difference is not None and judged.rows[0].difference.mean < -0.9


def test_one_seed_and_short_budgets_are_told() -> None:
    judged = judge(results_of([[0.5], [0.6]]))
    assert judged is not None
    assert any(line.startswith("1 seed: ") for line in judged.limits)
    assert any("ended with the budget" in line for line in judged.limits)
    three = judge(results_of([[0.5, 0.51, 0.5], [0.6, 0.6, 0.6]]))
    assert three is not None and three.limits[0] == (
        "3 seeds: a difference from the best of less than 0.014 is not seen"
    )
    busy = results_of([[0.5, 0.5], [0.6, 0.6]])
    assert not any("speed" in line for line in judge(busy).limits)  # type: ignore[union-attr]
    busy.speed = {0: {"unsteady": 0.1}, 1: {"unsteady": 0.4}}
    assert any("differed by 40%" in line for line in judge(busy).limits)  # type: ignore[union-attr]


def test_cautions_of_the_literature() -> None:
    results = results_of([[0.5, 0.5], [0.5, 0.5], [0.5, 0.5], [0.5, 0.5], [0.5, 0.5]])
    results.outcomes = [
        Outcome(o.design, o.seed, o.value, o.per_example, 1, 1.0, 0.5 if o.design == 1 else 0.0)
        for o in results.outcomes
    ]
    judged = judge(results)
    assert judged is not None
    starts = [line[:60] for line in judged.cautions]
    assert [c for c in judged.cautions if c.startswith("2 heads × 32: 50% of the pairs")], starts
    assert [c for c in judged.cautions if c.startswith("8 heads × 8: a head of 8 features")], starts
    assert [
        c for c in judged.cautions if c.startswith("16 heads × 4: many heads for a width of 64")
    ], starts
    # A head as wide as there are tokens has no bottleneck (Bhojanapalli 2020, theorem 1).
    results.tokens = 8
    told = judge(results)
    assert told is not None
    assert not any(c.startswith("8 heads × 8: a head") for c in told.cautions)
    assert any("a head of 4 features can tell few keys of 8 apart" in c for c in told.cautions)


def test_redundant_heads_are_found_in_a_model() -> None:
    task = planted()
    inputs = task.example()["inputs"] | {
        name: part[:20]
        for name, part in zip(("keys", "values", "asked"), task.held[1], strict=False)
    }
    model = task.build(Design(32, 3, head_dim=12, layers=1), 0)
    with torch.no_grad():  # sharp, so that heads differ
        model.attention.q_proj.weight.mul_(30)
    before = heads.alike(model, inputs)
    assert before is not None and before < 0.3
    with torch.no_grad():  # the second head does what the first one does
        for part in (model.attention.q_proj, model.attention.k_proj):
            for numbers in (part.weight, part.bias):
                numbers[12:24] = numbers[:12]
    after = heads.alike(model, inputs)
    assert after is not None and before < 1 / 3 <= after < 0.7
    assert heads.alike(task.build(Design(32, 1, head_dim=12, layers=1), 0), inputs) is None


def test_the_front() -> None:
    points = [(1.0, 0.5), (2.0, 0.9), (3.0, 0.8), (2.0, 0.7)]
    assert front(points, "higher") == [0, 1]
    assert front(points, "lower") == [0]


def test_the_picture_of_few_and_of_many_designs(tmp_path: Path) -> None:
    few = results_of([[0.5, 0.52], [0.6, 0.61], [0.7, 0.7]])
    few.baselines = {"popularity": 0.3, "small CNN": 0.65}
    few.speed = {n: {"latency": 0.001 * (n + 1), "decode": None} for n in range(3)}
    many = results_of([[0.5, 0.52]] * 2)
    designs = tuple(
        Design(256, 2**n, num_kv_heads=2**k) for n in range(6) for k in range(n + 1)
    )  # fmt: skip
    many.plan = Plan("planted", designs, (0, 1), many.plan.budget)
    many.outcomes = [
        Outcome(n, seed, 0.5 + 0.01 * n + 0.002 * seed, np.zeros(3), 1, 1.0, None)
        for n in range(len(designs)) for seed in range(2)
    ]  # fmt: skip
    many.parameters = tuple(1000 * (n + 1) for n in range(len(designs)))

    def drawn(results: Results) -> str:
        judged = judge(results)
        assert judged is not None
        with matplotlib.rc_context({"svg.fonttype": "none"}):  # words stay words
            draw(results, judged, tmp_path / "p.svg")
        draw(results, judged, tmp_path / "p.png")
        assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
        return (tmp_path / "p.svg").read_text(encoding="utf-8")

    text = drawn(few)
    assert "latency of one example, ms" in text
    kept = few.plan.designs[0].kv_bytes_per_token(4)
    assert f"alike in all: {kept:,} KV bytes of a token, 1,000 parameters" in text
    assert text.count(">small CNN<") == 1 and "popularity" not in text
    assert text.count(">4 heads × 16<") == 1, "named once, in the legend"
    text = drawn(many)
    assert "latency" not in text and ">parameters<" in text and ">KV bytes of a token<" in text
    assert all(text.count(f">{design.label}<") == 1 for design in designs)
    assert {path.name for path in tmp_path.iterdir()} == {"p.svg", "p.png"}


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


def test_a_step_of_generation_is_timed_apart_from_its_beginning() -> None:
    task = planted(Generating)
    plan = plan_of(task)
    built: list[Any] = []
    build = task.build

    def remember(design: Design, seed: int) -> Any:
        built.append(build(design, seed))
        return built[-1]

    task.build = remember  # type: ignore[method-assign]
    found = measure(task, plan)
    assert task.begun == 2 and all(model.steps >= 8 for model in built)
    one, two = (found[number]["decode"] or 0 for number in range(2))
    assert 0.005 <= one < 0.02 <= two


# --- nothing lost, nothing twice ------------------------------------------------------------------


def states(storage: str) -> list[tuple[str, Any]]:
    backend = optuna.storages.RDBStorage(storage)
    try:
        (summary,) = optuna.get_all_study_summaries(backend)
        study = optuna.load_study(study_name=summary.study_name, storage=backend)
        return [(t.state.name, key_of(t)) for t in study.get_trials(deepcopy=False)]
    finally:
        backend.remove_session()
        backend.engine.dispose()


def wait_for(storage: str, done: int, running: Any = None, limit: float = 120.0) -> None:
    """Until so many trainings are complete and another one, or that other work, is running."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        try:
            found = states(storage)
        except Exception:  # the storage is just being made
            found = []
        trained = sum(state == "COMPLETE" and isinstance(key, tuple) for state, key in found)
        under_way = [key for state, key in found if state == "RUNNING"]
        if trained >= done and (running in under_way if running else under_way):
            return
        time.sleep(0.3)  # each look opens the storage anew
    raise AssertionError(f"no running trial after {limit} s")


EVERY = [(design, seed) for design in range(2) for seed in range(3)]


def ended(storage: str) -> list[tuple[int, int]]:
    return [key for state, key in states(storage) if state == "COMPLETE" and key in EVERY]


def alone(log: Path) -> None:
    """Nothing else is under way while speed is measured; both closing works are done once."""
    under_way: list[str] = []
    seen = []
    for line in log.read_text().splitlines():
        word, what, process = line.split()
        if what == "worker":
            continue
        if word == "begin":
            under_way.append(f"{what} {process}")
            seen.append(what)
            assert what != "speed" or len(under_way) == 1, (line, under_way)
            assert not any("speed" in other for other in under_way[:-1]), (line, under_way)
        else:
            under_way.remove(f"{what} {process}")
    assert seen[-2:] == ["speed", "baseline"] and set(seen[:-2]) <= {"train"}, seen


@pytest.mark.slow
def test_a_killed_study_goes_on_with_nothing_lost_or_run_twice(tmp_path: Path) -> None:
    storage = at(tmp_path / "s.db")
    first = worker(storage, tmp_path / "first", pause=0.1)
    wait_for(storage, 1)
    first.kill()
    first.join()
    before = ended(storage)
    log = tmp_path / "log"
    others = [worker(storage, log, measuring=0.5) for _ in range(2)]
    for other in others:
        other.join(120)
        assert other.exitcode == 0
    after = ended(storage)
    assert sorted(after) == EVERY and after[: len(before)] == before
    again = collect(storage)
    assert again.left == 0 and judge(again) is not None
    assert len(again.speed) == 2 and again.baselines
    alone(log)
    assert log.read_text().count("begin train") == 6 - len(before)


def test_a_dead_worker_that_held_the_measuring_is_followed_by_another(tmp_path: Path) -> None:
    task, storage = planted(), at(tmp_path / "s.db")
    plan = plan_of(task, steps=3, seeds=1)
    assert run(plan, storage, task=task, speed=False, baselines=False).speed == {}
    study = open_study(storage, plan.name, 1, 3)
    enqueue(study, "speed")
    with pytest.warns(UserWarning, match="Heartbeat of storage"):
        held = study.ask()  # taken by a worker that never does it
    assert key_of(held) == "speed"
    study._storage.record_heartbeat(held._trial_id)
    told: list[str] = []
    begun = time.monotonic()
    found = run(plan, storage, task=task, baselines=False, heartbeat=1, grace=3,
                say=lambda done, total, line: told.append(line))  # fmt: skip
    assert time.monotonic() - begun > 1.5, "a claim that lives is respected"
    assert "waiting for another worker" in told and len(found.speed) == 2
    speeds = [state for state, key in states(storage) if key == "speed"]
    assert speeds == ["FAIL", "COMPLETE"]


def test_a_training_that_another_worker_gave_up_is_taken_over(tmp_path: Path, monkeypatch) -> None:
    """Ctrl-C on one machine: the others end its training before they measure speed."""
    task, storage, fit = planted(), at(tmp_path / "s.db"), trials.train
    plan = plan_of(task, steps=3, seeds=1)
    study = open_study(storage, plan.name, 1, 20)
    trials.put_trainings(study, plan)
    with pytest.warns(UserWarning, match="Heartbeat of storage"):
        other = study.ask()
    study._storage.record_heartbeat(other._trial_id)

    def interrupt_the_other(*given: Any, **more: Any) -> Any:
        if not [state for state, _ in states(storage) if state == "FAIL"]:
            study.tell(other, state=optuna.trial.TrialState.FAIL)
        return fit(*given, **more)

    monkeypatch.setattr(trials, "train", interrupt_the_other)
    found = run(plan, storage, task=task, heartbeat=1)
    assert found.left == 0 and len(found.speed) == 2
    assert [key for _, key in states(storage)] == [(0, 0), (1, 0), (0, 0), "speed", "baselines"]


def test_work_that_two_put_in_is_done_once(tmp_path: Path, monkeypatch) -> None:
    task, storage, calls = planted(), at(tmp_path / "s.db"), []
    plan = plan_of(task, steps=3, seeds=1)
    run(plan, storage, task=task, speed=False, baselines=False)
    study = open_study(storage, plan.name, 1, 2)
    for _ in range(3):
        enqueue(study, "speed")
    enqueue(study, (1, 0))
    monkeypatch.setattr(trials, "measure", lambda *given: calls.append(1) or measure(*given))
    monkeypatch.setattr(trials, "train", None)
    run(plan, storage, task=task)
    assert calls == [1]
    assert sorted(s for s, key in states(storage) if key == "speed") == (
        ["COMPLETE", "PRUNED", "PRUNED"]
    )


def test_a_training_that_diverges_is_told(tmp_path: Path, monkeypatch) -> None:
    task = planted()
    score = task.evaluate

    def lost(model: Any, split: str) -> Any:
        found = score(model, split)
        return type(found)(float("nan"), found.per_example) if split == "test" else found

    monkeypatch.setattr(task, "evaluate", lost)
    with pytest.raises(BadInput, match=r"1 head × 12, seed 0: accuracy is nan: the training div"):
        run(plan_of(task, steps=3, seeds=1), at(tmp_path / "s.db"), task=task)


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
    monkeypatch.setattr(trials, "measure", None)
    second = run(plan, storage, task=task)
    assert [o.value for o in second.outcomes] == [o.value for o in first.outcomes]
    assert [key for _, key in states(storage)] == [(0, 0), (1, 0), "speed", "baselines"]
    assert collect(storage).plan == plan


# --- bad input ------------------------------------------------------------------------------------


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def headwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture):
    """`headwise study`, inside this process: what it printed and its exit code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")

    def call(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["headwise", "study", *arguments])
        capfd.readouterr()
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return Done(stop.value.code or 0, *capfd.readouterr())

    return call


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
def test_bad_input_is_one_line(arguments: tuple[str, ...], says: str, headwise) -> None:
    out = headwise(*arguments)
    assert out.returncode == 2, out.stderr
    assert says in out.stderr and "secret" not in out.stderr
    assert len(out.stderr.strip().splitlines()) <= 2, out.stderr
    assert "Traceback" not in out.stderr


def test_the_command_answers_and_draws_again(tmp_path: Path, headwise) -> None:
    more = ("--heads", "2", "--seeds", "1", "--steps", "3", "--no-baselines")
    first = headwise("vision", *more, "--html", "a.html", "--records", "a.jsonl")
    assert first.returncode == 0, first.stderr
    assert "2 designs × 1 seed," in first.stdout and "cannot tell: 1 seed:" in first.stdout
    assert "training, batches/s" in first.stdout and "next token" not in first.stdout
    second = headwise("--from", "sqlite:///headwise-study.db", "--records", "b.jsonl")
    assert second.returncode == 0, second.stderr

    def numbers(name: str) -> list:
        return [r.values for r in read(tmp_path / name) if r.kind == "study"]

    assert numbers("a.jsonl") == numbers("b.jsonl")
    assert all(values["train"] > 0 for values in numbers("a.jsonl"))
    assert "smallest" in (tmp_path / "a.html").read_text(encoding="utf-8")


def test_what_is_missing_is_counted(tmp_path: Path, headwise, monkeypatch) -> None:
    """And the table has one step of generation where the task generates."""
    task, storage = planted(Generating), at(tmp_path / "s.db")
    plan = plan_of(task, steps=3, seeds=2)
    fit, calls = trials.train, []

    def last_fails(*given: Any, **more: Any) -> Any:
        calls.append(given[1].num_heads)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return fit(*given, **more)

    monkeypatch.setattr(trials, "train", last_fails)
    with pytest.raises(KeyboardInterrupt):
        run(plan, storage, task=task)
    told = headwise("--from", storage)
    assert told.returncode == 0, told.stderr
    assert told.stdout.splitlines()[-1] == "1 of 4 trainings is still to do"
    run(plan, storage, task=task)
    whole = headwise("--from", storage)
    assert "still to do" not in whole.stdout and "next token, ms" in whole.stdout
