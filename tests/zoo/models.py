"""Small models, each with one fault that people met in real code, and their correct twins.

The correct ones come first; a faulty one changes the one method in which the fault lies.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, WORDS, PLACES = 16, 2, 40, 64
Past = "list[tuple[Tensor, Tensor, Tensor]]"


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary positions, halves layout: x is (B, H, L, D), positions (B, L)."""
    half = x.shape[-1] // 2
    rates = 10.0 ** -torch.arange(half, dtype=x.dtype)
    angle = (positions[:, None, :, None].to(x.dtype) + 1) * rates
    one, two = x[..., :half], x[..., half:]
    return torch.cat(
        [one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin()], dim=-1
    )


class Block(nn.Module):
    """Self-attention and a small MLP, both with a residual path."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def split(self, x: Tensor) -> list[Tensor]:
        parts = self.qkv(self.norm(x)).chunk(3, dim=-1)
        return [part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts]

    def join(self, x: Tensor, heads: Tensor) -> Tensor:
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.mlp(self.second(x))


class Decoder(nn.Module):
    """A correct decoder: rotary positions, left or right padding, a cache of keys and values.

    `attention_mask` covers the cached tokens too. With `use_cache` it returns (logits, cache).
    """

    is_causal = True
    layers = 2

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(self.layers))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past: list | None = None,
        use_cache: bool = False,
    ) -> Tensor | tuple[Tensor, list]:
        start = past[0][0].shape[2] if past else 0
        length = input_ids.shape[1]
        positions = self.positions(input_ids, attention_mask, start)
        mask = self.mask(length, start + length, attention_mask)
        x = self.embed(input_ids, positions)
        kept = []
        for number, block in enumerate(self.blocks):
            query, key, value = block.split(x)
            query, key = self.place(query, positions), self.place(key, positions)
            seen, stored = self.remember(past[number] if past else None, key, value)
            kept.append(stored)
            x = block.join(x, self.attend(query, *seen, mask))
        logits = self.head(x)
        return (logits, kept) if use_cache else logits

    def embed(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        return self.embedding(input_ids)

    def place(self, x: Tensor, positions: Tensor) -> Tensor:
        return rotate(x, positions)

    def positions(self, ids: Tensor, real: Tensor | None, start: int) -> Tensor:
        length = ids.shape[1]
        if real is not None:
            return (real.cumsum(-1) - 1).clamp(min=0)[:, start : start + length]
        return torch.arange(start, start + length).expand(ids.shape[0], -1)

    def mask(self, length: int, keys: int, real: Tensor | None) -> Tensor | None:
        """(B or 1, 1, L, S), True where visible; padding sees its own key."""
        place = torch.arange(keys)
        seen = place[None, :] <= place[keys - length :, None]
        if real is None:
            return seen[None, None]
        own = place[None, :] == place[keys - length :, None]
        return (seen & real[:, None, :].bool() | own)[:, None]

    def remember(self, past: tuple | None, key: Tensor, value: Tensor) -> tuple[tuple, tuple]:
        """(what is attended to, what is kept for the next call)."""
        if past is not None:
            key, value = torch.cat([past[0], key], dim=2), torch.cat([past[1], value], dim=2)
        return (key, value), (key, value)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, mask)


class LearnedDecoder(Decoder):
    """Learned positions in place of rotary ones, counted over the real tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(PLACES, WIDTH)

    def embed(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        return self.embedding(input_ids) + self.places(positions)

    def place(self, x: Tensor, positions: Tensor) -> Tensor:
        return x


class ByHand(Decoder):
    """Attention in plain tensor operations; hidden scores are the most negative number."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        return self.softmax(scores) @ value

    def softmax(self, scores: Tensor) -> Tensor:
        return scores.softmax(dim=-1)


class Backends(Decoder):
    """Two implementations of the same attention."""

    attn_implementations = ("eager", "sdpa")
    attn_implementation = "sdpa"

    def set_attn_implementation(self, name: str) -> None:
        self.attn_implementation = name

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        if self.attn_implementation == "sdpa":
            return self.fused(query, key, value, mask)
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        return scores.softmax(dim=-1) @ value

    def fused(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, mask)


class Windowed(Decoder):
    """Each query sees the last 4 keys, its own counted."""

    window = 4
    num_layers = 2

    def mask(self, length: int, keys: int, real: Tensor | None) -> Tensor | None:
        place = torch.arange(keys)
        near = place[keys - length :, None] - place[None, :] < self.looks_back()
        whole = super().mask(length, keys, real)
        assert whole is not None
        return whole & near

    def looks_back(self) -> int:
        return self.window


class Packed(nn.Module):
    """Several documents in one row; each sees only itself."""

    is_causal = True

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, input_ids: Tensor, document_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        length = input_ids.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        mask = self.join_documents(causal, document_ids)[:, None]
        for block in self.blocks:
            query, key, value = block.split(x)
            x = block.join(x, F.scaled_dot_product_attention(query, key, value, mask))
        return x

    def join_documents(self, causal: Tensor, ids: Tensor) -> Tensor:
        return causal & (ids[:, :, None] == ids[:, None, :])


class Encoder(nn.Module):
    """A correct encoder with rotary positions and a padding mask."""

    is_causal = False

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embedding(input_ids)
        positions = torch.arange(input_ids.shape[1]).expand(input_ids.shape[0], -1)
        mask = self.mask(input_ids.shape[1], attention_mask)
        for block in self.blocks:
            query, key, value = block.split(x)
            query, key = rotate(query, positions), rotate(key, positions)
            heads = F.scaled_dot_product_attention(query, key, value, mask)
            x = self.mix(block.join(x, heads))
        return x

    def mask(self, length: int, real: Tensor | None) -> Tensor | None:
        return None if real is None else real[:, None, None, :].bool()

    def mix(self, x: Tensor) -> Tensor:
        return x


class TorchEncoder(nn.Module):
    """torch's MultiheadAttention on (batch, tokens, width) features."""

    is_causal = False
    batch_first_inside = True

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(
            WIDTH, HEADS, batch_first=self.batch_first_inside, dropout=0.1
        )
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.attention(x, x, x, need_weights=False)[0])
