"""Sampled rows: exact where all are taken, honest about their error where not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headwise import masks
from headwise.statistics import head_statistics, sampled_statistics
from materialised import make

PER_ROW = (
    "entropy", "effective_keys", "relative_entropy", "largest_weight", "distance", "sink",
    "previous_token", "own_token", "duplicate_token", "induction", "bhattacharyya",
    "sink_logit_mass",
)  # fmt: skip


def a_call(length: int = 61, **more: Any) -> Any:
    sinks = torch.tensor([0.3, -1.0, 2.0, 0.0]).double()
    return make(2, 4, 2, length, length, 7, 3, mask=masks.causal(), sinks=sinks, **more)


def test_all_rows_give_the_exact_statistics_without_error() -> None:
    call = a_call(softcap=2.0)
    rows = torch.ones(2, 61, dtype=torch.bool)
    rows[1, :20] = False
    options: dict[str, Any] = {"token_ids": torch.arange(61) % 9, "query_rows": rows}
    options["declared"] = masks.window(40)
    want = head_statistics(call, **options)
    got = sampled_statistics(call, sampled=61, **options)
    for name in PER_ROW:
        exact = getattr(want, name)
        torch.testing.assert_close(got[name].mean, exact, rtol=1e-10, atol=1e-13, msg=name)
        assert bool((got[name].standard_error == 0).all()), name
    assert want.hidden_mass is not None
    mean_a_row = want.hidden_mass / want.rows
    torch.testing.assert_close(got["hidden_mass"].mean, mean_a_row, rtol=1e-10, atol=1e-15)
    assert got.rows.tolist() == [61, 41] and got.of.tolist() == [61, 41]


def test_the_seed_fixes_the_sample() -> None:
    call = a_call()
    first, again = (sampled_statistics(call, sampled=9, seed=4) for _ in range(2))
    other = sampled_statistics(call, sampled=9, seed=5)
    assert torch.equal(first["entropy"].mean, again["entropy"].mean)
    assert not torch.equal(first["entropy"].mean, other["entropy"].mean)


def test_errors_are_as_large_as_the_standard_error_says() -> None:
    """Over 200 samples of 20 rows out of 61: no bias, and the mean squared standard error is the
    estimates' variance.

    The mean error may be four of its own standard deviations (and a ratio's bias, of order 1/n of
    one error). A variance from 200 samples is off by about √(2/200) = 10 %, by more where rows are
    skewed: the bounds allow 50 %.
    """
    call = a_call()
    want = head_statistics(call)
    names = ("entropy", "largest_weight", "distance", "own_token", "sink_logit_mass")
    errors: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    stated: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    for seed in range(200):
        got = sampled_statistics(call, sampled=20, seed=seed)
        for name in names:
            errors[name].append(got[name].mean - getattr(want, name))
            stated[name].append(got[name].standard_error)
    for name in names:
        # Heads of a sample share their rows, samples are independent: look at one head.
        off = torch.stack(errors[name])[:, 0, 1]
        spread = off.std()
        assert float(off.mean().abs() / spread) < 4 / 200**0.5 + 1 / 20, name
        variance = torch.stack(stated[name])[:, 0, 1].square().mean()
        assert 0.5 < float(variance / spread**2) < 1.5, name


def test_a_single_row_has_no_known_error() -> None:
    got = sampled_statistics(a_call(), sampled=1)
    assert bool(got["entropy"].standard_error.isnan().all())
    with pytest.raises(ValueError, match="sampled=0"):
        sampled_statistics(a_call(), sampled=0)
