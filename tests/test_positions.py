"""ALiBi, T5's relative bias, and positions counted from the real tokens."""

import itertools

import pytest
import torch
from torch import Tensor

from headwise.masks import causal, hide, keep, padding, prefix, window
from headwise.positions import (
    ALiBi,
    RelativeBias,
    alibi_slopes,
    count_positions,
    real_tokens,
    require_causal,
)


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# --- ALiBi ---------------------------------------------------------------------------------------


def test_slopes_are_those_of_the_authors_for_any_head_count():
    assert alibi_slopes(8) == [0.5**n for n in range(1, 9)]
    assert alibi_slopes(6) == [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]
    assert alibi_slopes(1) == [2.0**-8]
    for heads in range(1, 40):
        slopes = alibi_slopes(heads)
        assert len(slopes) == heads == len(set(slopes))
        assert all(0 < slope < 1 for slope in slopes)


def test_slopes_are_those_of_bloom():
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    for heads in (4, 6, 12, 13):
        ramp = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)
        theirs = ramp[:, 0, 1]
        ours = torch.tensor(alibi_slopes(heads))
        assert torch.allclose(ours, theirs, rtol=4 * torch.finfo(torch.float32).eps, atol=0)


def test_distance_form_by_hand():
    bias = ALiBi().bias(torch.tensor([2, 3]), torch.arange(4), num_heads=2)
    steps = torch.tensor([[-2.0, -1, 0, -1], [-3, -2, -1, 0]])
    assert torch.equal(bias, torch.stack((steps / 16, steps / 256))[None])


def test_key_form_differs_from_the_distance_form_by_a_number_a_row():
    index = torch.arange(7)
    distance = ALiBi().bias(index, index, num_heads=3, dtype=torch.float64)
    key = ALiBi("key").bias(index, index, num_heads=3, dtype=torch.float64)
    assert key.shape == (1, 3, 1, 7), "memory does not grow with the queries"
    seen = causal().dense(7, 7)
    gap = torch.where(seen, key - distance, torch.nan)
    assert torch.equal(gap.nan_to_num(-1e9).amax(-1), gap.nan_to_num(1e9).amin(-1))


def test_rows_have_their_own_positions():
    queries, keys = torch.tensor([[5], [9]]), torch.tensor([[3, 5], [1, 9]])
    bias = ALiBi().bias(queries, keys, num_heads=1)
    assert torch.equal(bias[:, 0, 0] * 2.0**8, torch.tensor([[-2.0, 0], [-8, 0]]))


def test_half_types_round_the_product_once():
    bias = ALiBi().bias(torch.tensor([1000]), torch.arange(1001), num_heads=6, dtype=torch.bfloat16)
    exact = ALiBi().bias(torch.tensor([1000]), torch.arange(1001), num_heads=6, dtype=torch.float64)
    half_ulp = torch.finfo(torch.bfloat16).eps / 2 * (1 + 1e-6)
    assert torch.allclose(bias.double(), exact, rtol=half_ulp, atol=0)


@pytest.mark.parametrize(
    ("mask", "allowed"),
    [
        (causal(), True),
        (window(2), True),
        (causal() & padding(torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])), True),
        (hide(torch.ones(5, 5, dtype=torch.bool).triu(1)), True),
        (hide(torch.ones(5, 5, dtype=torch.bool).triu(2)), False),
        (window(left=2, right=1), False),
        (causal() | prefix(2), False),
        # Three runs in the last row: packed bits.
        (causal() & hide(torch.tensor([[0, 1, 0, 1, 0]], dtype=torch.bool)), True),
        (hide(torch.tensor([[0, 1, 0, 1, 0]], dtype=torch.bool)), False),
        (None, False),
    ],
)
def test_key_form_is_refused_where_a_later_key_is_seen(mask, allowed):
    query = draw(2, 2, 5, 4)
    if allowed:
        require_causal(query, 5, mask)
    else:
        with pytest.raises(ValueError, match=r"ALiBi\(form='key'\): needs a causal mask"):
            require_causal(query, 5, mask)


def test_key_form_refuses_half_types_and_unknown_forms():
    with pytest.raises(ValueError, match=r"in torch\.bfloat16, loses the differences"):
        require_causal(draw(1, 1, 3, 4).bfloat16(), 3, causal())
    with pytest.raises(ValueError, match="form='keys' must be 'distance' or 'key'"):
        ALiBi("keys")


# --- T5 ------------------------------------------------------------------------------------------


def t5_attention(bidirectional: bool, buckets: int, furthest: int):
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5Attention

    config = T5Config(
        d_model=24,
        d_kv=6,
        num_heads=4,
        relative_attention_num_buckets=buckets,
        relative_attention_max_distance=furthest,
        is_decoder=not bidirectional,
    )
    return T5Attention(config, has_relative_attention_bias=True, layer_idx=0)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "furthest"), [(32, 128), (8, 20), (32, 1000)])
