"""Attention functions, each with one fault that people met in real code, and its correct twin.

A fault and its twin differ in the line that was wrong. All take (B, H, L, D) unless said otherwise.
`FUNCTIONS` lists them with the check that must catch the fault and the cause that it must name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.checks.signature import Signature

INF = math.inf


@dataclass(frozen=True)
class Entry:
    """One fault: the function that has it, its twin, what both declare, and who must catch it."""

    name: str
    faulty: Callable[..., object]
    twin: Callable[..., object]
    signature: Signature
    check: str
    cause: str
    also: tuple[str, ...] = ()  # other checks that the fault truly breaks too


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT / math.sqrt(q.shape[-1])


def zeros_for_empty(scores: Tensor) -> Tensor:
    """Softmax over the keys; a row of −inf gives zeros and no gradient."""
    empty = (scores == -INF).all(-1, keepdim=True)
    return scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)


def plain(q, k, v):
    return scores_of(q, k).softmax(-1) @ v


PLAIN = Signature(heads=4, head_dim=8)
KEEP = Signature(mask="keep", mask_axes=("ls", "bhls", "b1ls"), arguments={"mask": "mask"})


# --- masks ---------------------------------------------------------------------------------------


def kept(q, k, v, mask=None):
    scores = scores_of(q, k)
    if mask is not None:
        scores = scores.masked_fill(~mask, -INF)
    return zeros_for_empty(scores) @ v


def kept_inverted(q, k, v, mask=None):
    """True means hidden here; the caller's True means visible."""
    scores = scores_of(q, k)
    if mask is not None:
        scores = scores.masked_fill(mask, -INF)
    return zeros_for_empty(scores) @ v


def kept_added(q, k, v, mask=None):
    """0 and 1 are added: exp(1) against exp(0), nothing is hidden."""
    scores = scores_of(q, k)
    if mask is not None:
        scores = scores + mask.to(scores.dtype)
    return zeros_for_empty(scores) @ v


def float_kept(q, k, v, attention_mask=None):
    scores = scores_of(q, k)
    if attention_mask is not None:
        scores = scores.masked_fill(attention_mask == 0, -INF)
    return zeros_for_empty(scores) @ v


def float_kept_added(q, k, v, attention_mask=None):
    """A 0/1 float mask handed to a function that adds its mask."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask)


def kept_nan(q, k, v, mask=None):
    """−inf in a whole row, and the softmax of it is 0/0."""
    scores = scores_of(q, k)
    if mask is not None:
        scores = scores.masked_fill(~mask, -INF)
    return scores.softmax(-1) @ v


def kept_repaired_late(q, k, v, mask=None):
    """The NaN is painted over after the softmax; the backward pass still meets it."""
    scores = scores_of(q, k)
    if mask is not None:
        scores = scores + torch.zeros_like(scores).masked_fill(~mask, -INF)
    return scores.softmax(-1).nan_to_num(0.0) @ v


def kept_large_number(q, k, v, mask=None):
    """The smallest float instead of −inf: an empty row becomes uniform, a silent leak."""
    scores = scores_of(q, k)
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return scores.softmax(-1) @ v


def kept_after_softmax(q, k, v, mask=None):
    """Weights zeroed after the softmax: rows no longer sum to 1."""
    weights = scores_of(q, k).softmax(-1)
    if mask is not None:
        weights = weights.masked_fill(~mask, 0.0)
    return weights @ v


def kept_per_head_lost(q, k, v, mask=None):
    """A mask of four axes cut down to head 0."""
    return kept(q, k, v, mask[:, :1] if mask is not None and mask.dim() == 4 else mask)


def padded(q, k, v, key_mask=None):
    scores = scores_of(q, k)
    if key_mask is not None:
        scores = scores.masked_fill(~key_mask[:, None, None, :], -INF)
    return zeros_for_empty(scores) @ v


def padded_over_queries(q, k, v, key_mask=None):
    """(B, S) against scores (B, H, L, S): fits silently as (L, S) where B = L."""
    scores = scores_of(q, k)
    if key_mask is not None and key_mask.shape[0] == scores.shape[2]:
        scores = scores.masked_fill(~key_mask, -INF)
    elif key_mask is not None:
        scores = scores.masked_fill(~key_mask[:, None, None, :], -INF)
    return zeros_for_empty(scores) @ v


PADDED = Signature(padding="keep", arguments={"padding": "key_mask"})
FLOATS = Signature(mask="keep01", mask_axes=("ls", "b1ls"), arguments={"mask": "attention_mask"})


# --- causality -----------------------------------------------------------------------------------


def causal_grid(length: int, keys: int, *, shift: int | None = None) -> Tensor:
    shift = keys - length if shift is None else shift
    return torch.arange(keys) <= torch.arange(length)[:, None] + shift


def decoding(q, k, v, is_causal=False):
    """The last query stands at the last key."""
    return kept(q, k, v, causal_grid(q.shape[2], k.shape[2]) if is_causal else None)


def decoding_top_left(q, k, v, is_causal=False):
    """torch's flag stands at the first key: with cached keys a new token sees key 0 alone."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def decoding_strictly(q, k, v, is_causal=False):
    """triu(diagonal=0) hides the query's own key."""
    own = k.shape[2] - q.shape[2]
    grid = causal_grid(q.shape[2], k.shape[2], shift=own - 1)
    return kept(q, k, v, grid if is_causal else None)


