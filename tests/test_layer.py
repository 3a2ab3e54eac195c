"""MultiHeadAttention: what its eight steps do, one behaviour a test."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from headwise.cache import KVCache, RollingKVCache
from headwise.call import AttentionCall
from headwise.layer import MultiHeadAttention
from headwise.masks import causal, documents, hide, keep, padding, prefix, window
from headwise.options import AttentionOptions
from headwise.positions import ALiBi, RelativeBias, count_positions
from headwise.rotary import NTKScaling, Rotary, YaRNScaling
from tolerances import assert_near, rounding

NEAR = torch.tensor([0.880797, 0.119203])  # softmax of (2, 0)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def build(*args, dtype=torch.float32, seed=0, train=False, **kwargs) -> MultiHeadAttention:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layer = MultiHeadAttention(*args, **kwargs)
        # Biases, sinks and norms start at 0 and 1; every parameter must matter in a test.
        with torch.no_grad():
            for parameter in layer.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.3 * torch.randn_like(parameter))
    return layer.to(dtype).train(train)


def identity(embed_dim: int, num_heads: int, **options) -> MultiHeadAttention:
    """A layer whose projections pass everything through: queries, keys and values are x."""
    layer = MultiHeadAttention(
        embed_dim, num_heads, bias=False, options=AttentionOptions(**options)
    )
    for linear in (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj):
        nn.init.eye_(linear.weight)
    return layer.eval()


def by_hand(layer: MultiHeadAttention, x: Tensor, seen: Tensor | None = None) -> Tensor:
    """The layer once more, written as loops over batch, heads and rows, in float64."""
    o = layer.options

    def linear(module: nn.Linear, t: Tensor) -> Tensor:
        out = t.double() @ module.weight.double().T
        return out if module.bias is None else out + module.bias.double()

    def norm(module: nn.RMSNorm | None, t: Tensor) -> Tensor:
        if module is None:
            return t
        return t * (t.pow(2).mean(-1, keepdim=True) + module.eps).rsqrt() * module.weight.double()

    q, k, v = (linear(m, x) for m in (layer.q_proj, layer.k_proj, layer.v_proj))
    rows = []
    for b in range(x.shape[0]):
        heads = []
        for h in range(layer.num_heads):
            g, d, dv = (
                h * layer.num_kv_heads // layer.num_heads,
                layer.head_dim,
                layer.value_head_dim,
            )
            qh = norm(layer.q_norm, q[b, :, h * d : (h + 1) * d])
            kh = norm(layer.k_norm, k[b, :, g * d : (g + 1) * d])
            if isinstance(layer.position, Rotary):
                index = torch.arange(x.shape[1])
                qh = layer.position.rotate(qh[None, None], index)[0, 0]
                kh = layer.position.rotate(kh[None, None], index)[0, 0]
            s = qh @ kh.T * (o.scale or d**-0.5)
            if o.softcap:
                s = o.softcap * torch.tanh(s / o.softcap)
            if seen is not None:
                s = s.masked_fill(~seen, -math.inf)
            e = s.exp()
            total = e.sum(-1, keepdim=True)
            if layer.sinks is not None:
                total = total + layer.sinks[h].double().exp()
            heads.append(e / total @ v[b, :, g * dv : (g + 1) * dv])
        rows.append(torch.cat(heads, -1))
    joined = torch.stack(rows)
    if layer.gate_proj is not None:
        joined = joined * torch.sigmoid(linear(layer.gate_proj, x))
    return linear(layer.out_proj, joined)


# --- the mechanism -------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
    ("options", "position"),
    [
        ({}, None),
        ({"qk_norm": True}, Rotary(base=100.0)),
        ({"softcap": 2.0, "scale": 0.9}, None),
        ({"sinks": True}, Rotary(interleaved=True)),
        ({"output_gate": True, "value_head_dim": 3}, None),
        (
            {"window": 3, "qk_norm": True, "sinks": True, "softcap": 5.0, "output_gate": True},
            Rotary(),
        ),
    ],
)
def test_every_option_against_loops_in_float64(kv_heads, options, position):
    chosen = AttentionOptions(**options)
    sizes = {"num_kv_heads": kv_heads, "head_dim": 6}
    layer = build(14, 4, **sizes, position=position, options=chosen)
    x = draw(2, 7, 14)
    seen = torch.ones(7, 7, dtype=torch.bool).tril()
    if chosen.window is not None:
        seen = seen.triu(-2)
    for dtype in (torch.float64, torch.float32):
        got = layer.to(dtype)(x.to(dtype), mask=causal())
        assert got.dtype == dtype
        assert_near(got, by_hand(layer.double(), x, seen), terms=14)


def test_each_option_changes_the_output():
    x = draw(2, 7, 16)
    outputs = [build(16, 4)(x, mask=causal())]
    for options in (
        {"scale": 2.0},
        {"softcap": 0.5},
        {"sinks": True},
        {"window": 2},
        {"qk_norm": True},
        {"output_gate": True},
        {"out_bias": False},
    ):
        outputs.append(build(16, 4, options=AttentionOptions(**options))(x, mask=causal()))
    for position in (Rotary(), ALiBi(), RelativeBias(4)):
        outputs.append(build(16, 4, position=position)(x, mask=causal()))
    for i, one in enumerate(outputs):
        for other in outputs[:i]:
            assert float((one - other).detach().abs().max()) > 1e-3


def test_heads_are_split_by_feature_and_joined_in_the_same_order():
    x = torch.tensor([[[1.0, 2, 3, 4], [5, 6, 7, 8]]])
    layer = identity(4, 2)
    trace = layer.trace(x)
    assert trace["query"].tolist() == [[[[1, 2], [5, 6]], [[3, 4], [7, 8]]]]
    assert torch.equal(layer(x, mask=window(1)), x), "each token sees itself: split, then joined"


def test_a_changed_token_moves_only_its_own_rows_of_every_head():
    layer, x = build(12, 3), draw(2, 5, 12)
    moved = x.clone()
    moved[0, 3] += 1
    before, after = layer.trace(x), layer.trace(moved)
    for name in ("query", "key", "value"):
        changed = (before[name] != after[name]).any(-1)
        wanted = torch.zeros(2, 3, 5, dtype=torch.bool)
        wanted[0, :, 3] = True
        assert torch.equal(changed, wanted), name


def test_rows_of_a_batch_do_not_touch():
    layer, x = build(4, 2), draw(2, 3, 4)
    moved = x.clone()
    moved[1] += 1
    assert torch.equal(layer(x)[0], layer(moved)[0])
    assert not torch.equal(layer(x)[1], layer(moved)[1])


def test_the_scale_is_that_of_one_head_and_is_applied_once():
    x = torch.tensor([[[2.0, 0, 0, 0] * 4, [0.0] * 16]])
    _, weights = identity(16, 4)(x, need_weights=True)
    assert torch.allclose(weights[0, :, 0], NEAR.expand(4, 2), rtol=0, atol=1e-6)
    assert torch.allclose(weights.sum(-1), torch.ones(1, 4, 2), rtol=0, atol=1e-6)
    # As T5: no scale at all, in so many words.
    _, weights = identity(16, 4, scale=1.0)(x, need_weights=True)
    assert torch.allclose(weights[0, 0, 0, 0], torch.tensor(4.0).sigmoid(), rtol=0, atol=1e-6)


def test_softmax_runs_over_keys():
    """Scores [[0, 1], [2, 0]]."""
    layer = identity(2, 1, scale=1.0)
    with torch.no_grad():
        layer.k_proj.weight.copy_(torch.tensor([[0.0, 1.0], [2.0, 0.0]]))
    x = torch.eye(2)[None]
    scores = layer.trace(x)["scores"][0, 0]
    _, weights = layer(x, need_weights=True)
    assert sorted(scores.flatten().tolist()) == [0, 0, 1, 2]
    row = int(scores.amax(-1).argmax())
    assert torch.allclose(weights[0, 0, row].sort().values, NEAR.flip(0), rtol=0, atol=1e-6)
    assert torch.allclose(weights.sum(-1), torch.ones(1, 1, 2), rtol=0, atol=1e-6)
    _, weights = layer(x, mask=causal(), need_weights=True)
    assert weights[0, 0, 0].tolist() == [1, 0]


def test_nothing_is_causal_unless_the_mask_says_so():
    layer = identity(1, 1)
    context = (torch.zeros(1, 3, 1), torch.tensor([[[1.0], [2], [4]]]))
    x = torch.zeros(1, 3, 1)
    whole = layer(x, context).flatten()
    assert torch.allclose(whole, torch.full((3,), 7 / 3), rtol=0, atol=1e-6)
    past = layer(x, context, mask=causal()).flatten()
    assert torch.allclose(past, torch.tensor([1, 1.5, 7 / 3]), rtol=0, atol=1e-6)


def test_no_position_means_no_order():
    layer, x = build(16, 4), draw(1, 6, 16)
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    assert_near(layer(x[:, order]), layer(x)[:, order], terms=16)
    placed = build(16, 4, position=Rotary())
    assert float((placed(x[:, order]) - placed(x)[:, order]).detach().abs().max()) > 1e-3


# --- weights, dropout, gradients -----------------------------------------------------------------


def test_weights_are_per_head_and_average_on_request():
    layer, x = build(12, 3), draw(2, 5, 12)
    alone = layer(x, mask=causal())
    out, weights = layer(x, mask=causal(), need_weights=True)
    assert torch.equal(out, alone)
    assert weights.shape == (2, 3, 5, 5)
    assert_near(weights.sum(-1), torch.ones(2, 3, 5), terms=5)
    assert bool((weights.triu(1) == 0).all())
    assert_near(weights, layer.trace(x, mask=causal())["weights"], terms=12)
    _, mean = layer(x, mask=causal(), need_weights=True, average_weights=True)
    assert torch.equal(mean, weights.mean(1))
    with pytest.raises(ValueError, match="average_weights=True needs need_weights=True"):
        layer(x, average_weights=True)


def test_weights_leave_room_for_the_sink_and_for_rows_without_keys():
    layer = build(12, 3, options=AttentionOptions(sinks=True))
    x = draw(2, 5, 12)
    shut = torch.zeros(5, 5, dtype=torch.bool)
    shut[3] = True
    mask = causal() & hide(shut)
    _, weights = layer(x, mask=mask, need_weights=True)
    assert_near(weights, layer.trace(x, mask=mask)["weights"], terms=12)
    total = weights.sum(-1)
    assert bool((total < 1).all()) and bool((total[:, :, 3] == 0).all())
    assert bool((total[:, :, [0, 1, 2, 4]] > 0).all())


def test_weights_are_those_before_dropout():
    layer = build(8, 2, dropout=0.2, train=True)
    x = draw(3, 1, 8)
    for _ in range(5):
        _, weights = layer(x, need_weights=True)
        assert bool((weights == 1).all()), "one key: exactly 1, never 1.25 or 0"


def test_dropout_acts_in_training_only_and_repeats_with_the_seed():
    x = draw(2, 9, 16)
    layer, plain = build(16, 4, dropout=0.5), build(16, 4)
    assert torch.equal(layer(x), layer(x))
    assert torch.equal(layer(x), plain(x))
    layer.train()
    with torch.random.fork_rng():
        torch.manual_seed(3)
        first, second = layer(x), layer(x)
        torch.manual_seed(3)
        again = layer(x)
    assert not torch.equal(first, second)
    assert torch.equal(first, again)


def test_dropout_keeps_the_mean():
    x = draw(1, 4, 8)
    layer = build(8, 2, dropout=0.5, train=True, dtype=torch.float64)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        outs = torch.stack([layer(x.double()) for _ in range(4000)])
        wanted = layer.eval()(x.double())
    error = outs.std(0) / math.sqrt(4000)
    assert bool(((outs.mean(0) - wanted).abs() < 5 * error).all())


def test_gradients_in_float64_and_through_the_weights():
    layer = build(
        6,
        2,
        num_kv_heads=1,
        head_dim=2,
        dtype=torch.float64,
        position=RelativeBias(2, num_buckets=4, max_distance=3).double(),
        options=AttentionOptions(qk_norm=True, sinks=True, softcap=3.0, output_gate=True),
    )
    x = draw(2, 4, 6, dtype=torch.float64).requires_grad_()
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def run(x, *values):
        return torch.func.functional_call(
            layer, dict(zip(names, values, strict=True)), (x,), {"mask": causal()}
        )

    assert torch.autograd.gradcheck(run, (x, *parameters))
    out, weights = layer(x, mask=causal(), need_weights=True)
    (weights.pow(2).sum() + out.sum()).backward()
    for name, parameter in layer.named_parameters():
        assert bool((parameter.grad != 0).any()), name


def test_a_query_without_keys_gives_zeros_and_finite_gradients():
    layer, x = build(8, 2), draw(2, 4, 8).requires_grad_()
    hidden = torch.zeros(4, 4, dtype=torch.bool)
    hidden[2] = True
    out, weights = layer(x, mask=hide(hidden), need_weights=True)
    assert torch.equal(out[:, 2], layer.out_proj.bias.expand(2, 8))
    assert bool((weights[:, :, 2] == 0).all())
    (out.sum() + weights.pow(2).sum()).backward()
    assert bool(x.grad.isfinite().all())
    assert all(bool(p.grad.isfinite().all()) for p in layer.parameters())


def test_training_and_inference_are_one_path():
    """A fused fast path once cut the output at the longest real length, and zeroed pads."""
    layer, x = build(8, 2), draw(2, 4, 8)
    real = ~torch.tensor([[0, 0, 0, 1], [0, 0, 1, 1]]).bool()
    with torch.no_grad():
        bare = layer(x, mask=padding(real))
    graded = layer(x, mask=padding(real))
    assert graded.requires_grad and bare.shape == (2, 4, 8)
    assert_near(graded.detach(), bare, terms=8)
    for row, length in enumerate((3, 2)):
        alone = layer(x[row : row + 1, :length])
        assert_near(bare[row : row + 1, :length], alone.detach(), terms=8)


# --- shapes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 3, 8), (2, 0, 8), (0, 0, 8)])
def test_empty_batches_and_sequences(shape):
    layer = build(8, 2, position=Rotary())
    out, weights = layer(torch.zeros(shape), mask=causal(), need_weights=True)
    assert out.shape == shape
    assert weights.shape == (shape[0], 2, shape[1], shape[1])


def test_an_empty_context_gives_the_bias_of_out_proj():
    layer = build(8, 2)
    out, weights = layer(draw(2, 3, 8), torch.zeros(2, 0, 8), need_weights=True)
    assert torch.equal(out, layer.out_proj.bias.expand(2, 3, 8))
    assert weights.shape == (2, 2, 3, 0)


@given(
    batch=st.integers(1, 3),
    queries=st.integers(1, 7),
    keys=st.integers(1, 7),
    kv_heads=st.sampled_from([1, 2, 3]),
    groups=st.sampled_from([1, 2, 3]),
    head_dim=st.sampled_from([1, 2, 5]),
    value_dim=st.sampled_from([1, 3, None]),
    widths=st.sampled_from([(7, 11, 13), (7, 7, 13), (5, 11, 11), (4, 4, 4)]),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_cross_attention_of_any_widths_is_the_float64_definition(
    batch, queries, keys, kv_heads, groups, head_dim, value_dim, widths, seed
):
    embed_dim, kdim, vdim = widths
    layer = build(
        embed_dim,
        kv_heads * groups,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        kdim=kdim,
        vdim=vdim,
        options=AttentionOptions(value_head_dim=value_dim),
        seed=seed,
    )
    x = draw(batch, queries, embed_dim, seed=seed)
    context = (draw(batch, keys, kdim, seed=seed + 1), draw(batch, keys, vdim, seed=seed + 2))
    got, weights = layer(x, context, need_weights=True)
    trace = layer.trace(x, context)
    assert got.shape == (batch, queries, embed_dim)
    assert weights.shape == (batch, kv_heads * groups, queries, keys)
    assert_near(got, trace["output"], terms=max(widths) + keys)
    assert_near(weights, trace["weights"], terms=max(widths))
    if kdim == vdim:
        assert_near(layer(x, context[0]), layer.trace(x, context[0])["output"], terms=kdim + keys)


def test_values_of_another_width_leave_the_output_as_wide_as_the_query():
    layer = build(24, 4, vdim=12)
    x = draw(5, 10, 24)
    assert layer(x, (x, draw(5, 10, 12))).shape == (5, 10, 24)


def test_projected_context_serves_many_steps():
    layer = build(8, 2, num_kv_heads=1, kdim=5, vdim=5, options=AttentionOptions(qk_norm=True))
    x, context = draw(2, 3, 8), draw(2, 6, 5)
    once = layer.project_context(context)
    assert once.key.shape == (2, 1, 6, 4)
    calls = []
    layer.k_proj.register_forward_hook(lambda *_: calls.append(1))
    steps = torch.cat([layer(x[:, i : i + 1], once) for i in range(3)], 1)
    assert calls == []
    assert_near(steps, layer(x, context), terms=8)
    assert torch.equal(layer.trace(x, once)["key"], once.key.double())


# --- padding and positions -----------------------------------------------------------------------

POSITIONS = {
    "rotary": Rotary(),
    "partial interleaved": Rotary(fraction=0.5, interleaved=True),
    "yarn": Rotary(scaling=YaRNScaling(4.0, 16)),
    "alibi": ALiBi(),
    "alibi by key": ALiBi("key"),
    "t5": "t5",
    "none": None,
}


def placed(name: str, dtype=torch.float32, **kwargs) -> MultiHeadAttention:
    position = POSITIONS[name]
    if position == "t5":
        position = RelativeBias(4, num_buckets=8, max_distance=10, bidirectional=False)
    return build(16, 4, num_kv_heads=2, position=position, dtype=dtype, **kwargs)


@pytest.mark.parametrize("name", POSITIONS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_invisible(name, side):
    layer, x = placed(name), draw(3, 6, 16)
    lengths = [6, 3, 1]
    real = torch.zeros(3, 6, dtype=torch.bool)
    for row, length in enumerate(lengths):
        real[row, :length] = True
    if side == "left":
        real = real.flip(1)
    noise = torch.where(real[..., None], x, 1e3 * draw(3, 6, 16, seed=9))
    out = layer(noise, mask=causal() & padding(real))
    for row in range(3):
        alone = layer(x[row : row + 1, real[row]], mask=causal())
        assert_near(out[row : row + 1, real[row]], alone, terms=16)


@pytest.mark.parametrize("name", POSITIONS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_decoding_after_padding_goes_on_from_the_real_tokens(name, side):
    layer, x = placed(name), draw(2, 9, 16)
    real = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]).bool()
    real = real if side == "left" else real.flip(1)
    cache = layer.make_cache(2, 9)
    with torch.no_grad():
        first = layer(x[:, :5], mask=causal() & padding(real), cache=cache)
        assert cache.next_position.tolist() == [3, 5]
        steps = [layer(x[:, i : i + 1], mask=causal(), cache=cache) for i in range(5, 9)]
        for row in range(2):
            kept = torch.cat((real[row], torch.ones(4, dtype=torch.bool)))
            alone = layer(x[row : row + 1, kept], mask=causal())
            got = torch.cat((first, *steps), 1)[row : row + 1, kept]
            assert_near(got, alone, terms=16)


@pytest.mark.parametrize("name", ["rotary", "t5"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_of_all_keys_may_be_given_with_each_chunk(name, side):
    layer, x = placed(name), draw(2, 6, 16)
    real = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]]).bool()
    real = real if side == "left" else real.flip(1)
    cache = layer.make_cache(2, 6)
    with torch.no_grad():
        whole = layer(x, mask=causal() & padding(real))
        parts = [
            layer(x[:, i : i + 3], mask=causal() & padding(real[:, : i + 3]), cache=cache)
            for i in (0, 3)
        ]
    assert cache.next_position.tolist() == [4, 6]
    assert_near(torch.cat(parts, 1)[real], whole[real], terms=16)


@pytest.mark.parametrize("name", ["rotary", "alibi", "t5"])
def test_given_positions_replace_counting(name):
    layer, x = placed(name), draw(2, 5, 16)
    index = torch.arange(5)
    plain = layer(x, mask=causal())
    assert torch.equal(layer(x, mask=causal(), positions=index), plain)
    assert_near(layer(x, mask=causal(), positions=index + 40), plain, terms=16 * 40)
    rows = torch.stack((index, index * 3))
    apart = layer(x, mask=causal(), positions=rows)
    assert_near(apart[:1], plain[:1], terms=16)
    assert float((apart[1] - plain[1]).detach().abs().max()) > 1e-3
    # Packed documents: each counts from 0, and sees itself only.
    ids = torch.tensor([0, 0, 0, 1, 1])
    packed = layer(x, mask=causal() & documents(ids), positions=torch.tensor([0, 1, 2, 0, 1]))
    assert_near(packed[:, 3:], layer(x[:, 3:], mask=causal()), terms=16)


def test_a_half_layer_keeps_exact_rotation_far_out():
    """Moving a model to bfloat16 must round neither frequencies nor positions."""
    layer = placed("rotary", dtype=torch.bfloat16)
    x = draw(1, 6, 16).bfloat16()
    index = torch.arange(6)
    near = layer(x, mask=causal(), positions=index)
    far = layer(x, mask=causal(), positions=index + 100_000)
    # Each turn rounds q and k once to bfloat16: a few ulps, not the O(1) of a rounded position.
    assert_near(far, near, terms=4)


def test_alibi_by_key_equals_alibi_by_distance_under_a_causal_mask():
    x = draw(2, 9, 16)
    real = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1] * 9])
    for mask in (causal(), window(4), causal() & padding(real)):
        assert_near(placed("alibi by key")(x, mask=mask), placed("alibi")(x, mask=mask), terms=16)
    with pytest.raises(ValueError, match=r"ALiBi\(form='key'\): needs a causal mask, got none"):
        placed("alibi by key")(x)
    with pytest.raises(ValueError, match="a sink logit notices"):
        MultiHeadAttention(16, 4, position=ALiBi("key"), options=AttentionOptions(sinks=True))


# --- caches --------------------------------------------------------------------------------------

CHUNKS = [[9], [1] * 9, [4, 5], [3, 1, 1, 4], [2, 0, 7]]


@pytest.mark.parametrize("name", POSITIONS)
@pytest.mark.parametrize("chunks", CHUNKS)
def test_chunks_single_tokens_and_one_pass_agree(name, chunks):
    options = AttentionOptions(qk_norm=True, softcap=8.0, output_gate=True)
    for dtype in (torch.float32, torch.float64):
        layer = placed(name, dtype=dtype, options=options)
        x = draw(2, 9, 16, dtype=dtype)
        cache = layer.make_cache(2, 9)
        with torch.no_grad():
            whole = layer(x, mask=causal())
            parts = [layer(part, mask=causal(), cache=cache) for part in x.split(chunks, 1)]
        assert_near(torch.cat(parts, 1), whole, terms=16)


@pytest.mark.parametrize("name", [name for name in POSITIONS if name != "alibi by key"])
@pytest.mark.parametrize("rolling", [True, False])
@pytest.mark.parametrize("size", [1, 3, 5])
def test_a_window_needs_only_a_rolling_cache(name, rolling, size):
    layer = placed(name, options=AttentionOptions(window=size, sinks=True))
    x = draw(2, 23, 16)
    cache = layer.make_cache(2) if rolling else layer.make_cache(2, 23)
    with torch.no_grad():
        whole = layer(x)
        chunks = [1, 1, 4, 1, 1, 1, 11, 1, 1, 1]
        parts = [layer(part, cache=cache) for part in x.split(chunks, 1)]
    assert_near(torch.cat(parts, 1), whole, terms=16)
    assert cache.seen == 23 and cache.length == (size if rolling else 23)


def test_a_window_of_two_sides_is_that_mask():
    layer, x = placed("none", options=AttentionOptions(window=(2, 1))), draw(2, 7, 16)
    plain = placed("none")
    wanted = plain(x, mask=window(left=2, right=1))
    assert_near(layer(x), wanted, terms=16)
    mirrored = plain(x, mask=window(left=1, right=2))
    assert not torch.allclose(mirrored, wanted, rtol=0, atol=0.01), "the sides matter"


def test_a_rolling_cache_remembers_padding_and_positions():
    layer = placed("rotary", options=AttentionOptions(window=3))
    x = draw(2, 9, 16)
    real = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]).bool()
    cache = layer.make_cache(2)
    with torch.no_grad():
        out = [layer(x[:, :4], mask=padding(real), cache=cache)]
        out += [layer(x[:, i : i + 1], cache=cache) for i in range(4, 9)]
        assert cache.next_position.tolist() == [7, 9], "all tokens ever seen, not those held"
        alone = layer(x[:1, 2:])
    assert_near(torch.cat(out, 1)[:1, 2:], alone, terms=16)


def test_the_gap_between_cache_and_no_cache_is_rounding_and_a_lost_key_is_not():
    gaps, lost = {}, {}
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        layer, x = placed("rotary", dtype=dtype), draw(1, 9, 16).to(dtype)
        cache = layer.make_cache(1, 9)
        with torch.no_grad():
            whole = layer(x, mask=causal())
            steps = [layer(x[:, i : i + 1], mask=causal(), cache=cache) for i in range(9)]
            # The planted bug: the newest key is hidden from its own query.
            shut = ~torch.eye(9, dtype=torch.bool)
            planted = layer(x, mask=causal() & keep(shut))
        gaps[dtype] = float((torch.cat(steps, 1) - whole).abs().max())
        lost[dtype] = float((planted - whole).abs().max())
        assert gaps[dtype] <= rounding(dtype, terms=16, size=float(whole.abs().max()))
    assert gaps[torch.float64] < 1e-3 * max(gaps[torch.float32], 1e-7)
    assert all(gap > 0.1 for gap in lost.values())


def test_a_mask_that_does_not_fit_leaves_the_cache_alone():
    layer, x = placed("rotary"), draw(2, 4, 16)
    cache = layer.make_cache(2, 9)
    with torch.no_grad():
        whole = layer(x, mask=causal())
        layer(x[:, :3], mask=causal(), cache=cache)
        with pytest.raises(ValueError, match=r"padding: real: wanted shape \(2, 4\), got \(2, 1\)"):
            layer(x[:, 3:], mask=padding(torch.ones(2, 1, dtype=torch.bool)), cache=cache)
        assert cache.seen == 3
        assert_near(layer(x[:, 3:], mask=causal(), cache=cache), whole[:, 3:], terms=16)


def test_beams_reorder_and_drafts_are_taken_back():
    layer, x = placed("alibi"), draw(2, 8, 16)
    cache = layer.make_cache(2, 8)
    with torch.no_grad():
        layer(x[:, :5], mask=causal(), cache=cache)
        layer(draw(2, 2, 16, seed=7), mask=causal(), cache=cache)
        cache.crop(5)
        cache.reorder(torch.tensor([1, 1]))
        got = layer(x[:, 5:], mask=causal(), cache=cache)
        swapped = torch.cat((x[[1, 1], :5], x[:, 5:]), 1)
        assert_near(got, layer(swapped, mask=causal())[:, 5:], terms=16)


def test_a_cache_and_gradients_do_not_mix_in_silence():
    layer, x = placed("none"), draw(1, 3, 16)
    with pytest.raises(ValueError, match=r"call the layer under torch\.no_grad\(\)"):
        layer(x, mask=causal(), cache=layer.make_cache(1, 4))


def test_prefix_and_sink_masks_join_a_cache():
    layer, x = placed("rotary"), draw(1, 9, 16)
    mask = causal() & (window(3) | prefix(2))
    cache = layer.make_cache(1, 9)
    with torch.no_grad():
        whole = layer(x, mask=mask)
        parts = [layer(x[:, i : i + 1], mask=mask, cache=cache) for i in range(9)]
    assert_near(torch.cat(parts, 1), whole, terms=16)


# --- ordinary modules, compilers -----------------------------------------------------------------


def test_projections_are_called_as_modules():
    layer, x = build(4, 2), draw(1, 3, 4)
    before, calls = layer(x), []

    class Shifted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 100

    shifted = Shifted(4, 4)
    shifted.load_state_dict(layer.out_proj.state_dict())
    layer.out_proj = shifted
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        module = getattr(layer, name)
        assert isinstance(module, nn.Linear)
        module.register_forward_hook(lambda *_, name=name: calls.append(name))
    assert_near(layer(x), before + 100, terms=4)
    assert sorted(calls) == ["k_proj", "out_proj", "q_proj", "v_proj"]


class Int8Linear(nn.Module):
    """What a weight-only quantiser puts in a Linear's place; it has no `weight`."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.step = weight.abs().amax(1, keepdim=True) / 127
        self.whole = (weight / self.step).round().to(torch.int8)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.whole.to(x.dtype) * self.step, self.bias)


