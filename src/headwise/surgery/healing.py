"""A short fine-tune that lets the remaining heads take over what the removed ones did."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from headwise.errors import BadInput
from headwise.surgery.trial import Loss, token_losses


def heal(
    model: nn.Module,
    batches: Sequence[Any],
    steps: int,
    *,
    loss: Loss = token_losses,
    learning_rate: float = 5e-5,
    copy_first: bool = False,
) -> nn.Module:
    """`steps` of AdamW on the loss, next-token loss if no other is given, one batch a step (ids
    (B, N) for that loss), in order; gradients clipped to norm 1. Dropout is off, so the run is the
    same every time. Changes the model, or a copy of it with copy_first.

    Raises:
        BadInput: no batches, or a loss that stops being finite.
    """
    if not batches:
        raise BadInput("heal: nothing to train on")
    model = copy.deepcopy(model) if copy_first else model
    model.eval()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.0)
    for step in range(steps):
        with torch.enable_grad():
            lost = loss(model, batches[step % len(batches)]).mean()
            if not bool(torch.isfinite(lost)):
                raise BadInput(f"heal: the loss is {float(lost)} at step {step}; lower the rate")
            optimiser.zero_grad(set_to_none=True)
            lost.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
    optimiser.zero_grad(set_to_none=True)
    return model
