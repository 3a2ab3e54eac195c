"""The float64 definition as a backend: for checking, and the truth that others are held to."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.backends import exact
from headwise.call import AttentionCall


class Reference:
    name = "reference"

    def refuse(self, call: AttentionCall) -> str | None:
        return None

    def forward(
        self, call: AttentionCall, seed: int | None, need_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        output, lse = exact.forward(call.to(torch.float64), seed)
        return output.to(call.query.dtype), lse.to(call.accumulate_dtype)

    def backward(
        self,
        call: AttentionCall,
        seed: int | None,
        output: Tensor,
        lse: Tensor,
        grad_output: Tensor,
        grad_lse: Tensor | None,
        need_bias: bool,
    ) -> dict[str, Tensor]:
        wide = None if grad_lse is None else grad_lse.double()
        return exact.backward(call.to(torch.float64), seed, grad_output.double(), wide)
