"""The folder of a trained task: what `headwise train` writes, and `run`, `report`, `check` read.

run.json holds the task, the design, the scores and what using the model needs; model.safetensors
the weights; example.safetensors one input; log.csv and checkpoints/ are the training's. Nothing in
it is code, and nothing is unpickled when a run is used.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from headwise._extras import require
from headwise.errors import BadFile, BadInput
from headwise.tasks.design import Design
from headwise.tasks.task import Budget, Score, Task

if TYPE_CHECKING:
    from headwise.tasks.training import Trained

FORM = 1
NAMES = ("run.json", "model.safetensors", "example.safetensors")


@dataclass(frozen=True, eq=False)
class Run:
    """A folder, read: the task (restored, not prepared), the model in eval mode, an input for it
    with the names of its tokens, and run.json as it is."""

    folder: Path
    task: Task
    design: Design
    model: nn.Module
    inputs: Mapping[str, Tensor]
    tokens: tuple[str, ...]
    about: Mapping[str, Any]


def save(
    folder: Path,
    task: Task,
    design: Design,
    budget: Budget,
    seed: int,
    trained: Trained,
    test: Score,
    baselines: Mapping[str, Score],
) -> None:
    """Write a run. run.json comes last and by renaming, so a folder that has one is whole.

    Raises:
        BadInput: the folder cannot be written.
    """
    tensors = require("safetensors.torch", extra="models", purpose="saving a model")
    example = task.example()
    about = {
        "form": FORM,
        "task": task.name,
        "title": task.title,
        "metric": task.metric,
        "better": task.better,
        "data": None if task.data is None else str(task.data),
        "source": task.source if task.data is None else "the user's own",
        "licence": task.licence if task.data is None else "the user's own",
        "split_seed": task.seed,
        "seed": seed,
        "design": design.to_dict(),
        "budget": asdict(budget),
        "steps": trained.steps,
        "seconds": trained.seconds,
        "stopped": trained.stopped,
        "validation": _numbers(trained.validation),
        "test": _numbers(test),
        "baselines": {name: _numbers(score) for name, score in baselines.items()},
        "tokens": list(example["tokens"]),
        "state": task.state(),
    }
    text = json.dumps(about, indent=1, ensure_ascii=False) + "\n"

    def write(name: str, fill: Callable[[Path], None]) -> None:
        partial = folder / f"{name}.partial"
        fill(partial)
        os.replace(partial, folder / name)

    weights = {name: part.contiguous() for name, part in trained.model.state_dict().items()}
    inputs = {name: part.contiguous() for name, part in example["inputs"].items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write("model.safetensors", lambda path: tensors.save_file(weights, path))
        write("example.safetensors", lambda path: tensors.save_file(inputs, path))
        write("run.json", lambda path: _write_text(path, text))
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise BadInput(f"cannot write the run {folder}: {reason}") from None


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _numbers(score: Score) -> dict[str, Any]:
    return {"value": score.value, "extra": dict(score.extra), "examples": len(score.per_example)}


def is_run(folder: Path) -> bool:
    """Does the folder hold a finished run?"""
    return (folder / "run.json").is_file()


def load(folder: Path) -> Run:
    """Read a run.

    Raises:
        BadInput: no folder, or no finished run in it. BadFile: a file is damaged, or does not fit
        the others.
    """
    from headwise.tasks import load_task

    if not is_run(folder):
        begun = (folder / "checkpoints").is_dir()
        raise BadInput(
            f"{folder}: no finished run is here: "
            + (
                "its training was stopped; the same headwise train command goes on with it"
                if begun
                else "wanted a folder that headwise train wrote, with run.json in it"
            )
        )
    tensors = require("safetensors.torch", extra="models", purpose="reading a model")
    failed = require("safetensors", extra="models", purpose="reading a model")
    try:
        about = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        if about["form"] != FORM:
            raise BadFile(f"{folder}/run.json: form {about['form']!r} is not known, wanted {FORM}")
        task = load_task(about["task"], seed=int(about["split_seed"]))
        design = Design.from_dict(about["design"])
        task.restore(about["state"])
        tokens = tuple(str(token) for token in about["tokens"])
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise BadFile(f"{folder}/run.json is damaged ({what})") from None
    try:
        model = task.build(design, 0)
        model.load_state_dict(tensors.load_file(folder / "model.safetensors"))
        inputs = tensors.load_file(folder / "example.safetensors")
    except (OSError, RuntimeError, failed.SafetensorError) as error:
        first = str(error).splitlines()[0]
        raise BadFile(
            f"{folder}: the weights do not fit run.json, or are damaged ({first})"
        ) from None
    return Run(folder, task, design, model.eval(), inputs, tokens, about)
