"""One context length, measured in a process of its own: JSON in on stdin, JSON out on stdout."""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import json
import math
import os
import resource
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headwise import models
from headwise.errors import BadInput
from headwise.models.quiet import quiet
from headwise.models.text import positions_limit
from headwise.profile.machine import wait

TIMED = "headwise_timed"
STRETCH = "interpolate_pos_encoding"
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
    # From the start: a free block that the heap has already is used before memory is mapped.
    _map_large_tensors(torch.device(device), 1 << 18)
    with quiet():
        loaded = models.load(source, dtype=dtype, device=device, say=lambda line: None)
        model: Any = loaded.model
        spent, seen = _timed(model, attention, loaded.device)
    decodes = loaded.kind in ("causal", "encoder-decoder", "speech")
    place, int8 = loaded.device, cache == "int8"
    given = example(model, batch, context)
    first = given if "pixel_values" in given else example(model, batch, min(context, 1024))
    with torch.inference_mode():
        _prefill(model, first, decodes, None)
        if "pixel_values" in given and max(seen) != context:
            raise BadInput(f"profile: the picture of {context:,} tokens has {max(seen):,}")
        wait(place)
        _forget_peak(place)
        # What the interpreter, the libraries and their threads hold, without the weights.
        base = _resident() - sum(p.numel() * p.element_size() for p in model.parameters())
        kept: Any = None
        kept = _prefill(model, given, decodes, _quantized(model, context) if int8 else None)
        wait(place)
        peak = _peak(place, base)
        held = _bytes(kept[0]) if decodes else 0
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
            kept = _prefill(model, given, decodes, past)
            wait(place)
            prefill.append(time.perf_counter() - begin)
            share.append(spent[0] / prefill[-1])
        decode, decode_attention = [], []
        if decodes:
            _make_room(model, kept[0], context)
        for _ in range(DECODED if decodes else 0):
            spent[0] = 0.0
            begin = time.perf_counter()
            _step(model, given, *kept)
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


def example(model: Any, batch: int, context: int) -> dict[str, Any]:
    """An input of `context` tokens: random ids, for the decoder too where there are two stacks; a
    square picture of so many patches; 30 seconds of noise, transcribed in so many tokens.

    Raises:
        BadInput: no square picture has so many patches.
    """
    config, weight = model.config, next(p for p in model.parameters() if p.is_floating_point())
    random = torch.Generator().manual_seed(0)

    def noise(*size: int) -> Tensor:
        return torch.randn(*size, generator=random).to(weight)

    main = getattr(model, "main_input_name", "input_ids")
    if main == "pixel_values":
        side = picture_side(config, context)
        given = {main: noise(batch, getattr(config, "num_channels", 3), side, side)}
        # Some refuse other sizes than their own until they are told to stretch their positions.
        names = inspect.signature(model.forward).parameters
        return {**given, **({STRETCH: True} if STRETCH in names else {})}
    vocabulary = int(config.vocab_size)
    ids = torch.randint(10, max(11, vocabulary - 10), (batch, context), generator=random)
    ids = ids.to(weight.device)
    if main == "input_features":
        sound = noise(batch, config.num_mel_bins, 2 * config.max_source_positions)
        return {main: sound, "decoder_input_ids": ids}
    both = bool(getattr(config, "is_encoder_decoder", False))
    return {"input_ids": ids, **({"decoder_input_ids": ids} if both else {})}


def picture_side(config: Any, context: int) -> int:
    """Pixels of a side of the square picture that is `context` tokens, its [CLS] counted.

    Raises:
        BadInput: there is none.
    """
    across = math.isqrt(max(0, context - 1))
    if across < 1 or across**2 + 1 != context:
        near = ", ".join(f"{n**2 + 1:,}" for n in (max(1, across), across + 1))
        raise BadInput(
            f"profile: no square picture has {context:,} tokens; those nearest have {near} (one "
            "for each patch, and one more)"
        )
    return across * _pixels(config.patch_size)


def own_picture(config: Any) -> int:
    """Tokens of the square picture that a vision model was made for."""
    return (_pixels(config.image_size) // _pixels(config.patch_size)) ** 2 + 1


def _pixels(size: int | Sequence[int]) -> int:
    return size if isinstance(size, int) else int(size[0])


def _timed(model: Any, attention: str, device: torch.device) -> tuple[list[float], set[int]]:
    """The model attends through `attention` with a clock around each call: the list's one number
    grows by its seconds. The set gathers the numbers of queries."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    import headwise.hf  # noqa: F401  (registers "headwise")

    spent: list[float] = [0.0]
    seen: set[int] = set()
    inner = ALL_ATTENTION_FUNCTIONS.get_interface(attention, None)
    if inner is None:  # eager lives in each model's own file
        inner = sys.modules[type(model).__module__].eager_attention_forward

    def attend(*args: Any, **kwargs: Any) -> Any:
        wait(device)
        begin = time.perf_counter()
        found = inner(*args, **kwargs)
        wait(device)
        spent[0] += time.perf_counter() - begin
        seen.add(int(args[1].shape[2]))
        return found

    if attention == "headwise":
        # QuantizedCache asks for the implementation by its name, so that name gets the clock.
        AttentionInterface.register("headwise", attend)
        model.set_attn_implementation("headwise")
        return spent, seen
    AttentionInterface.register(TIMED, attend)
    AttentionMaskInterface.register(TIMED, ALL_MASK_ATTENTION_FUNCTIONS[attention])
    model.set_attn_implementation(TIMED)
    return spent, seen


def _prefill(model: Any, given: dict[str, Tensor], decodes: bool, past: Any) -> Any:
    """(the filled cache, what the encoder gave, where there is one); None without a cache."""
    more: dict[str, Any] = {}
    names = inspect.signature(model.forward).parameters
    if decodes:
        more["use_cache"] = True
        if past is not None:
            more[cache_word(model)] = past
        if "logits_to_keep" in names:
            more["logits_to_keep"] = 1
    output = model(**given, **more)
    if not decodes:
        return None
    return getattr(output, cache_word(model)), getattr(output, "encoder_last_hidden_state", None)


def _step(model: Any, given: dict[str, Tensor], past: Any, encoded: Tensor | None) -> None:
    more: dict[str, Any] = {"use_cache": True, cache_word(model): past}
    if encoded is None:
        model(input_ids=given["input_ids"][:, -1:], **more)
    else:
        token = given["decoder_input_ids"][:, -1:]
        model(encoder_outputs=(encoded,), decoder_input_ids=token, **more)


def _make_room(model: Any, past: Any, context: int) -> None:
    """Where the model has no position after these, the last tokens are decoded again."""
    limit = positions_limit(model.config) or getattr(model.config, "max_target_positions", None)
    over = 0 if limit is None else context + DECODED - limit
    if over > 0:
        own = getattr(past, "self_attention_cache", past)
        own.crop(-min(over, context - 1))


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
    if hasattr(past, "cross_attention_cache"):
        return _bytes(past.self_attention_cache) + _bytes(past.cross_attention_cache)
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
