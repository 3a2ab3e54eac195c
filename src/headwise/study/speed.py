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
# Repeated for so long in a round: one call of a small model is too short for the clock.
LEAST = 0.02  # seconds
Say = Callable[[int, int, str], None]


def measure(
    task: Task, plan: Plan, say: Say = lambda done, total, line: None
) -> dict[int, dict[str, float | None]]:
    """By design: "train" (batches a second: forward, backward), "latency" (seconds of one example),
    "decode" (seconds of one more token on a warm cache; None for a task that does not generate),
    "kv_bytes" (of one token, float32) and "unsteady" (the largest distance between the quartiles of
    a time's rounds, over its median).

    Designs take turns, round by round, so that what else the machine does falls on all alike; the
    median over rounds is given.
    """
    batch = task.batch(0, 0)
    inputs = task.example()["inputs"]
    models = [task.build(design, 0) for design in plan.designs]
    steps = [_step(task, model) for model in models]
    times: list[dict[str, list[float]]] = [
        {"train": [], "latency": [], "decode": []} for _ in models
    ]
    for round_ in range(ROUNDS + 1):  # the first is warm-up
        say(round_, ROUNDS + 1, "measuring speed")
        for model, step, mine in zip(models, steps, times, strict=True):
            taken = {"train": _seconds(partial(_train, task, model, batch))}
            model.eval()
            with torch.inference_mode():
                taken["latency"] = _seconds(partial(model, **inputs))
                if step is not None:
                    taken["decode"] = _seconds(step)
            for name, seconds in taken.items():
                if round_:
                    mine[name].append(seconds)
    return {
        number: {
            "train": 1 / statistics.median(mine["train"]),
            "latency": statistics.median(mine["latency"]),
            "decode": statistics.median(mine["decode"]) if mine["decode"] else None,
            "kv_bytes": float(design.kv_bytes_per_token(4)),
            "unsteady": max(_spread(rounds) for rounds in mine.values() if rounds),
        }
        for number, (design, mine) in enumerate(zip(plan.designs, times, strict=True))
    }


def _step(task: Task, model: nn.Module) -> Callable[[], Any] | None:
    """One more token on a cache that holds the example already."""
    if not task.generates:
        return None
    model.eval()
    with torch.inference_mode():
        return task.decode_step(model)


def _seconds(run: Callable[[], Any]) -> float:
    """Of one call, the mean of as many as fill `LEAST`."""
    start, calls = time.perf_counter(), 0
    while True:
        run()
        calls += 1
        taken = time.perf_counter() - start
        if taken >= LEAST:
            return taken / calls


def _spread(rounds: list[float]) -> float:
    low, middle, high = statistics.quantiles(rounds, n=4)
    return (high - low) / middle


def _train(task: Task, model: nn.Module, batch: Any) -> None:
    model.train()
    model.zero_grad(set_to_none=True)
    task.loss(model, batch).backward()
