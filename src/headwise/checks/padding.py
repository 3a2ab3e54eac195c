"""Padding: real tokens' outputs are the same whatever is padded, on which side, how much, with
what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from headwise.checks import blame, rounding
from headwise.checks.finding import NotRunnable, failed, gap, not_run, passed
from headwise.checks.streams import Stream
from headwise.checks.subject import Subject
from headwise.record import Record

PADDING = "padding"
_ONE = {"image": "a picture", "sound": "a sound of the one length that the model takes"}


@dataclass(frozen=True, eq=False)
class Padded:
    """Some real tokens with `count` pads on one side, and what says so to the model."""

    tokens: Tensor
    real: Tensor
    positions: Tensor

    def cut(self, outputs: Tensor, own_rows: bool) -> Tensor:
        """The real tokens' rows of the first example; all rows where they are another stream's."""
        if not own_rows or outputs.shape[1] != self.real.shape[1]:
            return outputs[:1]
        return outputs[:1, self.real[0]]


def pad(
    subject: Subject, content: Tensor, count: int, side: str, *, filling: int | None = None
) -> Padded:
    """`content` (1, n[, F]) with pads of the model's pad id (zeros for features).

    `filling` is the seed of random tokens in their place. Positions count the real tokens.
    """
    length = content.shape[1]
    blank = torch.zeros_like(content[:, :1]).repeat_interleave(count, dim=1)
    if not content.is_floating_point():
        blank = blank + subject.pad_token_id
    if filling is not None:
        blank = subject.fresh(blank + (0 if not content.is_floating_point() else 1), filling)
        if content.is_floating_point():
            blank = blank * float(content.std())
    tokens = torch.cat([blank, content] if side == "left" else [content, blank], dim=1)
    real = torch.ones(1, length + count, dtype=torch.bool)
    real[:, slice(0, count) if side == "left" else slice(length, None)] = False
    positions = (real.long().cumsum(-1) - 1).clamp(min=0)
    return Padded(tokens, real, positions)


def position_offset(subject: Subject, stream: Stream) -> int | None:
    """What the model counts its first token as, or None where it takes no positions.

    Some models count from padding_idx + 1; the number that changes nothing is the model's own.
    """
    if stream.positions is None or not stream.own_rows:
        return None
    tokens = subject.tokens(stream)
    base = subject.run(tokens, stream=stream)
    places = torch.arange(tokens.shape[1])[None]
    for offset in (0, subject.pad_token_id + 1):
        try:
            shifted = subject.run(tokens, stream=stream, positions=places + offset)
        except NotRunnable:
            continue
        if rounding.apart(base, shifted) <= rounding.bound_of(subject, base):
            return offset
    return None


def padding(subject: Subject) -> list[Record]:
    """Right and left, 0, 1 and many pads, alone and beside a longer row, pads of any content.

    One record a path, stream and side. Causal models must work on both sides; an encoder on the
    right, and on the left where it takes positions or `padding_side` asks for it.
    """
    streams = [s for s in subject.streams if s.padding is not None]
    if subject.main.whole:
        raise NotRunnable(f"{_ONE[subject.main.kind]} has no padding")
    if not streams:
        raise NotRunnable(
            "the model takes no padding mask (looked for attention_mask, key_padding_mask and "
            "their kin among forward's arguments)"
        )
    if subject.documents is not None:
        raise NotRunnable("packed documents are not padded; check the model without documents")
    subject.want_steady()
    records = []
    for path, stream, side in product(subject.paths, streams, ("right", "left")):
        try:
            with subject.on(path):
                records.append(_side(subject, stream, side, path))
        except NotRunnable as error:
            records.append(not_run(PADDING, str(error), path=path, case=_case(stream, side)))
    return records


def _case(stream: Stream, side: str) -> str:
    return f"{stream.name} {side}".strip()


def _demanded(subject: Subject, stream: Stream, side: str, offset: int | None) -> bool:
    if subject.padding_side in ("left", "right"):
        return side == subject.padding_side
    if subject.padding_side == "both" or side == "right" or offset is not None:
        return True
    return bool(subject.causal) and stream.name == ""


def _side(subject: Subject, stream: Stream, side: str, path: str) -> Record:
    content = subject.tokens(stream)
    many = content.shape[1] // 2
    content = content[:, : content.shape[1] - many]
    offset = position_offset(subject, stream)

    def measure(one: Subject) -> tuple[float, float]:
        own = one.streams[subject.streams.index(stream)]
        return _differences(one, own, side, many, offset)

    verdict = rounding.judge(subject, measure)
    moved = _content_moves(subject, stream, side, many, offset)
    numbers: dict[str, Any] = {
        "path": path,
        "case": _case(stream, side),
        "ran": f"{content.shape[1]} real tokens with 0, 1 and {many} pads, alone and in a batch of "
        "2, two contents of the pads"
        + ("" if offset is None or side == "right" else f", {stream.positions} given"),
        "tolerance": verdict.bound,
        "worst": max(verdict.worst, moved[0]),
    }
    if not verdict.bug and moved[0] <= moved[1]:
        message = f"{side} padding moves real outputs by {verdict.worst:.2g} at most"
        message += f" ({verdict.note})" if verdict.note else ""
        if side == "left" and offset is not None:
            message += _without_positions(subject, stream, many)
        return passed(PADDING, message, **numbers)
    cause, where, message = _diagnose(subject, stream, side, many, offset, verdict, moved)
    if not _demanded(subject, stream, side, offset) and cause == "positions-under-padding":
        reason = (
            f"{message}; nothing says that this model must take {side} padding: pass "
            f"padding_side={side!r} to demand it"
        )
        return not_run(PADDING, reason, **numbers)
    return failed(PADDING, message, cause=cause, where=where, **numbers)


def _given(case: Padded, offset: int | None, side: str) -> dict[str, Any]:
    positions = None if offset is None or side == "right" else case.positions + offset
    return {"real": case.real, "positions": positions}


def _differences(
    subject: Subject, stream: Stream, side: str, many: int, offset: int | None
) -> tuple[float, float]:
    """(largest movement of a real token's output, what rounding explains)."""
    whole = subject.tokens(stream)
    content = whole[:, : whole.shape[1] - many]
    base = subject.run(content, stream=stream)
    bound = rounding.bound_of(subject, base)
    worst = 0.0
    for count in (0, 1, many):
        case = pad(subject, content, count, side)
        outputs = subject.run(case.tokens, stream=stream, **_given(case, offset, side))
        worst = max(worst, rounding.apart(base, case.cut(outputs, stream.own_rows)))
    pair = beside(subject, case, whole)
    outputs = subject.run(pair.tokens, stream=stream, **_given(pair, offset, side))
    return max(worst, rounding.apart(base, pair.cut(outputs, stream.own_rows))), bound


def beside(subject: Subject, case: Padded, whole: Tensor) -> Padded:
    """The padded row in a batch with a row that has no pads."""
    neighbour = subject.fresh(whole, 5)
    return Padded(
        torch.cat([case.tokens, neighbour]),
        torch.cat([case.real, torch.ones_like(case.real)]),
        torch.cat([case.positions, torch.arange(case.real.shape[1])[None]]),
    )


def _content_moves(
    subject: Subject, stream: Stream, side: str, many: int, offset: int | None
) -> tuple[float, float]:
    """(movement of real outputs when only the pads' content changes, what rounding explains)."""
    content = subject.tokens(stream)
    content = content[:, : content.shape[1] - many]
    case = pad(subject, content, many, side)
    outputs = subject.run(case.tokens, stream=stream, **_given(case, offset, side))
    base = case.cut(outputs, stream.own_rows)
    worst = 0.0
    for seed in (6, 7):
        other = pad(subject, content, many, side, filling=seed)
        outputs = subject.run(other.tokens, stream=stream, **_given(other, offset, side))
        worst = max(worst, gap(base, other.cut(outputs, stream.own_rows)))
    return worst, rounding.equal_bound(base)


def _without_positions(subject: Subject, stream: Stream, many: int) -> str:
    """What a caller should know who pads on the left and leaves the positions to the model."""

    def measure(one: Subject) -> tuple[float, float]:
        own = one.streams[subject.streams.index(stream)]
        return _differences(one, own, "left", many, None)

    verdict = rounding.judge(subject, measure)
    if not verdict.bug:
        return "; its own positions count the real tokens too"
    return (
        f"; without {stream.positions} they move by {verdict.worst:.2g}: the model then counts "
        f"padding as positions, so give it {stream.positions}"
    )


def _diagnose(
    subject: Subject,
    stream: Stream,
    side: str,
    many: int,
    offset: int | None,
    verdict: rounding.Verdict,
    moved: tuple[float, float],
) -> tuple[str | None, dict | None, str]:
    """(cause, where, message), by what makes the difference go away."""
    content = subject.tokens(stream)
    content = content[:, : content.shape[1] - many]
    case = pad(subject, content, many, side)
    given = _given(case, offset, side)
    base = subject.run(content, stream=stream)
    outputs = subject.run(case.tokens, stream=stream, **given)
    padded = case.cut(outputs, stream.own_rows)
    if not bool(padded.isfinite().all()) or not bool(outputs.isfinite().all()):
        count = int((~padded.isfinite()).any(-1).sum())
        message = (
            f"{many} pads on the {side} make {count} of {padded.shape[1]} real outputs NaN or "
            "infinite: a row without a visible key"
        )
        return "nan-from-empty-row", None, message
    if moved[0] > moved[1]:
        cause = _mask_fault(subject, stream, side, case, given, base)
        where = _where(subject, stream, case, given)
        message = (
            f"the content of {many} pads on the {side} moves real outputs by {moved[0]:.3g} "
            f"(allowed {moved[1]:.1g}){blame.words(where)}"
        )
        return cause, where, message
    message = (
        f"{many} pads on the {side} move real outputs by {verdict.worst:.3g} (allowed "
        f"{verdict.bound:.1g}), whatever the pads hold: positions count the padding"
    )
    if side == "left":
        return "positions-under-padding", None, message
    return None, None, message.replace(": positions count the padding", "")


def _mask_fault(
    subject: Subject, stream: Stream, side: str, case: Padded, given: dict[str, Any], base: Tensor
) -> str | None:
    """Which other mask would have been right tells what the model does with the one it got."""
    positions = given["positions"]
    bound = rounding.bound_of(subject, base)

    def with_mask(real: Tensor | None, **more: Any) -> Tensor:
        found = subject.run(case.tokens, stream=stream, real=real, positions=positions, **more)
        return case.cut(found, stream.own_rows)

    def right(run: Callable[[], Tensor]) -> bool:
        try:
            return rounding.apart(base, run()) <= bound
        except NotRunnable:
            return False

    now = with_mask(case.real)
    if right(lambda: with_mask(~case.real)):
        return "mask-polarity"
    if right(lambda: with_mask(case.real.flip(1))):
        return "padding-side"
    if gap(now, with_mask(None)) <= rounding.equal_bound(now):
        return "padding-mask-ignored"
    name = stream.padding
    assert name is not None
    hiding = torch.zeros(case.real.shape).to(subject.dtype).masked_fill(~case.real, -1e9)
    if not stream.hides and right(lambda: with_mask(None, **{name: hiding})):
        return "float-mask-added"
    other = "right" if side == "left" else "left"
    many, offset = int((~case.real[0]).sum()), 0 if positions is not None else None
    moved, allowed = _content_moves(subject, stream, other, many, offset)
    return "padding-side" if moved <= allowed else None


def _where(
    subject: Subject, stream: Stream, case: Padded, given: dict[str, Any]
) -> dict[str, Any] | None:
    if not stream.own_rows:
        return None
    calls = blame.watched(subject, lambda: subject.run(case.tokens, stream=stream, **given))
    length = case.real.shape[1]
    allowed = case.real[:, None, :].expand(1, length, length)
    return blame.first_hidden_weight(calls, [allowed], rows=case.real)
