"""Known faults of masks: the declared mask with one part changed.

Each gives the call that the fault would have made, or None where it cannot occur in a case.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch
from torch import Tensor

from headwise.call import AttentionCall
from headwise.checks.bare_cases import Bare, Case, visible_of
from headwise.checks.faults import Change


def inverted(bare: Bare, case: Case, call: AttentionCall) -> AttentionCall | None:
    if case.visible is None and case.real is None:
        return None
    grid = None if case.visible is None else ~case.visible
    real = None if case.real is None else ~case.real
    return replace(call, mask=visible_of(bare, case, grid=grid, real=real))


def mask_only_inverted(bare: Bare, case: Case, call: AttentionCall) -> AttentionCall | None:
    if case.visible is None or case.real is None:
        return None
    return replace(call, mask=visible_of(bare, case, grid=~case.visible))


def unmasked(bare: Bare, case: Case, call: AttentionCall) -> AttentionCall | None:
    if case.visible is None and case.real is None:
        return None
    plain = case.but(visible=None, real=None)
    return replace(call, mask=visible_of(bare, plain))


def mask_added(sign: float) -> Change:
    """A 0/1 mask that is added to the scores."""

    def other(bare: Bare, case: Case, call: AttentionCall) -> AttentionCall | None:
        marks = case.visible
        if marks is None and case.real is not None:
            marks = case.real[:, None, None, :]
        if marks is None:
            return None
        shown = bare.signature.mask if case.visible is not None else bare.signature.padding
        marks = ~marks if shown == "hide" else marks
        bias = sign * marks.to(call.query.dtype)
        if call.bias is not None:
            bias = bias + call.bias
        mask = visible_of(bare, case.but(visible=None, real=None))
        with warnings.catch_warnings():
            # That such a bias hides nothing is the very fault that is computed here.
            warnings.simplefilter("ignore", UserWarning)
            return replace(call, mask=mask, bias=bias)

    return other


def causal_anyway(bare: Bare, case: Case, call: AttentionCall) -> AttentionCall | None:
    if case.causal:
        return None
    return replace(call, mask=visible_of(bare, case, align="start", is_causal=True))


def causal_lost(bare: Bare, case: Case, call: AttentionCall) -> AttentionCall | None:
    if not case.causal:
        return None
    return replace(call, mask=visible_of(bare, case, is_causal=False))


def strictly_causal(bare: Bare, case: Case, call: AttentionCall) -> AttentionCall | None:
    """Also the query's own key hidden."""
    if not case.causal:
        return None
    shift = 0 if bare.signature.causal == "start" else call.key_length - call.query_length
    rows, keys = torch.arange(call.query_length)[:, None], torch.arange(call.key_length)
    grid = (keys != rows + shift)[None, None]
    if case.visible is not None:
        grid = grid & case.visible
    return replace(call, mask=visible_of(bare, case, grid=grid))


def aligned(align: str) -> Change:
    def other(bare: Bare, case: Case, call: AttentionCall) -> AttentionCall | None:
        if not case.causal or bare.signature.causal == align:
            return None
        return replace(call, mask=visible_of(bare, case, align=align))

    return other


def wider(extra: int) -> Change:
    def other(bare: Bare, case: Case, call: AttentionCall) -> AttentionCall | None:
        width = bare.signature.window if case.window is None else case.window
        if width is None or not case.causal or width + extra < 1:
            return None
        return replace(call, mask=visible_of(bare, case, extra=extra))

    return other


def window_ignored(bare: Bare, case: Case, call: AttentionCall) -> AttentionCall | None:
    width = bare.signature.window if case.window is None else case.window
    return None if width is None or not case.causal else wider(call.key_length)(bare, case, call)


def batch_axis_lost(bare: Bare, case: Case, call: AttentionCall) -> AttentionCall | None:
    """A (B, S) or (B, 1, 1, S) mask laid over the queries: silent where B = L."""
    if case.sizes[0] != case.sizes[1]:
        return None
    if case.real is not None:
        plain = case.but(real=None)
        return replace(call, mask=visible_of(bare, plain, grid=_with(case, case.real[None, None])))
    if case.visible is None or case.visible.shape[0] == 1 or case.visible.shape[2] != 1:
        return None
    return replace(call, mask=visible_of(bare, case, grid=case.visible.permute(2, 1, 0, 3)))


def _with(case: Case, grid: Tensor) -> Tensor:
    return grid if case.visible is None else grid & case.visible


def first_sample(bare: Bare, case: Case, call: AttentionCall) -> AttentionCall | None:
    """Every sample gets the mask of sample 0."""
    grid = None if case.visible is None else case.visible[:1]
    real = None if case.real is None else case.real[:1].expand_as(case.real)
    if grid is None and real is None:
        return None
    return replace(call, mask=visible_of(bare, case, grid=grid, real=real))


def heads_as_batch(bare: Bare, case: Case, call: AttentionCall) -> AttentionCall | None:
    """A mask over (batch, heads) laid out heads first, as (H·B, L, S)."""
    if case.visible is None:
        return None
    full = case.visible.expand(call.batch, call.num_heads, *case.visible.shape[2:])
    turned = full.transpose(0, 1).reshape(full.shape)
    return replace(call, mask=visible_of(bare, case, grid=turned))


def first_head(bare: Bare, case: Case, call: AttentionCall) -> AttentionCall | None:
    if case.visible is None or case.visible.shape[1] == 1:
        return None
    return replace(call, mask=visible_of(bare, case, grid=case.visible[:, :1]))