def causal_everywhere(q, k, v, is_causal=False):
    """The flag's default was turned to True somewhere: cross-attention is causal too."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def causal_by_request(q, k, v, is_causal=False):
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def decoder(q, k, v, key_mask=None):
    """Always causal, padding or not."""
    grid = causal_grid(q.shape[2], k.shape[2])
    if key_mask is not None:
        grid = grid & key_mask[:, None, None, :]
    return kept(q, k, v, grid)


def decoder_leaking_without_padding(q, k, v, key_mask=None):
    """The causal mask is built only where it has to be joined with a padding mask."""
    return plain(q, k, v) if key_mask is None else decoder(q, k, v, key_mask)


def windowed(q, k, v):
    """Three keys, the query's own among them."""
    grid = causal_grid(q.shape[2], k.shape[2])
    near = ~causal_grid(q.shape[2], k.shape[2], shift=k.shape[2] - q.shape[2] - 3)
    return kept(q, k, v, grid & near)


def windowed_one_more(q, k, v):
    """Three keys before the query's own."""
    grid = causal_grid(q.shape[2], k.shape[2])
    near = ~causal_grid(q.shape[2], k.shape[2], shift=k.shape[2] - q.shape[2] - 4)
    return kept(q, k, v, grid & near)


FLAG = Signature(causal="end", arguments={"causal": "is_causal"})
FLAG_AT_START = Signature(causal="start", arguments={"causal": "is_causal"})
DECODER = Signature(causal="end", padding="keep", arguments={"padding": "key_mask"})
WINDOW = Signature(causal="end", window=3)


# --- scale, softmax, heads -----------------------------------------------------------------------


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

FUNCTIONS = [
    Entry("mask-inverted", kept_inverted, kept, KEEP, "polarity", "mask-polarity"),
    Entry("bool-mask-added", kept_added, kept, KEEP, "polarity", "float-mask-added"),
    Entry("float-mask-added", float_kept_added, float_kept, FLOATS, "polarity", "float-mask-added"),
    Entry("nan-from-empty-row", kept_nan, kept, KEEP, "alignment", "nan-from-empty-row"),
    Entry("nan-in-backward", kept_repaired_late, kept, KEEP, "gradients", "nan-from-empty-row"),
    Entry("finite-fill", kept_large_number, kept, KEEP, "alignment", "mean-from-empty-row"),
    Entry("mask-after-softmax", kept_after_softmax, kept, KEEP, "agreement", "mask-after-softmax"),
    Entry("mask-of-head-0", kept_per_head_lost, kept, KEEP, "broadcast", "mask-wrong-axis"),
    Entry("padding-as-rows", padded_over_queries, padded, PADDED, "broadcast", "mask-wrong-axis"),
    Entry("top-left-causal", decoding_top_left, decoding, FLAG, "alignment", "top-left-causal"),
    Entry("own-key-hidden", decoding_strictly, decoding, FLAG, "alignment", "causal-off-by-one"),
    Entry(
        "causal-by-default",
        causal_everywhere,
        causal_by_request,
        FLAG_AT_START,
        "alignment",
        "causal-flag-in-cross",
    ),
    Entry(
        "leak-without-padding",
        decoder_leaking_without_padding,
        decoder,
        DECODER,
        "future leak",
        "leak-without-padding-mask",
    ),
    Entry(
        "window-off-by-one", windowed_one_more, windowed, WINDOW, "alignment", "window-off-by-one"
    ),
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
