"""One page of semantics, each line on every backend."""

import math

import pytest
import torch
from torch import Tensor

import headwise.again as again
import headwise.backends as backends
from headwise.attention import attention, merge, observers
from headwise.call import AttentionCall
from headwise.masks import causal, documents, everything, hide, keep, padding, prefix, window
from headwise.reference import attention_steps, merge_heads, split_heads

NAMES = [backend.name for backend in backends.BACKENDS]
INF, NAN = math.inf, math.nan


@pytest.fixture(params=NAMES)
def backend(request):
    return request.param


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(batch=2, heads=4, kv_heads=2, queries=7, keys=11, dim=5, value_dim=3, dtype=torch.float32):
    return (
        draw(batch, heads, queries, dim, dtype=dtype, seed=1),
        draw(batch, kv_heads, keys, dim, dtype=dtype, seed=2),
        draw(batch, kv_heads, keys, value_dim, dtype=dtype, seed=3),
    )


def plain(q, k, v, seen=None, bias=None, scale=None, softcap=None, sinks=None):
    """Attention once more, in float64, by another road than the reference: a loop over rows."""
    q, k, v = q.double(), k.double(), v.double()
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
    lse = torch.full(q.shape[:3], -INF, dtype=torch.float64)
    groups = q.shape[1] // k.shape[1]
    for b, h, i in torch.cartesian_prod(*(torch.arange(n) for n in q.shape[:3])).tolist():
        s = k[b, h // groups] @ q[b, h, i] * (scale or q.shape[3] ** -0.5)
        if softcap is not None:
            s = softcap * torch.tanh(s / softcap)
        if bias is not None:
            s = s + bias.double().expand(*q.shape[:3], k.shape[2])[b, h, i]
        keys = torch.arange(k.shape[2])
        if seen is not None:
            keys = keys[seen.expand(*q.shape[:3], k.shape[2])[b, h, i]]
        keys = keys[s[keys] != -INF]
        if len(keys):
            logits = s[keys]
            if sinks is not None:
                logits = torch.cat((logits, sinks[h : h + 1].double()))
            lse[b, h, i] = torch.logsumexp(logits, 0)
            weights = torch.exp(s[keys] - lse[b, h, i])
            out[b, h, i] = weights @ v[b, h // groups, keys]
    return out, lse


def limit(dtype: torch.dtype, keys: int, size: float = 4.0) -> float:
    """Rounding of a sum over `keys` products of magnitude `size`, and of the stored result."""
    eps = torch.finfo(dtype).eps
    wide = min(eps, torch.finfo(torch.float32).eps)
    return size * (math.sqrt(keys) * 8 * wide + eps)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("mask", "options"),
    [
        (None, {}),
        (causal(), {}),
        (window(3), {"sinks": draw(4)}),
        (padding(lengths=torch.tensor([11, 4])), {"softcap": 1.5}),
        (causal() & padding(lengths=torch.tensor([9, 0]), side="left"), {"scale": 0.7}),
        (keep(draw(2, 4, 7, 11) > 0), {"bias": draw(4, 7, 11, seed=9)[None]}),
        (window(left=2, right=1) | prefix(2), {"bias": draw(7, 11, seed=8)}),
        (causal(), {"softcap": 2.0, "sinks": draw(4), "bias": draw(1, 4, 1, 11, seed=7)}),
    ],
    ids=["full", "causal", "window+sinks", "padding+softcap", "left", "keep+bias", "band", "all"],
)
def test_every_feature_equals_the_plain_loop(backend, dtype, mask, options):
    q, k, v = qkv(dtype=dtype)
    cast = {n: x.to(dtype) if isinstance(x, Tensor) else x for n, x in options.items()}
    out, lse = attention(q, k, v, mask, return_lse=True, backend=backend, **cast)
    seen = None if mask is None else mask.dense(7, 11, batch=2, heads=4)
    wanted, wanted_lse = plain(q, k, v, seen, **cast)
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.allclose(out.double(), wanted, rtol=0, atol=limit(dtype, 11))
    # torch's kernels for half types use a faster exponential, good to about 1e-4
    half = torch.finfo(dtype).bits == 16 and backend == "sdpa"
    tolerance = 1e-4 if half else limit(lse.dtype, 11)
    assert torch.allclose(lse.double(), wanted_lse, rtol=0, atol=tolerance)


def test_none_and_everything_hide_nothing_and_nothing_is_causal_by_itself(backend):
    q = k = torch.zeros(1, 1, 3, 1)
    v = torch.tensor([1.0, 2.0, 4.0]).view(1, 1, 3, 1)
    for mask in (None, everything()):
        out = attention(q, k, v, mask, backend=backend)
        assert torch.allclose(out.flatten(), torch.full((3,), 7 / 3))


def test_order_softcap_before_bias_before_mask(backend):
    q, k = torch.tensor([[[[3.0]]]]), torch.tensor([[[[2.0], [1.0], [9.0]]]])
    v, bias = torch.eye(3)[None, None], torch.tensor([[0.5, -0.5, 0.0]])
    mask = keep(torch.tensor([[True, True, False]]))
    out = attention(q, k, v, mask, bias=bias, softcap=2.0, scale=1.0, backend=backend).flatten()
    capped = [2 * math.tanh(6 / 2) + 0.5, 2 * math.tanh(3 / 2) - 0.5]
    first = 1 / (1 + math.exp(capped[1] - capped[0]))
    assert torch.allclose(out, torch.tensor([first, 1 - first, 0.0]), atol=1e-6)


def test_a_bias_without_a_mask_is_added(backend):
    q, k, v = qkv()
    for bias in (draw(7, 11, seed=8), draw(1, 4, 1, 11, seed=7)):
        out = attention(q, k, v, bias=bias, backend=backend)
        wanted, _ = plain(q, k, v, bias=bias)
        assert torch.allclose(out.double(), wanted, rtol=0, atol=limit(torch.float32, 11))


def test_gradients_take_the_given_scale(backend):
    q, k, v = (t.requires_grad_() for t in qkv(dtype=torch.float64))
    seen = causal().dense(7, 11)
    scores = 0.7 * q @ k.repeat_interleave(2, 1).mT
    wanted = scores.masked_fill(~seen, -INF).softmax(-1) @ v.repeat_interleave(2, 1)
    out = attention(q, k, v, causal(), scale=0.7, backend=backend)
    pull = draw(*out.shape, dtype=torch.float64, seed=4)
    grads = torch.autograd.grad(out, (q, k, v), pull)
    for grad, want in zip(grads, torch.autograd.grad(wanted, (q, k, v), pull), strict=True):
        assert torch.allclose(grad, want, rtol=0, atol=limit(torch.float64, 11, 16))


def test_what_is_asked_of_a_row_with_no_key_pulls_on_nothing(backend):
    leaves = [t.requires_grad_() for t in qkv()]
    out = attention(*leaves, causal(offset=-3), backend=backend)
    pull = draw(*out.shape, seed=4)
    asked = torch.autograd.grad(out, leaves, pull, retain_graph=True)
    pull[:, :, :3] = 0
    for grad, wanted in zip(asked, torch.autograd.grad(out, leaves, pull), strict=True):
        assert torch.equal(grad, wanted)
    assert (asked[0][:, :, :3] == 0).all()


def test_a_row_with_no_key_is_zero_forward_and_backward(backend):
    leaves = [t.requires_grad_() for t in qkv()]
    sinks = draw(4).requires_grad_()
    bias = draw(1, 4, 7, 11, seed=5).requires_grad_()
    mask = causal(offset=-3)
    out, lse = attention(*leaves, mask, sinks=sinks, bias=bias, return_lse=True, backend=backend)
    assert (out[:, :, :3] == 0).all()
    assert (lse[:, :, :3] == -INF).all()
    out.square().sum().backward()
    assert all(t.grad.isfinite().all() for t in (*leaves, sinks, bias))
    assert (leaves[0].grad[:, :, :3] == 0).all()
    assert (bias.grad[:, :, :3] == 0).all()
    steps = attention_steps(AttentionCall(*qkv(), mask=mask))
    assert (steps["weights"][:, :, :3] == 0).all()


def test_a_sink_does_not_fill_a_row_with_no_key(backend):
    q, k, v = qkv(queries=5, keys=2)
    out, lse = attention(q, k, v, causal(), sinks=draw(4), return_lse=True, backend=backend)
    assert (out[:, :, :3] == 0).all() and (lse[:, :, :3] == -INF).all()
    assert out[:, :, 3:].all() and lse[:, :, 3:].isfinite().all()


def test_no_row_has_a_key(backend):
    q, k, v = (t.requires_grad_() for t in qkv())
    out, lse = attention(q, k, v, ~everything(), return_lse=True, backend=backend)
    assert (out == 0).all()
    assert (lse == -INF).all()
    out.sum().backward()
    assert all((t.grad == 0).all() for t in (q, k, v))


def test_other_rows_keep_their_bits_when_one_row_is_empty(backend):
    q, k, v = qkv()
    marks = torch.ones(7, 11, dtype=torch.bool)
    marks[:, 4] = False
    some = attention(q, k, v, keep(marks), backend=backend)
    marks[2] = False
    emptied = attention(q, k, v, keep(marks), backend=backend)
    rest = [0, 1, 3, 4, 5, 6]
    assert torch.equal(some[:, :, rest], emptied[:, :, rest])
    assert (emptied[:, :, 2] == 0).all()


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("which", ["key", "value"])
@pytest.mark.parametrize(
    "mask", [causal(), window(3), keep(causal().dense(6, 6))], ids=["causal", "window", "keep"]
)
def test_nan_reaches_the_rows_that_see_it_and_no_other(backend, bad, which, mask):
    if which == "key" and bad == -INF:
        bad = NAN  # −inf times a number of unknown sign; NaN and +inf say enough
    q, k, v = qkv(1, 2, 1, 6, 6, 4, 4)
    clean = attention(q, k, v, mask, backend=backend)
    (k if which == "key" else v)[0, 0, 3, 1] = bad
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = attention(*leaves, mask, backend=backend)
    sees = mask.dense(6, 6)[0, 0, :, 3]
    hit = ~out.isfinite().all(-1)[0]
    if which == "value" or math.isnan(bad):
        assert torch.equal(hit, sees.expand(2, 6))
    assert not hit[:, ~sees].any()
    assert torch.allclose(out[:, :, ~sees], clean[:, :, ~sees], atol=1e-6)
    # Only rows that do not see it carry loss: no gradient may be touched.
    grads = torch.autograd.grad(out[:, :, ~sees].sum(), leaves)
    assert all(g.isfinite().all() for g in grads)
    # With every row in the loss, keys that no spoilt row sees keep finite gradients.
    _, d_key, d_value = torch.autograd.grad(attention(*leaves, mask, backend=backend).sum(), leaves)
    apart = ~mask.dense(6, 6)[0, 0][sees].any(0)
    assert d_key[:, :, apart].isfinite().all() and d_value[:, :, apart].isfinite().all()


def test_nan_everywhere_hidden_reaches_nothing(backend):
    q, k, v = qkv(2, 4, 2, 7, 11)
    lengths = torch.tensor([8, 5])
    for tensor in (k, v):
        tensor[0, :, 8:], tensor[1, :, 5:] = NAN, INF
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out, lse = attention(*leaves, padding(lengths=lengths), return_lse=True, backend=backend)
    assert out.isfinite().all() and lse.isfinite().all()
    out.sum().backward()
    assert all(t.grad.isfinite().all() for t in leaves)


def test_a_nan_query_spoils_its_row_only(backend):
    q, k, v = qkv(1, 2, 1, 6, 6, 4, 4)
    q[0, 1, 2, 0] = NAN
    out = attention(q, k, v, backend=backend)
    assert out[0, 1, 2].isnan().all()
    assert out[0, 0].isfinite().all()
    assert out[0, 1, [0, 1, 3, 4, 5]].isfinite().all()


def test_a_nan_query_outside_the_loss_leaves_gradients_finite(backend):
    q, k, v = qkv(1, 2, 1, 6, 6, 4, 4)
    q[0, :, 2] = NAN
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = attention(*leaves, causal(), backend=backend)
    grads = torch.autograd.grad(out[:, :, [0, 1, 3, 4, 5]].sum(), leaves)
    assert all(grad.isfinite().all() for grad in grads)


def test_a_bias_of_minus_infinity_hides_even_nan(backend):
    q, k, v = qkv(1, 2, 1, 3, 4, 4, 4)
    bias = torch.zeros(3, 4)
    bias[:, 2] = -INF
    wanted = attention(q, k, v, keep(bias == 0), backend=backend)
    k[:, :, 2] = v[:, :, 2] = NAN
    assert torch.allclose(attention(q, k, v, bias=bias, backend=backend), wanted, atol=1e-6)
    bias[1] = -INF
    out, lse = attention(q, k, v, bias=bias, return_lse=True, backend=backend)
    assert (out[:, :, 1] == 0).all() and (lse[:, :, 1] == -INF).all()


def test_large_scores_do_not_overflow(backend):
    """Products of 1e40 that the scale brings back: the true softmax is finite."""
    q, k = torch.full((1, 1, 1, 1), 1e20), torch.tensor([1e20, 1.0001e20]).view(1, 1, 2, 1)
    v = torch.tensor([0.0, 1.0]).view(1, 1, 2, 1)
    out, lse = attention(q, k, v, scale=1e-37, return_lse=True, backend=backend)
    scores = (q.double() * k.double() * 1e-37).flatten()
    # scores of 1000: their own rounding in float32 is 1e-4
    assert out.item() == pytest.approx(torch.softmax(scores, 0)[1].item(), abs=2e-4)
    assert lse.item() == pytest.approx(torch.logsumexp(scores, 0).item(), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_accumulate_in_float32(backend, dtype):
    """4,096 equal weights: a half-precision sum would stop growing long before the end."""
    q = k = torch.zeros(1, 1, 4096, 8, dtype=dtype)
    v = torch.ones(1, 1, 4096, 8, dtype=dtype)
    out = attention(q[:, :, :1], k, v, backend=backend)
    assert torch.allclose(out.float(), torch.ones(1), atol=torch.finfo(dtype).eps)


def test_float64_stays_float64(backend):
    q, k, v = qkv(dtype=torch.float64)
    out, lse = attention(q, k, v, causal(), return_lse=True, backend=backend)
    wanted, wanted_lse = plain(q, k, v, causal().dense(7, 11))
    assert torch.allclose(out, wanted, rtol=0, atol=1e-14)
    assert torch.allclose(lse, wanted_lse, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 3, 4), (2, 0, 4), (2, 3, 0), (2, 0, 0)])
