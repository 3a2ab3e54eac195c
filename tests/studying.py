"""Tasks with a planted truth, for the tests of the study, and a worker that other processes run."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import headwise.study.trials as trials
from headwise import MultiHeadAttention
from headwise.study import Plan, run
from headwise.tasks import Budget, Design, RunInput, RunOutput, Score, Task

KEYS, VALUES, SLOTS = 12, 6, 8


class LookUp(nn.Module):
    """One attention, no feedforward: a query names keys, the answer is their values, in order."""

    def __init__(self, design: Design, asked: int) -> None:
        super().__init__()
        width = design.embed_dim
        self.key = nn.Embedding(KEYS, width)
        self.value = nn.Embedding(VALUES, width)
        self.ask = nn.ModuleList(nn.Embedding(KEYS, width) for _ in range(asked))
        self.attention = MultiHeadAttention(
            width, design.num_heads, num_kv_heads=design.num_kv_heads, head_dim=design.head_dim
        )
        self.answer = nn.Linear(width, asked * VALUES)

    def forward(self, keys: Tensor, values: Tensor, asked: Tensor) -> Tensor:
        slots = self.key(keys) + self.value(values)
        query = sum(table(asked[:, n]) for n, table in enumerate(self.ask))
        found = self.attention(query[:, None], slots)[:, 0]
        return self.answer(found).unflatten(-1, (-1, VALUES))


class Planted(Task):
    """`asked` unrelated look-ups at once: as many heads are needed as there are look-ups."""

    name, title, metric, better = "planted", "Which values?", "accuracy", "higher"
    source, licence, causal, generates = "made here", "none", False, False
    asked = 2
    pause = 0.0

    def prepare(self, say: Callable[[str], None] = lambda line: None) -> None:
        self.held = [self._draw(300, 10**6 + n) for n in range(2)]

    def _draw(self, count: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        draw = np.random.default_rng(seed)
        keys = draw.random((count, KEYS)).argsort(1)[:, :SLOTS]
        values = draw.integers(VALUES, size=(count, SLOTS))
        places = draw.random((count, SLOTS)).argsort(1)[:, : self.asked]
        asked = np.take_along_axis(keys, places, 1)
        wanted = np.take_along_axis(values, places, 1)
        keys_, values_, asked_, wanted_ = map(torch.from_numpy, (keys, values, asked, wanted))
        return keys_, values_, asked_, wanted_

    def default_design(self) -> Design:
        return Design(embed_dim=32, num_heads=2, head_dim=12, layers=1, dropout=0.0)

    def budget(self, name: str = "quick") -> Budget:
        return Budget(150, 64, 2e-2, 20, 150, 10)

    def build(self, design: Design, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return LookUp(design, self.asked)

    def batch(self, index: int, seed: int) -> Any:
        if self.pause:
            time.sleep(self.pause)
        return self._draw(64, seed * 10**5 + index)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        *inputs, wanted = batch
        return nn.functional.cross_entropy(model(*inputs).flatten(0, 1), wanted.flatten())

    def evaluate(self, model: nn.Module, split: str) -> Score:
        *inputs, wanted = self.held[split == "test"]
        model.eval()
        with torch.inference_mode():
            right = (model(*inputs).argmax(-1) == wanted).double().mean(1).numpy()
        return Score(float(right.mean()), right)

    def baselines(self) -> dict[str, Callable[[], Score]]:
        return {"chance": lambda: Score(1 / VALUES, np.full(300, 1 / VALUES))}

    def example(self) -> dict[str, Any]:
        keys, values, asked, _ = (part[:1] for part in self.held[1])
        inputs = {"keys": keys, "values": values, "asked": asked}
        return {"inputs": inputs, "tokens": [str(n) for n in range(SLOTS)]}

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None: ...

    def run(self, model: nn.Module, args: RunInput) -> RunOutput:
        return RunOutput(())


class Single(Planted):
    """One look-up: one head does it, and two do it no better."""

    asked = 1


class Generating(Planted):
    """It generates: a step on a cache takes four times as long with two heads as with one."""

    generates = True

    def decode_step(self, model: nn.Module) -> Callable[[], Any]:
        assert not model.training and torch.is_inference_mode_enabled()
        self.begun = getattr(self, "begun", 0) + 1
        heads = model.attention.num_heads
        model.steps = 0

        def step() -> None:
            assert not model.training and torch.is_inference_mode_enabled()
            model.steps += 1
            time.sleep(0.005 * heads**2)

        return step


def planted(kind: type[Planted] = Planted, pause: float = 0.0) -> Planted:
    task = kind()
    task.pause = pause
    task.prepare()
    return task


def plan_of(task: Task, heads: tuple[int, ...] = (1, 2), seeds: int = 3, steps: int = 0) -> Plan:
    """Designs of one head_dim, and a budget of so many steps (0: the task's own)."""
    budget = task.budget()
    if steps:
        budget = Budget(steps, 64, 1e-2, 5, steps, 10)
    designs = tuple(Design(32, n, head_dim=12, layers=1, dropout=0.0) for n in heads)
    return Plan("planted", designs, tuple(range(seeds)), budget)


# --- workers in processes of their own ------------------------------------------------------------


@contextmanager
def noted(log: Path, what: str) -> Iterator[None]:
    """Lines "begin what pid" and "end what pid"."""

    def note(word: str) -> None:
        with log.open("a") as file:
            file.write(f"{word} {what} {os.getpid()}\n")

    note("begin")
    yield
    note("end")


def work(storage: str, log: Path, pause: float, measuring: float) -> None:
    """Take part in a study until it is done. `pause`: seconds of a training's step; `measuring`:
    of measuring speed. What it did stands in `log`."""
    torch.set_num_threads(1)
    train, measure = trials.train, trials.measure

    def training(*given: Any, **more: Any) -> Any:
        with noted(log, "train"):
            return train(*given, **more)

    def speeds(*given: Any) -> Any:
        with noted(log, "speed"):
            time.sleep(measuring)
            return measure(*given)

    def chance() -> Score:
        with noted(log, "baseline"):
            time.sleep(0.3)
            return Score(1 / VALUES, np.full(300, 1 / VALUES))

    trials.train, trials.measure = training, speeds
    task = planted(pause=pause)
    task.baselines = lambda: {"chance": chance}  # type: ignore[method-assign]
    with noted(log, "worker"):
        run(plan_of(task, steps=20), storage, task=task, heartbeat=1, grace=3)


_server = multiprocessing.get_context("forkserver")  # torch and the rest are imported once
_server.set_forkserver_preload(["headwise.study", "optuna.storages"])


def worker(storage: str, log: Path, pause: float = 0.0, measuring: float = 0.0) -> Any:
    """A process that works, begun; `.kill()` is SIGKILL."""
    process = _server.Process(target=work, args=(storage, log, pause, measuring), daemon=True)
    process.start()
    return process
