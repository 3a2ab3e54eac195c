"""The training loop: Lightning's, one loop for every task.

What a step does depends on the task, the seed and the step's number alone: its batch, its dropout,
its learning rate. So a training that was killed and goes on from its last checkpoint ends in the
same weights, bit for bit, as one that was left alone.
"""

from __future__ import annotations

import csv
import io
import logging
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from headwise._extras import require
from headwise.errors import BadFile, BadInput
from headwise.tasks.design import Design
from headwise.tasks.task import Budget, Score, Task

if TYPE_CHECKING:
    import lightning
else:
    lightning = require("lightning", extra="tasks", purpose="training")

WEIGHT_DECAY = 0.05
LARGEST_GRADIENT = 1.0
CHECKPOINT = "checkpoints/last.ckpt"
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, eq=False)
class Trained:
    """A model with the weights that were best on validation, in eval mode; `validation`, its score
    there; `steps` taken; `seconds` of this process; `history`: (step, mean loss since the row
    before, validation score) of each evaluation; `stopped`: why it ended."""

    model: nn.Module
    validation: Score
    steps: int
    seconds: float
    history: tuple[tuple[int, float, float], ...]
    stopped: str


def train(
    task: Task,
    design: Design,
    budget: Budget,
    seed: int = 0,
    *,
    folder: Path | None = None,
    progress: Progress = lambda done, total, line: None,
) -> Trained:
    """Train a model of `design` on a prepared task.

    Args:
        seed: of the weights, the batches and dropout.
        folder: where a checkpoint is kept after each evaluation, and log.csv; a checkpoint that is
            there is gone on from. None: nothing is kept.
        progress: called with (steps done, steps in all, a line).

    Raises:
        BadInput: a budget that holds no step. BadFile: a checkpoint of another training, or damage.
    """
    if budget.steps < 1 or (budget.seconds is not None and budget.seconds <= 0):
        raise BadInput(
            f"train: the budget must hold one step at least, got steps={budget.steps}, "
            f"seconds={budget.seconds}"
        )
    started = time.perf_counter()
    model = task.build(design, seed)
    what = {"task": task.name, "design": design.to_dict(), "seed": seed, "steps": budget.steps}
    watcher = _Evaluations(task, budget, what, folder, progress)
    with _quiet():
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=-1,
            max_steps=budget.steps,
            max_time=None if budget.seconds is None else timedelta(seconds=budget.seconds),
            gradient_clip_val=LARGEST_GRADIENT,
            callbacks=[watcher],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        module = _Module(task, model, budget, seed)
        batches = DataLoader(_Batches(task, module, budget.steps, seed), batch_size=None)
        last = None if folder is None else folder / CHECKPOINT
        again = None if last is None or not last.is_file() else last
        with torch.random.fork_rng(devices=[]):
            try:
                trainer.fit(module, batches, ckpt_path=again, weights_only=True)
            except (OSError, EOFError, KeyError, RuntimeError, UnpicklingError) as error:
                if again is None or trainer.global_step:
                    raise
                reason = "damaged, or no checkpoint of plain numbers"
                if not isinstance(error, UnpicklingError) and str(error):
                    reason = str(error).splitlines()[0]
                raise BadFile(
                    f"{again}: cannot go on from this checkpoint ({reason}); give another --out, "
                    "or delete it"
                ) from None
    if watcher.evaluated != trainer.global_step:
        watcher.evaluate(trainer, module)
    model.load_state_dict(watcher.best)
    score = task.evaluate(model.eval(), "validation")
    stopped = "the budget's steps"
    if watcher.waited >= budget.patience:
        stopped = f"nothing better in {budget.patience} evaluations"
    elif trainer.global_step < budget.steps:
        stopped = "the budget's time"
    seconds = time.perf_counter() - started
    return Trained(model, score, trainer.global_step, seconds, tuple(watcher.history), stopped)


