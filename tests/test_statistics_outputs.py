"""Ranks and CKA from running sums against the whole matrices in float64."""

from __future__ import annotations

import pytest
import torch

from headwise.errors import BadInput
from headwise.statistics.outputs import HeadOutputs


def test_against_the_definitions() -> None:
    torch.manual_seed(0)
    x = torch.randn(37, 3, 5).double() + 2
    x[:, 2] = x[:, 0] @ torch.linalg.qr(torch.randn(5, 5).double())[0]
    x[:, 1, 2:] *= 0.05
    sums = HeadOutputs(3, 5)
    for piece in x.split(11):
        sums.add(piece)
    for head in range(3):
        values = torch.linalg.svdvals(x[:, head])
        p = values / values.sum()
        rank = (-(p * p.log()).sum()).exp()
        torch.testing.assert_close(sums.effective_rank()[head], rank)
        stable = x[:, head].square().sum() / torch.linalg.matrix_norm(x[:, head], 2) ** 2
        torch.testing.assert_close(sums.stable_rank()[head], stable)
    c = x - x.mean(0)
    k = [c[:, h] @ c[:, h].T for h in range(3)]
    wanted = torch.tensor(
        [[float((a * b).sum() / (a.norm() * b.norm())) for b in k] for a in k]
    ).double()
    torch.testing.assert_close(sums.cka(), wanted, rtol=1e-6, atol=1e-6)
    # CKA does not see a rotation.
    assert sums.cka()[0, 2] == pytest.approx(1, abs=1e-9) and sums.cka()[0, 1] < 0.9


def test_bad_input() -> None:
    sums = HeadOutputs(2, 3)
    with pytest.raises(BadInput, match=r"wanted \(rows, 2, 3\), got \(4, 3, 2\)"):
        sums.add(torch.zeros(4, 3, 2))
    with pytest.raises(BadInput, match="no rows"):
        sums.effective_rank()
    with pytest.raises(BadInput, match="at least 2 rows, got 0"):
        sums.cka()
