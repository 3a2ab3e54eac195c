"""Measurements: one fresh process for each context length, so that none sees another's memory."""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from headwise.errors import HeadwiseError


@dataclass(frozen=True)
class Measured:
    """Medians of one context length, and the spread of the prefill (largest less smallest).

    prefill, decode, decode_attention: seconds; decode of one token after the context, None for a
    model that does not decode. attention_share: of the prefill. peak: bytes beyond the process
    without a model. kv_bytes: what the cache really held.
    """

    context: int
    prefill: float
    spread: float
    attention_share: float
    decode: float | None
    decode_attention: float | None
    peak: int
    kv_bytes: int


@dataclass(frozen=True)
class OutOfMemory:
    """The context at which memory ended."""

    context: int


def measure(
    source: str,
    contexts: list[int],
    *,
    batch: int = 1,
    dtype: str | None = None,
    device: str = "cpu",
    attention: str = "headwise",
    cache: str = "plain",
    say: Callable[[int, int, str], None] = lambda done, total, line: None,
) -> Iterator[Measured | OutOfMemory]:
    """Each context in turn, shortest first; ends at the first for which memory does not suffice.

    Raises:
        HeadwiseError: the process that measured stopped with an error.
    """
    ordered = sorted(contexts)
    for done, context in enumerate(ordered):
        say(done, len(ordered), f"measuring {context:,} tokens")
        found = _ask(
            {"source": source, "context": context, "batch": batch, "dtype": dtype,
             "device": device, "attention": attention, "cache": cache}
        )  # fmt: skip
        if found is None:
            yield OutOfMemory(context)
            return
        decode = found["decode"]
        yield Measured(
            context,
            statistics.median(found["prefill"]),
            max(found["prefill"]) - min(found["prefill"]),
            statistics.median(found["attention_share"]),
            statistics.median(decode) if decode else None,
            statistics.median(found["decode_attention"]) if decode else None,
            found["peak"],
            found["kv_bytes"],
        )
    say(len(ordered), len(ordered), "measured")


def _ask(question: dict[str, object]) -> dict | None:
    """The worker's answer; None: out of memory, also where the system stopped it for that."""
    command = [sys.executable, "-m", "headwise.profile.worker"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            out, err = process.communicate(json.dumps(question))
        except BaseException:
            process.kill()
            raise
    if process.returncode == -signal.SIGKILL:
        return None
    if process.returncode != 0:
        lines = [line for line in err.strip().splitlines() if line.strip()]
        raise HeadwiseError(
            f"profile: measuring {question['context']} tokens failed: "
            f"{lines[-1] if lines else f'exit code {process.returncode}'}"
        )
    answer: dict = json.loads(out.strip().splitlines()[-1])
    return None if answer.get("out_of_memory") else answer