class _Module(lightning.LightningModule):
    def __init__(self, task: Task, model: nn.Module, budget: Budget, seed: int) -> None:
        super().__init__()
        self.task, self.model, self.budget, self.seed = task, model, budget, seed

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        # Dropout of a step is drawn from its number, so that it is the same after a restart.
        torch.manual_seed(self.seed * 1_000_003 + self.global_step)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.task.loss(self.model, batch)

    def configure_optimizers(self) -> Any:
        optimiser = torch.optim.AdamW(
            self.model.parameters(), lr=self.budget.learning_rate, weight_decay=WEIGHT_DECAY
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, self._share)
        return {
            "optimizer": optimiser,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def _share(self, step: int) -> float:
        """A straight rise over the warm-up, then half a cosine (arXiv 1608.03983) down to 0."""
        rise = min(1.0, (step + 1) / max(1, self.budget.warmup))
        return rise * 0.5 * (1 + math.cos(math.pi * min(1.0, step / self.budget.steps)))


class _Batches(IterableDataset[Any]):
    """Batches from the number of the step that the module has come to."""

    def __init__(self, task: Task, module: _Module, steps: int, seed: int) -> None:
        self.task, self.module, self.steps, self.seed = task, module, steps, seed

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.module.global_step, self.steps):
            yield self.task.batch(index, self.seed)


class _Evaluations(lightning.Callback):
    """Evaluates, keeps the best weights, ends the training, writes the checkpoint and the log."""

    def __init__(
        self,
        task: Task,
        budget: Budget,
        what: dict[str, Any],
        folder: Path | None,
        progress: Progress,
    ) -> None:
        self.task, self.budget, self.what = task, budget, what
        self.folder, self.progress = folder, progress
        self.best: dict[str, Tensor] = {}
        self.best_value = math.nan
        self.waited = 0
        self.evaluated = 0
        self.history: list[tuple[int, float, float]] = []
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "best": self.best,
            "best_value": self.best_value,
            "waited": self.waited,
            "history": [list(row) for row in self.history],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict["what"] != self.what:
            raise BadInput(
                f"the checkpoint in {self.folder} belongs to another training "
                f"({state_dict['what']}), not to {self.what}; give another --out"
            )
        self.best, self.best_value = state_dict["best"], state_dict["best_value"]
        self.waited = state_dict["waited"]
        self.history = [(int(a), float(b), float(c)) for a, b, c in state_dict["history"]]
        self.evaluated = self.history[-1][0] if self.history else 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        # It had already ended when it was stopped.
        if self.waited >= self.budget.patience:
            trainer.should_stop = True

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        loss = float(outputs["loss"])
        self.losses.append(loss)
        if step % self.budget.evaluate_every == 0 or step == self.budget.steps:
            self.evaluate(trainer, pl_module)
            if self.waited >= self.budget.patience:
                trainer.should_stop = True
        seen = f", {self.task.metric} {self.history[-1][2]:.4g}" if self.history else ""
        self.progress(step, self.budget.steps, f"{self.task.name}: loss {loss:.3f}{seen}")

    def evaluate(self, trainer: Any, module: Any) -> None:
        model = module.model
        value = self.task.evaluate(model, "validation").value
        model.train()
        sign = 1 if self.task.better == "higher" else -1
        if not self.best or sign * value > sign * self.best_value:
            self.best_value, self.waited = value, 0
            self.best = {name: part.detach().clone() for name, part in model.state_dict().items()}
        else:
            self.waited += 1
        loss = sum(self.losses) / len(self.losses) if self.losses else math.nan
        self.losses = []
        self.evaluated = trainer.global_step
        self.history.append((trainer.global_step, loss, value))
        if self.folder is not None:
            self._keep(trainer, self.folder)

    def _keep(self, trainer: Any, folder: Path) -> None:
        last = folder / CHECKPOINT
        last.parent.mkdir(parents=True, exist_ok=True)
        partial = last.with_suffix(".partial")
        trainer.save_checkpoint(partial)
        os.replace(partial, last)
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        rows.writerow(("step", "loss", self.task.metric))
        rows.writerows(self.history)
        log = folder / "log.csv"
        log.with_suffix(".partial").write_text(text.getvalue(), encoding="utf-8")
        os.replace(log.with_suffix(".partial"), log)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Lightning's greetings, and its advice about loaders and devices."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"lightning\.")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
