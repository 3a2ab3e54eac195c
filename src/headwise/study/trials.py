"""A study's work: its trainings, shared by workers, resumed, none run twice; then speed, measured
by one worker while all others wait; then the simpler models.

Speed is put into the storage when no training waits or runs, so a worker that holds it has the
study's machines to itself. It is a trial like any other, with a heartbeat: where its worker is
killed, the next one measures.
"""

from __future__ import annotations

import base64
import json
import math
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headwise.errors import BadFile, BadInput
from headwise.study import heads
from headwise.study.plan import Plan, parameters
from headwise.study.speed import measure
from headwise.study.storage import (
    DEFAULT,
    GRACE,
    HEARTBEAT,
    PLAN,
    enqueue,
    errors,
    key_of,
    latest,
    open_study,
    optuna,
    taken,
    trainings,
)
from headwise.tasks import Task, load_task
from headwise.tasks.training import train

Say = Callable[[int, int, str], None]


@dataclass(frozen=True, eq=False)
class Outcome:
    """One training: its test score, one number for each test example, and how alike its heads are
    (the share of pairs in one layer with cosine above `heads.ALIKE`; None with one head)."""

    design: int
    seed: int
    value: float
    per_example: np.ndarray
    steps: int
    seconds: float
    alike: float | None


@dataclass(eq=False)
class Results:
    """A plan, what is known of it, and what was measured apart: `speed` by design, baselines.
    `tokens`: of the task's example; None where it is not known."""

    plan: Plan
    outcomes: list[Outcome]
    metric: str = ""
    better: str = "higher"
    title: str = ""
    parameters: tuple[int, ...] = ()
    tokens: int | None = None
    speed: dict[int, dict[str, float | None]] = field(default_factory=dict)
    baselines: dict[str, float] = field(default_factory=dict)

    @property
    def left(self) -> int:
        return len(self.plan.designs) * len(self.plan.seeds) - len(self.outcomes)

    def of(self, design: int) -> list[Outcome]:
        """The trainings of one design, in order of their seeds."""
        return sorted((o for o in self.outcomes if o.design == design), key=lambda o: o.seed)


def run(
    plan: Plan,
    storage: str = DEFAULT,
    *,
    task: Task | None = None,
    say: Say = lambda done, total, line: None,
    speed: bool = True,
    baselines: bool = True,
    heartbeat: int = HEARTBEAT,
    grace: int = GRACE,
) -> Results:
    """Take work that waits until none is left, then give what all workers found.

    Args:
        task: prepared; loaded by its name when None.
        speed, baselines: also measure speed, also score the simpler models, after all trainings.
        heartbeat, grace: seconds between a running trial's signs of life, and how long without one
            it counts as dead.

    Raises:
        BadInput: the storage cannot be reached, or a training diverged.
    """
    if task is None:
        task = load_task(plan.task, plan.path)
        task.prepare()
    study = open_study(storage, plan.name, heartbeat, grace)
    states = optuna().trial.TrialState
    closing = [name for name, wanted in (("speed", speed), ("baselines", baselines)) if wanted]
    worker = _Worker(study, plan, task, say)
    with errors(storage):
        study.set_user_attr(PLAN, json.dumps(plan.to_dict()))
        put_trainings(study, plan)
        while True:
            # What a killed worker left is failed here, and waits again.
            optuna().storages.fail_stale_trials(study)
            trials = study.get_trials(deepcopy=False)
            under_way = [key_of(t) for t in trials if t.state == states.RUNNING]
            if any(t.state == states.WAITING for t in trials):
                study.optimize(worker, n_trials=1)
            elif under_way:
                worker.tell("waiting for another worker")
                # Seldom while speed is measured, maybe on this machine.
                time.sleep(heartbeat if "speed" in under_way else min(1.0, heartbeat))
            elif not put_trainings(study, plan) and not _put_closing(study, closing):
                break
        worker.tell("all is done")
        # What a prepared task alone can tell, for `collect`.
        study.set_user_attr("parameters", [parameters(task, d) for d in plan.designs])
        study.set_user_attr("tokens", len(task.example()["tokens"]))
        return _read(study, plan, task)


def collect(storage: str, name: str | None = None) -> Results:
    """What a storage holds of a study, the latest where no name is given. Nothing is run.

    Raises:
        BadInput: no such storage, or no study in it.
    """
    study = latest(storage, name)
    with errors(storage):
        plan = Plan.from_dict(json.loads(study.user_attrs[PLAN]))
        return _read(study, plan, load_task(plan.task, plan.path))


