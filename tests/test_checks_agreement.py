"""Agreement of a model's paths and exported forms: what is seen, and what is said not to run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import headwise
from headwise.checks import check, failures
from zoo.models import Backends, Decoder

WORDS = torch.randint(1, 40, (1, 12), generator=torch.Generator().manual_seed(1))
FORMS = {"torch.export", "torch.compile"}


def agreement(model: nn.Module, inputs: Tensor = WORDS) -> list:
    torch.manual_seed(0)
    return check(model.eval(), inputs, only=["agreement"])


class ForgetsPadding(Backends):
    """The fused branch drops the mask when there is padding to hide."""

    def fused(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        length = query.shape[2]
        if mask is not None and int(mask[0].sum()) < length * (length + 1) // 2:
            mask = torch.ones_like(mask)
        return super().fused(query, key, value, mask)


def test_a_path_that_differs_with_padding_only() -> None:
    wrong = failures(agreement(ForgetsPadding()))
    assert ("sdpa", None) in {(r.where["path"], r.where["case"]) for r in wrong}
    assert any("with right padding" in r.values["message"] for r in wrong)
    assert {r.values["cause"] for r in wrong} <= {"path-differs", "exported-form-differs"}


def test_both_forms_run_and_each_is_named() -> None:
    records = agreement(Decoder())
    assert not failures(records)
    ran = {r.where["case"] for r in records if r.values["status"] == "passed"}
    assert ran == FORMS | {None}


class FixedWhenTraced(nn.Module):
    """Takes the mean of the example for that of every later input, once it is traced."""

    is_causal = True

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 16)
        self.attend = headwise.MultiHeadAttention(16, 2)
        self.level = 0.0

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.attend(self.table(input_ids), mask=headwise.causal())
        if not torch.compiler.is_compiling():
            self.level = float(x.detach().mean())
            return x + x.mean()
        return x + self.level


def test_a_form_is_run_on_another_input_than_it_was_made_of() -> None:
    model = FixedWhenTraced().eval()
    with torch.no_grad():
        model(WORDS)
    wrong = failures(agreement(model))
    assert FORMS & {r.where["case"] for r in wrong}
    assert {r.values["cause"] for r in wrong} == {"exported-form-differs"}


class Branches(Decoder):
    """Looks at a number, which no trace can follow."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        logits = out if isinstance(out, Tensor) else out[0]
        assert float(logits.sum()) == float(logits.sum())
        return out


def test_what_a_tracer_refuses_is_not_run_with_its_reason() -> None:
    records = agreement(Branches())
    assert not failures(records)
    refused = [r for r in records if r.values["status"] == "not run"]
    assert [r.where["case"] for r in refused] == ["torch.export"]
    assert "torch.export does not take the model" in refused[0].values["message"]


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_other_dtypes(kind: torch.dtype) -> None:
    records = agreement(Backends().to(kind))
    assert not failures(records)
    sdpa = next(r for r in records if r.where["path"] == "sdpa" and r.where["case"] is None)
    assert sdpa.values["status"] == "passed"
    assert "in float64" in sdpa.values["ran"]
    if kind == torch.float64:
        eager = next(r for r in records if r.where["path"] == "eager" and r.where["case"] is None)
        assert eager.values["status"] == "not run"
        assert "float64 already" in eager.values["message"]
    else:
        assert any((r.where["case"] or "").startswith("float32") for r in records)