def test_a_quantiser_may_replace_the_projections():
    layer, x = build(16, 4, options=AttentionOptions(output_gate=True)), draw(1, 5, 16)
    with torch.no_grad():
        whole = layer(x, mask=causal())
        for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "out_proj"):
            setattr(layer, name, Int8Linear(getattr(layer, name)))
        small = layer(x, mask=causal())
        cache = layer.make_cache(1, 5, dtype=torch.float32, device="cpu")
        parts = [layer(part, mask=causal(), cache=cache) for part in x.split([4, 1], 1)]
    gap = float((small - whole).abs().max())
    # Every weight is off by up to half a step, 1/254 of the largest of its row.
    assert 0 < gap < 5 * 16**0.5 / 254 * float(whole.abs().max())
    assert_near(torch.cat(parts, 1), small, terms=16)


def test_state_dict_round_trip():
    options = AttentionOptions(qk_norm=True, sinks=True, output_gate=True)
    one = build(16, 4, position=RelativeBias(4), options=options)
    two = build(16, 4, position=RelativeBias(4), options=options, seed=1)
    x = draw(2, 5, 16)
    assert not torch.equal(one(x), two(x))
    two.load_state_dict(one.state_dict())
    assert torch.equal(one(x), two(x))


COMPILED = {
    "plain": (dict(), lambda: causal()),
    "rotary, grouped": (dict(position=Rotary(scaling=YaRNScaling(2.0, 8)), num_kv_heads=2), causal),
    "dynamic rotary": (dict(position=Rotary(scaling=NTKScaling(2.0, 4))), causal),
    "alibi": (dict(position=ALiBi()), causal),
    "t5, no mask": (dict(position=RelativeBias(4)), lambda: None),
    "all options": (
        dict(
            options=AttentionOptions(
                qk_norm=True, sinks=True, softcap=4.0, output_gate=True, window=3
            )
        ),
        causal,
    ),
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_whole_it_computes_the_same(name):
    kwargs, mask = COMPILED[name]
    torch.compiler.reset()
    layer, x = build(16, 4, **kwargs), draw(2, 5, 16)
    compiled = torch.compile(
        lambda x: layer(x, mask=mask()), fullgraph=True, backend="aot_eager", dynamic=False
    )
    assert_near(compiled(x), layer(x, mask=mask()), terms=16)
    out, wanted = compiled(x.requires_grad_()), layer(x, mask=mask())
    (got,) = torch.autograd.grad(out.pow(2).sum(), x)
    (want,) = torch.autograd.grad(wanted.pow(2).sum(), x)
    assert_near(got, want, terms=64)


@pytest.mark.slow
def test_compiled_by_inductor_it_computes_the_same():
    layer, x = build(16, 4, num_kv_heads=2, position=Rotary()), draw(2, 5, 16)
    compiled = torch.compile(lambda x: layer(x, mask=causal()), fullgraph=True)
    with torch.no_grad():
        assert_near(compiled(x), layer(x, mask=causal()), terms=16)


@pytest.mark.parametrize("name", COMPILED)
def test_exported_it_computes_the_same_at_another_length(name):
    kwargs, mask = COMPILED[name]
    layer = build(16, 4, **kwargs)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x, mask=mask())

    length = torch.export.Dim("length", min=2, max=64)
    program = torch.export.export(
        Model(), (draw(2, 5, 16),), dynamic_shapes=({1: length},), strict=False
    )
    x = draw(2, 11, 16, seed=5)
    assert_near(program.module()(x), layer(x, mask=mask()), terms=16)


