"""Tasks with a planted truth, for the tests of the study, and a worker that other processes run.

python tests/studying.py STORAGE NAME SECONDS_PER_STEP
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

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
        keys = np.stack([draw.permutation(KEYS)[:SLOTS] for _ in range(count)])
        values = draw.integers(VALUES, size=(count, SLOTS))
        places = np.stack([draw.permutation(SLOTS)[: self.asked] for _ in range(count)])
        asked = np.take_along_axis(keys, places, 1)
        wanted = np.take_along_axis(values, places, 1)
        keys_, values_, asked_, wanted_ = map(torch.from_numpy, (keys, values, asked, wanted))
        return keys_, values_, asked_, wanted_

    def default_design(self) -> Design:
        return Design(embed_dim=32, num_heads=2, head_dim=12, layers=1, dropout=0.0)

    def budget(self, name: str = "quick") -> Budget:
        return Budget(350, 64, 1e-2, 20, 350, 10)

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


if __name__ == "__main__":
    torch.set_num_threads(1)
    task = planted(pause=float(sys.argv[2]))
    found = run(plan_of(task, steps=20), sys.argv[1], task=task, heartbeat=1, grace=3)
    print(len(found.outcomes))
