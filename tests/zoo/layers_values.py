"""Attention functions with a fault in the scale, the softmax, the heads, sinks or dropout, and
their correct twins. `VALUES` lists them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from headwise.checks.signature import Signature
from zoo.layers import INF, PLAIN, Entry, plain, scores_of, zeros_for_empty


def scaled_twice(q, k, v):
    """Queries are scaled, and torch scales again."""
    return F.scaled_dot_product_attention(q / math.sqrt(q.shape[-1]), k, v)


def unscaled(q, k, v):
    return (q @ k.mT).softmax(-1) @ v


def scaled_to_zero(q, k, v):
    """A default of 0 that was meant as “none given”."""
    return (q @ k.mT * 0.0).softmax(-1) @ v


def scaled_by_all_heads(q, k, v):
    """√(heads · head_dim), the width of the model."""
    return (q @ k.mT / math.sqrt(q.shape[1] * q.shape[-1])).softmax(-1) @ v


def scaled_after(q, k, v):
    return (q @ k.mT).softmax(-1) / math.sqrt(q.shape[-1]) @ v


def softmax_over_queries(q, k, v):
    return scores_of(q, k).softmax(-2) @ v


def softmax_over_heads(q, k, v):
    return scores_of(q, k).softmax(1) @ v


def softmax_over_batch(q, k, v):
    """softmax(0): every weight is 1 at batch 1."""
    return scores_of(q, k).softmax(0) @ v


def grouped(q, k, v):
    groups = q.shape[1] // k.shape[1]
    return plain(q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1))


def grouped_tiled(q, k, v):
    """Key/value heads in the order 0, 1, 0, 1 instead of 0, 0, 1, 1."""
    groups = q.shape[1] // k.shape[1]
    return plain(q, k.repeat(1, groups, 1, 1), v.repeat(1, groups, 1, 1))


def value_by_view(q, k, v):
    """The values' length and width exchanged by view, as if that were a transpose."""
    turned = v.reshape(*v.shape[:2], v.shape[3], v.shape[2])
    return torch.einsum("bhls,bhds->bhld", scores_of(q, k).softmax(-1), turned)


def over_heads(q, k, v):
    """Given (B, L, H, D), it attends over the third axis from the left: the heads."""
    return F.scaled_dot_product_attention(q, k, v)


def over_tokens(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def read_as_contiguous(q, k, v):
    """A kernel that walks through memory without looking at strides."""
    return plain(*(x.as_strided(x.shape, torch.empty(x.shape).stride()) for x in (q, k, v)))


def cut_gradient(q, k, v):
    """The keys are detached: their gradient is 0."""
    return plain(q, k.detach(), v)


GROUPED = Signature(heads=4, kv_heads=2)
TOKENS_FIRST = Signature(layout="blhd")


# --- sinks, softcap, dropout, batch --------------------------------------------------------------


def with_sink(q, k, v, sinks=None):
    scores = scores_of(q, k)
    if sinks is None:
        return scores.softmax(-1) @ v
    column = sinks[None, :, None, None].expand(*scores.shape[:3], 1)
    return torch.cat((scores, column), -1).softmax(-1)[..., :-1] @ v


def without_sink(q, k, v, sinks=None):
    """The logit is taken and never used."""
    return plain(q, k, v)


def with_sink_twice(q, k, v, sinks=None):
    scores = scores_of(q, k)
    if sinks is None:
        return scores.softmax(-1) @ v
    column = sinks[None, :, None, None].expand(*scores.shape[:3], 2)
    return torch.cat((scores, column), -1).softmax(-1)[..., :-2] @ v


def capped(q, k, v, softcap=None, bias=None, mask=None):
    scores = scores_of(q, k)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = scores.masked_fill(~mask, -INF)
    return zeros_for_empty(scores) @ v


def capped_after_bias(q, k, v, softcap=None, bias=None, mask=None):
    scores = scores_of(q, k)
    if bias is not None:
        scores = scores + bias
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -INF)
    return zeros_for_empty(scores) @ v


def capped_after_mask(q, k, v, softcap=None, bias=None, mask=None):
    """tanh makes a finite −softcap of −inf: hidden keys keep a weight."""
    scores = scores_of(q, k)
    if mask is not None:
        scores = scores.masked_fill(~mask, -INF)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    return zeros_for_empty(scores) @ v


def functional_dropout(q, k, v):
    """F.dropout trains unless told otherwise."""
    return F.dropout(scores_of(q, k).softmax(-1), 0.1) @ v


def functional_dropout_off(q, k, v):
    return F.dropout(scores_of(q, k).softmax(-1), 0.1, training=False) @ v


def batch_normalised(q, k, v):
    """Statistics over the batch: a neighbour changes the answer."""
    return plain(q, k, (v - v.mean((0, 2), keepdim=True)) + v.mean((2,), keepdim=True))


SINKS = Signature(arguments={"sinks": "sinks"})
CAPPED = Signature(
    mask="keep",
    mask_axes=("ls",),
    arguments={"softcap": "softcap", "bias": "bias", "mask": "mask"},
)

VALUES = [
    Entry("scale-twice", scaled_twice, plain, PLAIN, "agreement", "scale-twice"),
    Entry("no-scale", unscaled, plain, PLAIN, "agreement", "no-scale"),
    Entry("scale-zero", scaled_to_zero, plain, PLAIN, "agreement", "scale-zero"),
    Entry(
        "scale-by-width", scaled_by_all_heads, plain, PLAIN, "agreement", "scale-wrong-dimension"
    ),
    Entry("scale-after-softmax", scaled_after, plain, PLAIN, "agreement", "scale-after-softmax"),
    Entry("softmax-over-queries", softmax_over_queries, plain, PLAIN, "agreement", "softmax-axis"),
    Entry("softmax-over-heads", softmax_over_heads, plain, PLAIN, "agreement", "softmax-axis"),
    Entry("softmax-over-batch", softmax_over_batch, plain, PLAIN, "batch", "softmax-axis"),
    Entry(
        "grouped-heads-tiled", grouped_tiled, grouped, GROUPED, "agreement", "grouped-heads-tiled"
    ),
    Entry("value-by-view", value_by_view, plain, PLAIN, "agreement", "value-transposed"),
    Entry(
        "over-heads", over_heads, over_tokens, TOKENS_FIRST, "shapes", "heads-and-sequence-swapped"
    ),
    Entry("strides-ignored", read_as_contiguous, plain, PLAIN, "agreement", "strides-ignored"),
    Entry("gradient-cut", cut_gradient, plain, PLAIN, "gradients", "gradient-cut"),
    Entry("sink-ignored", without_sink, with_sink, SINKS, "agreement", "sink-ignored"),
    Entry("sink-twice", with_sink_twice, with_sink, SINKS, "agreement", "sink-twice"),
    Entry("softcap-after-bias", capped_after_bias, capped, CAPPED, "agreement", "softcap-order"),
    Entry("softcap-after-mask", capped_after_mask, capped, CAPPED, "agreement", "softcap-order"),
    Entry(
        "functional-dropout",
        functional_dropout,
        functional_dropout_off,
        PLAIN,
        "eval",
        "dropout-in-eval",
    ),
    Entry("batch-statistics", batch_normalised, plain, PLAIN, "batch", "batch-leak"),
]
