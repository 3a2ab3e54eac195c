"""Attention layers, each with one fault that people met in real code, and its correct twin.

`Layer` and its variants are right; a fault overrides the one step in which it was made. `LAYERS`
lists them with the check that must catch the fault and the cause that it must name.
"""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.checks.signature import Projections, Signature
from headwise.rotary import Rotary
from zoo.layers import INF, Entry, zeros_for_empty

WIDTH, HEADS = 24, 4


@functools.cache
def seeded(kind: type[nn.Module], *args: int) -> nn.Module:
    """A module with weights large enough that heads differ; one for all entries."""
    torch.manual_seed(1)
    module = kind(*args)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    return module


class Layer(nn.Module):
    """Plain multi-head attention, batch first; mask True = visible."""

    def __init__(self, kv_heads: int = HEADS) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = HEADS, kv_heads, WIDTH // HEADS
        self.q_proj = nn.Linear(WIDTH, WIDTH)
        self.k_proj = nn.Linear(WIDTH, kv_heads * self.dim)
        self.v_proj = nn.Linear(WIDTH, kv_heads * self.dim)
        self.out_proj = nn.Linear(WIDTH, WIDTH)

    def split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(x.shape[0], x.shape[1], heads, self.dim).transpose(1, 2)

    def merge(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], WIDTH)

    def share(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.heads // self.kv_heads, 1)

    def project(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query = self.split(self.q_proj(x), self.heads)
        key = self.share(self.split(self.k_proj(context), self.kv_heads))
        return query, key, self.share(self.split(self.v_proj(context), self.kv_heads))

    def scale(self) -> float:
        return 1 / math.sqrt(self.dim)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        scores = query @ key.mT * self.scale()
        if mask is not None:
            scores = scores.masked_fill(~mask, -INF)
        return zeros_for_empty(scores) @ value

    def forward(
        self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        parts = self.project(x, x if context is None else context)
        return self.out_proj(self.merge(self.attend(*parts, mask)))


class SplitByView(Layer):
    """view straight to (B, H, L, D): tokens and heads scrambled, shapes right."""

    def split(self, x: Tensor, heads: int) -> Tensor:
        return x.reshape(x.shape[0], heads, x.shape[1], self.dim)


class ViewBothWays(SplitByView):
    def merge(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], x.shape[2], WIDTH)


class MergeByView(Layer):
    def merge(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], x.shape[2], WIDTH)


class NoTranspose(Layer):
    """(B, L, H, D) goes straight into the dot products: a token attends over its heads."""

    def split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(x.shape[0], x.shape[1], heads, self.dim)

    def merge(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], x.shape[1], WIDTH)


class ScaleByWidth(Layer):
    def scale(self) -> float:
        return 1 / math.sqrt(WIDTH)


class ScaleTwice(Layer):
    """Queries are scaled, and the function scales by default."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(query * self.scale(), key, value, mask)


class TiledHeads(Layer):
    def share(self, x: Tensor) -> Tensor:
        return x.repeat(1, self.heads // self.kv_heads, 1, 1)


class InvertedMask(Layer):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return super().attend(query, key, value, None if mask is None else ~mask)


class NanRows(Layer):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        scores = query @ key.mT * self.scale()
        if mask is not None:
            scores = scores.masked_fill(~mask, -INF)
        return scores.softmax(-1) @ value


class SoftmaxOverQueries(Layer):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        scores = query @ key.mT * self.scale()
        if mask is not None:
            scores = scores.masked_fill(~mask, -INF)
        return scores.softmax(-2).nan_to_num(0.0) @ value


class CausalCross(Layer):
    """A decoder's layer reused for cross-attention: is_causal stayed on."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            return super().attend(query, key, value, mask)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class LengthFirst(Layer):
    """Built for (L, B, E) and given (B, L, E): samples attend to each other."""

    def forward(
        self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        context = None if context is None else context.transpose(0, 1)
        return super().forward(x.transpose(0, 1), context, mask).transpose(0, 1)


class Dropping(Layer):
    """Dropout inside torch's function, off in eval."""

    rate = 0.2

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        rate = self.rate if self.training else 0.0
        return F.scaled_dot_product_attention(query, key, value, mask, dropout_p=rate)


class DroppingAlways(Dropping):
    """The function knows no training flag, and the layer forgets to pass 0."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, mask, dropout_p=self.rate)


class ModeLost(Layer):
    """A dropout module that a wrapper keeps in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.2)

    def train(self, mode: bool = True) -> ModeLost:
        super().train(mode)
        self.drop.training = True
        return self

    def merge(self, x: Tensor) -> Tensor:
        return self.drop(super().merge(x))


