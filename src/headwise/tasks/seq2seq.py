"""An encoder-decoder, and generation from it: greedy and beam, with key/value caches or without."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headwise.arguments import Cache
from headwise.layer import MultiHeadAttention
from headwise.masks import causal, padding
from headwise.options import ProjectedContext
from headwise.positions import Rotary
from headwise.tasks.blocks import Encoder, Feedforward
from headwise.tasks.design import Design

PAD, BEGIN, END = 0, 1, 2


def _attention(design: Design, position: Rotary | None) -> MultiHeadAttention:
    return MultiHeadAttention(
        design.embed_dim,
        design.num_heads,
        num_kv_heads=design.num_kv_heads,
        head_dim=design.head_dim,
        position=position,
    )


class DecoderBlock(nn.Module):
    """Causal self-attention, cross-attention, feedforward, each normalised first and added."""

    def __init__(self, design: Design) -> None:
        super().__init__()
        width = design.embed_dim
        self.self_norm = nn.LayerNorm(width)
        self.self_attention = _attention(design, Rotary())
        self.cross_norm = nn.LayerNorm(width)
        self.cross_attention = _attention(design, None)
        # At first each head hands on its own features of the source tokens that it reads, as they
        # are: a token's translation, where `lexicon` gave it one. Training moves on from there.
        nn.init.eye_(self.cross_attention.v_proj.weight)
        nn.init.eye_(self.cross_attention.out_proj.weight)
        self.feedforward_norm = nn.LayerNorm(width)
        self.feedforward = Feedforward(design)
        self.dropout = nn.Dropout(design.dropout)

    def forward(
        self,
        x: Tensor,
        places: Tensor,
        context: tuple[Tensor, Tensor] | ProjectedContext,
        real: Tensor,
        cache: Cache | None = None,
    ) -> Tensor:
        """(B, L, E), places (L, E), context (B, S, E) for keys and for values, real (B, S) bool:
        True where the source has a token."""
        own = self.self_attention(self.self_norm(x), mask=causal(), cache=cache)
        x = x + self.dropout(own)
        asked = self.cross_norm(x) + places
        read = self.cross_attention(asked, context, mask=padding(real))
        x = x + self.dropout(read)
        return x + self.dropout(self.feedforward(self.feedforward_norm(x)))


@dataclass
class Memory:
    """What a step of generation reads: each layer's projected source and cache of own tokens."""

    contexts: list[ProjectedContext]
    real: Tensor
    caches: list[Cache]

    def reorder(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order."""
        self.real = self.real[rows]
        self.contexts = [ProjectedContext(c.key[rows], c.value[rows]) for c in self.contexts]
        for cache in self.caches:
            cache.reorder(rows)


def places(start: int, length: int, width: int) -> Tensor:
    """Sines and cosines of positions start … start + length - 1, (length, width); Vaswani et al.
    2017, section 3.5. Products are largest where two positions are equal: that helps a decoder to
    find soon that it should read the source at about the place where it writes."""
    rates = 10000 ** (-torch.arange(0, width, 2) / width)
    angles = torch.arange(start, start + length)[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, :width]


class Seq2Seq(nn.Module):
    """Source ids in, logits of the next target id out; the target's embedding also writes.

    lexicon: (V, V) sparse, rows that sum to 1: a source id's embedding begins as that mix of the
    target's, so that reading a token is already a guess at what to write. None: each as itself.
    """

    def __init__(self, design: Design, vocabulary: int, lexicon: Tensor | None = None) -> None:
        super().__init__()
        width = design.embed_dim
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=PAD)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        begin = self.embedding.weight.detach()
        begin = begin if lexicon is None else torch.sparse.mm(lexicon, begin)
        self.source_embedding = nn.Embedding.from_pretrained(
            begin.clone(), freeze=False, padding_idx=PAD
        )
        self.encoder = Encoder(design, Rotary())
        self.decoder = nn.ModuleList(DecoderBlock(design) for _ in range(design.layers))
        self.norm = nn.LayerNorm(width)
        self.scale = width**0.5

    def forward(
        self, src: Tensor, tgt: Tensor, src_key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """(B, S) ids, (B, T) ids → logits (B, T, V). src_key_padding_mask (B, S) bool is True where
        src is padding, as in torch.nn.Transformer."""
        hidden = src_key_padding_mask
        real = torch.ones_like(src, dtype=torch.bool) if hidden is None else ~hidden
        return self.decode(tgt, self.encode(src, real), real)

    def encode(self, source: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        """(B, S), (B, S) bool → what keys and values are made of, (B, S, E) each: the source in its
        context with its places, and the same with the tokens themselves."""
        tokens = self.source_embedding(source) * self.scale
        read = self.encoder(tokens, padding(real))
        where = places(0, source.shape[1], tokens.shape[-1])
        return read + where, read + tokens

    def decode(self, target: Tensor, context: tuple[Tensor, Tensor], real: Tensor) -> Tensor:
        """(B, T), what `encode` gave, (B, S) bool → logits (B, T, V)."""
        x = self.embedding(target) * self.scale
        where = places(0, target.shape[1], x.shape[-1])
        for block in self.decoder:
            x = block(x, where, context, real)
        return self.norm(x) @ self.embedding.weight.T

    def remember(self, source: Tensor, real: Tensor, limit: int) -> Memory:
        """The source, encoded and projected once, and empty caches for `limit` tokens."""
        context = self.encode(source, real)
        layers: list[DecoderBlock] = list(self.decoder)  # type: ignore[arg-type]
        return Memory(
            [block.cross_attention.project_context(context) for block in layers],
            real,
            [block.self_attention.make_cache(len(source), limit) for block in layers],
        )

    def step(self, target: Tensor, memory: Memory) -> Tensor:
        """The newest ids (B,) → logits of the next (B, V); the caches grow by one token."""
        x = self.embedding(target[:, None]) * self.scale
        where = places(memory.caches[0].seen, 1, x.shape[-1])
        for block, context, cache in zip(self.decoder, memory.contexts, memory.caches, strict=True):
            x = block(x, where, context, memory.real, cache)
        return (self.norm(x) @ self.embedding.weight.T)[:, 0]


@torch.inference_mode()
def greedy(
    model: Seq2Seq, source: Tensor, real: Tensor, limit: int, *, cached: bool = True
) -> list[list[int]]:
    """The likeliest next token until END, at most `limit`; a list of ids for each row of source
    (B, S). `cached=False` reads the whole target again at every step: slower, for comparison."""
    model.eval()
    written = torch.full((len(source), 1), BEGIN)
    done = torch.zeros(len(source), dtype=torch.bool)
    memory = model.remember(source, real, limit) if cached else None
    context = None if cached else model.encode(source, real)
    for _ in range(limit):
        if memory is not None:
            logits = model.step(written[:, -1], memory)
        else:
            assert context is not None
            logits = model.decode(written, context, real)[:, -1]
        token = logits.argmax(-1).masked_fill(done, PAD)
        written = torch.cat([written, token[:, None]], dim=1)
        done |= token == END
        if bool(done.all()):
            break
    return [cut(row) for row in written[:, 1:].tolist()]


@torch.inference_mode()
def beam(
    model: Seq2Seq, source: Tensor, limit: int, *, width: int = 4, penalty: float = 1.0
) -> list[int]:
    """Beam search over one source (S,): the finished text whose sum of log-probabilities, divided
    by length**penalty, is highest (Wu et al. 2016, arXiv 1609.08144, section 7, simplified).

    Where nothing finishes within `limit` tokens, the likeliest unfinished text.
    """
    model.eval()
    rows = source[None].expand(width, -1)
    memory = model.remember(rows, torch.ones_like(rows, dtype=torch.bool), limit)
    written = torch.full((width, 1), BEGIN)
    # All beams begin equal: only the first may branch, or every beam would hold the same text.
    total = torch.tensor([0.0] + [-torch.inf] * (width - 1))
    finished: list[tuple[float, list[int]]] = []
    for length in range(1, limit + 1):
        chances = total[:, None] + model.step(written[:, -1], memory).log_softmax(-1)
        # END may take at most `width` of the best 2 · width: as many live ones remain.
        best, place = chances.flatten().topk(min(2 * width, chances.numel()))
        keep: list[tuple[float, int, int]] = []
        for value, row, token in zip(
            best.tolist(),
            (place // chances.shape[1]).tolist(),
            (place % chances.shape[1]).tolist(),
            strict=True,
        ):
            if token == END:
                finished.append((value / length**penalty, written[row, 1:].tolist()))
            elif len(keep) < width:
                keep.append((value, row, token))
        if len(finished) >= width:
            break
        order = torch.tensor([row for _, row, _ in keep])
        tokens = torch.tensor([token for _, _, token in keep])
        total = torch.tensor([value for value, _, _ in keep])
        written = torch.cat([written[order], tokens[:, None]], dim=1)
        memory.reorder(order)
    if finished:
        return max(finished)[1]
    return [int(token) for token in written[int(total.argmax()), 1:]]


def cut(ids: list[int]) -> list[int]:
    """What stands before the first END or PAD."""
    for place, token in enumerate(ids):
        if token in (END, PAD):
            return ids[:place]
    return ids
