"""Random shapes, masks, dtypes and features: every backend against the float64 definition."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import headwise.backends as backends
from headwise.attention import attention
from headwise.call import AttentionCall
from headwise.reference import attention_steps
from test_masks import masks

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@st.composite
def calls(draw: st.DrawFn) -> AttentionCall:
    batch, kv_heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    heads = kv_heads * draw(st.integers(1, 3))
    queries, keys = draw(st.integers(1, 23)), draw(st.integers(1, 23))
    dim, value_dim = draw(st.integers(1, 17)), draw(st.integers(1, 17))
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    # Sizes of 8 make scores up to about 100: exponents where shortcuts show.
    size = draw(st.sampled_from([0.0, 1.0, 8.0]))

    def tensor(*shape: int) -> torch.Tensor:
        return (size * torch.randn(shape, generator=generator)).to(dtype)

    mask, _ = draw(masks((batch, heads, queries, keys)))
    shape = [draw(st.sampled_from([1, full])) for full in (batch, heads, queries, keys)]
    return AttentionCall(
        tensor(batch, heads, queries, dim),
        tensor(batch, kv_heads, keys, dim),
        tensor(batch, kv_heads, keys, value_dim),
        draw(st.sampled_from([None, mask])),
        # shifted, so that it is never a grid of zeros and ones
        bias=draw(st.sampled_from([None, tensor(*shape) + 0.25])),
        scale=draw(st.sampled_from([None, 0.125, 1.0])),
        softcap=draw(st.sampled_from([None, None, 5.0])),
        sinks=draw(st.sampled_from([None, tensor(heads)])),
    )


def score_size(call: AttentionCall) -> float:
    """The largest magnitude that a score passes through: rounding is relative to it."""
    dots = call.query.double().abs().max() * call.key.double().abs().max() * call.head_dim
    size = float(dots) * call.scale_value
    if call.bias is not None:
        size += float(call.bias.double().abs().max())
    if call.sinks is not None:
        size += float(call.sinks.double().abs().max())
    return size


@pytest.mark.parametrize("backend", [backend.name for backend in backends.BACKENDS])
@settings(max_examples=250, deadline=None)
@given(call=calls())
def test_every_backend_agrees_with_the_definition(backend, call):
    steps = attention_steps(call.to(torch.float64))
    out, lse = attention(
        call.query,
        call.key,
        call.value,
        call.mask,
        bias=call.bias,
        scale=call.scale,
        softcap=call.softcap,
        sinks=call.sinks,
        return_lse=True,
        backend=backend,
    )
    wide = min(torch.finfo(call.query.dtype).eps, torch.finfo(torch.float32).eps)
    eps = torch.finfo(call.query.dtype).eps
    # A score is off by about √D·eps of its size; torch adds a bias in the inputs' own precision.
    off = wide * (2 + math.sqrt(call.head_dim)) * (1 + score_size(call)) * 4
    if call.bias is not None and eps > wide:
        off += eps * (1 + float(call.bias.abs().max()))
    if eps > wide:
        off += 1e-4  # torch's exponential for half types
    size = 1 + float(call.value.double().abs().max())
    assert out.dtype == call.query.dtype
    # A weight changes by a factor e^off, so an output by its size times that.
    assert torch.allclose(out.double(), steps["output"], rtol=0, atol=size * (3 * off + 2 * eps))
    finite = steps["lse"] != -math.inf
    assert torch.equal(finite, lse != -math.inf)
    assert torch.allclose(lse.double()[finite], steps["lse"][finite], rtol=wide * 8, atol=off)


@settings(max_examples=60, deadline=None)
@given(call=calls())
def test_gradients_of_sdpa_agree_with_the_definition(call):
    call = call.to(torch.float64)
    grads = []
    for backend in ("sdpa", "reference"):
        names = ["query", "key", "value", "bias", "sinks"]
        leaves = {n: getattr(call, n) for n in names if getattr(call, n) is not None}
        leaves = {n: t.detach().clone().requires_grad_() for n, t in leaves.items()}
        out = attention(
            **leaves,
            mask=call.mask,
            scale=call.scale,
            softcap=call.softcap,
            backend=backend,
        )
        pull = torch.cos(torch.arange(out.numel(), dtype=out.dtype)).view(out.shape)
        grads.append(torch.autograd.grad(out, list(leaves.values()), pull))
    size = 1 + max(float(t.abs().max()) for t in (call.query, call.key, call.value))
    limit = 1e-13 * size**3 * call.head_dim * (1 + score_size(call)) * call.query_length
    for one, two in zip(*grads, strict=True):
        assert torch.allclose(one, two, rtol=0, atol=limit)
