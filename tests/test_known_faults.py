"""Faults that people met in real attention code, each with the right value worked out by hand.

With query = key = 0 the weights are uniform, so an output is the mean of the visible values.
"""

import math

import pytest
import torch
from torch import Tensor

import headwise.backends as backends
from headwise.attention import attention
from headwise.call import AttentionCall
from headwise.masks import causal, documents, everything, hide, keep, window
from headwise.reference import attention_steps, split_heads

INF = math.inf


@pytest.fixture(params=[backend.name for backend in backends.BACKENDS])
def mean(request):
    """The outputs for given values, query = key = 0, one head of dimension 1."""

    def run(values, mask=None, queries=None, **options) -> list[float]:
        keys = len(values)
        q = torch.zeros(1, 1, queries if queries is not None else keys, 1)
        v = torch.tensor(values, dtype=torch.float32).view(1, 1, keys, 1)
        k = torch.zeros(1, 1, keys, 1)
        out = attention(q, k, v, mask, backend=request.param, **options)
        return [round(x, 6) for x in out.flatten().tolist()]

    run.backend = request.param
    return run


def weights(scores: list, **options) -> Tensor:
    """The weights of given scores: keys are the unit vectors, the scale is 1."""
    table = torch.tensor(scores, dtype=torch.float64)[None, None]
    eye = torch.eye(table.shape[-1], dtype=torch.float64)[None, None]
    call = AttentionCall(table, eye, eye, scale=1.0, **options)
    return attention_steps(call)["weights"][0, 0]


def test_mask_polarity(mean):
    """A mask meant as “True hides”, read as “True keeps”, shows only the future."""
    future = torch.ones(3, 3).triu(1).bool()
    assert mean([1, 2, 4], hide(future)) == [1, 1.5, 2.333333]
    assert mean([1, 2, 4], keep(future)) == [3, 4, 0]
    with pytest.raises(TypeError, match=r"keep\(mask\) if True means visible, hide\(mask\)"):
        mean([1, 2, 4], future)


def test_fully_masked_row(mean):
    assert mean([1, 3], keep(torch.tensor([[True, False], [False, False]]))) == [1, 0]


def test_fully_masked_row_backward(mean):
    """A query that sees nothing, outside the loss, must not spoil any gradient."""
    x = torch.randn(1, 1, 3, 2, requires_grad=True)
    marks = torch.tensor([[0, 1, 1], [0, 0, 1], [1, 0, 0]]).bool()
    padded = torch.tensor([[False, True, True]])
    out = attention(x, x, x, hide(marks | padded), backend=mean.backend)
    assert (out[:, :, 2] == 0).all()
    out[:, :, 0].sum().backward()
    assert x.grad.isfinite().all()
    assert attention_steps(AttentionCall(x, x, x, hide(marks | padded)))["weights"].isfinite().all()


def test_causal_with_a_cache(mean):
    """One new query against cached keys sees them all, not key 0 alone."""
    assert mean([1, 2, 3, 4], causal(), queries=1) == [2.5]
    assert mean([1, 2, 3, 4, 5], causal(), queries=2) == [2.5, 3]
    assert mean([1, 3], causal(), queries=5) == [0, 0, 0, 1, 2]
    assert mean([1, 2, 3, 4, 5], causal(align="start"), queries=2) == [1, 1.5]


def test_packed_documents_do_not_leak(mean):
    packed = causal() & documents(torch.tensor([0, 0, 1, 1]))
    assert mean([1, 3, 10, 20], packed) == [1, 2, 10, 15]
    assert mean([77, -5, 10, 20], packed)[2:] == [10, 15]


def test_window_counts_are_named(mean):
    assert mean([1, 2, 4, 8], window(2)) == [1, 1.5, 3, 6]
    assert mean([1, 2, 4, 8], window(left=1, right=0)) == [1, 1.5, 3, 6]
    assert mean([1, 2, 4, 8], window(left=2, right=0)) == [1, 1.5, 2.333333, 4.666667]


def test_asking_for_weights_changes_no_mask(mean):
    q = k = torch.zeros(1, 1, 3, 1)
    v = torch.tensor([1.0, 2.0, 4.0]).view(1, 1, 3, 1)
    steps = attention_steps(AttentionCall(q, k, v, causal()))
    assert torch.equal(steps["weights"].tril(), steps["weights"])
    assert mean([1, 2, 4], causal()) == [1, 1.5, 2.333333]
    assert torch.allclose(steps["output"].flatten(), torch.tensor([1, 1.5, 7 / 3]))