def test_empty_sizes(backend, batch, queries, keys):
    q, k, v = (t.requires_grad_() for t in qkv(batch=batch, queries=queries, keys=keys))
    for mask in (None, causal(), window(2)):
        out, lse = attention(q, k, v, mask, return_lse=True, backend=backend)
        assert out.shape == (batch, 4, queries, 3)
        assert (out == 0).all() and (lse == -INF).all()
        out.sum().backward()
        assert all((t.grad == 0).all() for t in (q, k, v))


def test_value_width_may_differ(backend):
    for dim, value_dim in ((4, 2), (2, 4), (1, 7)):
        q, k, v = qkv(dim=dim, value_dim=value_dim)
        out = attention(q, k, v, backend=backend)
        assert out.shape == (2, 4, 7, value_dim)
        assert torch.allclose(out.double(), plain(q, k, v)[0], atol=1e-5)


def test_strided_inputs_equal_contiguous_ones(backend):
    base = draw(2, 11, 3, 8)
    q = k = v = base.transpose(1, 2)
    bias = draw(2, 1, 11, 11)
    expanded = bias.expand(2, 3, 11, 11)
    out = attention(q, k, v, causal(), bias=expanded, backend=backend)
    same = attention(
        *(t.contiguous() for t in (q, k, v)), causal(), bias=expanded.contiguous(), backend=backend
    )
    assert torch.equal(out, same)
    sliced = draw(2, 3, 11, 16)[..., ::2]
    assert torch.equal(
        attention(sliced, sliced, sliced, backend=backend),
        attention(*[sliced.contiguous()] * 3, backend=backend),
    )


