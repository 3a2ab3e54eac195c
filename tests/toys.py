"""Small models for tests of what stands on top of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headwise.layer import MultiHeadAttention
from headwise.masks import causal
from headwise.models import Inputs, Loaded


class Toy(nn.Module):
    """Embeds ids, runs causal attention layers, returns features."""

    def __init__(self, layers: int = 2, heads: int = 4, kv_heads: int = 2, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, width)
        self.layers = nn.ModuleList(
            MultiHeadAttention(width, heads, num_kv_heads=kv_heads) for _ in range(layers)
        )

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = x + layer(x, mask=causal())
        return x


def text_axis(text: str) -> dict[str, Any]:
    """An axis of words, each with its leading blank, as byte-pair tokenizers have them."""
    tokens, starts, place = [], [], 0
    for word in text.split(" "):
        token = word if not tokens else " " + word
        starts.append(place)
        place += len(token)
        tokens.append(token)
    count = len(tokens)
    return {
        "kind": "text",
        "text": text,
        "tokens": tokens,
        "starts": starts,
        "ends": [start + len(token) for start, token in zip(starts, tokens, strict=True)],
        "words": list(range(count)),
        "special": [0] * count,
        "real": [1] * count,
    }


def toy(text: str = "a b c a b c d", **sizes: int) -> tuple[Loaded, Inputs]:
    """A loaded toy with fixed random weights, and its input."""
    torch.manual_seed(0)
    model = Toy(**sizes).eval()
    axis = text_axis(text)
    ids = torch.tensor([[ord(token.strip()[0]) % 50 for token in axis["tokens"]]])
    inputs = Inputs("text", {"text": axis}, {"": "text"}, {"input_ids": ids})
    loaded = Loaded("toy", "tests", model, "causal", preparer=None)  # type: ignore[arg-type]
    return loaded, inputs
