"""Which known fault a wrong result matches.

A cause is named only where the observed numbers are those that the fault gives and are not the
right ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.checks import faults, faults_mask
from headwise.checks.bare_cases import Bare, Case, bound, definition
from headwise.checks.faults import Result, masked, scaled, weighed, with_projections
from headwise.checks.fixes import FIXES


@dataclass(frozen=True)
class Fault:
    """`cause` by name, `detail` what exactly it was, `result` the output that it gives.

    `result` gives None where the fault cannot occur in a case.
    """

    cause: str
    detail: str
    result: Result

    @property
    def fix(self) -> str:
        return FIXES[self.cause]


def matching(
    bare: Bare, observed: Sequence[tuple[Case, Tensor]], dtype: torch.dtype
) -> list[Fault]:
    """The faults whose results are all the observed ones, and not everywhere the right ones.

    observed: (case, output) pairs in `dtype`, of one check; sound results among them narrow the
        choice down. Code that computes in float32 inside is matched to float32's bounds.
    """
    for precision in dict.fromkeys((dtype, torch.float32)):
        truths = []
        for case, output in observed:
            wanted, limit = truth(bare, case, dtype, precision)
            truths.append((case, output.double(), wanted, limit))
        if all(near(output, wanted, limit) for _, output, wanted, limit in truths):
            return []
        found = [fault for fault in FAULTS if all(_fits(bare, fault, one, dtype) for one in truths)]
        if found:
            return found
    return []


def name_fault(
    bare: Bare, observed: Sequence[tuple[Case, Tensor]], dtype: torch.dtype
) -> Fault | None:
    """The first of `matching`."""
    found = matching(bare, observed, dtype)
    return found[0] if found else None


def truth(
    bare: Bare, case: Case, dtype: torch.dtype, precision: torch.dtype | None = None
) -> tuple[Tensor, float]:
    """The right output for inputs in `dtype`, and how far one computed in `precision` may be off.

    `precision` None: that of `dtype`.
    """
    wanted, call = definition(bare, case, dtype)
    width = 1 if wanted.dim() == 4 else wanted.shape[-1]
    return wanted, bound(call, wanted, dtype if precision is None else precision, width)


def near(one: Tensor, two: Tensor, limit: float) -> bool:
    """Equal up to `limit`, NaN at the same places."""
    if one.shape != two.shape or not torch.equal(one.isnan(), two.isnan()):
        return False
    return not one.numel() or float((one - two).nan_to_num().abs().max()) <= limit


def _fits(
    bare: Bare, fault: Fault, found: tuple[Case, Tensor, Tensor, float], dtype: torch.dtype
) -> bool:
    case, output, wanted, limit = found
    try:
        faulty = fault.result(bare, case, dtype)
    except (ValueError, RuntimeError, IndexError):
        # Shapes on which the fault cannot even be computed: it is not what happened here.
        return False
    faulty = wanted if faulty is None else bare.forgiven(faulty, case)
    return near(output, faulty, limit)


def _scale(cause: str, detail: str, factor: faults.Factor) -> Fault:
    return Fault(cause, detail, scaled(factor))


def _call(cause: str, detail: str, change: faults.Change) -> Fault:
    return Fault(cause, detail, masked(change))


def _softmax(cause: str, detail: str, weights: faults.Weights) -> Fault:
    return Fault(cause, detail, weighed(weights))


_WRONG = "scale-wrong-dimension"
_SCALES = (
    _scale("scale-twice", "the scale is applied twice", lambda case, call: call.scale_value**2),
    _scale("no-scale", "the scores are not scaled", lambda case, call: 1.0),
    _scale(
        "scale-argument-ignored",
        "the scale asked for is ignored",
        lambda case, call: None if case.scale is None else call.head_dim**-0.5,
    ),
    _scale(
        _WRONG,
        "the scale is 1/√(heads·head_dim)",
        lambda case, call: (call.head_dim * call.num_heads) ** -0.5,
    ),
    _scale(
        _WRONG,
        "the scale is 1/√features of a token",
        lambda case, call: None if case.query.dim() == 4 else case.query.shape[-1] ** -0.5,
    ),
    _scale(_WRONG, "the scale is 1/√keys", lambda case, call: call.key_length**-0.5),
    _scale(_WRONG, "the scale is 1/√queries", lambda case, call: call.query_length**-0.5),
    _scale(_WRONG, "the scale is 1/√heads", lambda case, call: call.num_heads**-0.5),
    _scale(_WRONG, "the scale is 1/√width of values", lambda case, call: call.value_dim**-0.5),
    _scale(_WRONG, "the scale is √head_dim", lambda case, call: call.head_dim**0.5),
    _scale("scale-zero", "all weights are equal, as with scale 0", lambda case, call: 1e-300),
    _softmax("scale-after-softmax", "the weights are scaled, not the scores", faults.scale_after),
)

_HEADS = (
    _call("grouped-heads-tiled", "key/value heads are tiled 0, 1, 0, 1", faults.tiled),
    _call("grouped-heads-lost", "every query head reads key/value head 0", faults.first_kv_head),
    Fault(
        "heads-and-sequence-swapped",
        "each token attends over its own heads, not over the tokens",
        faults.over_heads,
    ),
    Fault("split-by-view", "heads are split by view, without transpose", faults.split_by_view),
    Fault(
        "split-by-view",
        "heads are split and merged by view, without transpose",
        faults.split_and_merged_by_view,
    ),
    Fault("merge-without-transpose", "heads are merged without transpose", faults.merged_by_view),
    *(
        Fault(
            "fused-order",
            f"the fused projection is read in the order {', '.join(order)}",
            with_projections(order="".join(order)),
        )
        for order in itertools.permutations("qkv")
    ),
    Fault(
        "rope-layout-mixed",
        "rotary pairs are neighbours where halves were declared",
        with_projections(interleaved=True),
    ),
    Fault(
        "rope-layout-mixed",
        "rotary pairs are halves where neighbours were declared",
        with_projections(interleaved=False),
    ),
    Fault("rope-ignored", "nothing is rotated", with_projections(rotate=False)),
    Fault(
        "value-transposed",
        "the values' length and width are exchanged by a view",
        faults.transposed_value,
    ),
    Fault(
        "batch-and-sequence-swapped",
        "each position attends over the samples of the batch",
        faults.swapped_batch,
    ),
)

_ADDED = "mask is added to the scores: it hides nothing"
_MASKS = (
    _call("top-left-causal", "causality stands at the first key", faults_mask.aligned("start")),
    _call("bottom-right-causal", "causality stands at the last key", faults_mask.aligned("end")),
    _call("window-off-by-one", "the window is one key too long", faults_mask.wider(1)),
    _call("window-off-by-one", "the window is one key too short", faults_mask.wider(-1)),
    _call("window-ignored", "the window is ignored", faults_mask.window_ignored),
    _call("causal-flag-in-cross", "causal where none was declared", faults_mask.causal_anyway),
    _call("future-leak", "no causal mask where one was declared", faults_mask.causal_lost),
    _call("causal-off-by-one", "a query does not see its own key", faults_mask.strictly_causal),
    _call("mask-polarity", "the mask is read inverted", faults_mask.inverted),
    _call("mask-polarity", "the mask is inverted, the padding not", faults_mask.mask_only_inverted),
    _call("mask-ignored", "the mask is ignored", faults_mask.unmasked),
    _call("float-mask-added", f"a 0/1 {_ADDED}", faults_mask.mask_added(1.0)),
    _call("float-mask-added", f"a 0/−1 {_ADDED}", faults_mask.mask_added(-1.0)),
    _call("mask-wrong-axis", "its batch axis is laid over queries", faults_mask.batch_axis_lost),
    _call("mask-wrong-axis", "every sample gets the mask of sample 0", faults_mask.first_sample),
    _call("mask-wrong-axis", "every head gets the mask of head 0", faults_mask.first_head),
    _call("mask-wrong-axis", "batch and heads are exchanged", faults_mask.heads_as_batch),
)

_SOFTMAXES = (
    _call("sink-ignored", "the sink logit is not in the denominator", faults.no_sinks),
    _call("sink-twice", "the sink logit counts twice", faults.double_sinks),
    _call("softcap-ignored", "the scores are not capped", faults.no_softcap),
    _softmax("softcap-order", "the softcap comes after the bias", faults.bias_before_cap),
    _softmax("softcap-order", "the softcap comes after the mask", faults.mask_before_cap),
    _softmax("softcap-order", "the softcap comes before the scale", faults.cap_before_scale),
    _call("bias-ignored", "the bias is ignored", faults.no_bias),
    _softmax("softmax-axis", "the softmax runs over the queries", faults.softmax_over(-2)),
    _softmax("softmax-axis", "the softmax runs over the queries", faults.over_queries_zeroed),
    _softmax("softmax-axis", "the softmax runs over the heads", faults.softmax_over(1)),
    _softmax("softmax-axis", "the softmax runs over the batch", faults.softmax_over(0)),
    _softmax(
        "mask-after-softmax",
        "the mask comes after the softmax: rows sum to less than 1",
        faults.softmax_before_mask,
    ),
    _softmax("nan-from-empty-row", "a row with no visible key gives NaN", faults.nan_rows),
    _softmax("mean-from-empty-row", "a row with no key gives the mean", faults.uniform_rows),
    _softmax("mean-from-empty-row", "a row with no key sees every key", faults.raw_rows),
)

# In order: where two faults give the same numbers the first is named.
FAULTS: tuple[Fault, ...] = (*_SCALES, *_HEADS, *_MASKS, *_SOFTMAXES)