def test_one_head_fully_hidden(mean):
    x = torch.randn(1, 3, 5, 1)
    marks = torch.zeros(1, 3, 5, 5, dtype=torch.bool)
    marks[:, 2] = True
    out = attention(x, x, x, hide(marks), backend=mean.backend)
    steps = attention_steps(AttentionCall(x, x, x, hide(marks)))
    assert torch.allclose(out, steps["output"], atol=1e-6)
    assert (steps["weights"][:, 2] == 0).all() and (out[:, 2] == 0).all()


def test_float_mask_of_zeros_and_ones_is_not_a_mask(mean):
    lower = torch.ones(3, 3).tril()
    with pytest.raises(TypeError, match=r"a 0/1 mask is keep\(mask > 0\)"):
        mean([1, 2, 4], keep(lower))
    with pytest.warns(UserWarning, match="hides nothing"):
        assert mean([1, 2, 4], bias=lower) == [1.847766, 1.888406, 2.333333]
    assert mean([1, 2, 4], keep(lower > 0)) == [1, 1.5, 2.333333]


def test_cross_attention_is_not_causal_and_two_masks_meet(mean):
    assert mean([1, 2, 4]) == [2.333333] * 3
    both = causal() & keep(torch.ones(3, 3).bool())
    assert mean([1, 2, 4], both) == [1, 1.5, 2.333333]
    assert mean([1, 2, 4], causal(), bias=torch.zeros(3, 3)) == [1, 1.5, 2.333333]


def test_mask_dtype(mean):
    q = torch.zeros(1, 1, 2, 8, dtype=torch.bfloat16)
    for dtype in (torch.int64, torch.uint8):
        with pytest.raises(TypeError, match="floating point; got torch"):
            attention(q, q, q, bias=torch.ones(2, 2, dtype=dtype), backend=mean.backend)
    with pytest.raises(ValueError, match=r"query is torch.bfloat16 but bias is torch.float32"):
        attention(q, q, q, bias=torch.zeros(2, 2), backend=mean.backend)


def test_scale_is_one_over_root_head_dim_once(mean):
    """Not √embed_dim, not twice, not after the softmax."""
    q = torch.tensor([[[[2.0, 0, 0, 0]]]])
    k = torch.tensor([[[[2.0, 0, 0, 0], [0, 0, 0, 0]]]])
    v = torch.eye(2)[None, None]
    out = attention(q, k, v, backend=mean.backend).flatten()
    assert torch.allclose(out, torch.tensor([0.880797, 0.119203]), atol=1e-6)
    assert out.sum().item() == pytest.approx(1)


def test_no_scale_is_not_scale_zero(mean):
    q = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]])[None, None]
    k = torch.tensor([[0.7, 0.8], [0.9, 1.0], [1.1, 1.2]])[None, None]
    v = torch.tensor([[1.0, 2], [3, 4], [5, 6]])[None, None]
    out = attention(q, k, v, causal(), backend=mean.backend).flatten()
    wanted = torch.tensor([1, 2, 2.049457, 3.049457, 3.206586, 4.206586])
    assert torch.allclose(out, wanted, atol=1e-6)
    one = attention(q, k, v, causal(), scale=1.0, backend=mean.backend)
    assert not torch.allclose(one.flatten(), wanted, atol=1e-3)
    with pytest.raises(ValueError, match=r"above 0, got 0.0"):
        attention(q, k, v, scale=0.0, backend=mean.backend)


def test_softmax_runs_over_keys():
    rows = weights([[0, 1], [2, 0]])
    wanted = torch.tensor([[0.268941, 0.731059], [0.880797, 0.119203]], dtype=torch.float64)
    assert torch.allclose(rows, wanted, atol=1e-6)


def test_sink_joins_the_denominator_once(mean):
    assert mean([3, 6], sinks=torch.zeros(1), queries=1) == [3]
    near = weights([[10.0, 10.0]], sinks=torch.zeros(2, dtype=torch.float64)[:1])
    assert torch.allclose(near, torch.tensor(0.499989, dtype=torch.float64), atol=1e-6)


def test_grouped_heads_repeat_and_do_not_tile(mean):
    q = torch.zeros(1, 4, 1, 1)
    v = torch.tensor([10.0, 20.0]).view(1, 2, 1, 1)
    out = attention(q, torch.zeros(1, 2, 1, 1), v, backend=mean.backend)
    assert out.flatten().tolist() == [10, 10, 20, 20]


