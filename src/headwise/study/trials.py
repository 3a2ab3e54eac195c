"""The trainings of a study, in Optuna's storage: shared by workers, resumed, none run twice.

Every (design, seed) is put into the storage once, before anything runs; a worker takes one that
waits, which the storage gives to one worker only. A running trial keeps a heartbeat; one whose
heart has stopped (its worker was killed) is failed and put back to wait.
"""

from __future__ import annotations

import base64
import inspect
import json
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headwise._extras import require
from headwise.errors import BadFile, BadInput
from headwise.study import heads
from headwise.study.plan import Plan, parameters
from headwise.tasks import Task, load_task
from headwise.tasks.training import train

DEFAULT = "sqlite:///headwise-study.db"
HEARTBEAT, GRACE = 5, 20  # seconds
PLAN, READY = "headwise_plan", "headwise_ready"
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
    """A plan, what is known of it, and what was measured apart: `speed` by design, baselines."""

    plan: Plan
    outcomes: list[Outcome]
    metric: str = ""
    better: str = "higher"
    title: str = ""
    parameters: tuple[int, ...] = ()
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
    heartbeat: int = HEARTBEAT,
    grace: int = GRACE,
) -> Results:
    """Take trials that wait until none is left, then give what all workers found.

    Args:
        task: prepared; loaded by its name when None.
        heartbeat, grace: seconds between a running trial's signs of life, and how long without one
            it counts as dead.

    Raises:
        BadInput: the storage cannot be reached.
    """
    task = _prepared(plan, task)
    study = _open(storage, plan.name, heartbeat, grace, create=True)
    _put(study, plan)
    optuna = _optuna()
    total = len(plan.designs) * len(plan.seeds)

    def objective(trial: Any) -> float:
        key = _key(trial)
        if key is None:  # another worker took the last one that waited
            raise optuna.TrialPruned("nothing was left to take")
        if _other(study, trial.number, key):
            raise optuna.TrialPruned("another trial has this design and seed")
        design, seed = key
        trial.suggest_int("design", 0, len(plan.designs) - 1)
        trial.suggest_int("seed", min(plan.seeds), max(plan.seeds))
        label = f"{plan.designs[design].label}, seed {seed}"
        done = len(_complete(study))

        def progress(step: int, steps: int, line: str) -> None:
            say(done, total, f"{label}: step {step} of {steps}")

        progress(0, plan.budget.steps, "")
        trained = train(task, plan.designs[design], plan.budget, seed, progress=progress)
        score = task.evaluate(trained.model, "test")
        trial.set_user_attr("per_example", _pack(score.per_example))
        trial.set_user_attr("steps", trained.steps)
        trial.set_user_attr("seconds", trained.seconds)
        trial.set_user_attr("alike", heads.alike(trained.model, task.example()["inputs"]))
        return score.value

    states = optuna.trial.TrialState
    with _storage_errors(storage):
        while True:
            # What a killed worker left is failed here, and waits again.
            optuna.storages.fail_stale_trials(study)
            trials = study.get_trials(deepcopy=False)
            if any(t.state == states.WAITING for t in trials):
                study.optimize(objective, n_trials=1)
            elif any(t.state == states.RUNNING for t in trials):
                say(len(_complete(study)), total, "waiting for another worker")
                time.sleep(min(1.0, heartbeat))
            else:
                break
    say(total, total, "trained")
    return _read(study, plan, task)


def collect(storage: str, name: str | None = None) -> Results:
    """What a storage holds of a study, the latest where no name is given. Nothing is run.

    Raises:
        BadInput: no such storage, or no study in it.
    """
    optuna = _optuna()
    with _storage_errors(storage):
        if storage.startswith("sqlite:///"):
            from pathlib import Path

            file = Path(storage.removeprefix("sqlite:///"))
            if not file.is_file():
                raise BadInput(f"study: no such storage: {file}")
        backend = optuna.storages.RDBStorage(storage)
        found = [
            s for s in optuna.get_all_study_summaries(backend)
            if PLAN in s.user_attrs and name in (None, s.study_name)
        ]  # fmt: skip
        if not found:
            raise BadInput(
                f"study: {storage} holds no study of headwise" + (f" named {name}" if name else "")
            )
        last = max(found, key=lambda s: s.datetime_start.timestamp() if s.datetime_start else 0.0)
        study = optuna.load_study(study_name=last.study_name, storage=backend)
    plan = Plan.from_dict(json.loads(study.user_attrs[PLAN]))
    return _read(study, plan, None)


def keep(storage: str, results: Results) -> None:
    """Keep what was measured apart from training beside the trials."""
    study = _open(storage, results.plan.name, HEARTBEAT, GRACE, create=False)
    with _storage_errors(storage):
        study.set_user_attr("speed", {str(k): v for k, v in results.speed.items()})
        study.set_user_attr("baselines", results.baselines)


# --- the storage ----------------------------------------------------------------------------------


def _optuna() -> Any:
    optuna = require("optuna", extra="study", purpose="headwise study")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _prepared(plan: Plan, task: Task | None) -> Task:
    if task is None:
        task = load_task(plan.task, plan.path)
        task.prepare()
    return task