def test_merge_joins_parts_of_the_keys(backend):
    q, k, v = qkv()
    whole, lse = attention(q, k, v, causal(), return_lse=True, backend=backend)
    seen = causal().dense(7, 11)
    parts = [
        attention(q, k[:, :, s], v[:, :, s], keep(seen[..., s]), return_lse=True, backend=backend)
        for s in (slice(0, 3), slice(3, 4), slice(4, 11))
    ]
    merged, merged_lse = merge(*zip(*parts, strict=True))
    assert torch.allclose(merged, whole, atol=limit(torch.float32, 11))
    assert torch.allclose(merged_lse, lse, atol=limit(torch.float32, 11))
    nothing = attention(q, k, v, ~everything(), return_lse=True, backend=backend)
    out, empty = merge([nothing[0]] * 2, [nothing[1]] * 2)
    assert (out == 0).all() and (empty == -INF).all()
    same, _ = merge([whole, torch.full_like(whole, NAN)], [lse, torch.full_like(lse, -INF)])
    assert torch.equal(same, whole)


def test_merge_refuses_parts_that_do_not_fit():
    with pytest.raises(ValueError, match="at least one; got 0 and 0"):
        merge([], [])
    with pytest.raises(ValueError, match="part 1 has output"):
        merge([torch.zeros(1, 1, 2, 3)] * 2, [torch.zeros(1, 1, 2), torch.zeros(1, 1, 3)])


