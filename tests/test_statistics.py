"""Streamed statistics equal the materialised definitions, on random and on known cases."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import materialised
from headwise import masks
from headwise.call import AttentionCall
from headwise.statistics import HeadStatistics, head_statistics
from materialised import make

EPS32 = torch.finfo(torch.float32).eps


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
        floor = tol if name not in ("rows", "matched_rows") else 0.0
        torch.testing.assert_close(
            got, want, rtol=tol, atol=floor, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )
    for name in ("duplicate_token", "induction", "matched_rows", "hidden_mass", "sink_logit_mass"):
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
    if kind in ("none", "random") and draw(st.booleans()):
        # Cross-attention: two axes, each counted from its own first token.
        options["query_positions"] = torch.arange(queries).expand(batch, -1)
        options["key_positions"] = torch.arange(keys).expand(batch, -1)
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


@settings(max_examples=100, deadline=None)
@given(cases())
def test_streamed_equals_materialised(
    case: tuple[AttentionCall, dict[str, Any], tuple[int, int] | None],
) -> None:
    compare(*case)


def test_a_head_without_rows_has_no_shares_in_bins_that_only_others_reach() -> None:
    ids = torch.tensor([[1, 1], [1, 2]])
    hides = torch.zeros(1, 2, 2, 2).double()
    hides[0, 1, :, :] = -math.inf
    hides[0, 1, 1, 0] = 0.0  # all that head 1 sees is another document in the second text
    call = make(2, 2, 2, 2, 2, 3, 1, mask=masks.documents(ids) & masks.causal(), bias=hides)
    at = torch.tensor([[0, 1], [0, 0]])  # and that text reaches only distance 0
    compare(call, {"query_positions": at, "key_positions": at}, None)


@pytest.mark.parametrize("tile", [None, (7, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_long_rows_and_the_strided_search_for_top_keys(
    dtype: torch.dtype, tile: tuple[int, int] | None
) -> None:
    """Longer than 16·top keys, where top keys are searched in strided classes."""
    call = make(1, 6, 2, 61, 211, 7, 3, dtype, mask=masks.causal())
    compare(call, {"map_cells": 10, "declared": masks.window(50)}, tile)


@pytest.mark.parametrize("tile", [(16, 32), (13, 29)])
def test_a_known_lse_gives_the_same_from_one_pass(tile: tuple[int, int]) -> None:
    call = make(2, 4, 2, 64, 64, 8, 5, sinks=torch.randn(4).double(), mask=masks.causal())
    first = head_statistics(call, tile=tile)
    again = head_statistics(call, tile=tile, lse=first.row_lse)
    names = ("entropy", "effective_keys", "distance", "received", "cells", "bhattacharyya")
    for name in (*names, "largest_weight", "score_norm", "top_weights", "sink_logit_mass"):
        torch.testing.assert_close(getattr(again, name), getattr(first, name), rtol=1e-10, atol=0)


def test_a_known_lse_is_read_and_not_only_accepted() -> None:
    """A wrong lse must show, or the argument would be decoration."""
    call = make(1, 1, 1, 64, 64, 8, 5, mask=masks.causal())
    longer = torch.arange(64) >= 16  # rows of more than one tile: there it saves a pass
    first = head_statistics(call, tile=(16, 16), query_rows=longer)
    lse = first.row_lse.nan_to_num() - math.log(2.0)
    wrong = head_statistics(call, tile=(16, 16), query_rows=longer, lse=lse)
    torch.testing.assert_close(wrong.received, 2 * first.received)


def test_a_known_lse_too_large_to_be_exact_in_float32_is_computed_again() -> None:
    call = make(
        1,
        2,
        1,
        64,
        64,
        8,
        5,
        torch.float32,
        mask=masks.causal(),
        bias=torch.full((1, 1, 1, 1), 1024.0),
    )
    plain = head_statistics(call, tile=(16, 16))
    known = head_statistics(call, tile=(16, 16), lse=plain.row_lse.float())
    assert torch.equal(known.received, plain.received)


@pytest.mark.parametrize("tile", [None, (16, 32)])
def test_an_offset_of_a_thousand_costs_float32_nothing(tile: tuple[int, int] | None) -> None:
    """Scores are multiples of 1/1024, so that adding 1000 is exact and only the sums can err."""
    draw = torch.Generator().manual_seed(0)
    bias = torch.randint(-4096, 4096, (1, 2, 128, 128), generator=draw).float() / 1024
    zero = torch.zeros(1, 2, 128, 1)
    options: dict[str, Any] = {"mask": masks.causal()}
    near = AttentionCall(zero, zero, zero, bias=bias, **options)
    far = AttentionCall(zero, zero, zero, bias=bias + 1000, **options)
    want = materialised.statistics(near)
    got = head_statistics(far, tile=tile)
    for name in ("entropy", "row_entropy", "effective_keys", "largest_weight", "distance",
                 "received", "bhattacharyya", "cosine", "score_norm", "sink"):  # fmt: skip
        torch.testing.assert_close(
            getattr(got, name), want[name], rtol=1e-5, atol=1e-7, equal_nan=True
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_read_as_float32(dtype: torch.dtype) -> None:
    call = make(1, 2, 1, 33, 33, 8, 1, dtype, mask=masks.causal())
    want = head_statistics(call.to(torch.float32))
    got = head_statistics(call)
    assert torch.equal(got.entropy, want.entropy) and torch.equal(got.received, want.received)


def test_float32_meets_the_contract_at_four_thousand_keys() -> None:
    """1e-5 relative against float64 on the same inputs, at a length where sums are long."""
    call = make(1, 2, 1, 512, 4096, 16, 2, torch.float32, mask=masks.causal())
    got, want = head_statistics(call), head_statistics(call.to(torch.float64))
    for name in ("entropy", "effective_keys", "relative_entropy", "largest_weight", "distance",
                 "distance_ratio", "sink", "previous_token", "own_token", "received", "cells",
                 "gram", "cosine", "bhattacharyya", "score_norm", "row_entropy"):  # fmt: skip
        torch.testing.assert_close(
            getattr(got, name), getattr(want, name), rtol=tolerance(call), atol=0, msg=name
        )


def test_autocast_rounds_nothing():
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(1, 3, 37, 8, generator=generator) for _ in range(3))
    call = AttentionCall(q, k, v, masks.causal())
    plain = head_statistics(call, map_cells=7)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        within = head_statistics(call, map_cells=7)
    for name in ("entropy", "distance", "received", "cells", "gram", "bhattacharyya"):
        assert torch.equal(getattr(plain, name), getattr(within, name)), name
