"""Statistics on cases whose answers are known, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import materialised
from headwise import masks
from headwise.call import AttentionCall
from headwise.statistics import head_statistics
from materialised import make


@pytest.mark.parametrize("n", [1, 2, 64, 331])
@pytest.mark.parametrize("tile", [None, (17, 31)])
def test_uniform_causal_attention(n: int, tile: tuple[int, int] | None) -> None:
    zero = torch.zeros(1, 1, n, 4, dtype=torch.float64)
    got = head_statistics(AttentionCall(zero, zero, zero, masks.causal()), tile=tile)
    harmonic = sum(1 / i for i in range(1, n + 1))

    def close(value: Tensor, want: float) -> None:
        assert float(value) == pytest.approx(want, rel=1e-10, nan_ok=True)

    close(got.entropy, math.lgamma(n + 1) / n)
    close(got.distance, (n - 1) / 4)
    close(got.distance_ratio, 1.0 if n > 1 else math.nan)
    close(got.sink[0, 0, 0], harmonic / n)
    close(got.previous_token, (harmonic - 1) / (n - 1) if n > 1 else math.nan)
    close(got.own_token, harmonic / n)
    close(got.relative_entropy, 1.0 if n > 1 else math.nan)
    close(got.effective_keys, (n + 1) / 2)
    close(got.largest_weight, harmonic / n)
    for place in range(2, min(n, 4) + 1):
        tail = sum(1 / i for i in range(place, n + 1))
        close(got.sink[0, 0, place - 1], tail / (n - place + 1))
    close(got.entropy_bound, math.lgamma(n + 1) / n)  # equal scores: the bound is reached
    if n == 64:
        assert round(float(got.sink[0, 0, 0]), 4) == 0.0741


def test_identity_attention() -> None:
    bias = torch.full((1, 1, 50, 50), -math.inf, dtype=torch.float64)
    bias[0, 0].fill_diagonal_(0.0)
    zero = torch.zeros(1, 1, 50, 4, dtype=torch.float64)
    got = head_statistics(AttentionCall(zero, zero, zero, bias=bias))
    assert float(got.entropy) == 0.0 and float(got.distance) == 0.0
    assert float(got.own_token) == 1.0 and float(got.largest_weight) == 1.0
    # Not by a mask but by scores far apart: nearly the identity, and its entropy is the bound.
    steep = AttentionCall(zero, zero, zero, bias=bias.clamp(min=-40.0))
    got = head_statistics(steep)
    assert float(got.entropy) == pytest.approx(float(got.entropy_bound), rel=1e-9)
    assert 0 < float(got.entropy) < 1e-12


def test_an_induction_head_built_by_hand() -> None:
    """[BOS] r r, and a head that looks at the token after the earlier copy of its own."""
    n = 40
    r = torch.randperm(500, generator=torch.Generator().manual_seed(1))[:n] + 1
    ids = torch.cat((torch.zeros(1, dtype=torch.long), r, r))
    at = {int(token): 1 + i for i, token in enumerate(r)}
    length = 2 * n + 1
    induction = torch.zeros(length, length, dtype=torch.float64)
    duplicate = torch.zeros_like(induction)
    for i in range(n + 1, length):
        induction[i, at[int(ids[i])] + 1] = 50.0
        duplicate[i, at[int(ids[i])]] = 50.0
    zero = torch.zeros(1, 2, length, 4, dtype=torch.float64)
    bias = torch.stack((induction, duplicate))[None]
    call = AttentionCall(zero, zero, zero, masks.causal(), bias=bias)
    got = head_statistics(call, token_ids=ids, tile=(7, 30))
    assert got.induction is not None and got.duplicate_token is not None
    assert got.induction[0].tolist() == pytest.approx([1.0, 0.0], abs=1e-15)
    assert got.duplicate_token[0].tolist() == pytest.approx([0.0, 1.0], abs=1e-15)


def test_weight_outside_the_declared_mask_is_found() -> None:
    """The call sees one key more than was declared: exactly that key's weight is hidden mass."""
    zero = torch.zeros(1, 1, 8, 4, dtype=torch.float64)
    grid = torch.ones(8, 8, dtype=torch.bool).tril()
    grid[2, 5] = True
    got = head_statistics(
        AttentionCall(zero, zero, zero, masks.keep(grid)), declared=masks.causal(), tile=(3, 3)
    )
    assert got.hidden_mass is not None
    assert float(got.hidden_mass) == pytest.approx(1 / 4, rel=1e-12)
    clean = head_statistics(
        AttentionCall(zero, zero, zero, masks.causal()), declared=masks.causal()
    )
    assert clean.hidden_mass is not None and float(clean.hidden_mass) == 0.0


