"""The rollout row and gradient × attention against whole maps in float64."""

from __future__ import annotations

import pytest
import torch

from headwise.call import AttentionCall
from headwise.errors import BadInput
from headwise.masks import causal, keep, padding
from headwise.reference import attention_steps
from headwise.statistics.flow import gradient_attention, rollout_row


def _call(seed: int, **more: object) -> AttentionCall:
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, h, 13, 4, generator=g).double() for h in (4, 2, 2))
    return AttentionCall(query=q, key=k, value=v, **more)  # type: ignore[arg-type]


def test_rollout_row() -> None:
    real = torch.ones(2, 13, dtype=torch.bool)
    real[1, 9:] = False
    bias = torch.randn(1, 4, 13, 13).double()
    calls = [_call(0, mask=padding(real)), _call(1, bias=bias), _call(2, softcap=2.0)]
    joint = torch.eye(13).double().expand(2, 13, 13)
    for call in calls:
        mean = attention_steps(call)["weights"].mean(1)
        joint = (0.5 * torch.eye(13).double() + 0.5 * mean) @ joint
    for row in (0, 7):
        torch.testing.assert_close(rollout_row(calls, row, rows=5), joint[:, row])
    with pytest.raises(BadInput, match="row=13 is not one of the 13 tokens"):
        rollout_row(calls, 13)
    with pytest.raises(BadInput, match="encoders only"):
        rollout_row([*calls, _call(4, mask=causal())], 3)


@pytest.mark.parametrize("mask", [causal(), keep(torch.rand(13, 13) > 0.4), None])
def test_gradient_attention(mask: object) -> None:
    call, grad = _call(3, mask=mask), torch.randn(2, 4, 13, 4).double()
    weights = attention_steps(call)["weights"].detach()
    value = call.value.repeat_interleave(2, 1)
    wanted = (weights * torch.einsum("bhld,bhsd->bhls", grad, value)).clamp(min=0).sum(2)
    torch.testing.assert_close(gradient_attention(call, grad, rows=5), wanted)
    with pytest.raises(BadInput, match="wanted grad"):
        gradient_attention(call, grad[:, :2])
