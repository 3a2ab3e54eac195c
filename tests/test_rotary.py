"""Rotary embedding and its scalings, against transformers, complex numbers and hand-made cases."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headwise.rotary import LinearScaling, Llama3Scaling, NTKScaling, Rotary, YaRNScaling
from tolerances import assert_near

F32 = torch.finfo(torch.float32).eps


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def llama_rotary(head_dim: int, positions: int = 1024, **rope):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = {"rope_type": "default", "rope_theta": 10000.0} | rope
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=positions,
        rope_parameters=rope,
    )
    return config, LlamaRotaryEmbedding(config)


SCALINGS = {
    "linear": ({"factor": 4.0}, LinearScaling(4.0)),
    "yarn": (
        {"factor": 4.0, "original_max_position_embeddings": 256},
        YaRNScaling(4.0, 256),
    ),
    "yarn, ramp cut at the first pair": (
        {"factor": 8.0, "original_max_position_embeddings": 64},
        YaRNScaling(8.0, 64),
    ),
    "yarn, ends not rounded": (
        {"factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
        YaRNScaling(32.0, 4096, truncate=False),
    ),
    "yarn, own ramp and factor": (
        {
            "factor": 8.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "attention_factor": 1.25,
        },
        YaRNScaling(8.0, 128, beta_fast=16.0, beta_slow=2.0, attention_factor=1.25),
    ),
    "llama3": (
        {
            "factor": 8.0,
            "original_max_position_embeddings": 512,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
        Llama3Scaling(8.0, 512),
    ),
}


@pytest.mark.parametrize("base", [10000.0, 500000.0])
@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_frequencies_are_those_of_transformers(name, base):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    settings_, scaling = SCALINGS[name]
    kind = name.split(",")[0]
    config, _ = llama_rotary(64, rope_type=kind, rope_theta=base, **settings_)
    wanted, wanted_factor = ROPE_INIT_FUNCTIONS[kind](config)
    got, factor = Rotary(base=base, scaling=scaling).frequencies(64)
    assert got.dtype == torch.float64
    # Theirs are float32: the exponent's rounding times ln(base), and the powers' own. Blends of
    # Llama 3 also lose what turns - low cancels, up to the number of turns.
    bound = 8 * F32 * math.log(base)
    assert torch.allclose(got, wanted.double(), rtol=bound, atol=0)
    assert factor == pytest.approx(wanted_factor, rel=1e-12)
    plain, _ = Rotary(base=base).frequencies(64)
    assert not torch.allclose(got, plain, rtol=bound, atol=0), "the scaling did something"


@pytest.mark.parametrize("length", [7, 256, 257, 3000])
def test_dynamic_ntk_is_that_of_transformers_at_every_length(length):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config, _ = llama_rotary(32, positions=256, rope_type="dynamic", factor=4.0)
    wanted, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, seq_len=length)
    got, factor = Rotary(scaling=NTKScaling(4.0, 256)).frequencies(32, longest=length)
    assert factor == 1.0
    assert torch.allclose(got, wanted.double(), rtol=8 * F32 * math.log(1e6), atol=0)


def test_fixed_ntk_keeps_the_fastest_pair_and_divides_the_slowest_by_the_factor():
    dim, factor = 64, 8.0
    plain, _ = Rotary().frequencies(dim)
    got, _ = Rotary(scaling=NTKScaling(factor)).frequencies(dim)
    assert got[0] == plain[0]
    assert float(plain[-1] / got[-1]) == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("scaling", [None, NTKScaling(4.0, 16), YaRNScaling(4.0, 256)])
def test_a_table_takes_its_frequencies_and_its_factor_from_the_scaling(scaling):
    rotary = Rotary(scaling=scaling)
    cos, sin = rotary.table(torch.arange(40), 8, torch.float64)
    frequencies, factor = rotary.frequencies(8, longest=40)
    assert (factor > 1) == isinstance(scaling, YaRNScaling)
    angles = torch.arange(40)[:, None] * frequencies
    bound = 4 * torch.finfo(torch.float64).eps * 40
    assert torch.allclose(cos[0, 0], angles.cos() * factor, rtol=0, atol=bound)
    assert torch.allclose(sin[0, 0], angles.sin() * factor, rtol=0, atol=bound)


def test_a_longer_neighbour_does_not_change_a_row_under_dynamic_ntk():
    rotary = Rotary(scaling=NTKScaling(4.0, 16))
    x = draw(2, 3, 40, 8)
    short = torch.arange(40) % 10
    alone = rotary.rotate(x[:1], short[None])
    joined = rotary.rotate(x, torch.stack((short, torch.arange(40))))
    assert torch.equal(joined[:1], alone)
    assert not torch.equal(joined[1:], rotary.rotate(x[1:], short[None]))


@pytest.mark.parametrize("positions", [torch.arange(11), torch.arange(22).view(2, 11) * 37])
def test_rotation_is_that_of_llama(positions):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    _, theirs = llama_rotary(16, positions=4096)
    q = draw(2, 4, 11, 16, dtype=torch.float32)
    rows = positions if positions.dim() == 2 else positions[None]
    wanted, _ = apply_rotary_pos_emb(q, q, *theirs(q, rows))
    got = Rotary().rotate(q, positions)
    # Their angle is a float32 product: off by 2 eps of the largest angle.
    bound = (2 * int(positions.max()) + 8) * F32 * float(q.abs().max())
    assert torch.allclose(got, wanted, rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_interleaved_pairs_turn_as_complex_numbers(dtype):
    x, positions = draw(2, 3, 7, 10, dtype=dtype), torch.arange(100, 107)
    frequencies, _ = Rotary().frequencies(10)
    phase = torch.polar(torch.ones(7, 5, dtype=torch.float64), positions[:, None] * frequencies)
    pairs = torch.view_as_complex(x.double().unflatten(-1, (5, 2)).contiguous())
    wanted = torch.view_as_real(pairs * phase).flatten(-2)
    got = Rotary(interleaved=True).rotate(x, positions)
    assert got.dtype == dtype
    assert_near(got, wanted, terms=2)


def test_the_two_layouts_are_one_rotation_of_permuted_features():
    x, positions = draw(1, 2, 5, 8), torch.arange(5)
    halves = Rotary().rotate(torch.cat((x[..., 0::2], x[..., 1::2]), -1), positions)
    pairs = Rotary(interleaved=True).rotate(x, positions)
    assert torch.equal(halves, torch.cat((pairs[..., 0::2], pairs[..., 1::2]), -1))
    assert not torch.equal(pairs, Rotary().rotate(x, positions))


def test_the_query_stands_after_the_cached_keys():
    """A newly decoded token turned as position 0 would see the scores in reverse order."""
    key = Rotary().rotate(torch.tensor([1.0, 0.0]).expand(1, 1, 4, 2), torch.arange(4))
    query = Rotary().rotate(torch.tensor([1.0, 0.0]).expand(1, 1, 1, 2), torch.tensor([3]))
    scores = (query @ key.mT).flatten()
    wanted = torch.tensor([-0.989992, -0.416147, 0.540302, 1.0])
    assert torch.allclose(scores, wanted, rtol=0, atol=1e-6)


@given(
    shift=st.integers(0, 100_000),
    dim=st.sampled_from([2, 6, 14]),
    interleaved=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
def test_scores_know_only_the_distance(shift, dim, interleaved, seed):
    rotary = Rotary(interleaved=interleaved)
    q, k = draw(1, 1, 5, dim, seed=seed), draw(1, 1, 5, dim, seed=seed + 1)
    index = torch.arange(5)
    near = rotary.rotate(q, index) @ rotary.rotate(k, index).mT
    far = rotary.rotate(q, index + shift) @ rotary.rotate(k, index + shift).mT
    bound = torch.finfo(torch.float64).eps * (shift + 16) * dim * 16
    assert torch.allclose(near, far, rtol=0, atol=bound)


@pytest.mark.parametrize("position", [257, 100_003, 1_000_003])
def test_half_types_turn_by_the_exact_angle_at_large_positions(position):
    """In bfloat16 the number 100003 is 99840, and a float32 angle is off by 1e-2."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = draw(1, 1, 1, 8).to(dtype)
        got = Rotary().rotate(x, torch.tensor([position]))
        wanted = Rotary().rotate(x.double(), torch.tensor([position]))
        assert got.dtype == dtype
        bound = 2 * torch.finfo(dtype).eps * float(x.double().norm())
        assert torch.allclose(got.double(), wanted, rtol=0, atol=bound)


