"""A fault that lives in one attention implementation only, and not in the one the model is on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headwise.checks import check, failures
from zoo.models import Backends, Decoder


class _EagerOnly(Backends):
    """Right on sdpa, which it is on; wrong on eager."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        out = Decoder.attend(self, query, key, value, mask)
        if self.attn_implementation == "sdpa":
            return out
        return self.wrong(out, query, key, value)

    def wrong(self, out: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return out


class SeesTheFuture(_EagerOnly):
    def wrong(self, out: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return Decoder.attend(self, query, key, value, None)


class ReadsItsNeighbours(_EagerOnly):
    def wrong(self, out: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return out - 0.1 * out.mean(0, keepdim=True)


class GradientOfNothing(_EagerOnly):
    """Adds the root of 0: 0 in every output, NaN in every gradient."""

    def wrong(self, out: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return out + (query * 0).square().sum().sqrt()


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (SeesTheFuture, "measured mask"),
        (ReadsItsNeighbours, "batch"),
        (GradientOfNothing, "gradients"),
    ],
)
def test_each_check_runs_on_every_path(model: type[_EagerOnly], name: str) -> None:
    torch.manual_seed(0)
    made = model().eval()
    records = check(made, torch.randint(1, 40, (1, 12)), only=[name])
    by_path: dict[str, set[str]] = {}
    for record in records:
        by_path.setdefault(str(record.where["path"]), set()).add(record.values["status"])
    assert by_path["sdpa"] == {"passed"}
    assert "failed" in by_path["eager"]
    assert {record.where["path"] for record in failures(records)} == {"eager"}
    assert made.attn_implementation == "sdpa", "left on another path"


@pytest.mark.parametrize("name", ["measured mask", "batch", "gradients"])
def test_the_correct_twin_passes_on_both(name: str) -> None:
    torch.manual_seed(0)
    records = check(Backends().eval(), torch.randint(1, 40, (1, 12)), only=[name])
    assert {r.values["status"] for r in records} == {"passed"}
    assert {r.where["path"] for r in records} == {"eager", "sdpa"}


def test_one_grid_is_kept_and_those_of_failures() -> None:
    torch.manual_seed(0)
    words = torch.randint(1, 40, (1, 12))
    fine = check(Backends().eval(), words, only=["measured mask"])
    assert [r.values.get("measured") is not None for r in fine] == [True, False]
    wrong = check(SeesTheFuture().eval(), words, only=["measured mask"])
    assert all(r.values.get("measured") is not None for r in failures(wrong))
