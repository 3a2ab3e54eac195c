"""The statistics' native pass against torch's tiles (which are checked against whole maps), on
every instruction set that runs here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from headwise import causal, documents, head_statistics, keep, native, padding, window
from headwise.call import AttentionCall
from headwise.statistics import native as own
from headwise.statistics.interface import Job, Sums
from headwise.statistics.jobs import prepare
from headwise.statistics.stream import _Stream


@pytest.fixture(params=native.runnable())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    module = native.module()
    before = module.isa()
    assert module.use(request.param)
    yield request.param
    assert native.isa() == request.param, "another instruction set ran"
    module.use(before)


def jobs_of(call: AttentionCall, **options: Any) -> list[Job]:
    given = dict.fromkeys(
        ("lse", "token_ids", "query_rows", "query_positions", "key_positions"), None
    )
    more = {"declared": None, "block": (1, 1), "top": 4}
    for name, value in options.items():
        (given if name in given else more)[name] = value
    return prepare(call, given, **more)


def call_of(
    shape: tuple[int, int, int, int, int, int],
    dtype: torch.dtype = torch.float32,
    mask: Any = None,
    **more: Any,
) -> AttentionCall:
    batch, heads, kv_heads, queries, keys, dim = shape
    made = torch.Generator().manual_seed(sum(shape))
    tensors = [
        torch.randn(batch, h, n, dim, generator=made).to(dtype) * 1.5
        for h, n in ((heads, queries), (kv_heads, keys), (kv_heads, keys))
    ]
    return AttentionCall(*tensors, mask, **more)


def same(job: Job) -> Sums:
    """Assert that both passes find the same, and return the native one's."""
    assert own.refuse(job) is None
    mine, tiles = own.run(job), _Stream(job).run()
    double = job.query.dtype == torch.float64
    for field in fields(Sums):
        a, b = getattr(mine, field.name), getattr(tiles, field.name)
        if not isinstance(b, Tensor):
            assert a == b, field.name
        elif field.name == "top_keys":
            # Equal weights may stand in either order.
            differ = a != b
            gap = (mine.top_weights - tiles.top_weights).abs()
            assert float(torch.where(differ, gap, 0.0).sum()) < 1e-5
            assert bool(((a >= 0) == (b >= 0)).all())
        else:
            torch.testing.assert_close(
                a,
                b,
                rtol=1e-11 if double else 2e-5,
                atol=1e-12 if double else 2e-5,
                equal_nan=True,
                msg=lambda text, name=field.name: f"{name}: {text}",
            )
    return mine


SHAPES = [
    (1, 1, 1, 1, 1, 1),
    (1, 2, 1, 5, 7, 11),
    (2, 3, 3, 67, 67, 16),
    (1, 5, 5, 61, 300, 64),
    (1, 6, 3, 131, 131, 40),
    (1, 33, 11, 29, 29, 8),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_full_and_causal(shape, dtype, isa):
    for mask in (None, causal()):
        for pairs, top in ((True, 4), (False, 0)):
            for job in jobs_of(call_of(shape, dtype, mask), pairs=pairs, top=top):
                same(job)


MASKS = {
    "window": window(9),
    "two runs": window(20) | padding(lengths=torch.tensor([3, 5])),
    "bits": keep(torch.rand(1, 1, 150, 150, generator=torch.Generator().manual_seed(3)) < 0.3),
    "left padding": causal() & padding(lengths=torch.tensor([140, 90]), side="left"),
    "documents": causal() & documents(torch.arange(150)[None].expand(2, -1) // 37),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name, isa):
    call = call_of((2, 4, 2, 150, 150, 16), mask=MASKS[name])
    ids = torch.randint(0, 12, (2, 150), generator=torch.Generator().manual_seed(5))
    rows = torch.rand(2, 150, generator=torch.Generator().manual_seed(6)) < 0.8
    for job in jobs_of(call, token_ids=ids, query_rows=rows, block=(3, 5), declared=causal()):
        same(job)


def test_hidden_mass_is_what_lies_outside_the_declared_mask(isa):
    call = call_of((1, 2, 2, 140, 140, 16))
    (job,) = jobs_of(call, declared=window(30))
    found = same(job)
    assert float(found.hidden.min()) > 50
    (job,) = jobs_of(call_of((1, 2, 2, 140, 140, 16), mask=window(30)), declared=causal())
    assert float(same(job).hidden.abs().max()) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bias_softcap_and_sinks(dtype, isa):
    made = torch.Generator().manual_seed(4)
    bias = torch.randn(1, 4, 70, 150, generator=made).to(dtype)
    bias[..., 20:40] = -math.inf
    for more in (
        {"bias": bias},
        {"bias": bias[:, :, :1]},
        {"bias": bias[..., :1].clamp(min=-1)},
        {"softcap": 2.0},
        {"softcap": 5.0, "bias": bias[:, :1]},
        {"sinks": torch.randn(4, generator=made).to(dtype) * 3},
        {"sinks": torch.tensor([40.0, -math.inf, 0.0, 3.0], dtype=dtype)},
        {"scale": 0.7},
    ):
        for job in jobs_of(call_of((1, 4, 2, 70, 150, 24), dtype, causal(), **more)):
            same(job)


def test_uneven_positions(isa):
    call = call_of((1, 3, 3, 90, 90, 16), mask=causal())
    at = torch.arange(90)[None] * 2 + (torch.arange(90)[None] > 40) * 7
    (job,) = jobs_of(call, query_positions=at, key_positions=at)
    assert job.at is None
    same(job)


def test_large_scores_far_from_zero(isa):
    """Row maxima move from tile to tile, far up: what was summed before is scaled down."""
    call = call_of((1, 2, 2, 40, 700, 16))
    ramp = torch.linspace(-300, 300, 700)[None, None, None]
    (job,) = jobs_of(AttentionCall(call.query, call.key, call.value, bias=ramp), top=40)
    same(job)


def test_the_bits_do_not_depend_on_threads():
    call = call_of((1, 5, 5, 700, 700, 32), mask=causal())
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(own.run(jobs_of(call, block=(3, 3))[0]))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        for field in fields(Sums):
            a, b = getattr(found[0], field.name), getattr(other, field.name)
            if isinstance(a, Tensor):
                assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)), field.name


@pytest.mark.parametrize("where", ["query", "key", "bias", "sinks", "tile"])
def test_what_it_refuses(where):
    call = call_of((1, 2, 2, 9, 9, 8))
    parts = {"query": call.query, "key": call.key, "value": call.value}
    if where in parts:
        parts[where] = parts[where].clone()
        parts[where][0, 0, 3, 2] = math.nan
    elif where == "bias":
        parts["bias"] = torch.zeros(9, 9).index_fill(0, torch.tensor([2]), math.inf)
    elif where == "sinks":
        parts["sinks"] = torch.tensor([0.0, math.inf])
    (job,) = jobs_of(AttentionCall(**parts), **({"tile": (4, 4)} if where == "tile" else {}))
    reason = {"query": "finite", "key": "finite", "tile": "tile"}.get(where, "is not finite")
    assert reason in str(own.refuse(job))


def test_head_statistics_uses_it(monkeypatch):
    used = []
    run = own.run
    monkeypatch.setattr(own, "run", lambda job: used.append(job) or run(job))
    call = call_of((2, 2, 2, 9, 9, 8))
    head_statistics(call)
    assert len(used) == 2
    head_statistics(call, tile=(4, 4))
    assert len(used) == 2