def put_trainings(study: Any, plan: Plan) -> bool:
    """Every design and seed that has no trial, or only one that was interrupted; seeds first, so
    that an early stop leaves every design one. Were there any?"""
    states = optuna().trial.TrialState
    alive = (states.COMPLETE, states.RUNNING, states.WAITING)
    known = {key_of(t) for t in study.get_trials(deepcopy=False) if t.state in alive}
    every = [(design, seed) for seed in plan.seeds for design in range(len(plan.designs))]
    missing = [key for key in every if key not in known]
    for key in missing:
        enqueue(study, key)
    return bool(missing)


def _put_closing(study: Any, names: list[str]) -> bool:
    """The first that is not done. Was there one?"""
    missing = [name for name in names if name not in study.user_attrs]
    for name in missing[:1]:
        enqueue(study, name)
    return bool(missing)


class _Worker:
    """Does the work of one trial, whichever it is."""

    def __init__(self, study: Any, plan: Plan, task: Task, say: Say) -> None:
        self.study, self.plan, self.task, self.say = study, plan, task, say
        self.total = len(plan.designs) * len(plan.seeds)

    def tell(self, line: str) -> None:
        self.say(len(trainings(self.study)), self.total, line)

    def __call__(self, trial: Any) -> float:
        key = key_of(trial)
        if key is None:  # another worker took the last one that waited
            raise optuna().TrialPruned("nothing was left to take")
        if taken(self.study, trial.number, key):
            raise optuna().TrialPruned("another trial does this work")
        if key == "speed":
            speeds = measure(self.task, self.plan, self.say)
            self.study.set_user_attr(key, {str(number): v for number, v in speeds.items()})
        elif key == "baselines":
            scores = {}
            for label, fit in self.task.baselines().items():
                self.tell(f"{self.plan.task}: {label}")
                scores[label] = fit().value
            self.study.set_user_attr(key, scores)
        else:
            assert not isinstance(key, str)
            return self.train(trial, *key)
        return 0.0

    def train(self, trial: Any, design: int, seed: int) -> float:
        plan, task = self.plan, self.task
        trial.suggest_int("design", 0, len(plan.designs) - 1)
        trial.suggest_int("seed", min(plan.seeds), max(plan.seeds))
        label = f"{plan.designs[design].label}, seed {seed}"
        done = len(trainings(self.study))

        def progress(step: int, steps: int, line: str) -> None:
            self.say(done, self.total, f"{label}: step {step} of {steps}")

        progress(0, plan.budget.steps, "")
        trained = train(task, plan.designs[design], plan.budget, seed, progress=progress)
        score = task.evaluate(trained.model, "test")
        if not math.isfinite(score.value):
            raise BadInput(
                f"study: {label}: {task.metric} is {score.value}: the training diverged; leave "
                "this design out"
            )
        trial.set_user_attr("per_example", _pack(score.per_example))
        trial.set_user_attr("steps", trained.steps)
        trial.set_user_attr("seconds", trained.seconds)
        trial.set_user_attr("alike", heads.alike(trained.model, task.example()["inputs"]))
        return score.value


def _read(study: Any, plan: Plan, task: Task) -> Results:
    outcomes = []
    for t in trainings(study):
        key = key_of(t)
        assert isinstance(key, tuple)
        attrs = t.user_attrs
        outcomes.append(
            Outcome(key[0], key[1], float(t.value), _unpack(attrs["per_example"]),
                    int(attrs["steps"]), float(attrs["seconds"]), attrs["alike"])
        )  # fmt: skip
    outcomes.sort(key=lambda o: (o.design, o.seed))
    attrs = study.user_attrs
    return Results(
        plan,
        outcomes,
        task.metric,
        task.better,
        task.title,
        tuple(int(n) for n in attrs.get("parameters", ())),
        attrs.get("tokens"),
        {int(number): dict(speed) for number, speed in attrs.get("speed", {}).items()},
        dict(attrs.get("baselines", {})),
    )


def _pack(values: np.ndarray) -> str:
    raw = zlib.compress(np.asarray(values, dtype="<f4").tobytes(), 9)
    return base64.b64encode(raw).decode("ascii")


def _unpack(text: str) -> np.ndarray:
    try:
        raw = zlib.decompress(base64.b64decode(text, validate=True))
    except (ValueError, zlib.error) as error:
        raise BadFile(f"study: a trial's scores are damaged ({error})") from None
    return np.frombuffer(raw, dtype="<f4").astype(np.float64)
