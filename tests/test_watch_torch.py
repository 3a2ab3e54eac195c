"""Watching torch's own attention: SDPA, nn.MultiheadAttention, fused encoder layers."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as imported_by_name

from headwise.reference import attention_steps, merge_heads
from headwise.watch import watch
from headwise.watch.session import local
from watching import assert_all_reproduce, assert_reproduces, assert_same_bits, watched


class Block(nn.Module):
    """timm's ViT block: fused qkv, SDPA, residuals."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, self.num_heads, width // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v, dropout_p=0.0)
        return self.proj(x.transpose(1, 2).reshape(batch, length, width))


class Calls(nn.Module):
    """One SDPA call with whatever arguments a test gives."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return F.scaled_dot_product_attention(*args, **kwargs)


def qkv(
    batch: int = 2, heads: int = 3, queries: int = 5, keys: int = 7, **kind: Any
) -> list[Tensor]:
    made = torch.Generator().manual_seed(1)
    sizes = (queries, keys, keys)
    return [torch.randn(batch, heads, n, 11, generator=made, **kind) for n in sizes]


def expected_projection(layer: nn.MultiheadAttention, call: Any) -> Tensor:
    """What nn.MultiheadAttention returns if the recorded call is right."""
    output = merge_heads(attention_steps(call.call.to(torch.float64))["output"])
    weight, bias = layer.out_proj.weight.double(), layer.out_proj.bias
    return F.linear(output, weight, None if bias is None else bias.double())


def projection_limit(width: int, keys: int, scale: float) -> float:
    """Sums over the width and over the keys, in float32."""
    return 8 * torch.finfo(torch.float32).eps * (width + keys) ** 0.5 * scale


# --- scaled_dot_product_attention ----------------------------------------------------------------


def test_vit_block() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(33, 3), Block(33, 3)).eval()
    x = torch.randn(2, 7, 33)
    seen, _ = watched(model, lambda: model(x))
    assert_all_reproduce(seen, 2)
    assert [(c.id, c.module, c.mask_words) for c in seen] == [
        ("self/0", "0.attn", "full"),
        ("self/1", "1.attn", "full"),
    ]
    assert seen[0].call.num_heads == 3 and seen[0].route == "F.scaled_dot_product_attention"


@pytest.mark.parametrize(
    ("queries", "keys", "words"),
    [(7, 7, "causal"), (5, 7, "causal from the first key"), (7, 5, "causal from the first key")],
)
def test_is_causal_is_aligned_at_the_start_as_torch_does(
    queries: int, keys: int, words: str
) -> None:
    model, (q, k, v) = Calls(), qkv(queries=queries, keys=keys)
    seen, _ = watched(model, lambda: model(q, k, v, is_causal=True))
    assert_all_reproduce(seen, 1)
    assert words in seen[0].mask_words


def masks_of(kind: str) -> Tensor:
    grid = torch.rand(2, 3, 5, 7, generator=torch.Generator().manual_seed(3)) < 0.6
    grid[..., 0] = True
    real = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0]]).bool()[:, None, None]
    additive = torch.zeros(2, 1, 1, 7).masked_fill(~real, -torch.inf)
    return {
        "bool (L, S)": grid[0, 0],
        "bool (H, L, S)": grid[0],
        "bool (B, H, L, S)": grid,
        "bool (B, 1, 1, S)": real,
        "0 and -inf": additive,
        "0 and the dtype's minimum": additive.clamp(min=torch.finfo(torch.float32).min),
        "0 and -1e4": additive.clamp(min=-1e4),
        "real": torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(4)),
        "real and -inf": torch.randn(1, 3, 5, 7).masked_fill(~grid, -torch.inf),
    }[kind]


@pytest.mark.parametrize(
    ("kind", "masked", "biased"),
    [
        ("bool (L, S)", True, False),
        ("bool (H, L, S)", True, False),
        ("bool (B, H, L, S)", True, False),
        ("bool (B, 1, 1, S)", True, False),
        ("0 and -inf", True, False),
        ("0 and the dtype's minimum", True, False),
        ("0 and -1e4", True, False),
        ("real", False, True),
        ("real and -inf", True, True),
    ],
)
def test_masks_are_read_back(kind: str, masked: bool, biased: bool) -> None:
    model, (q, k, v), grid = Calls(), qkv(), masks_of(kind)
    seen, _ = watched(model, lambda: model(q, k, v, attn_mask=grid, scale=0.3))
    assert_all_reproduce(seen, 1)
    call = seen[0].call
    assert (call.mask is not None, call.bias is not None) == (masked, biased)
    if kind in ("bool (B, 1, 1, S)", "0 and -inf", "0 and -1e4"):
        assert seen[0].mask_words == "padding"
        assert seen[0].real_keys.sum(1).tolist() == [7, 4]


@pytest.mark.parametrize("make", [causal_lower_right, causal_upper_left])
def test_torch_causal_bias_objects(make: Any) -> None:
    model, (q, k, v) = Calls(), qkv()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bias = make(5, 7)
        seen, _ = watched(model, lambda: model(q, k, v, attn_mask=bias))
    assert_all_reproduce(seen, 1)
    assert ("first key" in seen[0].mask_words) == (make is causal_upper_left)


@pytest.mark.parametrize("attribute", [{"num_key_value_groups": 3}, {"num_kv_heads": 2}])
def test_repeated_keys_are_grouped_again(attribute: dict) -> None:
    model, (q, k, v) = Calls(**attribute), qkv(heads=6)
    k, v = (x[:, :2].repeat_interleave(3, dim=1) for x in (k, v))
    seen, _ = watched(model, lambda: model(q, k, v))
    assert_all_reproduce(seen, 1)
    assert (seen[0].call.num_heads, seen[0].call.num_kv_heads) == (6, 2)


def test_different_keys_are_never_grouped_even_where_the_module_says_so() -> None:
    model, (q, k, v) = Calls(num_key_value_groups=3), qkv(heads=6)
    seen, _ = watched(model, lambda: model(q, k, v))
    assert_all_reproduce(seen, 1)
    assert seen[0].call.num_kv_heads == 6


def test_enable_gqa() -> None:
    model, (q, k, v) = Calls(), qkv(heads=6)
    seen, _ = watched(model, lambda: model(q, k[:, :2], v[:, :2], enable_gqa=True))
    assert_all_reproduce(seen, 1)
    assert seen[0].call.groups == 3


@pytest.mark.parametrize("axes", [2, 3, 5])
def test_other_ranks(axes: int) -> None:
    q, k, v = ((x[0, 0] if axes == 2 else x.flatten(0, 1)) for x in qkv())
    if axes == 5:
        q, k, v = (x.unflatten(0, (1, 2, 3)) for x in (q, k, v))
    model = Calls(num_heads=3)
    grid = torch.ones(5, 7).tril(2).bool()
    seen, _ = watched(model, lambda: model(q, k, v, grid))
    assert len(seen) == 1 and seen[0].output is not None
    assert_reproduces(seen[0])
    assert seen[0].call.query.shape == ((1, 1, 5, 11) if axes == 2 else (2, 3, 5, 11))


def test_name_imported_into_the_models_own_module() -> None:
    class ByName(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return imported_by_name(q, k, v)

    before = imported_by_name
    model, (q, k, v) = ByName(), qkv()
    seen, _ = watched(model, lambda: model(q, k, v))
    assert_all_reproduce(seen, 1)
    assert imported_by_name is before


def test_half_precision_and_autocast() -> None:
    model, (q, k, v) = Calls(), qkv(dtype=torch.bfloat16)
    assert_all_reproduce(watched(model, lambda: model(q, k, v))[0], 1)

    def run() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(q.float(), k.float(), v)

    seen, out = watched(model, run)
    assert out.dtype == torch.bfloat16 and seen[0].call.query.dtype == torch.bfloat16
    assert_all_reproduce(seen, 1)


def test_training_run_keeps_gradients_and_random_numbers() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(24, 4, 48, dropout=0.25, batch_first=True)
    x = torch.randn(2, 7, 24)

    def run(watching: bool) -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(5)
        if watching:
            with watch(model) as seen:
                model(x).square().mean().backward()
            assert seen[0].dropout == 0.25 and not seen[0].call.query.requires_grad
        else:
            model(x).square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    assert_same_bits(run(False), run(True))


def test_checkpointed_layers_are_not_counted_twice() -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Attention(33, 3)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.layer, x, use_reentrant=False)

    model = Checkpointed()
    with watch(model) as seen:
        model(torch.randn(2, 7, 33)).sum().backward()
    assert len(seen) == 1


# --- nn.MultiheadAttention -----------------------------------------------------------------------


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("masked", ["none", "padding", "causal", "both"])
def test_multihead_attention(
    need_weights: bool, grad: bool, batch_first: bool, masked: str
) -> None:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(20, 4, batch_first=batch_first).eval()
    x = torch.randn(3, 7, 20)
    inputs = x if batch_first else x.transpose(0, 1)
    pads = torch.arange(7)[None] >= torch.tensor([7, 5, 6])[:, None]
    options = {
        "key_padding_mask": pads if masked in ("padding", "both") else None,
        "attn_mask": torch.ones(7, 7).triu(1).bool() if masked in ("causal", "both") else None,
    }

    def run() -> Any:
        with torch.set_grad_enabled(grad):
            return layer(inputs, inputs, inputs, need_weights=need_weights, **options)

    seen, (output, weights) = watched(layer, run)
    assert len(seen) == 1 and seen.not_caught == []
    call = seen[0]
    assert call.kind == "self" and call.call.num_heads == 4
    fused = batch_first and not grad
    assert ("fused" in call.route) == fused
    expected = expected_projection(layer, call)
    output = output if batch_first else output.transpose(0, 1)
    live = torch.ones(3, 7, dtype=torch.bool)
    error = (expected - output.double())[live].abs().max()
    assert error < projection_limit(20, 7, float(x.abs().max()))
    if need_weights:
        mine = attention_steps(call.call.to(torch.float64))["weights"].mean(1)
        assert (mine - weights.double()).abs().max() < projection_limit(20, 7, 1.0)
    wanted = {"none": "full", "padding": "padding", "causal": "causal", "both": "causal + padding"}
    assert call.mask_words == wanted[masked]


def test_multihead_attention_with_its_other_options() -> None:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(20, 5, kdim=9, vdim=13, add_bias_kv=True, add_zero_attn=True)
    layer.eval()
    query, key, value = torch.randn(5, 3, 20), torch.randn(7, 3, 9), torch.randn(7, 3, 13)
    bias = torch.randn(3 * 5, 5, 7)

    seen, (output, _) = watched(layer, lambda: layer(query, key, value, attn_mask=bias))
    assert len(seen) == 1 and seen[0].kind == "cross"
    assert (seen[0].call.query_length, seen[0].call.key_length) == (5, 9)
    error = (expected_projection(layer, seen[0]) - output.transpose(0, 1).double()).abs().max()
    assert error < projection_limit(20, 9, 4.0)


def test_unbatched_multihead_attention() -> None:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(20, 4, batch_first=True).eval()
    x = torch.randn(7, 20)
    for need_weights in (True, False):
        seen, (output, _) = watched(
            layer, lambda need=need_weights: layer(x, x, x, need_weights=need)
        )
        assert seen[0].call.query.shape == (1, 4, 7, 5)
        error = (expected_projection(layer, seen[0])[0] - output.double()).abs().max()
        assert error < projection_limit(20, 7, 4.0)


# --- nn.TransformerEncoder and nn.TransformerDecoder ---------------------------------------------


def encoder(norm_first: bool = False, layers: int = 2, nested: bool = True) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        24, 4, 48, batch_first=True, norm_first=norm_first, activation="gelu"
    )
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=nested and not norm_first)
    for parameter in model.parameters():  # the layers start as copies
        nn.init.normal_(parameter, std=0.2)
    return model.eval()


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("masked", ["none", "padding", "causal", "nested"])
def test_fused_encoder(norm_first: bool, masked: str) -> None:
    model = encoder(norm_first, nested=masked == "nested")
    x = torch.randn(3, 7, 24)
    lengths = torch.tensor([7, 4, 5])
    pads = torch.arange(7)[None] >= lengths[:, None]
    options: dict[str, Any] = {}
    if masked in ("padding", "nested"):
        options["src_key_padding_mask"] = pads
    if masked == "causal":
        options["mask"] = torch.ones(7, 7).triu(1).bool()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*nested tensors is in prototype.*")
        seen, output = watched(model, lambda: model(x, **options))
    assert len(seen) == 2 and seen.not_caught == []
    assert [c.id for c in seen] == ["self/0", "self/1"]
    assert [c.module for c in seen] == ["layers.0.self_attn", "layers.1.self_attn"]
    assert {c.route for c in seen} == {"nn.TransformerEncoderLayer fused"}
    # Rebuild the model's output from the recorded calls, layer after layer, in float64.
    double = copy.deepcopy(model).double()
    state = x.double()
    for layer, call in zip(double.requires_grad_(False).layers, seen, strict=True):
        attended = expected_projection(layer.self_attn, call)
        if norm_first:
            state = state + attended
            state = state + layer._ff_block(layer.norm2(state))
        else:
            state = layer.norm1(state + attended)
            state = layer.norm2(state + layer._ff_block(state))
    live = ~pads if masked in ("padding", "nested") else torch.ones(3, 7, dtype=torch.bool)
    # Two layers of about ten sums each; activations stay below 10.
    limit = 20 * projection_limit(48, 7, float(state[live].abs().max()))
    assert (state - output.double())[live].abs().max() < limit
    if masked == "nested" and not norm_first:
        assert not output[pads].any()  # the nested path did run: torch fills what it dropped with 0
        assert (seen[0].call.visible.counts()[:, 0] == 0).tolist() == pads.tolist()
        assert seen[0].real_queries is not None
        assert seen[0].real_queries.tolist() == (~pads).tolist()


def test_encoder_decoder() -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Transformer(24, 4, 2, 2, 48, batch_first=True).eval()
    source, target = torch.randn(2, 7, 24), torch.randn(2, 7, 24)
    causal = nn.Transformer.generate_square_subsequent_mask(7)
    seen, _ = watched(model, lambda: model(source, target, tgt_mask=causal, tgt_is_causal=True))
    assert seen.not_caught == []
    assert [c.id for c in seen] == [
        "encoder.self/0",
        "encoder.self/1",
        "decoder.self/0",
        "decoder.cross/0",
        "decoder.self/1",
        "decoder.cross/1",
    ]
    assert [c.mask_words for c in seen][2:4] == ["causal", "full"]
    for call in seen:
        if call.output is not None:
            assert_reproduces(call)


def test_hooks_would_have_changed_the_fused_path() -> None:
    """Why the watch replaces nn.Module.__call__ and sets no hooks."""
    model = encoder(layers=1, nested=False)
    x = torch.randn(3, 7, 24)
    hook = model.layers[0].linear1.register_forward_pre_hook(lambda *_: None)
    with watch(model) as seen, torch.no_grad():
        model(x)
    hook.remove()
    assert seen[0].route != "nn.TransformerEncoderLayer fused"
    assert local.watches == [] and local.muted == 0
