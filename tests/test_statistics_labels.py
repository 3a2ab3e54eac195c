"""Names of heads and clusters, and the collapse warning, on heads built to deserve them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from headwise import masks
from headwise.call import AttentionCall
from headwise.statistics import (
    HeadStatistics,
    Thresholds,
    clusters,
    collapse_warning,
    entropy_lower_bound,
    head_statistics,
    labels,
    sink_rate,
)

N = 64


def built() -> HeadStatistics:
    """Heads, by their scores: sink, previous token, local, even, even again, and one of none."""
    i, j = torch.arange(N)[:, None], torch.arange(N)[None]
    noise = torch.randn(N, N, generator=torch.Generator().manual_seed(0)) * 4
    every = torch.zeros(N, N)
    scores = torch.stack(
        [
            every + 6.0 * (j == 0),
            every + 8.0 * (j == i - 1),
            every + 3.0 * ((i - j) < 5),
            every,
            every + 0.1 * torch.sin(j),
            noise,
        ]
    ).double()
    zero = torch.zeros(1, 6, N, 4, dtype=torch.float64)
    return head_statistics(AttentionCall(zero, zero, zero, masks.causal(), bias=scores[None]))


def test_each_head_gets_the_names_it_was_built_for() -> None:
    names = labels(built())
    assert names[0] == ["sink"]
    assert "previous-token" in names[1] and "local" in names[1]
    assert names[2] == ["local"]
    assert names[3] == ["broad", "redundant"] == names[4]
    assert names[5] == []


def test_names_follow_the_thresholds() -> None:
    statistics = built()
    sink = float(statistics.sink[0, 0, 0])
    assert "sink" in labels(statistics, thresholds=Thresholds(sink=sink - 1e-6))[0]
    assert "sink" not in labels(statistics, thresholds=Thresholds(sink=sink + 1e-6))[0]
    alone = labels(statistics, thresholds=Thresholds(redundant=1.0))
    assert not any("redundant" in names for names in alone)


def test_induction_and_duplicate_token_need_token_ids() -> None:
    n, length = 20, 41
    ids = torch.cat((torch.zeros(1), torch.arange(1, n + 1), torch.arange(1, n + 1))).long()
    scores = torch.zeros(2, length, length, dtype=torch.float64)
    for i in range(n + 1, length):
        scores[0, i, i - n + 1] = 9.0
        scores[1, i, i - n] = 9.0
    zero = torch.zeros(1, 2, length, 4, dtype=torch.float64)
    call = AttentionCall(zero, zero, zero, masks.causal(), bias=scores[None])
    first, second = labels(head_statistics(call, token_ids=ids))
    assert "induction" in first and "duplicate-token" not in first
    assert "duplicate-token" in second and "induction" not in second
    assert not {"induction", "duplicate-token"} & {
        n for h in labels(head_statistics(call)) for n in h
    }


def test_clusters_use_the_average_of_all_pairs() -> None:
    """Single linkage would chain all three; the average of 0.9 and 0.2 stays below 0.6."""
    chain = np.array([[1, 0.95, 0.2], [0.95, 1, 0.9], [0.2, 0.9, 1]])
    assert clusters(chain, 0.6) == [0, 0, 1]
    assert clusters(chain, 0.5) == [0, 0, 0]
    assert clusters(chain, 0.96) == [0, 1, 2]
    chain[2] = chain[:, 2] = math.nan
    assert clusters(chain, 0.6) == [0, 0, 1]
    assert clusters(np.zeros((0, 0)), 0.5) == []


def test_sink_rate_counts_heads() -> None:
    statistics = built()
    assert sink_rate(statistics) == pytest.approx(100 / 6)
    assert sink_rate(statistics, 2) == 0.0
    with pytest.raises(ValueError, match="got 5"):
        sink_rate(statistics, 5)


def test_collapse_is_warned_of_only_at_the_bound() -> None:
    """One score stands above equal others, which is the theorem's extreme case, with equality."""
    zero = torch.zeros(1, 2, N, 4, dtype=torch.float64)

    def layer(scores: Tensor) -> HeadStatistics:
        return head_statistics(AttentionCall(zero, zero, zero, bias=scores.double()))

    extreme = torch.zeros(1, 2, N, N)
    extreme[..., 3] = 12.0
    warned = collapse_warning(layer(extreme))
    assert warned is not None
    assert warned["mean_entropy"] == pytest.approx(warned["lower_bound"], rel=1e-9)
    assert warned["score_norm"] == pytest.approx(12 * math.sqrt((N - 1) / N), rel=1e-9)
    spread = torch.randn(1, 2, N, N, generator=torch.Generator().manual_seed(1))
    assert collapse_warning(layer(spread)) is None
    sinking = replace(layer(extreme), sink_logit_mass=torch.zeros(1, 2))
    assert collapse_warning(sinking) is None


@pytest.mark.parametrize("keys", [2, 7, 1000])
def test_the_entropy_bound_holds_and_is_reached(keys: int) -> None:
    scores = torch.randn(200, keys, generator=torch.Generator().manual_seed(keys)).double() * 3
    scores[0] = 0.0
    scores[0, 0] = 5.0
    norm = (scores - scores.mean(-1, keepdim=True)).norm(dim=-1)
    entropy = torch.distributions.Categorical(logits=scores).entropy()
    bound = entropy_lower_bound(norm, torch.full((200,), keys))
    assert bool((entropy >= bound - 1e-12).all())
    assert float(entropy[0]) == pytest.approx(float(bound[0]), rel=1e-12)
    wild = entropy_lower_bound(torch.tensor([math.inf, math.nan]), torch.tensor([keys, keys]))
    assert float(wild[0]) == 0.0 and math.isnan(float(wild[1]))
