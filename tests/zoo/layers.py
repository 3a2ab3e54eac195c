"""Attention functions, each with one fault that people met in real code, and its correct twin.

A fault and its twin differ in the line that was wrong. All take (B, H, L, D) unless said otherwise.
`MASKS` lists them with the check that must catch the fault and the cause that it must name.
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

MASKS = [
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
]
