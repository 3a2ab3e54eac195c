"""One context length, measured in a process of its own: JSON in on stdin, JSON out on stdout."""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import json
import os
import resource
import sys
import time
from typing import Any

import torch
from torch import Tensor

from headwise import models
from headwise.models.quiet import quiet
from headwise.profile.machine import wait

TIMED = "headwise_timed"
DECODED = 9  # the first is warm-up
LONGEST = 25.0  # seconds of repeated prefills, at least one
REPEATS = 3


def main() -> None:
    """Answer one question and leave; out of memory is an answer."""
    asked = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        try:
            answer = measure(**asked)
        except (MemoryError, torch.OutOfMemoryError):
            answer = {"out_of_memory": True}
        except RuntimeError as error:
            # torch's CPU allocator raises no kind of its own.
            if "allocate memory" not in str(error) and "out of memory" not in str(error):
                raise
            answer = {"out_of_memory": True}
    print(json.dumps(answer))


def measure(
    source: str,
    context: int,
    batch: int,
    dtype: str | None,
    device: str,
    attention: str,
    cache: str,
) -> dict[str, Any]:
    """Seconds of prefills and of decode steps, attention's part in them, bytes at the peak.

    The peak is taken from a run of its own, in which every large tensor is mapped and unmapped by
    itself: glibc otherwise keeps what was freed, and the peak would tell of its habits.
    """
    with quiet():
        loaded = models.load(source, dtype=dtype, device=device, say=lambda line: None)
        model: Any = loaded.model
        spent = _timed(model, attention, loaded.device)
    decodes = loaded.kind == "causal"
    place, int8 = loaded.device, cache == "int8"
    ids = torch.randint(
        10, max(11, int(model.config.vocab_size) - 10), (batch, context),
        generator=torch.Generator().manual_seed(0),
    ).to(place)  # fmt: skip
    with torch.inference_mode():
        _prefill(model, ids[:, : min(context, 1024)], decodes, None)
        wait(place)
        _map_large_tensors(place, 1 << 18)
        _forget_peak(place)
        # What the interpreter, the libraries and their threads hold, without the weights.
        base = _resident() - sum(p.numel() * p.element_size() for p in model.parameters())
        kept: Any = None
        kept = _prefill(model, ids, decodes, _quantized(model, context) if int8 else None)
        wait(place)
        peak = _peak(place, base)
        held = _bytes(kept) if decodes else 0
        _map_large_tensors(place, 1 << 25)
        prefill: list[float] = []
        share: list[float] = []
        started = time.perf_counter()
        while len(prefill) < REPEATS and (
            not prefill or time.perf_counter() - started < LONGEST - prefill[-1]
        ):
            kept = None
            past = _quantized(model, context) if int8 else None
            spent[0] = 0.0
            begin = time.perf_counter()
            kept = _prefill(model, ids, decodes, past)
            wait(place)
            prefill.append(time.perf_counter() - begin)
            share.append(spent[0] / prefill[-1])
        decode, decode_attention = [], []
        for _ in range(DECODED if decodes else 0):
            spent[0] = 0.0
            begin = time.perf_counter()
            _step(model, ids[:, -1:], kept)
            wait(place)
            decode.append(time.perf_counter() - begin)
            decode_attention.append(spent[0])
    return {
        "prefill": prefill,
        "attention_share": share,
        "decode": decode[1:],
        "decode_attention": decode_attention[1:],
        "peak": peak,
        "kv_bytes": held,
        "threads": torch.get_num_threads(),
    }


def _timed(model: Any, attention: str, device: torch.device) -> list[float]:
    """The model attends through `attention` with a clock around each call: the list's one number
    grows by its seconds."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    import headwise.hf  # noqa: F401  (registers "headwise")

    spent = [0.0]
    inner = ALL_ATTENTION_FUNCTIONS.get_interface(attention, None)
    if inner is None:  # eager lives in each model's own file
        inner = sys.modules[type(model).__module__].eager_attention_forward

    def attend(*args: Any, **kwargs: Any) -> Any:
        wait(device)
        begin = time.perf_counter()
        found = inner(*args, **kwargs)
        wait(device)
        spent[0] += time.perf_counter() - begin
        return found

    if attention == "headwise":
        # QuantizedCache asks for the implementation by its name, so that name gets the clock.
        AttentionInterface.register("headwise", attend)
        model.set_attn_implementation("headwise")
        return spent
    AttentionInterface.register(TIMED, attend)
    AttentionMaskInterface.register(TIMED, ALL_MASK_ATTENTION_FUNCTIONS[attention])
    model.set_attn_implementation(TIMED)
    return spent


def _prefill(model: Any, ids: Tensor, decodes: bool, past: Any) -> Any:
    more: dict[str, Any] = {}
    names = inspect.signature(model.forward).parameters
    if decodes:
        more["use_cache"] = True
        if past is not None:
            more[cache_word(model)] = past
        if "logits_to_keep" in names:
            more["logits_to_keep"] = 1
    output = model(input_ids=ids, **more)
    return getattr(output, cache_word(model), None) if decodes else None


def _step(model: Any, token: Tensor, past: Any) -> None:
    model(input_ids=token, use_cache=True, **{cache_word(model): past})


def cache_word(model: Any) -> str:
    """transformers renames the keyword, and warns of the old one."""
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def _quantized(model: Any, context: int) -> Any:
    from headwise.hf import QuantizedCache

    return QuantizedCache(model, capacity=context + DECODED)


def _bytes(past: Any) -> int:
    """Bytes of the keys and values that a cache holds."""
    if hasattr(past, "nbytes"):
        return int(past.nbytes)
    return sum(
        tensor.numel() * tensor.element_size()
        for layer in past.layers
        for tensor in (layer.keys, layer.values)
    )


# --- memory ---------------------------------------------------------------------------------------


def _status(name: str) -> int | None:
    """A size in bytes from Linux's /proc/self/status; None elsewhere."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith(name + ":"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _resident() -> int:
    found = _status("VmRSS")
    return found if found is not None else _highest()


def _highest() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak starts again from what is resident now


def _map_large_tensors(device: torch.device, size: int) -> None:
    """Let glibc map what is larger than `size` bytes by itself; elsewhere nothing changes."""
    if device.type == "cpu" and sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).mallopt(-3, size)  # M_MMAP_THRESHOLD


def _peak(device: torch.device, base: int) -> int:
    """Bytes at the peak beyond those of the process without the model's weights."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    found = _status("VmHWM")
    return (found if found is not None else _highest()) - base


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
