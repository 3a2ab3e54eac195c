"""Text for an encoder-decoder: the source that is given, and the target that the model writes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from headwise.errors import BadInput
from headwise.models.generate import decoded_offsets, greedy
from headwise.models.loaded import Inputs
from headwise.models.text import check_length, encode, positions_limit, text_axis

_TARGET = 128  # tokens: enough to see the alignment, short enough to write in seconds


class Seq2SeqPreparer:
    """The model answers greedily, at most 128 tokens; one pass then reads that answer."""

    takes: tuple[str, ...] = ("text",)

    def __init__(self, tokenizer: Any, name: str):
        self.tokenizer = tokenizer
        self.name = name

    def __call__(self, model: nn.Module, **given: Any) -> Inputs:
        text = given.get("text")
        if text is None:
            raise BadInput(f"{self.name} reads text: give --text TEXT or --file FILE")
        config: Any = model.config
        generation: Any = model.generation_config
        ids, offsets = encode(self.tokenizer, text)
        limit = positions_limit(config)
        check_length(len(ids), limit, self.name)
        source = torch.tensor([ids], device=next(model.parameters()).device)
        start = generation.decoder_start_token_id
        start = config.decoder_start_token_id if start is None else start
        if start is None:
            start = config.pad_token_id
        prompt = [int(start)]
        forced = generation.forced_bos_token_id
        if forced is not None:
            prompt.append(int(forced))
        room = _TARGET if limit is None else min(_TARGET, limit - len(prompt))
        stop = generation.eos_token_id
        target = greedy(
            model,
            {"input_ids": source},
            prompt,
            stop=() if stop is None else stop,
            limit=room,
        )
        answer, places = decoded_offsets(self.tokenizer, target)
        whole = prompt + target
        axes = {
            "source": text_axis(self.tokenizer, text, ids, offsets),
            "target": text_axis(self.tokenizer, answer, whole, [(0, 0)] * len(prompt) + places),
        }
        kwargs = {
            "input_ids": source,
            "decoder_input_ids": torch.tensor([whole]),
            "use_cache": False,
        }
        stacks = {"encoder": "source", "decoder": "target"}
        note = f"target by the model itself (greedy, at most {_TARGET} tokens)"
        return Inputs("text", axes, stacks, kwargs, note=note)
