"""Speed and memory of each design, apart from training and with nothing else running."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from headwise.study.plan import Plan
from headwise.tasks import Task

ROUNDS = 7
Say = Callable[[int, int, str], None]


def measure(
    task: Task, plan: Plan, say: Say = lambda done, total, line: None
) -> dict[int, dict[str, float | None]]:
    """By design: "train" (batches a second: forward, backward), "latency" (seconds of one example),
    "decode" (seconds of one more token on a cache; None for a task that does not generate) and
    "kv_bytes" (of one token, float32).

    Designs take turns, round by round, so that what else the machine does falls on all alike; the
    median over rounds is given.
    """
    batch = task.batch(0, 0)
    inputs = task.example()["inputs"]
    models = [task.build(design, 0) for design in plan.designs]
    step: Any = getattr(task, "decode_step", None)
    times: dict[str, list[list[float]]] = {
        name: [[] for _ in models] for name in ("train", "latency", "decode")
    }
    for round_ in range(ROUNDS + 1):  # the first is warm-up
        say(round_, ROUNDS + 1, "measuring speed")
        for number, model in enumerate(models):
            train = _seconds(partial(_train, task, model, batch))
            model.eval()
            with torch.inference_mode():
                latency = _seconds(partial(model, **inputs))
                decode = None
                if task.generates and step is not None:
                    decode = _seconds(partial(step, model))
            if round_:
                times["train"][number].append(train)
                times["latency"][number].append(latency)
                if decode is not None:
                    times["decode"][number].append(decode)
    found: dict[int, dict[str, float | None]] = {}
    for number, design in enumerate(plan.designs):
        decodes = times["decode"][number]
        found[number] = {
            "train": 1 / statistics.median(times["train"][number]),
            "latency": statistics.median(times["latency"][number]),
            "decode": statistics.median(decodes) if decodes else None,
            "kv_bytes": float(design.kv_bytes_per_token(4)),
        }
    return found


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _train(task: Task, model: nn.Module, batch: Any) -> None:
    model.train()
    model.zero_grad(set_to_none=True)
    task.loss(model, batch).backward()