@contextmanager
def _storage_errors(storage: str) -> Iterator[None]:
    optuna = require("optuna", extra="study", purpose="headwise study")
    sqlalchemy = require("sqlalchemy", extra="study", purpose="headwise study")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
            yield
    except (
        optuna.exceptions.StorageInternalError,
        sqlalchemy.exc.SQLAlchemyError,
        ModuleNotFoundError,
        ImportError,
    ) as error:
        lines = str(error.__cause__ or error).strip().splitlines() or [type(error).__name__]
        raise BadInput(f"study: the storage {_shown(storage)} cannot be used: {lines[0]}") from None


def _shown(storage: str) -> str:
    """Without a password."""
    _, at, tail = storage.rpartition("@")
    return f"…@{tail}" if at else storage


def _open(storage: str, name: str, heartbeat: int, grace: int, *, create: bool) -> Any:
    optuna = _optuna()

    def again(study: Any, trial: Any) -> None:
        key = _key(trial)
        if key is not None:
            _enqueue(study, *key)

    with _storage_errors(storage):
        kind = optuna.storages.RDBStorage
        # optuna renamed it in 4.9, and warns of the old name.
        new = "heartbeat_stale_trial_callback"
        word = new if new in inspect.signature(kind).parameters else "failed_trial_callback"
        backend = kind(storage, heartbeat_interval=heartbeat, grace_period=grace, **{word: again})
        if create:
            return optuna.create_study(
                study_name=name, storage=backend, load_if_exists=True, direction="maximize",
                sampler=optuna.samplers.RandomSampler(seed=0),
            )  # fmt: skip
        return optuna.load_study(study_name=name, storage=backend)


def _put(study: Any, plan: Plan) -> None:
    """Every design and seed, seeds first so that an early stop leaves every design one; once."""
    with _storage_errors(""):
        states = _optuna().trial.TrialState
        alive = (states.COMPLETE, states.RUNNING, states.WAITING)  # not what was interrupted
        known = {_key(t) for t in study.get_trials(deepcopy=False) if t.state in alive}
        study.set_user_attr(PLAN, json.dumps(plan.to_dict()))
        for seed in plan.seeds:
            for design in range(len(plan.designs)):
                if (design, seed) not in known:
                    _enqueue(study, design, seed)


def _enqueue(study: Any, design: int, seed: int) -> None:
    both = {"design": design, "seed": seed}
    study.enqueue_trial(both, user_attrs=both)


def _key(trial: Any) -> tuple[int, int] | None:
    attrs = trial.user_attrs
    return (int(attrs["design"]), int(attrs["seed"])) if "design" in attrs else None


def _other(study: Any, number: int, mine: tuple[int, int]) -> bool:
    """Has another trial of this design and seed ended, or is an earlier one under way? (Two workers
    that began at one moment may both have put them in.)"""
    states = _optuna().trial.TrialState
    for t in study.get_trials(deepcopy=False):
        if t.number == number or _key(t) != mine:
            continue
        if t.state == states.COMPLETE or (t.state == states.RUNNING and t.number < number):
            return True
    return False


def _complete(study: Any) -> list[Any]:
    states = _optuna().trial.TrialState
    done = [t for t in study.get_trials(deepcopy=False) if t.state == states.COMPLETE]
    return list({_key(t): t for t in reversed(done) if _key(t) is not None}.values())


def _read(study: Any, plan: Plan, task: Task | None) -> Results:
    outcomes = []
    for t in _complete(study):
        key = _key(t)
        assert key is not None
        attrs = t.user_attrs
        outcomes.append(
            Outcome(key[0], key[1], float(t.value), _unpack(attrs["per_example"]),
                    int(attrs["steps"]), float(attrs["seconds"]), attrs["alike"])
        )  # fmt: skip
    outcomes.sort(key=lambda o: (o.design, o.seed))
    about = task if task is not None else load_task(plan.task, plan.path)
    found = Results(plan, outcomes, about.metric, about.better, about.title)
    attrs = study.user_attrs
    if task is not None:
        found.parameters = tuple(parameters(task, d) for d in plan.designs)
        study.set_user_attr("parameters", list(found.parameters))
    elif "parameters" in attrs:
        found.parameters = tuple(int(n) for n in attrs["parameters"])
    found.speed = {int(k): dict(v) for k, v in attrs.get("speed", {}).items()}
    found.baselines = dict(attrs.get("baselines", {}))
    return found


def _pack(values: np.ndarray) -> str:
    raw = zlib.compress(np.asarray(values, dtype="<f4").tobytes(), 9)
    return base64.b64encode(raw).decode("ascii")


def _unpack(text: str) -> np.ndarray:
    try:
        raw = zlib.decompress(base64.b64decode(text, validate=True))
    except (ValueError, zlib.error) as error:
        raise BadFile(f"study: a trial's scores are damaged ({error})") from None
    return np.frombuffer(raw, dtype="<f4").astype(np.float64)