def test_autocast_keeps_one_dtype_inside():
    options = AttentionOptions(qk_norm=True, sinks=True, output_gate=True)
    layer = build(16, 4, position=ALiBi(), options=options)
    x = draw(2, 5, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x, mask=causal())
    assert out.dtype == torch.bfloat16
    assert_near(out, layer(x, mask=causal()), terms=16)


def test_a_call_is_made_of_the_parts():
    """The layer builds the call; what it hands over is what the trace shows."""
    layer, x = placed("t5", options=AttentionOptions(scale=1.0)), draw(2, 5, 16)
    seen: list[AttentionCall] = []
    from headwise.attention import observers

    observers.append(lambda call, output: seen.append(call))
    try:
        layer(x, mask=causal())
    finally:
        observers.pop()
    (call,) = seen
    assert (call.scale, call.num_heads, call.num_kv_heads) == (1.0, 4, 2)
    assert call.bias is not None and call.bias.shape == (1, 4, 5, 5)
    assert call.visible.is_causal
    trace = layer.trace(x, mask=causal())
    assert_near(call.query, trace["query"], terms=16)
    assert_near(call.bias, trace["biased"][:1] - trace["scaled"][:1], terms=16)


def test_counting_helper_is_what_the_layer_uses():
    real = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    layer, x = placed("rotary"), draw(2, 5, 16)
    mask = causal() & padding(real)
    counted = layer(x, mask=mask, positions=count_positions(real))
    assert torch.equal(counted, layer(x, mask=mask))


def test_make_cache_fits_the_layer():
    layer = build(16, 4, num_kv_heads=2, options=AttentionOptions(value_head_dim=3))
    cache = layer.make_cache(2, 5)
    assert isinstance(cache, KVCache) and cache.dtype == torch.float32
    assert cache.nbytes == 2 * 2 * 5 * (4 + 3) * 4
    assert layer.make_cache(2, 5, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert layer.bfloat16().make_cache(2, 5).dtype == torch.bfloat16
    rolling = build(16, 4, options=AttentionOptions(window=(3, 0))).make_cache(2)
    assert isinstance(rolling, RollingKVCache) and rolling.window == 4
