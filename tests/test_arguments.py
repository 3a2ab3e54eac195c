"""What a layer refuses, and the words it uses: operation, wanted, got, likely cause."""

import inspect

import pytest
import torch

from headwise.cache import RollingKVCache
from headwise.layer import MultiHeadAttention
from headwise.masks import causal
from headwise.options import AttentionOptions
from headwise.positions import RelativeBias
from headwise.rotary import NTKScaling, Rotary

MHA = MultiHeadAttention


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


BUILDS = [
    (
        lambda: MHA(10, 3),
        r"^MultiHeadAttention: num_heads=3 does not divide embed_dim=10; pass head_dim= to "
        r"choose it freely, or num_heads=2$",
    ),
    (lambda: MHA(96, 7), "num_heads=7 does not divide embed_dim=96; .* or num_heads=(6|8)$"),
    (
        lambda: MHA(12, 6, num_kv_heads=4),
        r"num_kv_heads=4 does not divide num_heads=6, .*; num_kv_heads=3 would do$",
    ),
    (lambda: MHA(12, 2, num_kv_heads=4), "num_kv_heads=4 does not divide num_heads=2"),
    (lambda: MHA(0, 2), "embed_dim=0 must be at least 1"),
    (lambda: MHA(8, 0), "num_heads=0 must be at least 1"),
    (lambda: MHA(8, 2, num_kv_heads=0), "num_kv_heads=0 must be at least 1"),
    (lambda: MHA(8, 2, head_dim=0), "head_dim=0 must be at least 1"),
    (lambda: MHA(8, 2, dropout=1.0), r"dropout=1\.0 must lie in \[0, 1\)"),
    (lambda: MHA(9, 3, position=Rotary()), "3 features to turn must be even.*head_dim=3"),
    (lambda: AttentionOptions(scale=0.0), r"scale=0\.0 must be a finite number above 0; leave it"),
    (lambda: AttentionOptions(softcap=-1.0), r"softcap=-1\.0 must be a finite number above 0"),
    (lambda: AttentionOptions(window=0), "size counts the query's own key"),
    (lambda: AttentionOptions(window=(1, -1)), "right counts keys beside the query's own; got -1"),
    (lambda: AttentionOptions(value_head_dim=0), "value_head_dim=0 must be at least 1"),
    (lambda: MHA(8, 2).make_cache(1), "pass capacity=, the most tokens it must hold"),
    (
        lambda: MHA(8, 2, options=AttentionOptions(window=(2, 1))).make_cache(1),
        "pass capacity=, the most tokens it must hold",
    ),
]

ROLLING = RollingKVCache(2, 2, 4, 4)
CALLS = [
    (
        MHA(8, 2),
        (zeros(5, 8),),
        {},
        r"x must be batch first, .* got 2 axes: \(5, 8\); .*x\[None\]",
    ),
    (MHA(8, 2), (zeros(2, 2, 5, 4),), {}, r"got 4 axes: .*; heads are split inside the layer"),
    (MHA(8, 2), (zeros(2, 5, 10),), {}, r"x has 10 features, wanted embed_dim=8; its shape is"),
    (
        MHA(8, 2, kdim=6),
        (zeros(2, 5, 8),),
        {},
        r"kdim=6 differs from embed_dim=8, so this layer attends to another .*; pass context=",
    ),
    (
        MHA(8, 2, kdim=24, vdim=12),
        (zeros(2, 5, 8), zeros(2, 3, 24)),
        {},
        r"kdim=24 and vdim=12 differ, so context must be a pair .* shape \(2, 3, 24\)",
    ),
    (
        MHA(8, 2, vdim=4),
        (zeros(2, 5, 8), (zeros(2, 3, 8), zeros(2, 3, 10))),
        {},
        r"value context has 10 features, wanted vdim=4",
    ),
    (
        MHA(8, 2, kdim=6),
        (zeros(2, 5, 8), (zeros(2, 3, 8), zeros(2, 3, 8))),
        {},
        r"key context has 8 features, wanted kdim=6",
    ),
    (
        MHA(8, 2),
        (zeros(2, 5, 8), (zeros(2, 3, 8), zeros(2, 4, 8))),
        {},
        r"must agree in \(batch, sequence\), got \(2, 3\) and \(2, 4\)",
    ),
    (
        MHA(8, 2),
        (zeros(2, 5, 8), zeros(7, 2, 8)),
        {},
        r"x has batch 2 and context has batch 7; .* tensor\.transpose\(0, 1\)",
    ),
    (
        MHA(8, 2, position=Rotary()),
        (zeros(2, 5, 8), zeros(2, 3, 8)),
        {},
        r"position=Rotary orders the tokens of one sequence, but context= is another sequence",
    ),
    (
        MHA(8, 2, options=AttentionOptions(window=3)),
        (zeros(2, 5, 8), zeros(2, 3, 8)),
        {},
        r"options\.window orders the tokens of one sequence",
    ),
    (
        MHA(8, 2),
        (zeros(2, 5, 8), zeros(2, 3, 8)),
        {"cache": ROLLING},
        r"cache= orders .*; use project_context\(\) once for many steps",
    ),
    (
        MHA(8, 2),
        (zeros(2, 5, 8),),
        {"positions": torch.arange(5)},
        r"positions= was given, but the layer has position=None",
    ),
    (
        MHA(8, 2, position=Rotary()),
        (zeros(2, 5, 8),),
        {"positions": torch.arange(6)},
        r"positions must be \(length,\) = \(5,\) or \(batch, length\) = \(2, 5\), got \(6,\)",
    ),
    (
        MHA(8, 2),
        (zeros(2, 5, 8),),
        {"cache": ROLLING},
        r"RollingKVCache keeps 4 keys, but the layer looks back without a limit; .*window=4",
    ),
    (
        MHA(8, 2, options=AttentionOptions(window=5)),
        (zeros(2, 5, 8),),
        {"cache": ROLLING},
        r"RollingKVCache keeps 4 keys, but the layer looks back over 5",
    ),
    (
        MHA(8, 2, options=AttentionOptions(window=(1, 1))),
        (zeros(2, 5, 8),),
        {"cache": ROLLING},
        r"RollingKVCache keeps 4 keys, but the layer looks back without a limit",
    ),
    (
        MHA(8, 2, position=Rotary(scaling=NTKScaling(2.0, 16))),
        (zeros(2, 5, 8),),
        {"cache": MHA(8, 2).make_cache(2, 9)},
        r"changes the rotary base as the text grows, but cached keys were turned with the old one",
    ),
]