def test_jensen_shannon_lies_between_its_bounds() -> None:
    """ln 2 ≤ JS/(1 − BC) ≤ 1 per row (METRICS), so for the means over rows too."""
    call = make(1, 6, 6, 41, 41, 6, 9, mask=masks.causal(), size=2.0)
    a, _, _ = materialised.weights(call)
    got = head_statistics(call).bhattacharyya
    assert got is not None
    for g in range(6):
        for h in range(g):
            one, two = a[0, g], a[0, h]
            middle = (one + two) / 2
            js = (torch.special.xlogy(one, one) + torch.special.xlogy(two, two)).sum(-1) / 2
            js = (js - torch.special.xlogy(middle, middle).sum(-1)).mean()
            assert math.log(2) <= float(js / (1 - got[0, g, h])) <= 1


def test_positions_are_counted_from_the_real_tokens() -> None:
    """Left padding changes no statistic, with or without positions given."""
    call = make(1, 2, 1, 11, 11, 5, 4, mask=masks.causal())
    want = head_statistics(call, token_ids=torch.arange(11) % 4)
    pad = 5

    def padded(x: Tensor) -> Tensor:
        return torch.cat((torch.full((1, x.shape[1], pad, x.shape[3]), math.nan), x), 2)

    left = AttentionCall(
        padded(call.query), padded(call.key), padded(call.value),
        masks.causal() & masks.padding(lengths=torch.tensor([11]), side="left"),
    )  # fmt: skip
    rows = (torch.arange(16) >= pad)[None]
    ids = torch.cat((torch.zeros(pad, dtype=torch.long), torch.arange(11) % 4))
    at = torch.cat((torch.ones(pad, dtype=torch.long), torch.arange(11)))
    for positions in ({}, {"query_positions": at, "key_positions": at}):
        got = head_statistics(left, query_rows=rows, token_ids=ids, **positions)
        for name in ("entropy", "distance", "distance_ratio", "sink", "previous_token", "rows",
                     "own_token", "induction", "duplicate_token", "bhattacharyya"):  # fmt: skip
            torch.testing.assert_close(
                getattr(got, name), getattr(want, name), rtol=1e-10, atol=1e-12, msg=name
            )
        assert bool((got.received[..., :pad] == 0).all())
        assert bool(got.row_entropy[..., :pad].isnan().all())


def test_nan_in_nan_out_but_not_from_hidden_keys() -> None:
    call = make(1, 3, 3, 9, 9, 4, 6, mask=masks.window(3))
    query = call.query.clone()
    query[0, 1, 4, 0] = math.nan
    got = head_statistics(AttentionCall(query, call.key, call.value, call.mask))
    assert got.entropy[0].isnan().tolist() == [False, True, False]
    assert got.row_entropy[0, 1].isnan().nonzero().flatten().tolist() == [4]
    assert got.rows[0].tolist() == [9, 9, 9]
    key = call.key.clone()
    key[0, :, 0] = math.inf
    seen_late = torch.arange(9)[None] >= 3
    hidden = head_statistics(
        AttentionCall(call.query, key, call.value, call.mask), query_rows=seen_late
    )
    want = head_statistics(call, query_rows=seen_late)
    torch.testing.assert_close(hidden.entropy, want.entropy, rtol=1e-12, atol=0)
    torch.testing.assert_close(hidden.cells, want.cells, rtol=1e-12, atol=0)


