"""How a trained task measures variants of its model: by its own metric, on its own test part."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from headwise.errors import BadInput
from headwise.surgery import Trial
from headwise.tasks import load_task
from headwise.tasks.runs import Run

CALIBRATION = 8  # batches by which heads are ranked


def trial(run: Run, *, healing: int = 0, say: Callable[[str], None] = lambda line: None) -> Trial:
    """The task's test metric, for `headwise.surgery.what_if`.

    Heads are ranked, and variants healed for `healing` steps, by the training loss on batches of
    the training part. What is timed is the run's example, and a token upon its caches where the
    task generates.

    Raises:
        BadInput: the data of the task is not there any more, or is not what it was trained on.
    """
    about = run.about
    data = None if about["data"] is None else Path(about["data"])
    if data is not None and not data.exists():
        raise BadInput(f"{run.folder}: it was trained on {data}, which is not there any more")
    task = load_task(about["task"], data, int(about["split_seed"]))
    task.prepare(say)
    if json.loads(json.dumps(task.state())) != about["state"]:
        raise BadInput(
            f"{run.folder}: the data is not what the model was trained on, so its test part cannot "
            "be told from its training part; train it again"
        )

    def loss(model: nn.Module, batch: Any) -> Tensor:
        # Means over examples: one mean an example has the gradients of the examples' own losses.
        return task.loss(model, batch).expand(_examples(batch))

    seed = int(about["seed"]) + 1
    batches = [task.batch(index, seed) for index in range(CALIBRATION + healing)]
    return Trial(
        metric=task.metric,
        better=task.better,
        quality=lambda model: task.evaluate(model, "test").value,
        run=lambda model: model(**run.inputs),
        tokens=len(run.tokens),
        step=_step(task) if task.generates else None,
        loss=loss,
        calibration=batches[:CALIBRATION],
        training=batches[CALIBRATION:],
    )


def _step(task: Any) -> Callable[[nn.Module], Callable[[], Any]]:
    def step(model: nn.Module) -> Callable[[], Any]:
        found: Callable[[], Any] | None = task.decode_step(model)
        assert found is not None, f"{task.name} generates"
        return found

    return step


def _examples(batch: Any) -> int:
    """Examples of a batch: the first axis of its first tensor, whatever holds it."""
    while not isinstance(batch, Tensor):
        batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    return len(batch)
