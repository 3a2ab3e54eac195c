"""What attention must cost: counted, not measured. FLOPs are exact for the mask."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from headwise.profile.shapes import Layer, Shape, by_kind

BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}


@dataclass(frozen=True)
class Cost:
    """The cost of a context of N tokens, batch B.

    attention_flops: 2·(D + Dv) for each visible pair of each head, scores and values (METRICS of
    the reports count alike). other_flops: 2 for each weight and token, and the logits of one token.
    decode_*: one more token after N. kv_bytes: what the caches of all layers hold after N tokens.
    decode_bytes: what one decode step must read: weights and caches. weight_bytes. fused_bytes,
    materialised_bytes: the most activation bytes alive at once beside weights and caches, where
    scores live in tiles, and where each layer's whole map is made in turn.
    """

    context: int
    attention_flops: int
    other_flops: int
    decode_attention_flops: int
    decode_other_flops: int
    kv_bytes: int
    weight_bytes: int
    decode_bytes: int
    fused_bytes: int
    materialised_bytes: int

    @property
    def fused_peak(self) -> int:
        """Bytes at the height of a prefill with fused attention."""
        return self.weight_bytes + self.kv_bytes + self.fused_bytes

    def to_dict(self) -> dict[str, Any]:
        """The fields, for records and CSV."""
        return {**asdict(self), "fused_peak": self.fused_peak}


def pairs(layer: Layer, queries: int, keys: int) -> int:
    """Visible (query, key) pairs of one head: the last query sees the last key."""
    if layer.cross or not layer.causal:
        return queries * keys
    before = keys - queries
    if layer.window is None or layer.window >= keys:
        return queries * before + queries * (queries + 1) // 2
    # Row i sees min(before + i + 1, window) keys; the first `short` rows see fewer than the window.
    short = min(queries, max(0, layer.window - before))
    return short * before + short * (short + 1) // 2 + (queries - short) * layer.window


def cache_numbers(layer: Layer, context: int, source: int) -> int:
    """Numbers that the cache of one layer holds of one sequence after `context` tokens."""
    if layer.encoder:
        return 0
    tokens = source if layer.cross else context
    if layer.window is not None:
        tokens = min(tokens, layer.window)
    if layer.latent is not None:
        return tokens * layer.latent
    return tokens * layer.kv_heads * (layer.dim + layer.value_dim)


def cost(
    shape: Shape,
    context: int,
    *,
    batch: int = 1,
    dtype: str = "float32",
    cache_dtype: str | None = None,
) -> Cost:
    """What `context` tokens cost, all at once, and what one more token costs after them."""
    size, cached = BYTES[dtype], BYTES[cache_dtype or dtype]
    source = shape.source if shape.source is not None else context
    prefill = decode = kv = read = maps = 0
    for layer, count in by_kind(shape.layers).items():
        per_pair = 2 * layer.heads * (layer.dim + layer.value_dim) * count
        queries = source if layer.encoder and shape.source else context
        keys = source if layer.cross or (layer.encoder and shape.source) else context
        prefill += per_pair * pairs(layer, queries, keys)
        maps = max(maps, layer.heads * queries * keys)
        kv += count * cache_numbers(layer, context, source)
        if not layer.encoder:
            step = keys if layer.cross else context + 1
            decode += per_pair * pairs(layer, 1, step)
            read += count * cache_numbers(layer, context + (not layer.cross), source)
    weights = shape.parameters * size
    # Experts that a token does not visit are not read.
    met = (shape.per_token + shape.head) * size
    encoder = shape.encoder_per_token * (source if shape.source else context)
    # An encoder has done its work before a cache is filled.
    fused = batch * max(
        activations(shape, context) * size, encoder_activations(shape, context) * size - kv * cached
    )
    return Cost(
        context=context,
        attention_flops=batch * prefill,
        other_flops=2 * batch * (shape.per_token * context + encoder + shape.head),
        decode_attention_flops=batch * decode,
        decode_other_flops=2 * batch * (shape.per_token + shape.head),
        kv_bytes=batch * kv * cached,
        weight_bytes=weights,
        decode_bytes=met + batch * read * cached,
        fused_bytes=fused,
        # Scores and weights of one layer stand side by side while the softmax runs.
        materialised_bytes=fused + 2 * batch * maps * size,
    )


def activations(shape: Shape, context: int) -> int:
    """Numbers alive at once for one sequence, in the stack that keeps the cache or the only one:
    the most of a layer's attention, its feedforward, and all logits where they are computed.

    Both: the embeddings, which forward keeps to its end. Attention: what came in and its normalised
    copy, queries, keys and values, the rotated queries and keys beside the old ones, the output.
    Feedforward: what came in, its normalised copy, and the inner features: three times where they
    are gated (two factors and their product), else two. Beside an encoder: what it gave, and the
    keys and values that one cross layer makes of it before the cache takes its copy.
    """
    encoded = _encoded(shape, context)
    crossing = max(
        (one.kv_heads * (one.dim + one.value_dim) for one in shape.layers if one.cross), default=0
    )
    tokens = context * max(*_layer(shape), shape.width + shape.logits)
    return encoded * shape.width + max(tokens, encoded * crossing)


def encoder_activations(shape: Shape, context: int) -> int:
    """Numbers alive at once for one sequence while an encoder beside a decoder runs; 0 without."""
    return _encoded(shape, context) * max(_layer(shape))


def _encoded(shape: Shape, context: int) -> int:
    """Tokens of an encoder beside a decoder."""
    if not any(one.cross for one in shape.layers):
        return 0
    return shape.source if shape.source is not None else context


def _layer(shape: Shape) -> tuple[int, int]:
    """(numbers of a token alive in attention, in the feedforward)."""
    layer = max(shape.layers, key=lambda one: one.heads * (one.dim + one.value_dim))
    query, key = layer.heads * layer.dim, layer.kv_heads * layer.dim
    value, out = layer.kv_heads * layer.value_dim, layer.heads * layer.value_dim
    attention = 3 * shape.width + 2 * query + 2 * key + value + out
    feedforward = 3 * shape.width + (3 if shape.gated else 2) * shape.inner
    return attention, feedforward


def reach(
    shape: Shape,
    memory: int,
    *,
    batch: int = 1,
    dtype: str = "float32",
    cache_dtype: str | None = None,
) -> int:
    """The longest context whose weights, caches and fused activations fit into `memory` bytes; 0
    where not even one token does."""

    def fits(context: int) -> bool:
        found = cost(shape, context, batch=batch, dtype=dtype, cache_dtype=cache_dtype)
        return found.fused_peak <= memory

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high) and high < 1 << 40:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
