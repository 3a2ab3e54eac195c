"""`headwise.accelerated()`: the same answers, on the native kernel, and counts that tell."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

import headwise
from headwise.attention import observers

ORIGINAL = functional.scaled_dot_product_attention


def qkv(heads: int = 4, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [
        torch.randn(2, n, length, 8, dtype=dtype)
        for n, length in ((4, 9), (heads, 11), (heads, 11))
    ]


def some() -> torch.Tensor:
    seen = torch.rand(2, 1, 9, 11) < 0.5
    seen[..., 0] = True
    return seen


SERVED: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "bool mask": {"attn_mask": some()},
    "bool mask of two axes": {"attn_mask": some()[0, 0]},
    "additive mask": {"attn_mask": torch.randn(4, 9, 11)},
    "scale": {"scale": 0.3},
}


@pytest.mark.parametrize("given", SERVED.values(), ids=SERVED)
def test_calls_it_serves_have_torchs_answers(given: dict[str, Any]) -> None:
    tensors = qkv()
    want = ORIGINAL(*tensors, **given)
    calls: list[object] = []
    observers.append(lambda call, output: calls.append(call))
    try:
        with headwise.accelerated() as fast:
            got = functional.scaled_dot_product_attention(*tensors, **given)
    finally:
        observers.pop()
    assert (fast.served, sum(fast.left.values()), len(calls)) == (1, 0, 1)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


LEFT: dict[str, tuple[dict[str, Any], str]] = {
    "dropout": ({"dropout_p": 0.5}, "dropout"),
    "empty row": ({"attn_mask": torch.zeros(9, 11, dtype=torch.bool)}, "a row that sees nothing"),
}


@pytest.mark.parametrize(("given", "reason"), LEFT.values(), ids=LEFT)
def test_calls_it_leaves_are_torchs_own(given: dict[str, Any], reason: str) -> None:
    tensors = qkv()
    torch.manual_seed(3)
    want = ORIGINAL(*tensors, **given)
    torch.manual_seed(3)
    with headwise.accelerated() as fast:
        got = functional.scaled_dot_product_attention(*tensors, **given)
    assert fast.served == 0
    assert torch.equal(got.nan_to_num(7), want.nan_to_num(7))
    assert fast.report().startswith("native kernel: 0\ntorch: 1\n  1 × ")
    assert reason in fast.report()


def test_torchs_errors_stay_torchs() -> None:
    query, key, value = qkv(heads=2)
    with headwise.accelerated() as fast, pytest.raises(RuntimeError, match="size of tensor"):
        functional.scaled_dot_product_attention(query, key, value)
    assert sum(fast.left.values()) == 1
    grouped = functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    with fast:
        again = functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    torch.testing.assert_close(again, grouped, rtol=1e-5, atol=1e-5)
    assert fast.served == 1


def test_the_name_is_given_back_also_after_an_error_and_cannot_be_taken_twice() -> None:
    with pytest.raises(ZeroDivisionError), headwise.accelerated():
        raise ZeroDivisionError
    assert functional.scaled_dot_product_attention is ORIGINAL
    with headwise.accelerated() as fast, pytest.raises(RuntimeError, match="open already"):
        fast.__enter__()
    assert functional.scaled_dot_product_attention is ORIGINAL


def test_gradients_flow() -> None:
    found = []
    for open_it in (False, True):
        torch.manual_seed(0)
        leaves = [t.requires_grad_() for t in qkv()]
        with headwise.accelerated() if open_it else torch.enable_grad():
            out = functional.scaled_dot_product_attention(*leaves, is_causal=True)
        found.append(torch.autograd.grad(out.square().sum(), leaves))
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


def test_a_layer_of_torchs() -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0).train()
    x = torch.randn(2, 5, 16)
    want = layer(x)
    with headwise.accelerated() as fast:
        got = layer(x)
    assert fast.served == 1, fast.report()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