@pytest.mark.parametrize(
    ("mask", "names"),
    [
        (None, "qkv"),
        (causal(), "qkv"),
        (causal() & padding(lengths=torch.tensor([0, 4]), side="left"), "qkvbs"),
        (keep(draw(2, 1, 3, 5) > 0), "qkvbsc"),
        (window(2) | prefix(1), "qkvsc"),
    ],
    ids=["full", "causal", "left+bias+sinks", "keep+all", "window"],
)
@pytest.mark.parametrize("with_lse", [False, True], ids=["output", "output+lse"])
def test_gradients_equal_finite_differences(backend, mask, names, with_lse):
    q, k, v = (t.requires_grad_() for t in qkv(2, 4, 2, 3, 5, 4, 3, dtype=torch.float64))
    bias = draw(1, 4, 3, 5, dtype=torch.float64, seed=5).requires_grad_()
    sinks = draw(4, dtype=torch.float64, seed=6).requires_grad_()
    inputs = [q, k, v] + [bias] * ("b" in names) + [sinks] * ("s" in names)

    def run(*tensors: Tensor):
        rest = list(tensors[3:])
        out, lse = attention(
            *tensors[:3],
            mask,
            bias=rest.pop(0) if "b" in names else None,
            sinks=rest.pop(0) if "s" in names else None,
            softcap=1.3 if "c" in names else None,
            return_lse=True,
            backend=backend,
        )
        return (out, torch.where(lse == -INF, 0.0, lse)) if with_lse else out

    assert torch.autograd.gradcheck(run, inputs)


