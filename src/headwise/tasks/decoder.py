"""A decoder: text in, the next token out; and generation from it, greedy or drawn by chance."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from headwise.arguments import Cache
from headwise.masks import causal
from headwise.positions import Rotary
from headwise.tasks.blocks import Encoder
from headwise.tasks.design import Design


class Decoder(nn.Module):
    """Ids in, logits of each next id out; causal self-attention, rotary positions, tied weights."""

    def __init__(self, design: Design, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, design.embed_dim)
        nn.init.normal_(self.embedding.weight, std=design.embed_dim**-0.5)
        self.stack = Encoder(design, Rotary())
        self.scale = design.embed_dim**0.5

    def forward(self, ids: Tensor, caches: Sequence[Cache] | None = None) -> Tensor:
        """(B, L) ids → logits (B, L, V). With caches the ids follow those that the caches hold."""
        x = self.stack(self.embedding(ids) * self.scale, causal(), caches)
        return x @ self.embedding.weight.T

    def make_caches(self, batch: int, capacity: int) -> list[Cache]:
        """Empty caches for `capacity` tokens, one a layer."""
        return self.stack.make_caches(batch, capacity)


@torch.inference_mode()
def greedy(model: nn.Module, prompt: Tensor, limit: int, *, cached: bool = True) -> Tensor:
    """The likeliest next ids, `limit` of them, after each row of prompt (B, L) → (B, limit).

    `cached=False` reads the whole text again at every step: slower, for comparison, and for models
    that have no caches.
    """
    return _write(model, prompt, limit, cached, lambda logits: logits.argmax(-1))


@torch.inference_mode()
def draw(
    model: nn.Module,
    prompt: Tensor,
    limit: int,
    *,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
    cached: bool = True,
) -> Tensor:
    """As `greedy`, but each id is drawn from the likeliest ones that hold `top_p` of the chance
    (nucleus sampling, Holtzman et al. 2020, arXiv 1904.09751), after logits / temperature.

    The same seed gives the same text; torch's own generator is left as it was.
    """
    generator = torch.Generator().manual_seed(seed)

    def pick(logits: Tensor) -> Tensor:
        chances, order = (logits / temperature).softmax(-1).sort(-1, descending=True)
        # An id stays while those before it hold less than top_p: the first one always does.
        chances = chances.masked_fill(chances.cumsum(-1) - chances >= top_p, 0.0)
        return order.gather(-1, torch.multinomial(chances, 1, generator=generator))[:, 0]

    return _write(model, prompt, limit, cached, pick)


def _write(model: nn.Module, prompt: Tensor, limit: int, cached: bool, pick: object) -> Tensor:
    assert callable(pick)
    model.eval()
    text, start = prompt, prompt.shape[1]
    caches = model.make_caches(len(prompt), start + limit) if isinstance(model, Decoder) else None
    new = prompt
    for _ in range(limit):
        logits = model(new, caches) if cached and caches is not None else model(text)
        new = pick(logits[:, -1])[:, None]
        text = torch.cat([text, new], dim=1)
    return text[:, start:]
