"""Models of text without attention, to compare with: a GRU, and a mixer of positions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headwise.tasks.blocks import Feedforward
from headwise.tasks.design import Design


class GatedRecurrent(nn.Module):
    """A GRU (Cho et al. 2014) of one layer over ids; the embedding also writes."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        self.reader = nn.GRU(width, 2 * width, batch_first=True)
        self.narrow = nn.Linear(2 * width, width)
        self.scale = width**0.5

    def forward(self, ids: Tensor) -> Tensor:
        """(B, L) → logits (B, L, V)."""
        states, _ = self.reader(self.embedding(ids) * self.scale)
        return self.narrow(states) @ self.embedding.weight.T


class _MixerBlock(nn.Module):
    def __init__(self, design: Design, length: int) -> None:
        super().__init__()
        self.groups = design.num_heads
        self.mixing_norm = nn.LayerNorm(design.embed_dim)
        self.mixing = nn.Parameter(torch.zeros(self.groups, length, length))
        nn.init.normal_(self.mixing, std=length**-0.5)
        self.inward = nn.Linear(design.embed_dim, design.embed_dim)
        self.outward = nn.Linear(design.embed_dim, design.embed_dim)
        self.feedforward_norm = nn.LayerNorm(design.embed_dim)
        self.feedforward = Feedforward(design)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        groups = self.inward(self.mixing_norm(x)).view(batch, length, self.groups, -1)
        weights = self.mixing[:, :length, :length].tril()  # a place reads itself and those before
        mixed = torch.einsum("glk,bkgd->blgd", weights, groups).reshape(batch, length, width)
        x = x + self.outward(mixed)
        return x + self.feedforward(self.feedforward_norm(x))


class Mixer(nn.Module):
    """The decoder with each attention replaced by fixed weights between positions, one matrix for
    as many groups of features as the decoder has heads: MLP-Mixer (Tolstikhin et al. 2021, arXiv
    2105.01601) without sight of the future. It reads `length` ids at most."""

    def __init__(self, design: Design, vocabulary: int, length: int) -> None:
        super().__init__()
        self.length = length
        self.embedding = nn.Embedding(vocabulary, design.embed_dim)
        nn.init.normal_(self.embedding.weight, std=design.embed_dim**-0.5)
        self.blocks = nn.ModuleList(_MixerBlock(design, length) for _ in range(design.layers))
        self.norm = nn.LayerNorm(design.embed_dim)
        self.scale = design.embed_dim**0.5

    def forward(self, ids: Tensor) -> Tensor:
        """(B, L) → logits (B, L, V). Of a longer text the last `length` ids are read."""
        x = self.embedding(ids[:, -self.length :]) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.embedding.weight.T
