"""Importance against finite differences of the loss in the size of each head's output."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

from headwise import MultiHeadAttention
from headwise.errors import BadInput
from headwise.masks import causal
from headwise.statistics.importance import Projection, head_importance
from headwise.surgery import importance


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MultiHeadAttention(12, 4, num_kv_heads=2) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, mask=causal())
        return x


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).pow(3).sum((1, 2))


def _scaled(model: Any, layer: int, heads: slice, factor: float, x: Tensor) -> Tensor:
    def scale(_m: Any, args: Any) -> Any:
        y = args[0].clone()
        y[..., heads] *= factor
        return (y,)

    hook = model.layers[layer].out_proj.register_forward_pre_hook(scale)
    with torch.no_grad():
        out = _loss(model, x)
    hook.remove()
    return out


def test_importance_equals_finite_differences() -> None:
    torch.manual_seed(0)
    model = Toy().double()
    model.layers[0].k_proj.weight.requires_grad_(False)
    flags = [p.requires_grad for p in model.parameters()]
    batches = [torch.randn(3, 5, 12).double(), torch.randn(2, 7, 12).double()]
    found = importance(model, batches, _loss)
    assert found.examples == 5 and list(found.heads) == ["self/0", "self/1"]
    assert [p.requires_grad for p in model.parameters()] == flags
    assert all(p.grad is None for p in model.parameters())
    step = 1e-5
    for layer in range(2):
        # d loss / d factor at 1 is exactly the sum over i of <O_i, dL/dO_i>, one an example.
        def slope(heads: slice, layer: int = layer) -> Tensor:
            parts = [
                _scaled(model, layer, heads, 1 + step, x)
                - _scaled(model, layer, heads, 1 - step, x)
                for x in batches
            ]
            return (torch.cat(parts) / (2 * step)).abs().mean()

        heads = torch.stack([slope(slice(3 * h, 3 * h + 3)) for h in range(4)])
        groups = torch.stack([slope(slice(6 * g, 6 * g + 6)) for g in range(2)])
        name = f"self/{layer}"
        torch.testing.assert_close(found.raw_heads[name], heads, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(found.raw_groups[name], groups, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(found.heads[name], heads / heads.norm(), rtol=1e-6, atol=1e-8)
        assert not torch.allclose(found.raw_groups[name], heads.view(2, 2).sum(1))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_same_through_any_backend(implementation: str) -> None:
    torch.manual_seed(0)
    config = tf.GPT2Config(vocab_size=23, n_embd=24, n_layer=2, n_head=4, n_positions=16)
    model = tf.GPT2LMHeadModel(config).double().eval()
    ids = torch.arange(12).view(2, 6)

    def loss(m: Any, x: Tensor) -> Tensor:
        return m(input_ids=x).logits.log_softmax(-1)[:, :, 1].sum(1)

    model.set_attn_implementation("eager")
    wanted = importance(model, [ids], loss)
    model.set_attn_implementation(implementation)
    got = importance(model, [ids[:1], ids[1:]], loss)
    for name, value in wanted.raw_heads.items():
        assert value.min() > 0
        torch.testing.assert_close(got.raw_heads[name], value, rtol=1e-9, atol=1e-12)


def test_bad_losses_are_named() -> None:
    model, x = Toy(), torch.randn(2, 3, 12)
    with pytest.raises(BadInput, match="no examples"):
        importance(model, [], _loss)
    with pytest.raises(BadInput, match="finite numbers, one an example"):
        importance(model, [x], lambda m, b: m(b)[:, :, 0])
    with pytest.raises(BadInput, match="got 2 examples, the loss has 1"):
        importance(model, [x], lambda m, b: m(b).sum())
    with pytest.raises(BadInput, match="got no gradient"):
        spare = {"spare": Projection(nn.Linear(2, 2), 1, 1)}
        head_importance(model, spare, [x.requires_grad_()], _loss)
