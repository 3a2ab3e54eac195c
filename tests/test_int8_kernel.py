"""One token upon int8 keys and values, against the float64 definition on what the cache stands for:
on every instruction set that runs here, and by torch's tiles."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from headwise import QuantizedKVCache, attention, causal, explain, keep, native, padding, window
from headwise.backends import int8
from headwise.int8_cache import attend_held
from headwise.quantized import QuantizedCall

ROUNDING = {torch.float32: 3e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
# Batch, query heads, key/value heads, keys, dim, value dim.
SHAPES = [
    (1, 1, 1, 1, 1, 1),
    (2, 3, 1, 63, 11, 13),
    (1, 2, 2, 64, 64, 64),
    (3, 4, 2, 131, 17, 37),
    (2, 6, 3, 1031, 64, 80),
    (1, 7, 1, 283, 129, 96),
    (1, 10, 2, 700, 40, 8),
]


@pytest.fixture(params=[*native.runnable(), "torch tiles"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "torch tiles":
        monkeypatch.setattr(int8, "TILE", 100)
        yield request.param
        return
    module = native.module()
    before = module.isa()
    assert module.use(request.param)
    yield "native int8"
    assert native.isa() == request.param, "another instruction set ran"
    module.use(before)


def made(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, QuantizedKVCache]:
    batch, heads, kv_heads, keys, dim, value_dim = shape
    source = torch.Generator().manual_seed(0)
    key = torch.randn(batch, kv_heads, keys, dim, generator=source)
    key[..., dim // 2] += 20.0  # one large channel, as trained models have
    value = torch.randn(batch, kv_heads, keys, value_dim, generator=source)
    query = torch.randn(batch, heads, 1, dim, generator=source)
    cache = QuantizedKVCache(batch, kv_heads, keys + 70, dim, value_dim, dtype=dtype)
    cache.store(key.to(dtype), value.to(dtype))
    return query.to(dtype), cache


def features(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    batch, heads, _, keys, *_ = shape
    source = torch.Generator().manual_seed(1)

    def noise(*size: int) -> Tensor:
        return torch.randn(size, generator=source).to(dtype)

    some = noise(1, heads, 1, keys)
    some[..., ::3] = -math.inf
    lengths = torch.arange(1, batch + 1) * keys // batch
    left = torch.arange(keys)[None] >= (torch.arange(batch) * keys // (batch + 1))[:, None]
    return {
        "full": {},
        "causal": {"mask": causal()},
        "window": {"mask": window(70)},
        "right padding": {"mask": padding(lengths=lengths)},
        "left padding": {"mask": padding(left)},
        "bits": {"mask": keep(torch.rand(batch, heads, 1, keys, generator=source) < 0.4)},
        "no keys": {"mask": keep(torch.zeros(1, 1, 1, keys, dtype=torch.bool))},
        "no keys, sinks": {
            "mask": keep(torch.zeros(1, 1, 1, keys, dtype=torch.bool)), "sinks": noise(heads)
        },
        "bias": {"bias": noise(batch, heads, 1, keys)},
        "bias that hides": {"bias": some},
        "soft cap": {"softcap": 1.7, "bias": noise(1, keys)},
        "sinks": {"sinks": noise(heads) * 3, "mask": causal()},
        "scale": {"scale": 0.021},
    }  # fmt: skip


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_the_definition_on_what_the_cache_stands_for(
    path: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    query, cache = made(shape, dtype)
    keys, values = cache.held.dequantized(dtype=torch.float64)
    for name, more in features(shape, dtype).items():
        call = QuantizedCall(query, cache.held, **more)
        output, lse = attend_held(call, path)
        wide = {n: m.double() if isinstance(m, Tensor) else m for n, m in more.items()}
        want, want_lse = attention(
            query.double(), keys, values, return_lse=True, backend="reference", **wide
        )
        assert output.dtype == dtype and lse.dtype == torch.float32
        size = max(1.0, float(want.abs().max()))
        torch.testing.assert_close(
            output.double(), want, rtol=0, atol=ROUNDING[dtype] * size,
            msg=lambda text, name=name: f"{name}: {text}",
        )  # fmt: skip
        peak = max(1.0, float(want_lse.nan_to_num(0, 0, 0).abs().max()))
        # Dot products of bytes round a bfloat16 call's query to 16 bits (native/quads.inl).
        bytes_too = path == "native int8" and native.isa() in ("avx512bf16", "portable")
        near = 1e-4 if dtype == torch.bfloat16 and bytes_too else 3e-6
        torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=near * peak)
        again, _ = attend_held(call, path)
        assert torch.equal(again, output), f"{name}: not repeatable"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["key", "value"])
@pytest.mark.parametrize("at", [5, 150])  # in a block that is int8, in the tail
def test_not_finite_reaches_the_rows_that_see_it_and_no_other(
    path: str, bad: float, where: str, at: int
) -> None:
    key, value = torch.randn(2, 2, 160, 24), torch.randn(2, 2, 160, 24)
    (key if where == "key" else value)[1, 0, at, 3] = bad
    cache = QuantizedKVCache(2, 2, 200, 24)
    cache.store(key, value)
    query = torch.randn(2, 4, 1, 24)
    output, _ = attend_held(QuantizedCall(query, cache.held), path)
    assert bool(output[1, :2].isnan().all()), "its group's two query heads see it"
    assert bool(output[0].isfinite().all()) and bool(output[1, 2:].isfinite().all())
    seen = torch.ones(2, 1, 1, 160, dtype=torch.bool)
    seen[..., at] = False
    hidden, _ = attend_held(QuantizedCall(query, cache.held, keep(seen)), path)
    clean = QuantizedKVCache(2, 2, 200, 24)
    clean.store(key.nan_to_num(0, 0, 0), value.nan_to_num(0, 0, 0))
    want, _ = attend_held(QuantizedCall(query, clean.held, keep(seen)), path)
    torch.testing.assert_close(hidden, want, rtol=1e-5, atol=1e-5)


def test_large_numbers_stay_finite(path: str) -> None:
    cache = QuantizedKVCache(1, 1, 128, 8, dtype=torch.float32)
    key = torch.full((1, 1, 100, 8), 1e30)
    cache.store(key, torch.ones(1, 1, 100, 8))
    output, _ = attend_held(QuantizedCall(torch.full((1, 1, 1, 8), 1e5), cache.held), path)
    torch.testing.assert_close(output, torch.ones(1, 1, 1, 8))


@pytest.mark.parametrize("heads", [1, 3])
def test_small_numbers_are_not_lost(path: str, heads: int) -> None:
    """Values near float's smallest, weights far below another head's, a query of zeros."""
    source = torch.Generator().manual_seed(3)
    key, value = torch.randn(2, 1, 1, 200, 64, generator=source)
    value *= 1e-33
    query = torch.randn(1, heads, 1, 64, generator=source)
    query[:, -1] = 0
    bias = torch.zeros(1, heads, 1, 200)
    bias[:, 0, :, 130:] = -80.0  # the second step's weights are 2^-115 beside the first's
    cache = QuantizedKVCache(1, 1, 256, 64)
    cache.store(key, value)
    output, lse = attend_held(QuantizedCall(query, cache.held, bias=bias), path)
    keys, values = cache.held.dequantized(dtype=torch.float64)
    want, want_lse = attention(
        query.double(), keys, values, bias=bias.double(), return_lse=True, backend="reference"
    )
    torch.testing.assert_close(output.double() * 1e33, want * 1e33, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=1e-5)


def test_threads_do_not_change_a_bit() -> None:
    query, cache = made((2, 6, 3, 2100, 64, 64), torch.float32)
    before = torch.get_num_threads()
    found = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        found.append(attend_held(QuantizedCall(query, cache.held), "native int8")[0])
    torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_each_path_says_why_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    query, cache = made((1, 2, 1, 70, 16, 16), torch.float32)
    call = QuantizedCall(query, cache.held)
    assert explain(call) == {"native int8": None, "torch tiles": None}
    assert int8.choose(call).name == "native int8"
    with pytest.raises(ValueError, match="there are native int8, torch tiles"):
        int8.choose(call, "nativ")
    wide, wide_cache = made((1, 1, 1, 70, 520, 16), torch.float32)
    reason = explain(QuantizedCall(wide, wide_cache.held))["native int8"]
    assert reason == "it takes a head dimension of up to 512, got 520"

    def missing() -> None:
        raise ImportError("headwise's native module cannot be loaded")

    want, _ = attend_held(call)
    monkeypatch.setattr(native, "module", missing)
    assert explain(call)["native int8"] == "headwise's native module cannot be loaded"
    assert int8.choose(call).name == "torch tiles"
    with pytest.raises(ValueError, match=r"native int8.*refuses.*cannot be loaded"):
        int8.choose(call, "native int8")
    torch.testing.assert_close(attend_held(call)[0], want)
