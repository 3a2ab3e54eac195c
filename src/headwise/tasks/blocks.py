"""Stacks of transformer blocks, every attention in them a headwise.MultiHeadAttention."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from headwise.arguments import Cache
from headwise.intervals import Mask
from headwise.layer import MultiHeadAttention
from headwise.positions import Position
from headwise.tasks.design import Design


class Feedforward(nn.Sequential):
    """The second half of a block: wider, GELU, back. (B, L, E) → (B, L, E)."""

    def __init__(self, design: Design) -> None:
        super().__init__(
            nn.Linear(design.embed_dim, design.hidden),
            nn.GELU(),
            nn.Linear(design.hidden, design.embed_dim),
        )


class EncoderBlock(nn.Module):
    """Self-attention, then the feedforward, each normalised first and added to what came in
    (Xiong et al. 2020, arXiv 2002.04745)."""

    def __init__(self, design: Design, position: Position | None = None) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(design.embed_dim)
        self.attention = MultiHeadAttention(
            design.embed_dim,
            design.num_heads,
            num_kv_heads=design.num_kv_heads,
            head_dim=design.head_dim,
            position=position,
        )
        self.feedforward_norm = nn.LayerNorm(design.embed_dim)
        self.feedforward = Feedforward(design)
        self.dropout = nn.Dropout(design.dropout)

    def forward(self, x: Tensor, mask: Mask | None = None, cache: Cache | None = None) -> Tensor:
        """(B, L, E) → (B, L, E). A cache holds the tokens before these, and takes these in."""
        read = self.attention(self.attention_norm(x), mask=mask, cache=cache)
        x = x + self.dropout(read)
        return x + self.dropout(self.feedforward(self.feedforward_norm(x)))


class Encoder(nn.Module):
    """`design.layers` blocks and a last normalisation. Without a mask every token sees every
    other."""

    def __init__(self, design: Design, position: Position | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(EncoderBlock(design, position) for _ in range(design.layers))
        self.norm = nn.LayerNorm(design.embed_dim)

    def forward(
        self, x: Tensor, mask: Mask | None = None, caches: Sequence[Cache] | None = None
    ) -> Tensor:
        """(B, L, E) → (B, L, E); caches: one for each block."""
        for number, block in enumerate(self.blocks):
            x = block(x, mask, None if caches is None else caches[number])
        return self.norm(x)

    def make_caches(self, batch: int, capacity: int) -> list[Cache]:
        """Empty caches for `capacity` tokens."""
        blocks: list[EncoderBlock] = list(self.blocks)  # type: ignore[arg-type]
        return [block.attention.make_cache(batch, capacity) for block in blocks]
