"""The usual fix of each cause, in one sentence: the one table that every check reads."""

from __future__ import annotations

_GROUPS = "use repeat_interleave: query head h reads key/value head h // groups"
_VIEW = "split with view(B, L, H, D).transpose(1, 2), merge with transpose(1, 2).reshape(B, L, -1)"
_EMPTY = "a row that sees no key has no softmax: set its weights to 0 inside the softmax"
_SCALE = "multiply the dot products by 1/√head_dim, once, before the softmax"
_SINK = "add exp(sink) to the softmax's denominator once, shifted by the same maximum"
_ORDER = "order: scale, softcap, bias, mask, softmax"

FIXES = {
    "batch-and-sequence-swapped": (
        "the layer reads (sequence, batch, width): pass batch_first=True or transpose"
    ),
    "batch-leak": "something mixes rows of the batch; let each row see only itself",
    "bias-ignored": "add the bias to the scaled scores",
    "bottom-right-causal": "query 0 stands at key 0 here: key j ≤ query i",
    "cache-drops-newest": "read the cache after the new keys are written, with them in it",
    "cache-overwrite": "write new keys behind the cached ones, at the cached length",
    "cached-chunk-leak": (
        "with a cache, query i of a chunk of L tokens at S keys sees j ≤ i + S − L, and no more"
    ),
    "causal-flag-in-cross": "make causality an explicit argument, False where none is asked for",
    "causal-in-encoder": "an encoder's tokens see each other both ways: drop the causal mask",
    "causal-off-by-one": "use triu(diagonal=1): the diagonal is the query's own key, and visible",
    "document-leak": "hide keys of other documents: join the causal mask with ids[i] == ids[j]",
    "dropout-in-eval": "tie dropout to self.training (F.dropout(x, p, self.training))",
    "float-mask-added": "a 0/1 mask is not an additive one: use 0 and −inf, or a bool mask",
    "exported-form-differs": (
        "let no branch ask whether the model is traced, and fix no number of one example"
        " (a length, a mask) while it is"
    ),
    "fused-order": "split the fused projection in the order in which it was built",
    "future-leak": "build the causal mask in every branch of the forward pass, and draw it once",
    "gradient-cut": "remove the detach() or no_grad() on the way",
    "grouped-heads-lost": _GROUPS,
    "grouped-heads-tiled": _GROUPS,
    "heads-and-sequence-swapped": "transpose to (B, H, L, D) before the dot products",
    "heads-scrambled": _VIEW,
    "leak-in-one-backend": (
        "give every attention implementation the same mask; one of them ignores it or gets none"
    ),
    "leak-without-padding-mask": (
        "build the causal mask also when no padding mask is given, not only to join the two"
    ),
    "mask-after-softmax": "mask the scores with −inf before the softmax",
    "mask-ignored": "pass the mask on to the scores",
    "mask-misread": "draw the mask that the function builds beside the one that it was given",
    "mask-polarity": "the mask says the opposite of what its reader expects: invert it",
    "mask-wrong-axis": (
        "a key mask (B, S) goes in as (B, 1, 1, S), one for each sample as (B, 1, L, S)"
    ),
    "mean-from-empty-row": _EMPTY,
    "merge-without-transpose": _VIEW,
    "nan-from-empty-row": _EMPTY,
    "no-scale": _SCALE,
    "nothing-connected": "draw the mask: every key is hidden, or the output is not used",
    "path-differs": "compare the implementations' masks, scales and dropout, call by call",
    "padding-leak": "hide the padding keys with −inf before the softmax",
    "padding-lost-with-cache": "keep the padding mask of the cached tokens, not only of the new",
    "padding-mask-ignored": "pass the padding mask down to every attention call",
    "padding-side": "derive the mask from where the padding is, not from a length and a fixed side",
    "positions-under-padding": (
        "count positions over the real tokens: (mask.cumsum(-1) - 1).clamp(min=0)"
    ),
    "random-in-eval": "draw no random numbers in eval mode",
    "rope-ignored": "rotate queries and keys before the dot products",
    "rope-layout-mixed": (
        "rotate halves for half-split checkpoints and neighbours for interleaved ones, or permute"
        " the weights"
    ),
    "rope-offset-lost": "with a cache, positions go on from the cached length, not from 0",
    "scale-after-softmax": _SCALE,
    "scale-argument-ignored": "pass the scale asked for on to the dot products",
    "scale-twice": _SCALE,
    "scale-wrong-dimension": _SCALE,
    "scale-zero": "a scale of None means 1/√head_dim; 0 must not be taken as a scale",
    "sink-ignored": _SINK,
    "sink-twice": _SINK,
    "softcap-ignored": _ORDER,
    "softcap-order": _ORDER,
    "softmax-axis": "take the softmax over the keys (the last axis), not over the queries",
    "split-by-view": _VIEW,
    "strides-ignored": "read the tensor by its strides, or call contiguous() first",
    "top-left-causal": (
        "with a cache the last query sees the last key: align the causal mask at the end "
        "(is_causal=True of SDPA aligns at the start)"
    ),
    "value-transposed": "exchange axes with transpose; a view keeps the order in memory",
    "window-ignored": "join the window to the causal mask",
    "window-off-by-one": "a window of W keys counts the query's own: hide keys with i − j ≥ W",
}
