"""What an int8 cache costs in quality: perplexity beside that of the plain cache."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import BadInput
from headwise.profile.worker import cache_word

CONTEXT, WINDOWS = 256, 8


@dataclass(frozen=True)
class Quality:
    """Perplexity of the same `tokens` tokens of `text`, each read alone upon a plain cache and upon
    an int8 one."""

    plain: float
    int8: float
    tokens: int
    text: str

    def line(self) -> str:
        """ "perplexity of 1,024 tokens of book.txt, each alone on the cache: 22.31 plain, …"."""
        change = self.int8 / self.plain - 1
        return (
            f"perplexity of {self.tokens:,} tokens of {self.text}, each alone on the cache: "
            f"{self.plain:.4g} plain, {self.int8:.4g} int8 ({change:+.2%})"
        )


@torch.inference_mode()
def cache_quality(
    model: Any,
    ids: Tensor,
    *,
    text: str = "the text",
    context: int = CONTEXT,
    windows: int = WINDOWS,
    say: Callable[[str], None] = lambda line: None,
) -> Quality:
    """Measure a Hugging Face causal language model on token ids (N,).

    Windows of `context` tokens (fewer where the model or the text has fewer), at most `windows` of
    them at equal distances, read side by side. The first half of each is a prompt; the tokens of
    the other half come one by one, as in generation, where every key and value is read from the
    cache. Both caches are read by headwise's attention.

    Raises:
        BadInput: the text has fewer than four tokens, or the model keeps no cache of its own.
    """
    import headwise.hf  # registers "headwise"

    positions = getattr(model.config, "max_position_embeddings", None) or context
    context = min(context, positions, len(ids))
    if context < 4:
        raise BadInput(f"profile: the text has {len(ids)} tokens; wanted at least 4, better 2,048")
    count = min(windows, len(ids) // context)
    have = len(ids) // context
    pieces = ids[: have * context].reshape(have, context)
    rows = pieces[[i * have // count for i in range(count)]].to(next(model.parameters()).device)
    before = model.config._attn_implementation
    model.set_attn_implementation("headwise")
    try:
        say("perplexity upon the plain cache")
        plain = _nats(model, rows, None)
        say("perplexity upon the int8 cache")
        int8 = _nats(model, rows, headwise.hf.QuantizedCache(model, capacity=context))
    finally:
        model.set_attn_implementation(before)
    tokens = count * (context - context // 2)
    return Quality(math.exp(plain / tokens), math.exp(int8 / tokens), tokens, text)


def _nats(model: Any, rows: Tensor, past: Any) -> float:
    """Nats of the second half of each row, its tokens read one by one."""
    prompt, word = rows.shape[1] // 2, cache_word(model)
    out = model(
        input_ids=rows[:, :prompt], use_cache=True, **({} if past is None else {word: past})
    )
    past, nats = getattr(out, word), 0.0
    for at in range(prompt, rows.shape[1]):
        logits = out.logits[:, -1].float()
        nats += float(nn.functional.cross_entropy(logits, rows[:, at], reduction="sum"))
        if at + 1 < rows.shape[1]:
            out = model(input_ids=rows[:, at : at + 1], use_cache=True, **{word: past})
    return nats
