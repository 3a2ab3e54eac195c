"""Running a model piece by piece on a cache, whatever form its cache has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headwise.checks.finding import NotRunnable
from headwise.checks.outputs import rows_of
from headwise.checks.subject import Subject


def run(
    subject: Subject,
    tokens: Tensor,
    chunks: list[int],
    *,
    real: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """(B, L, F): the outputs of all chunks, each run on the cache that the ones before it left.

    The padding mask covers the cached tokens too, as transformers has it.

    Raises:
        NotRunnable: the model takes no cache, or gives none back.
    """
    stream = subject.main
    if stream.cache is None:
        raise NotRunnable("the model takes no cache (no past_key_values, cache or past argument)")
    cache = _new(subject, tokens)
    outputs, start = [], 0
    for size in chunks:
        stop = start + size
        more: dict[str, Any] = {stream.cache: cache}
        if subject.takes("use_cache"):
            more["use_cache"] = True
        output = subject.call(
            tokens[:, start:stop],
            real=None if real is None else real[:, :stop],
            positions=None if positions is None else positions[:, start:stop],
            more=more,
        )
        rows = rows_of(output, tokens.shape[0], subject.batch_first)
        subject.want_rows(rows, tokens[:, start:stop])
        outputs.append(rows)
        if stop < tokens.shape[1]:
            cache = _left(output, stream.cache, cache)
        start = stop
    return torch.cat(outputs, dim=1)


def _new(subject: Subject, tokens: Tensor) -> Any:
    """An empty cache where the model makes one itself; else None, and its first call gives one."""
    make = getattr(subject.model, "make_cache", None)
    return make(tokens.shape[0], tokens.shape[1]) if callable(make) else None


def _left(output: Any, name: str, before: Any) -> Any:
    """The cache after a call: named in the output, second in a tuple, or the same object again."""
    for word in (name, "past_key_values", "cache"):
        found = output.get(word) if isinstance(output, dict) else getattr(output, word, None)
        if found is not None:
            return found
    if isinstance(output, tuple | list) and len(output) > 1 and output[1] is not None:
        return output[1]
    if before is not None:
        return before
    raise NotRunnable(
        f"the model takes {name}= but gave no cache back: wanted an output with {name}, a pair "
        "(outputs, cache), or a make_cache(batch, capacity) method"
    )