@pytest.mark.parametrize(("build", "message"), BUILDS)
def test_layers_that_cannot_be_built(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(("layer", "args", "kwargs", "message"), CALLS)
def test_calls_that_cannot_be_made(layer, args, kwargs, message):
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        layer(*args, **kwargs)


@pytest.mark.parametrize("mask", [torch.ones(5, 5), torch.ones(5, 5, dtype=torch.bool), "causal"])
def test_a_mask_that_does_not_say_what_it_means_is_refused(mask):
    kind = type(mask).__name__
    for layer in (MHA(8, 2), MHA(8, 2, options=AttentionOptions(window=2))):
        with pytest.raises(TypeError, match=rf"mask is a {kind}, .*keep\(mask\) .*hide\(mask\)"):
            layer(zeros(2, 5, 8), mask=mask)


def test_unknown_keywords_are_errors():
    with pytest.raises(TypeError, match="unexpected keyword argument 'is_causal'"):
        MHA(8, 2)(zeros(2, 5, 8), is_causal=True)


def test_the_constructor_takes_at_most_ten_arguments():
    assert len(inspect.signature(MHA).parameters) <= 10


def test_a_correct_call_of_each_kind_passes():
    """The refusals above are not refusals of everything."""
    x = zeros(2, 5, 8)
    with torch.no_grad():
        assert MHA(8, 2)(x, mask=causal()).shape == x.shape
        assert MHA(8, 2, vdim=4)(x, (zeros(2, 3, 8), zeros(2, 3, 4))).shape == x.shape
        fits = MHA(8, 2, options=AttentionOptions(window=4))
        assert fits(x, cache=RollingKVCache(2, 2, 4, 4)).shape == x.shape


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"position": "rotary"}, TypeError, "position is Rotary.* or None, got 'rotary'"),
        ({"position": Rotary}, TypeError, "position is Rotary.*, got <class"),
        ({"position": RelativeBias(4)}, ValueError, "has num_heads=4, the layer has num_heads=2"),
        ({"options": {"sinks": True}}, TypeError, "options is AttentionOptions.*, got dict"),
    ],
)
def test_parts_of_another_kind_fail_where_the_layer_is_built(options, error, message):
    with pytest.raises(error, match=message):
        MHA(8, 2, **options)


@pytest.mark.parametrize(
    ("context", "message"),
    [
        (causal(), r"context is a mask \(_Band\); pass mask= by name"),
        ((zeros(2, 5, 8),) * 3, "context is one tensor, a pair .*; got a tuple of 3"),
        ("abc", "got a str"),
    ],
)
def test_a_context_of_another_kind_is_named(context, message):
    with pytest.raises(TypeError, match=message):
        MHA(8, 2)(zeros(2, 5, 8), context)
