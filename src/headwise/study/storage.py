"""Optuna's storage, as a study uses it: opened, its trials told apart, its errors in one line.

Work is a trial with user attributes that say which: {"design": 1, "seed": 0} is a training,
{"closing": "speed"} is done once, after all trainings. A worker takes a trial that waits, which the
storage gives to one worker only. A running trial keeps a heartbeat; one whose heart has stopped
(its worker was killed) is failed and put back to wait.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headwise._extras import require
from headwise.errors import BadInput

DEFAULT = "sqlite:///headwise-study.db"
HEARTBEAT, GRACE = 5, 20  # seconds
PLAN = "headwise_plan"
# A training's design and seed, or the name of closing work.
Key = tuple[int, int] | str


def optuna() -> Any:
    found = require("optuna", extra="study", purpose="headwise study")
    # What a trial raises is raised here too; its log would be a second, longer message.
    found.logging.set_verbosity(found.logging.ERROR)
    return found


@contextmanager
def errors(storage: str) -> Iterator[None]:
    """Raises BadInput in place of what a storage raises."""
    sqlalchemy = require("sqlalchemy", extra="study", purpose="headwise study")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=optuna().exceptions.ExperimentalWarning)
            yield
    except (optuna().exceptions.StorageInternalError, sqlalchemy.exc.SQLAlchemyError) as error:
        raise _unusable(storage, error) from None


def _unusable(storage: str, error: BaseException) -> BadInput:
    lines = str(error.__cause__ or error).strip().splitlines() or [type(error).__name__]
    _, at, tail = storage.rpartition("@")
    shown = f"…@{tail}" if at else storage  # without a password
    return BadInput(f"study: the storage {shown} cannot be used: {lines[0]}")


def _backend(storage: str, **more: Any) -> Any:
    try:
        return optuna().storages.RDBStorage(storage, **more)
    except ImportError as error:  # the driver that the URL names
        raise _unusable(storage, error) from None


def open_study(storage: str, name: str, heartbeat: int, grace: int) -> Any:
    """The study of that name, made where it is not there."""

    def again(study: Any, trial: Any) -> None:
        key = key_of(trial)
        if key is not None:
            enqueue(study, key)

    with errors(storage):
        # optuna renamed it in 4.9, and warns of the old name.
        new = "heartbeat_stale_trial_callback"
        word = (
            new
            if new in inspect.signature(optuna().storages.RDBStorage).parameters
            else "failed_trial_callback"
        )
        backend = _backend(
            storage, heartbeat_interval=heartbeat, grace_period=grace, **{word: again}
        )
        return optuna().create_study(
            study_name=name, storage=backend, load_if_exists=True, direction="maximize",
            sampler=optuna().samplers.RandomSampler(seed=0),
        )  # fmt: skip


def latest(storage: str, name: str | None = None) -> Any:
    """The study begun last of those that a storage holds.

    Raises:
        BadInput: no such storage, or no study in it.
    """
    with errors(storage):
        if storage.startswith("sqlite:///"):
            file = Path(storage.removeprefix("sqlite:///"))
            if not file.is_file():
                raise BadInput(f"study: no such storage: {file}")
        backend = _backend(storage)
        found = [
            s for s in optuna().get_all_study_summaries(backend)
            if PLAN in s.user_attrs and name in (None, s.study_name)
        ]  # fmt: skip
        if not found:
            raise BadInput(
                f"study: {storage} holds no study of headwise" + (f" named {name}" if name else "")
            )
        last = max(found, key=lambda s: s.datetime_start.timestamp() if s.datetime_start else 0.0)
        return optuna().load_study(study_name=last.study_name, storage=backend)


def enqueue(study: Any, key: Key) -> None:
    """Put work in, to wait for a worker."""
    if isinstance(key, str):
        study.enqueue_trial({}, user_attrs={"closing": key})
    else:
        both = {"design": key[0], "seed": key[1]}
        study.enqueue_trial(both, user_attrs=both)


def key_of(trial: Any) -> Key | None:
    attrs = trial.user_attrs
    if "closing" in attrs:
        return str(attrs["closing"])
    return (int(attrs["design"]), int(attrs["seed"])) if "design" in attrs else None


def taken(study: Any, number: int, mine: Key) -> bool:
    """Has another trial of this work ended, or is an earlier one under way? (Two workers that began
    at one moment may both have put it in.)"""
    states = optuna().trial.TrialState
    for t in study.get_trials(deepcopy=False):
        if t.number == number or key_of(t) != mine:
            continue
        if t.state == states.COMPLETE or (t.state == states.RUNNING and t.number < number):
            return True
    return False


def trainings(study: Any) -> list[Any]:
    """The trainings that ended, one for each design and seed."""
    states = optuna().trial.TrialState
    done = [t for t in study.get_trials(deepcopy=False) if t.state == states.COMPLETE]
    return list({key_of(t): t for t in reversed(done) if isinstance(key_of(t), tuple)}.values())