@pytest.mark.parametrize("rotary", [Rotary(dim=4), Rotary(fraction=0.4)])
def test_partial_rotary_leaves_the_other_features_alone(rotary):
    x, positions = draw(2, 3, 5, 10), torch.arange(5)
    got = rotary.rotate(x, positions)
    assert torch.equal(got[..., 4:], x[..., 4:])
    assert torch.equal(got[..., :4], Rotary().rotate(x[..., :4], positions))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rotary(base=1.0), r"base=1\.0 must be a finite number above 1"),
        (lambda: Rotary(fraction=0.0), r"fraction=0\.0 must lie in \(0, 1\]"),
        (lambda: Rotary(dim=4, fraction=0.5), r"dim=4 and fraction=0\.5 both say"),
        (lambda: Rotary().rotated(5), r"5 features to turn must be even.*head_dim=5"),
        (lambda: Rotary(dim=12).rotated(8), r"12 features to turn .* at most head_dim=8"),
        (lambda: LinearScaling(0.5), r"LinearScaling: factor=0\.5 must be .* at least 1"),
        (lambda: NTKScaling(math.inf), r"NTKScaling: factor=inf"),
        (lambda: YaRNScaling(0.0, 128), r"YaRNScaling: factor=0\.0"),
        (lambda: Llama3Scaling(8.0, 512, 4.0, 1.0), r"high_frequency=1\.0 must exceed"),
        (
            lambda: Rotary(scaling=NTKScaling(2.0)).frequencies(2),
            r"needs more than 2 rotated features a head, got 2",
        ),
        (
            lambda: Rotary().rotate(draw(1, 1, 3, 4), torch.zeros(1, 1, 3, dtype=torch.long)),
            r"positions must be \(length,\) or \(batch, length\), got \(1, 1, 3\)",
        ),
    ],
)
def test_wrong_numbers_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_positions_in_a_half_type_are_refused():
    with pytest.raises(TypeError, match=r"must be integers, got torch\.bfloat16"):
        Rotary().rotate(draw(1, 1, 3, 4), torch.arange(3).bfloat16())
