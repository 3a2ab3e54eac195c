"""The short training loop of the baselines that are trained: no restarts, no stopping early."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def fit(
    build: Callable[[], nn.Module],
    loss: Callable[[nn.Module, Any], Tensor],
    batch: Callable[[int], Any],
    *,
    steps: int,
    learning_rate: float = 2e-3,
    seed: int = 0,
) -> nn.Module:
    """A model from `build`, trained for `steps` batches by AdamW with a half-cosine, in eval mode.

    Weights and dropout are drawn from `seed`; torch's own generator is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build().train()
        optimiser = torch.optim.AdamW(model.parameters(), lr=learning_rate)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimiser, lambda step: 0.5 * (1 + math.cos(math.pi * step / steps))
        )
        for index in range(steps):
            value = loss(model, batch(index))
            optimiser.zero_grad()
            value.backward()
            optimiser.step()
            schedule.step()
    return model.eval()
