"""What a model would lose and gain with fewer heads: quality, latency and KV bytes of pruned and
shared variants beside the original, least important heads first."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from headwise.errors import BadInput
from headwise.record import Record
from headwise.statistics.importance import Importance, Projection, head_importance
from headwise.surgery.families import sites
from headwise.surgery.healing import heal
from headwise.surgery.prune import prune_heads
from headwise.surgery.share import share_kv
from headwise.surgery.trial import Trial, check, language

RUNS, STEPS = 5, 8  # timed forward passes and decoded tokens of each variant, at most
LONGEST = 5.0  # seconds of each, after the first two
Say = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Variant:
    """One row. name: "original", "prune 20%", "1 kv head", with "+ healed". pruned: the share of
    heads (or key/value groups) really removed. quality: in `metric`, `better` "lower" or "higher".
    prefill_ms: median forward pass; decode_ms: median token behind filled caches, None where the
    model does not decode. kv_bytes: keys and values of the trial's tokens in all layers, from the
    model's shapes. healed: steps of fine-tuning.
    """

    name: str
    pruned: float
    kv_heads: int
    metric: str
    better: Literal["lower", "higher"]
    quality: float
    prefill_ms: float
    decode_ms: float | None
    kv_bytes: int
    parameters: int
    healed: int = 0

    def record(self) -> Record:
        values = asdict(self)
        return Record("whatif", {"variant": values.pop("name")}, values)


def importance(
    model: nn.Module, batches: Sequence[Any], loss: Callable[[nn.Module, Any], Tensor]
) -> Importance:
    """`head_importance` of every attention module of a model whose heads can be changed."""
    return head_importance(
        model,
        {s.name: Projection(s.output, s.heads, s.kv_heads) for s in sites(model)},
        batches,
        loss,
    )


def least_important(found: Importance, share: float) -> dict[int | str, list[int]]:
    """{layer: units} of the `share` least important heads (groups, where grouped), over all
    layers; every layer keeps its most important one.

    Raises:
        BadInput: the share is not in [0, 1), or would leave some layer empty.
    """
    if not 0 <= share < 1:
        raise BadInput(f"what_if: prune={share} must be a share in [0, 1), such as 0.2")
    ranked = sorted(
        (float(value), name, unit)
        for name, values in found.groups.items()
        for unit, value in enumerate(values)
        if unit != int(values.argmax())
    )
    total = sum(len(v) for v in found.groups.values())
    wanted = round(share * total)
    if wanted > len(ranked):
        raise BadInput(
            f"what_if: prune={share} would remove {wanted} of {total} heads or groups, and each of "
            f"the {len(found.groups)} layers keeps one: at most {len(ranked) / total:.2f}"
        )
    gone: dict[int | str, list[int]] = {}
    for _, name, unit in ranked[:wanted]:
        gone.setdefault(name, []).append(unit)
    return gone


def what_if(
    model: nn.Module,
    data: Tensor | Trial,
    *,
    prune: Sequence[float] = (0.1, 0.2, 0.4),
    kv_heads: Sequence[int] = (),
    context: int = 512,
    windows: int = 16,
    heal_steps: int = 0,
    by: Literal["mean", "similar"] = "mean",
    say: Say = lambda done, total, line: None,
) -> list[Variant]:
    """Measure variants of a model; the original comes first. The model is left as it is.

    data: token ids (N,) of a Hugging Face causal language model, measured by perplexity
    (`headwise.surgery.language` says how `windows` of `context` tokens are taken); or a `Trial`:
    any quality of any model whose heads can be changed. prune: shares of heads to remove, least
    important first. kv_heads: key/value heads to share down to, `by` as in `share_kv`. heal_steps:
    of fine-tuning after each change, and of the original for fairness.

    Raises:
        BadInput: no causal language model, too little text, a share or count that does not fit, a
        quality that is no number, a Trial that lacks what was asked for.
    """
    if heal_steps < 0:
        raise BadInput(f"what_if: heal steps must be at least 0, got {heal_steps}")
    trial = data if isinstance(data, Trial) else language(
        model, data, context=context, windows=windows
    )  # fmt: skip
    for share in prune:
        if not 0 <= share < 1:
            raise BadInput(f"what_if: prune={share} must be a share in [0, 1), such as 0.2")
    if prune and (trial.loss is None or not trial.calibration):
        raise BadInput("what_if: ranking heads needs the Trial's loss and calibration batches")
    if heal_steps and (trial.loss is None or not trial.training):
        raise BadInput("what_if: healing needs the Trial's loss and training batches")
    full = sites(model)
    plans: list[tuple[str, Callable[[], nn.Module]]] = [("original", lambda: model)]
    for count in kv_heads:
        if count < 1 or any(s.kv_heads % count for s in full):
            raise BadInput(f"what_if: kv_heads={count} does not divide every layer's kv heads")
        plans.append(
            (f"{count} kv head{'s' * (count > 1)}", partial(share_kv, model, count, by=by))
        )
    total = (len(plans) + len(prune)) * (2 if heal_steps else 1) + bool(prune)
    rows: list[Variant] = []
    if prune:
        assert trial.loss is not None
        say(0, total, f"importance over {len(trial.calibration)} batches")
        with _evaluating(model):
            found = importance(model, trial.calibration, trial.loss)
        for share in sorted(prune):
            gone = least_important(found, share)
            plans.append((f"prune {share:.0%}", partial(prune_heads, model, gone)))
    units = sum(s.kv_heads for s in full)
    for name, make in plans:
        say(len(rows) + bool(prune), total, f"measuring {name}")
        variant = make()
        pruned = 1 - sum(s.kv_heads for s in sites(variant)) / units if name[:5] == "prune" else 0.0
        rows.append(_measure(variant, name, pruned, trial))
        if heal_steps:
            assert trial.loss is not None
            say(len(rows) + bool(prune), total, f"healing {name}")
            healed = heal(
                variant, trial.training, heal_steps, loss=trial.loss, copy_first=variant is model
            )
            rows.append(_measure(healed, f"{name} + healed", pruned, trial, heal_steps))
    say(total, total, "done")
    return rows


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    was = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was)


def _measure(model: nn.Module, name: str, pruned: float, trial: Trial, healed: int = 0) -> Variant:
    with _evaluating(model), torch.inference_mode():
        quality = check(trial, model)
        prefill = _median(partial(trial.run, model), RUNS)
        decode = None if trial.step is None else _median(trial.step(model), STEPS)
    found = sites(model)
    size = next(model.parameters()).element_size()
    held = sum(s.kv_heads * (s.head_dim + s.value_dim) for s in found)
    return Variant(
        name=name,
        pruned=pruned,
        kv_heads=max(s.kv_heads for s in found),
        metric=trial.metric,
        better=trial.better,
        quality=quality,
        prefill_ms=1e3 * prefill,
        decode_ms=None if decode is None else 1e3 * decode,
        kv_bytes=held * size * trial.tokens,
        parameters=sum(p.numel() for p in model.parameters()),
        healed=healed,
    )


def _median(run: Callable[[], Any], times: int) -> float:
    """Seconds of a run, after one that warms up."""
    taken: list[float] = []
    while len(taken) <= times and (len(taken) < 3 or sum(taken) < LONGEST):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])