class Fused(Layer):
    """One projection for queries, keys, values, in this order."""

    order = (0, 1, 2)

    def __init__(self) -> None:
        super().__init__()
        del self.q_proj, self.k_proj, self.v_proj
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def project(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        thirds = [self.split(part, self.heads) for part in self.qkv(x).chunk(3, -1)]
        query, key, value = (thirds[place] for place in self.order)
        return query, key, value

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return super().forward(x, None, mask)


class FusedWrongOrder(Fused):
    """Keys taken from the rows of values, and values from those of keys."""

    order = (0, 2, 1)


class Turning(Fused):
    """Rotary in halves: feature m turns with m + D/2. Causal."""

    def turn(self, x: Tensor) -> Tensor:
        half = self.dim // 2
        angle = self.angles(x)
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)

    def angles(self, x: Tensor) -> Tensor:
        speed = 10000.0 ** -(torch.arange(0, self.dim, 2, dtype=torch.float64) / self.dim)
        return (torch.arange(x.shape[2])[:, None] * speed).to(x.dtype)

    def project(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = super().project(x, context)
        return self.turn(query), self.turn(key), value

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        grid = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
        return super().attend(query, key, value, grid if mask is None else grid & mask)


class TurningNeighbours(Turning):
    """Rotary on neighbours, features 2m and 2m + 1, under weights made for halves."""

    def turn(self, x: Tensor) -> Tensor:
        angle = self.angles(x)
        a, b = x[..., 0::2], x[..., 1::2]
        pair = (a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin())
        return torch.stack(pair, -1).flatten(-2)


class NotTurning(Turning):
    def turn(self, x: Tensor) -> Tensor:
        return x


class Sinking(Fused):
    """A learned logit a head joins the denominator."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.zeros(HEADS))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        scores = query @ key.mT * self.scale()
        if mask is not None:
            scores = scores.masked_fill(~mask, -INF)
        column = self.sinks[None, :, None, None].expand(*scores.shape[:3], 1)
        return torch.cat((scores, column), -1).softmax(-1)[..., :-1] @ value


class SinkForgotten(Sinking):
    """The parameter is loaded and never used."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return Layer.attend(self, query, key, value, mask)


APART = Projections(query="q_proj", key="k_proj", value="v_proj", output="out_proj")
CROSS = Signature(
    layout="ble",
    inputs="context",
    heads=HEADS,
    head_dim=WIDTH // HEADS,
    mask="keep",
    mask_axes=("ls", "bhls", "b1ls"),
    arguments={"mask": "mask"},
    projections=APART,
)
GROUPED = CROSS.but(kv_heads=2)
FUSED = CROSS.but(inputs="self", projections=Projections(fused="qkv", output="out_proj"))
TURNING = FUSED.but(
    causal="end", projections=Projections(fused="qkv", output="out_proj", rotary=Rotary())
)
SINKING = FUSED.but(projections=Projections(fused="qkv", output="out_proj", sinks="sinks"))
# Without names of its projections only the black box is left.
CLOSED = CROSS.but(projections=None)


def _entry(name, faulty, twin, signature, check, cause, *args) -> Entry:
    return Entry(name, seeded(faulty, *args), seeded(twin, *args), signature, check, cause)


LAYERS = [
    _entry("layer-split-by-view", SplitByView, Layer, CROSS, "shapes", "split-by-view"),
    _entry("layer-view-both-ways", ViewBothWays, Layer, CROSS, "agreement", "split-by-view"),
    _entry("layer-merge-by-view", MergeByView, Layer, CROSS, "shapes", "merge-without-transpose"),
    _entry("layer-closed-by-view", SplitByView, Layer, CLOSED, "shapes", "heads-scrambled"),
    _entry(
        "layer-no-transpose",
        NoTranspose,
        Layer,
        CROSS,
        "measured mask",
        "heads-and-sequence-swapped",
    ),
    _entry(
        "layer-scale-by-width", ScaleByWidth, Layer, CROSS, "agreement", "scale-wrong-dimension"
    ),
    _entry("layer-scale-twice", ScaleTwice, Layer, CROSS, "agreement", "scale-twice"),
    _entry("layer-tiled", TiledHeads, Layer, GROUPED, "agreement", "grouped-heads-tiled", 2),
    _entry("layer-mask-inverted", InvertedMask, Layer, CROSS, "polarity", "mask-polarity"),
    _entry("layer-nan-rows", NanRows, Layer, CROSS, "alignment", "nan-from-empty-row"),
    _entry("layer-softmax-axis", SoftmaxOverQueries, Layer, CROSS, "agreement", "softmax-axis"),
    _entry("layer-causal-cross", CausalCross, Layer, CROSS, "alignment", "causal-flag-in-cross"),
    _entry("layer-length-first", LengthFirst, Layer, CROSS, "batch", "batch-and-sequence-swapped"),
    _entry(
        "layer-closed-length-first",
        LengthFirst,
        Layer,
        CLOSED,
        "batch",
        "batch-and-sequence-swapped",
    ),
    _entry("layer-dropout-argument", DroppingAlways, Dropping, CROSS, "eval", "dropout-in-eval"),
    _entry("layer-dropout-mode", ModeLost, Layer, CROSS, "eval", "dropout-in-eval"),
    _entry("layer-fused-order", FusedWrongOrder, Fused, FUSED, "agreement", "fused-order"),
    _entry(
        "layer-rope-mixed", TurningNeighbours, Turning, TURNING, "agreement", "rope-layout-mixed"
    ),
    _entry("layer-rope-ignored", NotTurning, Turning, TURNING, "agreement", "rope-ignored"),
    _entry("layer-sink-forgotten", SinkForgotten, Sinking, SINKING, "agreement", "sink-ignored"),
]
