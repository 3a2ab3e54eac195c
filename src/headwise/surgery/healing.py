"""A short fine-tune that lets the remaining heads take over what the removed ones did."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from headwise.errors import BadInput


def heal(
    model: nn.Module,
    windows: Sequence[Tensor],
    steps: int,
    *,
    learning_rate: float = 5e-5,
    copy_first: bool = False,
) -> nn.Module:
    """`steps` of AdamW on next-token loss, one window (1, N) of ids a step, in order; gradients
    clipped to norm 1. Dropout is off, so the run is the same every time. Changes the model, or a
    copy of it with copy_first.

    Raises:
        BadInput: no windows, or a loss that stops being finite.
    """
    from headwise.surgery.what_if import token_losses

    if not windows:
        raise BadInput("heal: no windows of text to train on")
    model = copy.deepcopy(model) if copy_first else model
    model.eval()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.0)
    for step in range(steps):
        with torch.enable_grad():
            loss = token_losses(model, windows[step % len(windows)]).mean()
            if not bool(torch.isfinite(loss)):
                raise BadInput(f"heal: the loss is {float(loss)} at step {step}; lower the rate")
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
    optimiser.zero_grad(set_to_none=True)
    return model