def test_grouped_heads_with_a_mask_for_each_sample(mean):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 5, 3, generator=generator)
    k, v = (torch.randn(2, 2, 5, 3, generator=generator) for _ in range(2))
    marks = keep(torch.rand(2, 1, 5, 5, generator=generator) > 0.3)
    out = attention(q, k, v, marks, backend=mean.backend)
    wide = [t.repeat_interleave(2, 1) for t in (k, v)]
    assert torch.allclose(out, attention(q, *wide, marks, backend=mean.backend), atol=1e-6)


def test_samples_do_not_touch_each_other(mean):
    """(B, L, E) handed to a length-first function mixes samples; only batches show it."""
    x = split_heads(torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)), 2)
    y = x.clone()
    y[1] = torch.randn(x[1].shape, generator=torch.Generator().manual_seed(1))
    one, two = (attention(t, t, t, backend=mean.backend)[0] for t in (x, y))
    assert torch.equal(one, two)


def test_batch_and_padding_leave_real_tokens_alone(mean):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(8, 4, 37, 64, generator=generator) for _ in range(3))
    together = attention(q, k, v, backend=mean.backend)
    for item in range(8):
        one = slice(item, item + 1)
        alone = attention(q[one], k[one], v[one], backend=mean.backend)
        assert torch.allclose(together[one], alone, rtol=0, atol=1e-6)
    q, k, v = (torch.randn(1, 2, 5, 16, generator=generator) for _ in range(3))
    pad = [torch.nn.functional.pad(t, (0, 0, 0, 7), value=3.0) for t in (q, k, v)]
    marks = keep((torch.arange(12) < 5)[None].expand(12, 12))
    padded = attention(*pad, marks, backend=mean.backend)[:, :, :5]
    assert torch.allclose(padded, attention(q, k, v, backend=mean.backend), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_step_by_step_equals_one_pass(mean, dtype):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 9, 16, generator=generator).to(dtype) for _ in range(3))
    full = attention(q, k, v, causal(), backend=mean.backend)
    steps = [
        attention(
            q[:, :, i : i + 1], k[:, :, : i + 1], v[:, :, : i + 1], causal(), backend=mean.backend
        )
        for i in range(9)
    ]
    tolerance = 2 * torch.finfo(dtype).eps  # a few units in the last place
    assert torch.allclose(torch.cat(steps, 2), full, rtol=tolerance, atol=tolerance)
    # the planted fault, newest key dropped, is far outside
    short = attention(q[:, :, 8:], k[:, :, :8], v[:, :, :8], causal(), backend=mean.backend)
    assert (short - full[:, :, 8:]).abs().max() > 10 * tolerance


def test_weights_come_for_each_head():
    """The average of opposite heads hides both."""
    q = torch.tensor([[[[1.0]], [[-1.0]]]])
    k = torch.tensor([[[[0.0], [math.log(3.0)]], [[0.0], [math.log(3.0)]]]])
    found = attention_steps(AttentionCall(q, k, k, scale=1.0))["weights"]
    assert found.shape == (1, 2, 1, 2)
    wanted = torch.tensor([[0.25, 0.75], [0.75, 0.25]])
    assert torch.allclose(found[0, :, 0], wanted, atol=1e-6)


def test_weights_are_before_dropout():
    one = torch.ones(1, 1, 1, 4)
    assert attention_steps(AttentionCall(one, one, one, dropout=0.2))["weights"].item() == 1.0


def test_empty_batch_and_no_keys(mean):
    none = torch.zeros(0, 2, 3, 4)
    assert attention(none, none, none, backend=mean.backend).shape == (0, 2, 3, 4)
    q, k = torch.ones(1, 1, 2, 4), torch.ones(1, 1, 0, 4)
    assert torch.equal(attention(q, k, k, backend=mean.backend), torch.zeros(1, 1, 2, 4))


def test_a_broadcast_mask_costs_nothing_per_head():
    """7,784 tokens and 12 heads: a float mask copied per head would take 2.7 GiB."""
    marks = (torch.arange(7784) % 3 > 0)[None, None, None].expand(1, 12, 7784, 7784)
    compiled = keep(marks).compile(batch=1, heads=12, queries=7784, keys=7784)
    assert compiled.bits.numel() == 7784 // 8


def test_everything_is_not_causal():
    assert everything().dense(2, 2).all()
