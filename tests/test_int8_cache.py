"""The int8 cache: how far rounding moves a number, what is kept, and that nothing old is rounded
twice. Its kernel is in test_int8_kernel.py."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import headwise
from headwise import MultiHeadAttention, QuantizedKVCache, Rotary, causal, padding, window
from headwise.cache import KVCache
from headwise.int8_cache import attend_held
from headwise.quantized import BLOCK, QuantizedCall, quantise_keys, quantise_values

B, H, D, DV = 2, 3, 20, 12


def tokens(length: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    key = torch.randn(B, H, length, D, generator=made) * torch.logspace(-2, 2, D)
    return key.to(dtype), torch.randn(B, H, length, DV, generator=made).to(dtype)


def filled(length: int, capacity: int | None = None, **more: Tensor) -> QuantizedKVCache:
    cache = QuantizedKVCache(B, H, capacity or length, D, DV)
    cache.store(*tokens(length), **more)
    return cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_number_moves_by_half_a_step_at_most(dtype: torch.dtype) -> None:
    key, value = tokens(3 * BLOCK + 5, dtype)
    cache = QuantizedKVCache(B, H, 400, D, DV, dtype=dtype)
    cache.store(key, value)
    keys, values = cache.held.dequantized(dtype=torch.float64)
    blocks = key[:, :, : 3 * BLOCK].double().unflatten(2, (3, BLOCK))
    step = blocks.abs().amax(3, keepdim=True) / 127
    off = (keys[:, :, : 3 * BLOCK].unflatten(2, (3, BLOCK)) - blocks).abs()
    # Rounding itself, and float32's own in the division and in the scale.
    assert bool((off <= step * (0.5 + 1e-4)).all())
    assert bool((off.amax(3, keepdim=True) > step * 0.3).any()), "the bound is not idle"
    assert torch.equal(keys[:, :, 3 * BLOCK :], key[:, :, 3 * BLOCK :].double()), (
        "the tail is exact"
    )
    step = value.double().abs().amax(-1, keepdim=True) / 127
    assert bool(((values - value.double()).abs() <= step * (0.5 + 1e-4)).all())


def test_one_large_channel_does_not_drown_the_small_ones() -> None:
    key = torch.randn(1, 1, 4 * BLOCK, 64, generator=torch.Generator().manual_seed(3))
    key[..., 7] += 100.0

    def error(found: Tensor) -> float:
        small = [d for d in range(64) if d != 7]
        off = (found - key)[..., small]
        return float(off.norm() / key[..., small].norm())

    small, scales = quantise_keys(key)
    by_channel = (small * scales[..., None]).mT.flatten(2, 3)
    by_token = torch.round(key / (s := key.abs().amax(-1, keepdim=True) / 127)) * s
    assert error(by_channel) < 0.01
    assert error(by_token) > 0.2, "one scale a token leaves the small channels two or three steps"


@given(chunks=st.lists(st.integers(1, 90), min_size=1, max_size=6), seed=st.integers(0, 3))
@settings(max_examples=25, deadline=None)
def test_however_it_is_cut_the_same_is_held_and_old_tokens_stay(
    chunks: list[int], seed: int
) -> None:
    total = sum(chunks)
    key, value = tokens(total, seed=seed)
    cache, at = QuantizedKVCache(B, H, total, D, DV), 0
    before: tuple[Tensor, Tensor] | None = None
    for length in chunks:
        now = slice(at, at + length)
        assert cache.visible_after(length) == at + length
        got = cache.append(key[:, :, now], value[:, :, now])
        assert torch.equal(got.keys[:, :, now], key[:, :, now]), "a chunk sees its own keys"
        assert torch.equal(got.values[:, :, now], value[:, :, now])
        if before is not None:
            assert torch.equal(got.keys[:, :, :at], before[0]), "older ones as they were held"
            assert torch.equal(got.values[:, :, :at], before[1])
        at += length
        after = cache.held.dequantized()
        if before is not None:
            sealed = (at - length) // BLOCK * BLOCK
            assert torch.equal(after[0][:, :, :sealed], before[0][:, :, :sealed])
        before = after
    whole = filled_with(key, value)
    assert before is not None
    assert torch.equal(before[0], whole[0]) and torch.equal(before[1], whole[1])
    start, stop = total // 3, total - total // 4
    part = cache.held.dequantized(start, stop)
    assert torch.equal(part[0], before[0][:, :, start:stop])
    assert torch.equal(part[1], before[1][:, :, start:stop])


def filled_with(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    cache = QuantizedKVCache(B, H, key.shape[2], D, DV)
    cache.store(key, value)
    return cache.held.dequantized()


def test_bytes_are_those_of_every_buffer() -> None:
    cache = QuantizedKVCache(2, 3, 8192, 64, dtype=torch.bfloat16)
    tokens, blocks = 2 * 3 * 8192, 2 * 3 * 128
    assert cache.nbytes == tokens * (64 + 64 + 4) + blocks * 64 * 4 + 2 * 3 * 64 * 64 * 2
    plain = KVCache(2, 3, 8192, 64, dtype=torch.bfloat16)
    assert cache.nbytes < 0.54 * plain.nbytes
    assert filled(5, 100).nbytes == QuantizedKVCache(B, H, 128, D, DV).nbytes, "whole blocks"


def test_positions_and_pads_are_kept_as_in_a_plain_cache() -> None:
    plain, cache = KVCache(B, H, 200, D, DV), QuantizedKVCache(B, H, 200, D, DV)
    for length, seed in ((70, 0), (1, 1), (60, 2)):
        real = torch.rand(B, length, generator=torch.Generator().manual_seed(seed)) < 0.8
        want = plain.append(*tokens(length, seed=seed), real=real)
        got = cache.append(*tokens(length, seed=seed), real=real)
        assert torch.equal(got.positions, want.positions)
        assert got.real is not None and want.real is not None and torch.equal(got.real, want.real)
    cache.crop(71)
    plain.crop(71)
    assert torch.equal(cache.next_position, plain.next_position) and cache.seen == 71


def test_what_stands_at_a_pad_does_not_widen_the_scales() -> None:
    key, value = tokens(BLOCK)
    wild = key.clone()
    wild[:, :, :9] = 1e6
    real = (torch.arange(BLOCK) >= 9).expand(B, -1)
    cache = QuantizedKVCache(B, H, BLOCK, D, DV)
    cache.store(wild, value, real=real)
    keys, _ = cache.held.dequantized()
    step = key[:, :, 9:].abs().amax(2, keepdim=True) / 127
    assert bool(((keys - key)[:, :, 9:].abs() <= step * 0.51).all())


@pytest.mark.parametrize("length", [0, 5, BLOCK, BLOCK + 30, 2 * BLOCK, 2 * BLOCK + 3])
def test_a_cropped_cache_goes_on(length: int) -> None:
    cache = filled(2 * BLOCK + 20, 400)
    was = cache.held.dequantized()
    cache.crop(length)
    assert cache.length == cache.seen == length
    for now, then in zip(cache.held.dequantized(), was, strict=True):
        torch.testing.assert_close(now, then[:, :, :length])
    key, value = tokens(100, seed=5)
    got = cache.append(key, value)
    torch.testing.assert_close(got.keys[:, :, :length], was[0][:, :, :length])
    keys, _ = cache.held.dequantized()
    step = torch.cat((was[0][:, :, :length], key), 2).abs().amax(2, keepdim=True) / 127
    assert bool(((keys[:, :, length:] - key).abs() <= step * 0.51).all())


def test_rows_change_places_and_memory_grows() -> None:
    cache = filled(BLOCK + 7)
    keys, values = cache.held.dequantized()
    cache.grow(1000)
    assert cache.capacity == 1000 and torch.equal(cache.held.dequantized()[0], keys)
    cache.reorder(torch.tensor([1, 0, 1]))
    assert cache.batch == 3
    now = cache.held.dequantized()
    assert torch.equal(now[0], keys[[1, 0, 1]]) and torch.equal(now[1], values[[1, 0, 1]])
    assert cache.next_position.tolist() == [BLOCK + 7] * 3
    cache.reset()
    assert cache.length == cache.seen == 0


def test_what_does_not_fit_is_said() -> None:
    cache = filled(10, 12)
    with pytest.raises(ValueError, match=r"capacity=12 holds 10 tokens and 3 more came.*13"):
        cache.append(*tokens(3))
    assert cache.length == 10, "nothing was taken in"
    with pytest.raises(ValueError, match=r"cache is torch\.float32 but key is torch\.float16"):
        cache.store(*tokens(1, torch.float16))
    with pytest.raises(ValueError, match="require grad"):
        key, value = tokens(1)
        cache.store(key.requires_grad_(), value)
    with pytest.raises(ValueError, match=r"float64.*KVCache"):
        QuantizedKVCache(1, 1, 8, 8, dtype=torch.float64)
    with pytest.raises(ValueError, match="capacity=0"):
        QuantizedKVCache(1, 1, 0, 8)
    query = torch.randn(B, H, 2, D)
    with pytest.raises(ValueError, match=r"wanted one query.*\(2, 3, 2, 20\)"):
        QuantizedCall(query, cache.held)
    with pytest.raises(ValueError, match=r"query is torch\.float16 but key is torch\.float32"):
        QuantizedCall(query[:, :, :1].half(), cache.held)
    with pytest.raises(ValueError, match="no gradient"):
        attend_held(QuantizedCall(query[:, :, :1].requires_grad_(), cache.held))
    layer = MultiHeadAttention(32, 2)
    with pytest.raises(ValueError, match="quantized=True needs capacity"):
        layer.make_cache(1, quantized=True)


def make_layer(**more: object) -> MultiHeadAttention:
    torch.manual_seed(0)
    options = headwise.AttentionOptions(**more)  # type: ignore[arg-type]
    return MultiHeadAttention(
        48, 6, num_kv_heads=2, head_dim=16, position=Rotary(), options=options
    ).eval()


LAYERS = {
    "plain": {},
    "window": {"window": 70},
    "sinks, soft cap": {"sinks": True, "softcap": 3.0},
    "gate": {"output_gate": True},
}


@torch.no_grad()
@pytest.mark.parametrize("more", LAYERS.values(), ids=LAYERS.keys())
@pytest.mark.parametrize("padded", [False, True])
def test_the_layer_decodes_and_prefills_in_chunks(more: dict[str, object], padded: bool) -> None:
    layer, length = make_layer(**more), 150
    x = torch.randn(2, length, 48)
    real = torch.ones(2, length, dtype=torch.bool)
    if padded:
        real[1, :20] = False
    plain = layer.make_cache(2, length)
    cache = layer.make_cache(2, length, quantized=True)
    assert isinstance(cache, QuantizedKVCache)
    start = 0
    for stop in (100, 130, *range(131, length + 1)):
        chunk, now = x[:, start:stop], real[:, start:stop]
        mask = causal()
        if padded and start == 0:
            mask = mask & padding(now)
        want = layer(chunk, mask=mask, cache=plain)
        got = layer(chunk, mask=mask, cache=cache)
        off = (got - want)[now].abs().max() / want[now].abs().max()
        assert float(off) < 0.02, f"{start}…{stop}"  # a few steps of 1/254, over small outputs
        start = stop
    assert cache.length == length


@torch.no_grad()
def test_one_token_upon_the_cache_is_the_attention_upon_what_it_stands_for() -> None:
    layer = make_layer()
    x = torch.randn(2, 140, 48)
    cache = layer.make_cache(2, 140, quantized=True)
    assert isinstance(cache, QuantizedKVCache)
    layer(x[:, :139], mask=causal(), cache=cache)
    seen: list[tuple[headwise.AttentionCall, Tensor]] = []
    headwise.attention.__globals__["observers"].append(lambda c, o: seen.append((c, o)))
    try:
        layer(x[:, 139:], mask=causal(), cache=cache)
    finally:
        headwise.attention.__globals__["observers"].pop()
    (call, output), (keys, values) = seen[0], cache.held.dequantized()
    assert torch.equal(call.key, keys) and torch.equal(call.value, values)
    want = headwise.attention(
        call.query.double(), keys.double(), values.double(), backend="reference"
    )
    torch.testing.assert_close(output.double(), want, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_weights_are_those_upon_what_is_held() -> None:
    layer = make_layer()
    x = torch.randn(1, 80, 48)
    cache = layer.make_cache(1, 80, quantized=True)
    layer(x[:, :79], mask=causal(), cache=cache)
    _, weights = layer(x[:, 79:], mask=causal(), cache=cache, need_weights=True)
    assert weights.shape == (1, 6, 1, 80)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 6, 1))


@torch.no_grad()
def test_later_tokens_of_a_chunk_do_not_reach_earlier_ones() -> None:
    layer = make_layer()
    x = torch.randn(1, 2 * BLOCK, 48)
    changed = x.clone()
    changed[:, 90:] *= 50.0
    for first in (0, 40):
        outs = []
        for tokens_in in (x, changed):
            cache = layer.make_cache(1, 2 * BLOCK, quantized=True)
            if first:
                layer(tokens_in[:, :first], mask=causal(), cache=cache)
            outs.append(layer(tokens_in[:, first:], mask=causal(), cache=cache))
        assert torch.equal(outs[0][:, : 90 - first], outs[1][:, : 90 - first])


@torch.no_grad()
def test_a_window_is_kept_by_the_mask() -> None:
    layer = make_layer(window=30)
    cache = layer.make_cache(1, 200, quantized=True)
    x = torch.randn(1, 150, 48)
    layer(x[:, :149], mask=causal(), cache=cache)
    out = layer(x[:, 149:], mask=causal(), cache=cache)
    other = layer.make_cache(1, 200, quantized=True)
    y = x.clone()
    y[:, :64] = torch.randn(1, 64, 48)  # whole blocks beyond the window
    layer(y[:, :149], mask=window(30), cache=other)
    assert torch.equal(out, layer(y[:, 149:], mask=causal(), cache=other))


def test_nothing_not_finite_is_lost_in_int8() -> None:
    key, value = tokens(BLOCK)
    key[0, 0, 3, 2], value[1, 1, 5, 0] = torch.inf, torch.nan
    _, scale = quantise_values(value, key)
    assert bool(scale[0, 0, 3].isnan()) and bool(scale[1, 1, 5].isnan())
    assert int(scale.isnan().sum()) == 2
    cache = QuantizedKVCache(B, H, BLOCK, D, DV)
    cache.store(key, value)
    keys, values = cache.held.dequantized()
    assert bool(keys[0, 0, 3].isnan().all()) and bool(values[1, 1, 5].isnan().all())
    assert int(keys.isnan().any(-1).sum()) == 2 and bool(keys[0, 0, 4:].isfinite().all())
