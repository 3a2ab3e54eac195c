"""Eval and gradients: the same answer twice, and no NaN in any gradient with padded rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headwise.checks import padding
from headwise.checks.finding import NotRunnable, failed, gap, not_run, passed
from headwise.checks.subject import Subject
from headwise.record import Record

EVAL, GRADIENTS = "eval", "gradients"
_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout")


class _Drops(TorchFunctionMode):
    """Writes down which module drops values while the block runs, and with what probability."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {module: name for name, module in model.named_modules()}
        self.inside: list[nn.Module] = []
        self.found: list[tuple[str, str, float]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        probability = 0.0
        if name in _DROPOUTS:
            given = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
            if given.get("training", given.get("train", True)):
                probability = float(given.get("p", 0.5))
        elif name == "scaled_dot_product_attention":
            probability = float(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
        if probability:
            inner = self.inside[-1] if self.inside else None
            self.found.append((self.names.get(inner, ""), name, probability))
        return func(*args, **kwargs)


@contextlib.contextmanager
def _tracked(model: nn.Module, mode: _Drops, outputs: list[tuple[str, Any]]) -> Iterator[None]:
    """Each module's first output by name, in the order in which they end; and who is running."""
    handles = []
    for name, module in model.named_modules():

        def enter(module: nn.Module, args: Any) -> None:
            mode.inside.append(module)

        def leave(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
            if mode.inside:
                mode.inside.pop()
            first = output[0] if isinstance(output, tuple) and output else output
            if isinstance(first, Tensor):
                outputs.append((name, first.detach().clone()))

        handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    try:
        with mode:
            yield
    finally:
        for handle in handles:
            handle.remove()


def eval_runs(subject: Subject) -> list[Record]:
    """Two eval runs of one input are equal bit for bit; what differs is named, dropout first."""
    tokens = subject.tokens()
    records = []
    for path in subject.paths:
        try:
            with subject.on(path):
                records.append(_twice(subject, path, tokens))
        except NotRunnable as error:
            records.append(not_run(EVAL, str(error), path=path))
    return records


def _twice(subject: Subject, path: str, tokens: Tensor) -> Record:
    worst = gap(subject.run(tokens), subject.run(tokens))
    numbers = {"path": path, "ran": "two runs in eval mode", "tolerance": 0.0, "worst": worst}
    if not worst:
        return passed(EVAL, "two eval runs are equal, bit for bit", **numbers)
    runs: list[list[tuple[str, Any]]] = [[], []]
    drops = _Drops(subject.model)
    for outputs in runs:
        with _tracked(subject.model, drops, outputs):
            subject.run(tokens)
    first = next(
        (a for (a, x), (b, y) in zip(*runs, strict=False) if a == b and not torch.equal(x, y)), None
    )
    if drops.found:
        name, function, probability = drops.found[0]
        module = dict(subject.model.named_modules()).get(name, subject.model)
        message = (
            f"two eval runs differ by {worst:.3g}: {name or 'the model'} "
            f"({type(module).__name__}) calls {function} with p={probability:g} in eval mode"
        )
        where = {"module": name, "layer": None, "head": None, "query": None, "key": None,
                 "weight": None}  # fmt: skip
        return failed(EVAL, message, cause="dropout-in-eval", where=where, **numbers)
    message = (
        f"two eval runs differ by {worst:.3g}: the first module whose output differs is "
        f"{first or 'the model itself'}; no dropout was called"
    )
    return failed(EVAL, message, cause="random-in-eval", **numbers)


def gradients(subject: Subject) -> list[Record]:
    """Every gradient is finite, in eval and in train mode, with padded rows in the batch.

    The loss reads the real tokens only, as losses do; the gradient of padding must then be 0.
    """
    records = []
    for path in subject.paths:
        for mode in ("eval", "train"):
            try:
                with subject.on(path):
                    records.append(_mode(subject, path, mode))
            except NotRunnable as error:
                records.append(not_run(GRADIENTS, str(error), path=path, case=mode))
    return records


def _mode(subject: Subject, path: str, mode: str) -> Record:
    cases: list[tuple[str, padding.Padded]] = [("no padding", _whole(subject))]
    stream = subject.main
    if stream.padding is not None and not stream.whole and subject.documents is None:
        content = subject.tokens()
        many = content.shape[1] // 2
        short = content[:, : content.shape[1] - many]
        for side in ("right", "left"):
            case = padding.pad(subject, short, many, side)
            cases.append((f"{side} padding", padding.beside(subject, case, content)))
    ran, skipped = [], []
    with _set(subject.model, mode):
        for name, case in cases:
            try:
                bad = _not_finite(subject, case)
            except NotRunnable as error:
                skipped.append(f"{name} not run: {error}")
                continue
            ran.append(name)
            if bad:
                cause = "nan-from-empty-row" if name != "no padding" else None
                message = (
                    f"{name}, {mode} mode: {len(bad)} gradients hold NaN or infinities, e.g. "
                    f"{bad[0]}"
                )
                words = f"{', '.join(ran)}, {mode} mode"
                return failed(GRADIENTS, message, cause=cause, path=path, case=mode, ran=words)
    if not ran:
        raise NotRunnable("; ".join(skipped))
    words = ", ".join([*ran, *skipped])
    message = f"all gradients are finite ({mode} mode)"
    return passed(GRADIENTS, message, path=path, case=mode, ran=words)


def _whole(subject: Subject) -> padding.Padded:
    tokens = subject.tokens()
    length = tokens.shape[1]
    real = torch.ones(1, length, dtype=torch.bool)
    return padding.Padded(tokens, real, torch.arange(length)[None])


@contextlib.contextmanager
def _set(model: nn.Module, mode: str) -> Iterator[None]:
    before = {module: module.training for module in model.modules()}
    # Batch normalisation writes its running statistics in train mode.
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    model.train(mode == "train")
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, kept in buffers:
                buffer.copy_(kept)
        for module, training in before.items():
            module.training = training


def _not_finite(subject: Subject, case: padding.Padded) -> list[str]:
    """Names of what has a gradient that is not finite (or the output, where it is not)."""
    weights = {n: p for n, p in subject.model.named_parameters() if p.is_floating_point()}
    asked = {name: p.requires_grad for name, p in weights.items()}
    for p in weights.values():
        p.requires_grad_(True)
    masked = not bool(case.real.all())
    try:
        outputs = subject.run(case.tokens, real=case.real if masked else None, grad=True)
        rows = outputs
        if outputs.shape[1] == case.real.shape[1]:
            rows = outputs[case.real]
        if not bool(rows.isfinite().all()):
            return ["the outputs of real tokens themselves"]
        if not rows.requires_grad:
            raise NotRunnable("the model's outputs carry no gradient (detached, or no_grad inside)")
        found = torch.autograd.grad(
            rows.double().square().mean(), list(weights.values()), allow_unused=True
        )
    finally:
        for name, p in weights.items():
            p.requires_grad_(asked[name])
    if all(g is None for g in found):
        raise NotRunnable("no parameter takes part in the outputs")
    return [
        name
        for name, gradient in zip(weights, found, strict=True)
        if gradient is not None and not bool(gradient.isfinite().all())
    ]