@pytest.mark.parametrize("shape", [(5,), (1, 5), (4, 1, 1), (2, 1, 3, 1), (2, 4, 3, 5)])
def test_a_bias_gets_its_gradient_in_its_own_shape(backend, shape):
    q, k, v = qkv(2, 4, 2, 3, 5, 4, 3, dtype=torch.float64)
    bias = draw(*shape, dtype=torch.float64).requires_grad_()

    def run(b: Tensor) -> Tensor:
        wide = b if b.dim() in (2, 4) else b.reshape((1,) * (4 - b.dim()) + tuple(b.shape))
        return attention(q, k, v, causal(), bias=wide, backend=backend)

    assert torch.autograd.gradcheck(run, [bias])


def test_a_bias_with_one_column_meets_a_mask_that_starts_late(backend):
    q, k, v = qkv(dtype=torch.float64)
    column = draw(7, 1, dtype=torch.float64).requires_grad_()
    late = window(2)  # with 7 queries and 11 keys no row sees keys 0 to 2
    out, lse = attention(q, k, v, late, bias=column, return_lse=True, backend=backend)
    wanted, wanted_lse = plain(q, k, v, late.dense(7, 11), bias=column)
    assert torch.allclose(out, wanted, rtol=0, atol=limit(torch.float64, 11))
    assert torch.allclose(lse, wanted_lse, rtol=0, atol=limit(torch.float64, 11))
    (pulled,) = torch.autograd.grad(lse.sum(), column)
    # lse moves with what is added to its whole row: 2 batch elements, 4 heads
    assert torch.allclose(
        pulled, torch.full_like(pulled, 8.0), rtol=0, atol=limit(torch.float64, 8)
    )


@pytest.mark.parametrize("softcap", [None, 2.0], ids=["plain", "softcap"])
@pytest.mark.parametrize("learnt", [True, False], ids=["bias learns", "bias fixed"])
def test_more_rows_than_one_block_holds(backend, softcap, learnt):
    """Blocks of rows are at most 1024 long: what is cut with them, and what is added up."""
    rows, keys = 1100, 5
    q, k, v = (t.requires_grad_() for t in qkv(1, 2, 1, rows, keys, 4, 3, dtype=torch.float64))
    bias = draw(1, 2, 1, keys, dtype=torch.float64).requires_grad_(learnt)
    seen = draw(rows, keys, seed=5) > 0
    seen[:, 0] = True
    out = attention(q, k, v, keep(seen), bias=bias, softcap=softcap, backend=backend)
    scores = q @ k.mT / 2
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    wanted = (scores + bias).masked_fill(~seen, -INF).softmax(-1) @ v
    assert torch.allclose(out, wanted, rtol=0, atol=limit(torch.float64, keys))
    leaves = [q, k, v, *[bias] * learnt]
    pull = draw(*out.shape, dtype=torch.float64, seed=6)
    grads = torch.autograd.grad(out, leaves, pull)
    for grad, want in zip(grads, torch.autograd.grad(wanted, leaves, pull), strict=True):
        # a key's gradient is a sum over all rows
        assert torch.allclose(grad, want, rtol=0, atol=limit(torch.float64, rows, 16))


