"""Trace: the intermediates of the eight steps, and the table they print as."""

import pytest
import torch
from torch import Tensor

from headwise.layer import MultiHeadAttention
from headwise.masks import causal, padding
from headwise.options import AttentionOptions
from headwise.positions import ALiBi
from headwise.rotary import Rotary
from headwise.trace import STEPS, Trace


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


PLAIN = [
    "x",
    "key_context",
    "value_context",
    "query_projected",
    "key_projected",
    "value_projected",
    "query",
    "key",
    "value",
    "scores",
    "scaled",
    "masked",
    "lse",
    "weights",
    "head_outputs",
    "concatenated",
    "output",
]


def test_each_step_follows_from_the_one_before():
    layer, x = MultiHeadAttention(12, 4, num_kv_heads=2, head_dim=5), draw(2, 7, 12)
    t = layer.trace(x, mask=causal())
    assert list(t) == PLAIN and len(t) == len(PLAIN)
    assert {tensor.dtype for tensor in t.values()} == {torch.float64}
    assert not any(tensor.requires_grad for tensor in t.values())
    # 1, 2
    wanted = x.double() @ layer.q_proj.weight.double().T + layer.q_proj.bias.double()
    assert torch.allclose(t["query_projected"], wanted, rtol=1e-14, atol=1e-14)
    for head in range(4):
        columns = slice(5 * head, 5 * head + 5)
        assert torch.equal(t["query"][:, head], t["query_projected"][..., columns])
    for head in range(2):
        columns = slice(5 * head, 5 * head + 5)
        assert torch.equal(t["key"][:, head], t["key_projected"][..., columns])
        assert torch.equal(t["value"][:, head], t["value_projected"][..., columns])
    # 3 … 7
    key, value = (t[name].repeat_interleave(2, 1) for name in ("key", "value"))
    close = {"rtol": 1e-13, "atol": 1e-13}
    assert torch.allclose(t["scores"], t["query"] @ key.mT, **close)
    assert torch.allclose(t["scaled"], t["scores"] / 5**0.5, **close)
    future = torch.ones(7, 7, dtype=torch.bool).triu(1)
    assert torch.equal(t["masked"], t["scaled"].masked_fill(future, -torch.inf))
    assert torch.allclose(t["lse"], t["masked"].logsumexp(-1), **close)
    assert torch.allclose(t["weights"], t["masked"].softmax(-1), **close)
    assert torch.allclose(t["head_outputs"], t["weights"] @ value, **close)
    # 8
    assert torch.equal(t["concatenated"], torch.cat(t["head_outputs"].unbind(1), -1))
    out = layer.out_proj
    wanted = t["concatenated"] @ out.weight.double().T + out.bias.double()
    assert torch.allclose(t["output"], wanted, **close)


def test_options_add_their_own_steps():
    layer = MultiHeadAttention(
        12,
        2,
        position=ALiBi(),
        options=AttentionOptions(qk_norm=True, softcap=2.0, output_gate=True, sinks=True),
    )
    t = layer.trace(draw(1, 5, 12), mask=causal())
    added = {"query_normed", "key_normed", "capped", "biased", "gate", "gated"}
    assert set(t) == set(PLAIN) | added
    assert torch.allclose(t["capped"], 2 * torch.tanh(t["scaled"] / 2), rtol=1e-13, atol=0)
    distance = (torch.arange(5)[:, None] - torch.arange(5)).abs().double()
    slopes = torch.tensor([2.0**-4, 2.0**-8], dtype=torch.float64)[:, None, None]
    assert torch.allclose(t["biased"], t["capped"] - slopes * distance, rtol=0, atol=1e-13)
    assert torch.equal(t["gated"], t["concatenated"] * t["gate"])
    assert bool((t["weights"].sum(-1) < 1).all())
    turned = MultiHeadAttention(12, 2, position=Rotary()).trace(draw(1, 5, 12))
    assert set(turned) == set(PLAIN) | {"query_turned", "key_turned"}
    assert torch.equal(turned["key_turned"][:, :, 0], turned["key"][:, :, 0]), "position 0"


def test_a_trace_changes_nothing_and_never_drops():
    layer, x = MultiHeadAttention(8, 2, dropout=0.5), draw(2, 5, 8)
    state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    rng = torch.get_rng_state()
    one, two = layer.trace(x), layer.trace(x)
    assert torch.equal(one["output"], two["output"])
    assert torch.equal(rng, torch.get_rng_state())
    assert layer.training and layer.q_proj.weight.dtype == torch.float32
    assert all(torch.equal(state[name], value) for name, value in layer.state_dict().items())
    layer.bfloat16().trace(x.bfloat16())
    assert layer.q_proj.weight.dtype == torch.bfloat16


def test_axes_are_named():
    layer = MultiHeadAttention(12, 4, num_kv_heads=2, head_dim=5, kdim=7, vdim=7)
    t = layer.trace(draw(2, 3, 12), draw(2, 11, 7))
    assert t.axes("x") == {"batch": 2, "query sequence": 3, "features": 12}
    assert t.axes("key_context") == {"batch": 2, "key sequence": 11, "features": 7}
    assert t.axes("query") == {"batch": 2, "head": 4, "query sequence": 3, "head dim": 5}
    assert t.axes("key") == {"batch": 2, "head": 2, "key sequence": 11, "head dim": 5}
    wanted = {"batch": 2, "head": 4, "query sequence": 3, "key sequence": 11}
    assert t.axes("weights") == wanted
    steps = [entry.step for entry in t.entries]
    assert steps == sorted(steps) and set(steps) == set(STEPS)
    with pytest.raises(KeyError, match="no_such; this trace has x, key_context"):
        t["no_such"]


TABLE = """\
MultiHeadAttention(12, 4 heads, num_kv_heads=2, head_dim=5)
                                sequence  sequence
  tensor           batch  head     query       key  head dim  features  what
0 input
  x                    2               3                            12  the tokens
  key_context          2                         3                  12  x
  value_context        2                         3                  12  x
1 project to query, key, value
  query_projected      2               3                            20  q_proj(x)
  key_projected        2                         3                  10  k_proj(key_context)
  value_projected      2                         3                  10  v_proj(value_context)
2 split into heads
  query                2     4         3                   5            head h: features from h*D on
  key                  2     2                   3         5
  value                2     2                   3         5
3 dot-product scores
  scores               2     4         3         3                      query . key
4 scale
  scaled               2     4         3         3                      times 0.447214
5 mask
  masked               2     4         3         3                      -inf where hidden
6 softmax
  lse                  2     4         3                                ln of the denominator
  weights              2     4         3         3                      each row sums to 1
7 weigh the values
  head_outputs         2     4         3                   5            weights @ value
8 join the heads and project out
  concatenated         2               3                            20  heads side by side
  output               2               3                            12  out_proj(...)
"""


def test_printed_it_is_a_table():
    layer = MultiHeadAttention(12, 4, num_kv_heads=2, head_dim=5)
    real = torch.tensor([[0, 1, 1], [1, 1, 1]])
    text = str(layer.trace(draw(2, 3, 12), mask=causal() & padding(real)))
    assert text.splitlines() == TABLE.splitlines()
    assert text == repr(layer.trace(draw(2, 3, 12), mask=causal() & padding(real)))


def test_a_trace_checks_its_names_and_axes():
    with pytest.raises(ValueError, match="no such step: scors"):
        Trace("layer", {"scors": torch.zeros(1)}, {})
    with pytest.raises(ValueError, match=r"weights has shape \(2, 3\), wanted axes \(batch, head,"):
        Trace("layer", {"weights": torch.zeros(2, 3)}, {})
