"""Greedy decoding for encoder-decoders, and where the decoded tokens stand in their text."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch


def greedy(
    model: Any,
    encoder_inputs: Mapping[str, torch.Tensor],
    prompt: Sequence[int],
    *,
    stop: int | Sequence[int],
    limit: int,
    suppress: Sequence[int] = (),
    suppress_first: Sequence[int] = (),
) -> list[int]:
    """The likeliest next token, at most `limit` times; `stop` and `prompt` are not in the result.

    Deterministic: no sampling, no beams. The encoder runs once.
    """
    # transformers renamed the cache's keyword and field; one of the two names is always there.
    named = inspect.signature(model.forward).parameters
    keyword = "cache" if "cache" in named else "past_key_values"
    stops = {stop} if isinstance(stop, int) else set(stop)
    ids: list[int] = []
    with torch.inference_mode():
        encoded = model.get_encoder()(**encoder_inputs)
        device = encoded[0].device
        step, cache = list(prompt), None
        for number in range(limit):
            found = model(
                encoder_outputs=encoded,
                decoder_input_ids=torch.tensor([step], device=device),
                use_cache=True,
                **{keyword: cache},
            )
            cache, logits = found[keyword], found.logits[0, -1].float()
            banned = [*suppress, *(suppress_first if number == 0 else ())]
            logits[torch.tensor(banned, dtype=torch.long, device=device)] = -torch.inf
            token = int(logits.argmax())
            if token in stops:
                break
            ids.append(token)
            step = [token]
    return ids


def decoded_offsets(tokenizer: Any, ids: Sequence[int]) -> tuple[str, list[tuple[int, int]]]:
    """The text that the ids spell, and each one's (start, end) in it.

    Ids that share one character (a byte-level vocabulary cuts rare ones) get it with the last of
    them; special tokens spell nothing and get (n, n).
    """

    def spell(part: Sequence[int]) -> str:
        decoded = tokenizer.decode(
            list(part), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(decoded)

    whole = spell(ids)
    offsets: list[tuple[int, int]] = []
    place = 0
    for count in range(1, len(ids) + 1):
        # An unfinished character decodes to U+FFFD; it is there only once it is finished.
        length = len(spell(ids[:count]).rstrip("\ufffd")) if count < len(ids) else len(whole)
        length = max(place, min(length, len(whole)))
        offsets.append((place, length))
        place = length
    return whole, offsets