def test_relative_bias_is_that_of_t5_at_every_distance(bidirectional, buckets, furthest):
    theirs = t5_attention(bidirectional, buckets, furthest)
    ours = RelativeBias(4, num_buckets=buckets, max_distance=furthest, bidirectional=bidirectional)
    with torch.no_grad():
        weight = theirs.relative_attention_bias.weight
        weight.copy_(draw(buckets, 4))
        ours.weight.copy_(weight)
    length = furthest + 40
    index = torch.arange(length)
    assert torch.equal(ours.bias(index, index, num_heads=4), theirs.compute_bias(length, length))
    # Both ends of the buckets are used, so the comparison covered them.
    used = set(ours.buckets(index, index).unique().tolist())
    assert used == set(range(buckets)) - ({buckets // 2} if bidirectional else set())


def test_relative_bias_of_a_decoded_token_starts_after_the_cache():
    theirs = t5_attention(False, 32, 128)
    ours = RelativeBias(4, bidirectional=False)
    with torch.no_grad():
        ours.weight.copy_(theirs.relative_attention_bias.weight)
    wanted = theirs.compute_bias(1, 9, past_seen_tokens=8)
    assert torch.equal(ours.bias(torch.tensor([8]), torch.arange(9), num_heads=4), wanted)


def test_relative_bias_learns_and_its_gradient_is_the_same_each_time():
    bias = RelativeBias(3, num_buckets=8, max_distance=20)
    index, pull = torch.arange(30), draw(1, 3, 30, 30, dtype=torch.float32)
    grads = []
    for _ in range(2):
        bias.weight.grad = None
        (bias.bias(index, index, num_heads=3) * pull).sum().backward()
        grads.append(bias.weight.grad)
    assert torch.equal(*grads)
    buckets = bias.buckets(index, index)[0]
    wanted = torch.stack([pull[0, :, buckets == b].double().sum(-1) for b in range(8)])
    bound = torch.finfo(torch.float32).eps * 30 * 30
    assert torch.allclose(grads[0].double(), wanted, rtol=0, atol=bound)


def test_buckets_survive_a_move_to_half():
    bias = RelativeBias(2)
    before = bias.buckets(torch.arange(300), torch.arange(300))
    assert torch.equal(bias.half().buckets(torch.arange(300), torch.arange(300)), before)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RelativeBias(2, num_buckets=5), "num_buckets=5 must be at least 4 and even"),
        (lambda: RelativeBias(2, num_buckets=1, bidirectional=False), "num_buckets=1 .*at least 2"),
        (lambda: RelativeBias(2, max_distance=8), "max_distance=8 must exceed the 8 distances"),
        (
            lambda: RelativeBias(2).bias(torch.arange(2), torch.arange(2), num_heads=3),
            "built for num_heads=2, the layer has num_heads=3",
        ),
    ],
)
def test_relative_bias_names_wrong_numbers(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# --- positions under padding ---------------------------------------------------------------------


def test_positions_are_counted_from_the_real_tokens():
    real = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]])
    wanted = torch.tensor([[-1, -1, 0, 1, 2], [0, 1, 2, 2, 2], [-1] * 5])
    assert torch.equal(count_positions(real), wanted)
    assert torch.equal(
        count_positions(real, torch.tensor([3, 0, 7])), wanted + real.new_tensor([[3], [0], [7]])
    )


def test_real_tokens_are_read_out_of_joined_masks_only():
    real = torch.tensor([[0, 1, 1], [1, 1, 1]])
    pads = padding(real)
    right = torch.tensor([[True, True, False], [True, False, False]])
    lengths = padding(lengths=torch.tensor([2, 1]))
    for mask in (pads, causal() & pads, pads & causal(), causal() & (window(2) & pads)):
        got = real_tokens(mask, 2, 3)
        assert got is not None and torch.equal(got, real.bool())
    both = real_tokens(pads & lengths, 2, 3)
    assert both is not None and torch.equal(both, real.bool() & right)
    left = real_tokens(padding(lengths=torch.tensor([2, 1]), side="left"), 2, 3)
    assert left is not None and torch.equal(left, right.flip(1))
    for mask in (None, causal(), ~pads, causal() | pads):
        assert real_tokens(mask, 2, 3) is None
    for batch, keys in itertools.product((2, 4), (3, 5)):
        if (batch, keys) != (2, 3):
            assert real_tokens(pads, batch, keys) is None, "left for the mask to refuse"


def test_causality_is_read_from_runs_and_bits_together():
    """Padding cuts the runs, the bits cut them again: no query sees a later key."""
    holes = torch.ones(9, 9, dtype=torch.bool).tril()
    holes[:, 1::2] = False
    holes |= torch.eye(9, dtype=torch.bool)
    mask = keep(holes) & padding(lengths=torch.tensor([9]))
    seen = require_causal(draw(1, 1, 9, 4), 9, mask)
    assert seen.bits is not None and seen.intervals is not None, "the case that was misread"
    holes[0, 5] = True
    with pytest.raises(ValueError, match="some query sees a later key"):
        require_causal(draw(1, 1, 9, 4), 9, keep(holes) & padding(lengths=torch.tensor([9])))