@pytest.mark.parametrize("tile", [None, (2, 3)])
def test_a_visible_score_of_minus_infinity_gets_no_weight(tile: tuple[int, int] | None) -> None:
    """Its softmax is finite: the same as if the key were hidden, but for the keys counted."""
    call = make(1, 2, 1, 9, 9, 4, 6, mask=masks.causal())
    query = torch.cat((call.query, torch.ones(1, 2, 9, 1)), -1)
    key = torch.cat((call.key, torch.zeros(1, 1, 9, 1)), -1)
    key[0, 0, 4, -1] = -math.inf
    got = head_statistics(AttentionCall(query, key, call.value, call.mask), tile=tile)
    key[0, 0, 4, -1] = 0.0
    without = masks.causal() & masks.hide(torch.arange(9).expand(9, 9) == 4)
    want = head_statistics(AttentionCall(query, key, call.value, without), tile=tile)
    for name in ("entropy", "largest_weight", "distance", "received", "top_weights", "cosine"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=1e-12, atol=0)


def test_cost_counts_visible_pairs() -> None:
    call = make(2, 6, 3, 10, 10, 8, dtype=torch.float32, mask=masks.causal())
    cost = head_statistics(call).cost
    assert cost.pairs == 2 * 6 * 55 and cost.flops == 2 * cost.pairs * (8 + 3)
    assert cost.kv_bytes == 2 * 3 * 10 * (8 + 3) * 4
    windowed = make(2, 6, 3, 10, 10, 8, dtype=torch.float32, mask=masks.window(4))
    assert head_statistics(windowed).cost.kv_bytes == 2 * 3 * 4 * (8 + 3) * 4
    assert head_statistics(call).low_rank is not None
    assert "head dimension 8 is below the context length 10" in str(head_statistics(call).low_rank)
    assert head_statistics(make(dim=8, queries=8)).low_rank is None


@pytest.mark.parametrize("queries, keys", [(0, 5), (5, 0), (0, 0)])
def test_empty_axes_give_nan_means_and_no_rows(queries: int, keys: int) -> None:
    call = make(1, 2, 1, queries, keys, 3)
    got = head_statistics(call)
    assert bool(got.entropy.isnan().all()) and bool((got.rows == 0).all())
    assert got.received.shape == (1, 2, keys) and bool((got.received == 0).all())
    with pytest.raises(ValueError, match="no batch element"):
        head_statistics(make(0, 2, 1, 3, 3))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"token_ids": torch.arange(4)}, r"token_ids must have shape \(1, 7\), got \(1, 4\)"),
        ({"query_rows": torch.ones(7)}, "query_rows is bool.*torch.float32"),
        ({"query_positions": torch.arange(7)}, "together"),
        ({"lse": torch.zeros(1, 2, 3)}, r"lse must have shape \(1, 2, 7\), got \(1, 2, 3\)"),
        ({"map_cells": 0}, "map_cells=0"),
        ({"tile": (0, 4)}, r"tile=\(0, 4\)"),
        ({"token_ids": torch.rand(7)}, "token_ids are whole numbers, got torch.float32"),
        (
            {"query_positions": torch.arange(7) ** 9, "key_positions": torch.arange(7) ** 9},
            "positions span",
        ),
    ],
)
def test_what_does_not_fit_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        head_statistics(make(), **options)


def test_more_queries_than_keys_have_no_token_of_their_own() -> None:
    with pytest.raises(ValueError, match="7 queries cannot be the last of 5 keys"):
        head_statistics(make(queries=7, keys=5), token_ids=torch.arange(5))
