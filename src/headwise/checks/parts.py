"""What of a model is checked besides the whole: its encoder by itself, and the same in float32."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from headwise.checks.finding import NotRunnable
from headwise.checks.prepare import noise_for
from headwise.checks.streams import two_parts
from headwise.checks.subject import Subject
from headwise.record import Record

# What a part runs: the rest is said of the whole, or does not arise.
OF_ENCODER = ("measured mask", "padding", "batch", "eval", "gradients", "agreement")
IN_FLOAT32 = ("future leak", "measured mask", "padding", "batch", "cache", "gradients", "agreement")


@dataclass(frozen=True, eq=False)
class Part:
    """A subject, the name that its records carry ("" for the whole), and the checks that it runs.

    `subject` is the reason where the part cannot be had.
    """

    name: str
    subject: Subject | NotRunnable
    checks: tuple[str, ...]

    def label(self, record: Record) -> Record:
        """The record with the part's name before its case."""
        if not self.name:
            return record
        own = record.where.get("case")
        case = f"{self.name}, {own}" if own else self.name
        return replace(record, where={**record.where, "case": case})


def parts_of(subject: Subject, names: list[str]) -> list[Part]:
    """The whole; the encoder where there is one beside a decoder; float32 beside half precision."""
    parts = [Part("", subject, tuple(names))]
    if two_parts(subject.model):
        parts.append(Part("encoder", _encoder(subject), _of(OF_ENCODER, names)))
    if torch.finfo(subject.dtype).eps > torch.finfo(torch.float32).eps:
        wide = subject.copied(torch.float32)
        missing = NotRunnable("a float32 copy would be larger than 4 GiB, or can't be made")
        parts.append(Part("float32", wide or missing, _of(IN_FLOAT32, names)))
        if wide is not None and two_parts(wide.model):
            both = tuple(name for name in OF_ENCODER if name in IN_FLOAT32)
            parts.append(Part("float32 encoder", _encoder(wide), _of(both, names)))
    return [part for part in parts if part.checks]


def _of(some: tuple[str, ...], names: list[str]) -> tuple[str, ...]:
    return tuple(name for name in some if name in names)


def _encoder(subject: Subject) -> Subject | NotRunnable:
    """The encoder by itself: bidirectional, on the example's own input where it has one."""
    get = getattr(subject.model, "get_encoder", None)
    model = get() if callable(get) else None
    if not isinstance(model, torch.nn.Module):
        return NotRunnable("the model gives no encoder (get_encoder) to check by itself")
    inputs: dict[str, Any] = {
        name: subject.kwargs[name]
        for name in ("input_ids", "inputs_embeds", "input_features")
        if name in subject.kwargs
    }
    try:
        if not inputs:
            inputs = {"input_features": noise_for(model, subject.model)}
        return Subject.of(
            model,
            inputs,
            causal=False,
            pad_token_id=subject.pad_token_id,
            batch_first=subject.batch_first,
            name=f"{subject.name}'s encoder",
        )
    except NotRunnable as error:
        return error
