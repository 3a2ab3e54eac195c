"""A whole model, SmolLM2 in bfloat16, upon headwise and upon transformers' sdpa."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

import headwise.hf  # noqa: F401  (registers "headwise")
from benchmarks.case import Case
from headwise import models

# The argument's name changed between versions of transformers.
CACHE = "cache" if "cache" in signature(LlamaForCausalLM.forward).parameters else "past_key_values"
CHECKED = 256  # tokens of the prompt on which both are compared with float32


def prompt(tokens: int) -> Tensor:
    return torch.randint(1000, 40000, (1, tokens), generator=torch.Generator().manual_seed(0))


def prefill(model: Any, name: str, ids: Tensor) -> tuple[Tensor, Any]:
    """The last token's logits, and the cache."""
    model.set_attn_implementation(name)
    found = model(ids, use_cache=True, logits_to_keep=1)
    return found.logits[0, -1], found[CACHE]


def step(model: Any, name: str, cache: Any) -> Tensor:
    """One more token upon a cache, which is cut back afterwards."""
    model.set_attn_implementation(name)
    found = model(torch.tensor([[5]]), **{CACHE: cache}, use_cache=True)
    cache.crop(-1)
    return found.logits[0, -1]


def _no_further(ours: Tensor, torchs: Tensor, exact: Tensor, name: str) -> None:
    off = [float((x.double() - exact.double()).square().mean().sqrt()) for x in (ours, torchs)]
    # Thirty layers of rounding in bfloat16: the two errors are alike, not equal.
    assert off[0] <= 1.5 * off[1], f"{name}: error {off[0]:.3g}, sdpa's {off[1]:.3g}"


def cases(context: int) -> list[Case]:
    """Prefill of `context` tokens, and decoding one token after them."""
    model = models.load("smollm2", dtype=torch.bfloat16, say=lambda line: None).model
    short = prompt(CHECKED)
    # Called before anything is timed; the float32 model is not kept.
    wide = models.load("smollm2", dtype=torch.float32, say=lambda line: None).model
    want, cache = prefill(wide, "sdpa", short)
    wanted = {"prefill": want, "decode": step(wide, "sdpa", cache)}
    del wide, cache

    def check(what: str) -> Callable[[], None]:
        def run() -> None:
            found = []
            for name in ("headwise", "sdpa"):
                logits, cache = prefill(model, name, short)
                found.append(logits if what == "prefill" else step(model, name, cache))
            _no_further(found[0], found[1], wanted[what], f"SmolLM2 {what}")

        return run

    ids = prompt(context)
    kept: dict[str, Any] = {}

    def one(name: str) -> Callable[[], Tensor]:
        return lambda: prefill(model, name, ids)[0]

    def token(name: str) -> Callable[[], Tensor]:
        def run() -> Tensor:
            if not kept:  # at the warm-up
                kept["cache"] = prefill(model, "headwise", ids)[1]
            return step(model, name, kept["cache"])

        return run

    size = f"bf16, {context:,} tokens"
    return [
        Case(f"SmolLM2 prefill {size}", one("headwise"), one("sdpa"), context, "tokens/s",
             check("prefill")),
        Case(f"SmolLM2 decode after {size}", token("headwise"), token("sdpa"), 1, "tokens/s",
             check("decode")),
    ]  # fmt: skip
