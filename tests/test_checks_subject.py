"""What the checks make of models that do not fit: words, never a traceback, never a pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise.checks import CHECKS, NotRunnable, Subject, check, failures
from headwise.checks.declared import one_layer, reach
from headwise.checks.measured import jacobian
from headwise.checks.rounding import judge
from headwise.masks import causal, window
from zoo import models as sound
from zoo.models_faulty import DropoutInEval, IgnoresPadding, ids


class Says(nn.Module):
    """Answers whatever it was given to answer."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.answer = answer

    def forward(self, x: Tensor) -> Any:
        return self.answer(self.linear(x))


class Refuses(sound.Decoder):
    """Takes its example and nothing else."""

    def forward(self, input_ids: Tensor, **more: Any) -> Any:
        if not torch.equal(input_ids, self.known):
            raise KeyError("an unknown sentence")
        return super().forward(input_ids)


class Pools(sound.Encoder):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = super().forward(input_ids, attention_mask)
        real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        return (x * real[..., None]).sum(1) / real.sum(1, keepdim=True)


def reasons(records: list[Any]) -> set[str]:
    assert {r.values["status"] for r in records} == {"not run"}
    assert [r.where["check"] for r in records if r.where["case"] != "train"] == list(CHECKS)
    return {r.values["message"] for r in records}


def test_a_model_without_inputs_says_what_to_pass() -> None:
    (reason,) = reasons([r for r in check(sound.Decoder()) if r.where["case"] is None])
    assert "pass inputs=" in reason


def test_inputs_without_tokens_are_named_by_their_shape() -> None:
    (reason,) = reasons(check(sound.Decoder(), {"input_ids": torch.zeros(3)}))
    assert "{'input_ids': '(3,) float32'}" in reason


def test_what_is_no_module_is_said() -> None:
    (reason,) = reasons(check("smollm2"))
    assert reason == "wanted a torch.nn.Module, got str"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda x: "a word", "returned a str with no floating tensor"),
        (lambda x: x.sum(), r"the output has shape \[\]"),
        (lambda x: {"counts": x.argmax(-1)}, "returned a dict with no floating tensor"),
    ],
)
def test_outputs_that_are_no_rows_stop_every_check(answer: Any, words: str) -> None:
    records = check(Says(answer), torch.randn(1, 12, 4), causal=True)
    assert {r.values["status"] for r in records} == {"not run"}
    subject = Subject.of(Says(answer), torch.randn(1, 12, 4), causal=True)
    with pytest.raises(NotRunnable, match=words):
        subject.run(subject.tokens())


def test_a_model_that_takes_no_other_tokens_is_not_run_with_its_own_words() -> None:
    model = Refuses()
    model.known = ids()["input_ids"]
    records = check(model, {"input_ids": model.known}, only=["future leak", "batch"])
    assert not [r for r in records if r.values["status"] == "passed"]
    assert all("the model raised KeyError" in r.values["message"] for r in records)
    assert all("unknown sentence" in r.values["message"] for r in records)


def test_a_model_that_is_random_in_eval_fails_eval_and_runs_nothing_that_compares() -> None:
    records = check(DropoutInEval(), ids())
    status = {r.where["check"]: r.values["status"] for r in records}
    compared = {"future leak", "measured mask", "padding", "batch", "cache"}
    assert {status[name] for name in compared} == {"not run"}
    (wrong,) = failures(records)
    assert "calls dropout with p=0.1 in eval mode" in wrong.values["message"]
    reason = next(r for r in records if r.where["check"] == "batch").values["message"]
    assert "two runs of the same input differ by" in reason


def test_a_model_that_does_not_say_whether_it_is_causal_is_asked_about() -> None:
    class Silent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = sound.Packed()

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.inner(input_ids, torch.zeros_like(input_ids))

    model = Silent()
    del sound.Packed.is_causal
    try:
        unknown = check(model, ids(), only=["future leak", "measured mask"])
        told = check(model, ids(), only=["future leak", "measured mask"], causal=True)
        wrong = check(model, ids(), only=["measured mask"], causal=False)
    finally:
        sound.Packed.is_causal = True
    assert {r.values["status"] for r in unknown} == {"not run"}
    assert all("causal=True or causal=False" in r.values["message"] for r in unknown)
    assert unknown[1].values["measured"] is not None and unknown[1].values["declared"] is None
    assert {r.values["status"] for r in told} == {"passed"}
    assert failures(wrong)[0].values["cause"] == "causal-in-encoder"


