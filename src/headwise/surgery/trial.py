"""What variants of a model are measured by: a quality, a loss to rank heads by, what is timed."""

from __future__ import annotations

import inspect
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from headwise.errors import BadInput

Loss = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True, eq=False)
class Trial:
    """One way to measure a model and its variants.

    metric, better: the quality's name, and which way is better. quality(model): the number, in eval
    mode and without gradients. run(model): one forward pass, timed. step(model): a function that
    decodes one token upon filled caches, timed; None: nothing is decoded. tokens: those whose keys
    and values count as KV bytes. loss(model, batch) with `calibration` batches ranks heads (its
    shape: see `head_importance`); with `training` batches it heals. Keep both apart from what
    `quality` reads.
    """

    metric: str
    better: Literal["lower", "higher"]
    quality: Callable[[nn.Module], float]
    run: Callable[[nn.Module], Any]
    tokens: int
    step: Callable[[nn.Module], Callable[[], Any]] | None = None
    loss: Loss | None = None
    calibration: Sequence[Any] = ()
    training: Sequence[Any] = ()


def token_losses(model: nn.Module, ids: Tensor) -> Tensor:
    """Mean nats per predicted token of each window, (B,), from ids (B, N) of a causal model."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    lost = nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none"
    )
    return lost.unflatten(0, (len(ids), -1)).mean(1)


def language(model: nn.Module, ids: Tensor, *, context: int = 512, windows: int = 16) -> Trial:
    """Perplexity of a Hugging Face causal language model on token ids (N,).

    Windows of `context` tokens are taken at equal distances from the text: every other one is for
    evaluation (`windows` of them), the rest for importance and healing, so no variant is measured
    on what it was chosen by. One window's logits are held at a time. What is timed is a window as
    a prompt, and a token upon a cache that a window fills.

    Raises:
        BadInput: no causal language model, too little text, numbers that do not fit.
    """
    config: Any = getattr(model, "config", None)
    if config is None or getattr(model, "get_output_embeddings", lambda: None)() is None:
        raise BadInput(
            f"what_if: {type(model).__name__} is no causal language model; give a Trial with the "
            "quality that suits it"
        )
    if context < 2 or windows < 1:
        raise BadInput(
            f"what_if: context must be at least 2 and windows 1, got {context}, {windows}"
        )
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and context > limit:
        raise BadInput(f"what_if: context={context} is more than the model's {limit} positions")
    have = len(ids) // context
    if have < 2 * windows:
        raise BadInput(
            f"what_if: the text has {len(ids):,} tokens and {2 * windows} windows of {context} "
            f"need {2 * windows * context:,}: give more text, or fewer or shorter windows"
        )
    device = next(model.parameters()).device
    pieces = ids[: have * context].reshape(have, 1, context).to(device)
    at = [i * have // (2 * windows) for i in range(2 * windows)]
    test = [pieces[i] for i in at[::2]]

    def perplexity(variant: nn.Module) -> float:
        nats = statistics.fmean(float(token_losses(variant, window)) for window in test)
        return math.exp(nats) if nats < 700 else math.inf

    return Trial(
        metric="perplexity",
        better="lower",
        quality=perplexity,
        run=lambda variant: variant(input_ids=test[0], use_cache=False, logits_to_keep=1),
        tokens=context,
        step=lambda variant: decoder(variant, test[0]),
        loss=token_losses,
        calibration=[pieces[i] for i in at[1::2]][: max(1, windows // 2)],
        training=[pieces[i] for i in range(have) if i not in set(at[::2])],
    )


def decoder(model: Any, window: Tensor, steps: int = 8) -> Callable[[], Any]:
    """A function that decodes one token behind a prompt that leaves room for `steps` of them."""
    prompt = window[:, : max(1, window.shape[1] - steps)]
    # transformers renames the keyword, and warns of the old one.
    word = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    first = model(input_ids=prompt, use_cache=True, logits_to_keep=1)
    cache = getattr(first, word) if hasattr(first, word) else first.past_key_values
    return lambda: model(input_ids=window[:, -1:], use_cache=True, **{word: cache})


@torch.inference_mode()
def check(trial: Trial, model: nn.Module) -> float:
    """The quality of `model`.

    Raises:
        BadInput: it is no number, or not finite for any reason but a perplexity beyond floats.
    """
    found = trial.quality(model)
    if isinstance(found, bool) or not isinstance(found, int | float) or math.isnan(found):
        raise BadInput(f"what_if: the quality {trial.metric!r} gave {found!r}, wanted a number")
    return float(found)