@pytest.mark.parametrize("queries", [49, 64])
def test_gradients_at_lengths_that_are_and_are_not_tile_multiples(backend, queries):
    leaves = [t.requires_grad_() for t in qkv(1, 2, 1, queries, queries, 8, 8)]
    out = attention(*leaves, causal(), backend=backend)
    pull = draw(*out.shape, seed=4)
    grads = torch.autograd.grad(out, leaves, pull)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    scores = wide[0] @ wide[1].repeat_interleave(2, 1).mT / 8**0.5
    seen = causal().dense(queries, queries)
    weights = scores.masked_fill(~seen, -INF).softmax(-1)
    wanted = torch.autograd.grad(weights @ wide[2].repeat_interleave(2, 1), wide, pull.double())
    for grad, want in zip(grads, wanted, strict=True):
        # a gradient sums over up to `queries` rows of two products each
        assert torch.allclose(grad.double(), want, rtol=0, atol=limit(torch.float32, queries, 16))


def test_second_derivatives_fail_early_with_a_hint(backend):
    q, k, v = (t.requires_grad_() for t in qkv(dtype=torch.float64))
    out = attention(q, k, v, backend=backend)
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad.sum().backward()


def test_same_bits_every_run_forward_and_backward(backend):
    def run():
        leaves = [t.requires_grad_() for t in qkv(2, 4, 2, 67, 67, 16, 16)]
        out = attention(*leaves, causal(), backend=backend)
        out.square().sum().backward()
        return [out, *(t.grad for t in leaves)]

    first = run()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


class TestDropout:
    def test_drops_about_the_share_asked_for_and_scales_the_rest(self, backend):
        q = k = torch.zeros(1, 4, 50, 8)
        v = torch.ones(1, 4, 50, 1)
        torch.manual_seed(0)
        out = attention(q, k, v, dropout=0.3, backend=backend)
        assert out.std() > 0
        # 10,000 draws of 0 or 1/0.7: standard error √(0.3/0.7)/100
        assert abs(out.mean().item() - 1) < 5 * math.sqrt(0.3 / 0.7) / 100

    def test_follows_torchs_generator(self, backend):
        args = qkv()
        torch.manual_seed(3)
        one = attention(*args, dropout=0.5, backend=backend)
        two = attention(*args, dropout=0.5, backend=backend)
        torch.manual_seed(3)
        again = attention(*args, dropout=0.5, backend=backend)
        assert torch.equal(one, again)
        assert not torch.equal(one, two)

    def test_backward_redraws_what_forward_dropped(self, backend):
        q, k, v = (t.requires_grad_() for t in qkv(1, 2, 1, 3, 5, 4, 3, dtype=torch.float64))

        def run(*tensors: Tensor) -> Tensor:
            torch.manual_seed(5)
            return attention(*tensors, causal(), dropout=0.4, backend=backend)

        assert torch.autograd.gradcheck(run, (q, k, v))

    def test_each_block_of_rows_draws_anew(self, backend):
        rows, keys = 1024, 8
        q, k = torch.zeros(1, 1, rows, 4), torch.zeros(1, 1, keys, 4)
        v = torch.eye(keys)[None, None]  # the output is the weights
        seen = keep(torch.ones(rows, keys, dtype=torch.bool))
        kept = attention(q, k, v, seen, dropout=0.5, backend=backend)[0, 0] > 0
        # 4096 coins a half: two independent ones agree on 2048 ± 32
        agree = int((kept[:512] == kept[512:]).sum())
        assert abs(agree - 2048) < 6 * 32

    def test_lse_is_before_dropout(self, backend):
        args = qkv()
        _, dropped = attention(*args, dropout=0.5, return_lse=True, backend=backend)
        _, whole = attention(*args, return_lse=True, backend=backend)
        assert torch.allclose(dropped, whole, atol=1e-5)