def test_a_pooled_output_is_checked_where_that_is_possible() -> None:
    records = check(Pools(), ids())
    passed = {r.where["check"] for r in records if r.values["status"] == "passed"}
    assert {"padding", "batch", "eval", "gradients"} <= passed
    assert "1 output rows for 12 tokens" in next(
        r.values["message"] for r in records if r.where["check"] == "measured mask"
    )

    class Careless(Pools, IgnoresPadding):
        pass

    # The pooling reads the mask that the attention ignores, so the white box must find it.
    wrong = failures(check(Careless(), ids(), only=["padding"]))
    right = next(r for r in wrong if r.where["case"] == "right")
    assert right.values["where"]["layer"] == 0 and right.values["where"]["key"] >= 6


def test_a_checked_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(12), nn.Dropout(0.5))
    model[2].eval()
    model[0].weight.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.random.get_rng_state()
    check(model, torch.randn(1, 12, 4, generator=torch.Generator().manual_seed(1)), causal=False)
    assert torch.equal(random, torch.random.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert (model.training, model[1].training, model[2].training) == (True, True, False)
    assert not model[0].weight.requires_grad and model[0].bias.requires_grad
    assert all(p.grad is None for p in model.parameters())


def test_wrong_options_raise() -> None:
    with pytest.raises(ValueError, match="no check is named 'leak'; choose from future leak"):
        check(sound.Decoder(), ids(), only=["leak"])
    with pytest.raises(ValueError, match="padding_side='top'; wanted 'left', 'right' or 'both'"):
        check(sound.Decoder(), ids(), padding_side="top")


def test_progress_counts_the_checks() -> None:
    calls: list[tuple[int, int, str]] = []
    only = ["eval", "batch"]
    check(sound.Decoder(), ids(), only=only, progress=lambda *said: calls.append(said))
    assert calls == [(0, 2, "eval"), (1, 2, "batch"), (2, 2, "")]


def test_the_reach_of_stacked_windows() -> None:
    """Two windows of 4 reach 2·(4 − 1) keys back; the masks are those of headwise.masks."""
    one = one_layer(12, is_causal=True, window=4, documents=None)
    assert torch.equal(one, window(4).dense(12, 12)[0, 0])
    assert torch.equal(reach([one, one]), window(7).dense(12, 12)[0, 0])
    whole = one_layer(12, is_causal=True, window=None, documents=None)
    assert torch.equal(reach([one, whole]), causal().dense(12, 12)[0, 0])


def test_the_jacobian_of_a_known_map() -> None:
    """y_i = Σ_j A_ij x_j: one probe v gives |A_ij|·‖v‖ for every pair."""
    grid = torch.randn(12, 12).tril()

    class Mixes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * (grid @ x)

    subject = Subject.of(Mixes(), torch.randn(1, 12, 4), causal=True)
    found = jacobian(subject, subject.tokens(), list(range(12)))
    ratio = found[grid != 0] / grid[grid != 0].abs().double()
    assert bool((found[grid == 0] == 0).all())
    assert float(ratio.max() / ratio.min()) < 1 + 1e-4


def test_rounding_is_told_from_a_bug_by_float64() -> None:
    subject = Subject.of(Says(lambda x: x), torch.randn(1, 12, 4), causal=False)

    def rounds(one: Subject) -> tuple[float, float]:
        return 3e4 * torch.finfo(one.dtype).eps, torch.finfo(one.dtype).eps

    verdict = judge(subject, rounds)
    assert not verdict.bug and verdict.note.startswith("rounding: 0.0036, and 7e-12 in float64")
    verdict = judge(subject, lambda one: (0.01, torch.finfo(one.dtype).eps))
    assert verdict.bug and "0.01 in float64 too" in verdict.note
