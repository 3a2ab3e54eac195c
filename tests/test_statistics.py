"""Streamed statistics equal the materialised definitions, on random and on known cases."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import materialised
from headwise import masks
from headwise.call import AttentionCall
from headwise.statistics import HeadStatistics, head_statistics

EPS32 = torch.finfo(torch.float32).eps


def make(
    batch: int = 1, heads: int = 2, kv: int = 1, queries: int = 7, keys: int | None = None,
    dim: int = 5, seed: int = 0, dtype: torch.dtype = torch.float64, size: float = 1.0,
    **more: Any,
) -> AttentionCall:  # fmt: skip
    keys = queries if keys is None else keys
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype) * size

    q, k = normal(batch, heads, queries, dim), normal(batch, kv, keys, dim)
    return AttentionCall(q, k, normal(batch, kv, keys, 3), **more)


def tolerance(call: AttentionCall) -> float:
    """Relative: the contract's 1e-10 in float64; in float32 its 1e-5, plus what the scores carry.

    A score is a sum of D products, each rounded: its error, at most about √D·ε·|s|, becomes a
    relative error of its weight before any accumulator sees it.
    """
    if call.query.dtype == torch.float64:
        return 1e-10
    q = call.query.double().norm(dim=-1).max()
    k = call.key.double().norm(dim=-1).max()
    size = float(q * k) * call.scale_value
    if call.bias is not None:
        size += float(call.bias.double().abs().where(call.bias.isfinite(), torch.zeros(())).max())
    return 1e-5 + math.sqrt(call.head_dim) * EPS32 * size


def compare(call: AttentionCall, options: dict[str, Any], tile: tuple[int, int] | None) -> None:
    """Every field of both, and the top keys."""
    tol = tolerance(call)
    map_cells = options.pop("map_cells", 256)
    mine = head_statistics(call, tile=tile, map_cells=map_cells, top=3, **options)
    wanted = materialised.statistics(call, block=mine.block, **options)
    for name, want in wanted.items():
        got = getattr(mine, name)
        assert got is not None, name
        got = got.double()
        if name == "distance_histogram":
            want, beyond = want[..., : got.shape[-1]], want[..., got.shape[-1] :]
            assert not bool((beyond > 0).any()), "weight beyond the last bin"
        # Means of weights are at most 1; what is near 0 is compared with a part of a weight.
        floor = tol if name not in ("rows",) else 0.0
        torch.testing.assert_close(
            got, want, rtol=tol, atol=floor, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )
    for name in ("duplicate_token", "induction", "hidden_mass", "sink_logit_mass"):
        assert (getattr(mine, name) is None) == (name not in wanted), name
    check_top(call, mine, options, tol)


def check_top(
    call: AttentionCall, mine: HeadStatistics, options: dict[str, Any], tol: float
) -> None:
    want, whole = materialised.top_keys(call, 3)
    rows = options.get("query_rows")
    if rows is not None:
        want = want * rows[:, None, :, None]
    torch.testing.assert_close(mine.top_weights.double(), want, rtol=tol, atol=tol)
    named = mine.top_keys >= 0
    at_keys = whole.gather(-1, mine.top_keys.clamp(min=0))
    torch.testing.assert_close(mine.top_weights.double()[named], at_keys[named], rtol=tol, atol=tol)
    assert bool((mine.top_weights[~named] == 0).all())
    ordered = mine.top_keys.sort(-1).values
    assert not bool(((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any())


TILES = [None, (1, 1), (3, 5), (7, 2), (2, 64), (64, 3), (5, 7)]


@st.composite
def cases(draw: st.DrawFn) -> tuple[AttentionCall, dict[str, Any], tuple[int, int] | None]:
    prime = st.sampled_from([1, 2, 3, 5, 7, 11, 13])
    batch, kv = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 3]))
    heads = kv * draw(st.sampled_from([1, 2, 3]))
    queries = draw(prime)
    kind = draw(
        st.sampled_from(
            ["none", "causal", "start", "window", "both", "left", "right", "documents", "prefix",
             "random", "rows", "heads", "two"]
        )
    )  # fmt: skip
    options: dict[str, Any] = {}
    keys = draw(prime) if kind in ("none", "causal", "start", "window", "random") else queries
    seed = draw(st.integers(0, 2**16))
    noise = torch.Generator().manual_seed(seed + 1)
    lengths = torch.randint(0, queries + 1, (batch,), generator=noise)
    mask: masks.Mask | None = None
    if kind == "causal":
        mask = masks.causal()
    elif kind == "start":
        mask = masks.causal(align="start")
    elif kind == "window":
        mask = masks.window(draw(st.sampled_from([1, 2, 4])))
    elif kind == "both":
        mask = masks.window(left=2, right=1)
    elif kind in ("left", "right"):
        side = kind
        real = torch.arange(queries).expand(batch, -1) < lengths[:, None]
        real = real.flip(-1) if side == "left" else real
        mask = masks.padding(lengths=lengths, side=side)
        mask = mask & masks.causal() if draw(st.booleans()) else mask
        options["query_rows"] = real
        if draw(st.booleans()):
            at = (real.long().cumsum(-1) - 1).clamp(min=1)  # as Hugging Face fills it
            options["query_positions"] = options["key_positions"] = torch.where(
                real, real.long().cumsum(-1) - 1, at
            )
    elif kind == "documents":
        ids = torch.randint(0, 3, (batch, queries), generator=noise).sort(-1).values
        mask = masks.documents(ids) & masks.causal()
        if draw(st.booleans()):
            same = (ids[:, :, None] == ids[:, None, :]).tril(-1).sum(-1)
            options["query_positions"] = options["key_positions"] = same
    elif kind == "prefix":
        mask = masks.prefix(2) | masks.causal()
    elif kind == "two":
        mask = (masks.window(2) | masks.prefix(1)) & masks.causal()
    elif kind in ("random", "rows", "heads"):
        grid = torch.rand(batch, heads, queries, keys, generator=noise) < 0.5
        if kind == "rows":
            grid = grid.any(-1, keepdim=True).expand(grid.shape)
        if kind == "heads":
            grid = grid[:1]
        mask = masks.keep(grid)
        if draw(st.booleans()):
            options["query_rows"] = torch.rand(batch, queries, generator=noise) < 0.7
    if keys >= queries and draw(st.booleans()):
        options["token_ids"] = torch.randint(0, 4, (batch, keys), generator=noise)
    if draw(st.booleans()):
        options["declared"] = masks.window(3)
    more: dict[str, Any] = {"mask": mask}
    if draw(st.booleans()):
        more["sinks"] = torch.randn(heads, generator=noise, dtype=torch.float64) * 3
    if draw(st.booleans()):
        more["softcap"] = 1.5
    if draw(st.booleans()):
        bias = torch.randn(1, heads, queries, keys, generator=noise, dtype=torch.float64)
        if draw(st.booleans()):
            bias[torch.rand(bias.shape, generator=noise) < 0.3] = -math.inf
        more["bias"] = bias
    options["map_cells"] = draw(st.sampled_from([1, 3, 256]))
    dtype = draw(st.sampled_from([torch.float64, torch.float32]))
    for name in ("sinks", "bias"):
        if name in more:
            more[name] = more[name].to(dtype)
    call = make(batch, heads, kv, queries, keys, draw(prime), seed, dtype, **more)
    return call, options, draw(st.sampled_from(TILES))


@settings(max_examples=150, deadline=None)
@given(cases())
def test_streamed_equals_materialised(
    case: tuple[AttentionCall, dict[str, Any], tuple[int, int] | None],
) -> None:
    compare(*case)