def test_memory_of_a_long_window_is_linear(backend):
    """One row block at a time: the largest tensor made stays far below L·S."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for item in out if isinstance(out, tuple | list) else (out,):
                if isinstance(item, Tensor):
                    largest = max(largest, item.untyped_storage().nbytes())
            return out

    call = AttentionCall(*qkv(1, 1, 1, 20_000, 20_000, 8, 8), mask=window(64))
    with Watch():
        backends.get(backend).forward(call, None, True)
    assert largest <= 128 << 20, "20,000² scores would be 1.6 GB in float32"


def test_split_and_merge_move_whole_tokens():
    x = torch.tensor([[[1, 2, 3, 4], [5, 6, 7, 8]]])
    heads = split_heads(x, 2)
    assert heads[0].tolist() == [[[1, 2], [5, 6]], [[3, 4], [7, 8]]]
    assert torch.equal(merge_heads(heads), x)


def test_steps_are_all_there_before_dropout_and_per_head():
    call = AttentionCall(*qkv(), mask=causal(), softcap=3.0, bias=draw(7, 11), dropout=0.5)
    steps = attention_steps(call.to(torch.float64))
    names = ["scores", "scaled", "capped", "biased", "masked", "weights", "lse", "output"]
    assert list(steps) == names
    assert steps["weights"].shape == (2, 4, 7, 11)
    assert torch.allclose(steps["weights"].sum(-1), torch.ones((), dtype=torch.float64))


class TestBackends:
    def test_the_definition_computes_in_float64_whatever_comes(self):
        call = AttentionCall(*qkv(keys=301, dim=64), mask=causal())
        out, lse = backends.get("reference").forward(call, None, True)
        steps = attention_steps(call.to(torch.float64))
        # One rounding, to the call's own dtype, and none before it.
        assert torch.equal(out, steps["output"].float())
        assert torch.equal(lse, steps["lse"].float())

    def test_choose_never_takes_the_definition_by_itself(self):
        assert backends.choose(AttentionCall(*qkv())).name != "reference"

    def test_explain_names_every_backend(self):
        assert backends.explain(AttentionCall(*qkv())) == dict.fromkeys(NAMES)

    def test_unknown_name(self):
        with pytest.raises(ValueError, match="unknown backend 'fast'; there are native, sdpa, ref"):
            attention(*qkv(), backend="fast")

    def test_a_forced_backend_that_refuses_raises_with_its_reason(self, monkeypatch):
        # What the native kernel takes does not change while a program runs, but here it does.
        monkeypatch.setattr(again, "_known", {})
        assert backends.choose(AttentionCall(*qkv())).name == "native"
        monkeypatch.setattr(backends.native.Native, "refuse", lambda self, call: "never")
        assert backends.choose(AttentionCall(*qkv())).name == "sdpa"
        monkeypatch.setattr(backends.sdpa.Sdpa, "refuse", lambda self, call: "not today")
        with pytest.raises(ValueError, match="'sdpa' refuses this call: not today"):
            attention(*qkv(), backend="sdpa")
        assert backends.choose(AttentionCall(*qkv())).name == "reference"
        monkeypatch.setattr(backends.reference.Reference, "refuse", lambda self, call: "nor today")
        with pytest.raises(
            ValueError, match="native: never; sdpa: not today; reference: nor today"
        ):
            attention(*qkv())

    def test_sdpa_on_an_accelerator_uses_the_public_function(self, monkeypatch):
        """The road taken off the CPU, walked on the CPU."""
        monkeypatch.setattr(backends.sdpa, "_is_cpu", lambda call: False)
        for mask in (None, causal(), window(3), keep(draw(7, 11) > 0.5)):
            leaves = [t.requires_grad_() for t in qkv()]
            out = attention(*leaves, mask, backend="sdpa")
            grads = torch.autograd.grad(out.sum(), leaves)
            with torch.no_grad():
                fused = attention(*leaves, mask, backend="sdpa")
            assert torch.allclose(out, fused, atol=1e-5)
            wide = [t.detach().double().requires_grad_() for t in leaves]
            wanted = attention(*wide, mask, backend="reference")
            assert torch.allclose(out.double(), wanted, atol=1e-5)
            for a, b in zip(grads, torch.autograd.grad(wanted.sum(), wide), strict=True):
                assert torch.allclose(a.double(), b, atol=1e-4)


def test_observers_get_the_call_and_the_output():
    seen = []
    observers.append(lambda call, output: seen.append((call, output)))
    try:
        out = attention(*qkv(), causal())
    finally:
        observers.pop()
    ((call, output),) = seen
    assert output is out
    assert call.num_heads == 4 and call.visible.sizes.keys == 11


T = torch.zeros


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: (T(2, 3, 4), T(2, 3, 4), T(2, 3, 4)),
            ValueError,
            r"query must have 4 axes.*got 3",
        ),
        (
            lambda: (T(2, 4, 3, 8), T(3, 4, 3, 8), T(3, 4, 3, 8)),
            ValueError,
            "query 2, key 3, value 3",
        ),
        (
            lambda: (T(2, 4, 3, 8), T(2, 4, 3, 6), T(2, 4, 3, 6)),
            ValueError,
            "dimension 8, key has 6",
        ),
        (lambda: (T(2, 4, 3, 8), T(2, 4, 3, 8), T(2, 4, 5, 8)), ValueError, r"\(4, 3\).*\(4, 5\)"),
        (
            lambda: (T(2, 3, 1, 8), T(2, 2, 1, 8), T(2, 2, 1, 8)),
            ValueError,
            "3 query heads.* 2 key",
        ),
        (lambda: (T(1, 5, 3, 8), T(1, 7, 3, 8), T(1, 7, 3, 8)), ValueError, "5 query heads"),
        (
            lambda: (T(2, 7, 4, 8), T(2, 4, 7, 8), T(2, 4, 7, 8)),
            ValueError,
            r"wanted \(B, H, L, D\)",
        ),
        (
            lambda: (T(1, 1, 2, 4), *[T(1, 1, 2, 4).half()] * 2),
            ValueError,
            "float32 but key is .*float16",
        ),
        (lambda: tuple([T(1, 1, 2, 4).int()] * 3), TypeError, "int32"),
    ],
)
def test_tensors_that_do_not_fit_are_named(make, error, message):
    with pytest.raises(error, match=message):
        attention(*make())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"mask": torch.ones(7, 11).bool()}, TypeError, r"keep\(mask\).*hide\(mask\)"),
        ({"mask": torch.zeros(7, 11)}, TypeError, "does not say what it means"),
        ({"bias": torch.ones(7, 11).bool()}, TypeError, "mask=keep"),
        ({"bias": torch.ones(7, 11).long()}, TypeError, "int64"),
        ({"bias": torch.ones(7, 11).double()}, ValueError, "float32 but bias is .*float64"),
        ({"bias": torch.ones(3, 7, 11)}, ValueError, "rank 3"),
        ({"bias": torch.ones(7, 12)}, ValueError, r"\(7, 12\) to \(7, 11\)"),
        ({"sinks": torch.ones(2)}, ValueError, r"wanted \(4,\), got \(2,\)"),
        ({"scale": 0.0}, ValueError, "above 0, got 0.0"),
        ({"scale": -1.0}, ValueError, "got -1.0"),
        ({"scale": NAN}, ValueError, "got nan"),
        ({"softcap": 0.0}, ValueError, "softcap .* got 0.0"),
        ({"dropout": 1.0}, ValueError, r"\[0, 1\), got 1.0"),
        (
            {"mask": padding(torch.ones(3, 11).bool())},
            ValueError,
            r"wanted shape \(2, 11\), got \(3",
        ),
        ({"mask": documents(torch.zeros(9))}, ValueError, r"\(2, 11\), got \(1, 9\)"),
        ({"mask": hide(torch.ones(5, 11).bool())}, ValueError, r"hide: cannot broadcast"),
    ],
)
def test_options_that_cannot_be_meant_are_named(options, error, message):
    with pytest.raises(error, match=message):
        attention(*qkv(), **options)


def test_unknown_keywords_are_errors():
    with pytest.raises(TypeError, match="is_causal"):
        attention(*qkv(), is_causal=True)


def test_a_bias_of_zeros_and_ones_is_called_out():
    with pytest.warns(UserWarning, match="holds only 0 and 1"):
        attention(*qkv(queries=11), bias=torch.ones(11, 11).tril())
    attention(*qkv(queries=11), bias=torch.zeros(11, 11))


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_rounds_nothing_inside(backend, softcap, dtype):
    q, k, v = (x.requires_grad_() for x in qkv(queries=11, dtype=dtype))
    bits = []
    for on in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
            output = attention(q, k, v, causal(), softcap=softcap, backend=backend)
            grads = torch.autograd.grad(output.float().square().sum(), (q, k, v))
            weights = attention_steps(AttentionCall(q, k, v, causal()))["weights"]
        bits.append((output, *grads, weights))
    for without, within in zip(*bits, strict=True):
        assert without.dtype == within.dtype and torch.equal(without, within)


def test_merge_gives_no_gradient_to_rows_that_no_part_sees():
    outputs = draw(2, 1, 1, 2, 4).requires_grad_()
    lses = torch.tensor([[[[1.0, -INF]]], [[[-INF, -INF]]]], requires_grad=True)
    output, lse = merge(list(outputs), list(lses))
    assert torch.equal(lse, torch.tensor([[[1.0, -INF]]]))
    (output.sum() + lse[..., 0].sum()).backward()
    assert torch.equal(lses.grad, torch.tensor([[[[1.0, 0.0]]], [[[0.0, 0.0]]]]))
    assert outputs.grad.isfinite().all() and not outputs.grad[:, :, :, 1].any()


@pytest.mark.parametrize("learnt", [False, True])
def test_meta_tensors_have_shapes_with_and_without_gradients(backend, learnt):
    q, k, v = (x.to("meta").requires_grad_(learnt) for x in qkv())
    output, lse = attention(q, k, v, causal(), return_lse=True, backend=backend)
    assert output.is_meta and output.shape == (2, 4, 7, 3) and lse.shape == (2, 4, 7)
