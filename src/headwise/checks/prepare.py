"""Random inputs of the right form, where a model's own words say what it takes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headwise.checks.finding import NotRunnable
from headwise.checks.streams import LENGTH, parameters

SEED = 20


def default_inputs(model: nn.Module, loaded: Any = None) -> Any:
    """Inputs for a model that came without any: random ids, features or pixels.

    Raises:
        NotRunnable: neither the model's config nor its factory says what it takes.
    """
    if loaded is not None and getattr(loaded, "kind", "") == "module":
        return loaded.prepare()
    config = getattr(model, "config", None)
    names, _ = parameters(model)
    place = next((p.device for p in model.parameters()), torch.device("cpu"))
    kinds = (p.dtype for p in model.parameters() if p.is_floating_point())
    dtype = next(kinds, torch.float32)
    vocabulary = getattr(config, "vocab_size", None)
    if "input_features" in names and "decoder_input_ids" in names and vocabulary:
        return _speech(model, config, vocabulary, place)
    sees = "pixel_values" in names and "input_ids" not in names
    if sees and getattr(config, "image_size", None) is not None:
        return {"pixel_values": _pixels(model, config).to(place, dtype)}
    if "input_ids" in names and isinstance(vocabulary, int):
        inputs = {"input_ids": random_ids(config, vocabulary, LENGTH).to(place)}
        if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in names:
            other = random_ids(config, vocabulary, LENGTH + 1, seed=SEED + 1)
            inputs = {"input_ids": other[:, 1:].to(place), "decoder_input_ids": inputs["input_ids"]}
        return inputs
    raise NotRunnable(
        f"{type(model).__name__} came without inputs, and no config says what it takes: pass "
        "inputs= (a tensor, a tuple of arguments or a dict of keywords)"
    )


def special_ids(config: Any) -> frozenset[int]:
    """Ids that mean more than a word; some models treat them apart."""
    found: set[int] = set()
    for name in ("pad", "bos", "eos", "sep", "cls", "mask", "decoder_start", "unk"):
        value = getattr(config, f"{name}_token_id", None)
        found |= {value} if isinstance(value, int) else set(value or ())
    return frozenset(found)


def random_ids(config: Any, vocabulary: int, length: int, seed: int = SEED) -> Tensor:
    """(1, length) ids without the special ones, and no two neighbours alike."""
    special = special_ids(config)
    ordinary = torch.tensor([i for i in range(vocabulary) if i not in special] or [0])
    picked = torch.randperm(len(ordinary), generator=torch.Generator().manual_seed(seed))
    repeats = -(-length // len(ordinary))
    return ordinary[picked.repeat(repeats)[:length]][None]


def _pixels(model: nn.Module, config: Any) -> Tensor:
    """A picture of 8 × 8 patches where the model takes one, else of the size that it was made for.

    Noise: every patch is another.
    """
    size, patch = config.image_size, getattr(config, "patch_size", None)
    sizes = [(size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))]
    if isinstance(patch, int) and 8 * patch < min(sizes[0]):
        sizes.insert(0, (8 * patch, 8 * patch))
    first = next(model.parameters())
    for shape in sizes:
        pixels = torch.randn(
            (1, getattr(config, "num_channels", 3), *shape),
            generator=torch.Generator().manual_seed(SEED),
        )
        try:
            with torch.no_grad():
                model(pixel_values=pixels.to(first))
        except (ValueError, RuntimeError):  # positions for one size only
            continue
        break
    return pixels


def _speech(model: Any, config: Any, vocabulary: int, place: torch.device) -> dict[str, Any]:
    """Noise as sound, heard once: the encoder's answer is given to every run of the decoder. The
    encoder is a part of its own (parts.py)."""
    with torch.no_grad():
        heard = model.get_encoder()(noise_for(model, model))
    ids = random_ids(config, vocabulary, LENGTH).to(place)
    return {"decoder_input_ids": ids, "encoder_outputs": heard}


def noise_for(encoder: nn.Module, model: nn.Module) -> Tensor:
    """A spectrogram of noise, (1, bands, frames), as long as a speech encoder takes.

    Raises:
        NotRunnable: the config does not say that it takes one.
    """
    config = getattr(model, "config", None)
    bands, half = (getattr(config, name, None) for name in ("num_mel_bins", "max_source_positions"))
    if not isinstance(bands, int) or not isinstance(half, int):
        raise NotRunnable(
            f"{type(encoder).__name__} came without inputs, and no config says what it takes"
        )
    noise = torch.randn((1, bands, 2 * half), generator=torch.Generator().manual_seed(SEED))
    first = next(encoder.parameters())
    return noise.to(first.device, first.dtype)


def batch_first_of(model: nn.Module) -> bool:
    """torch's own stacks say it themselves; a model around them is taken to be batch first."""
    if isinstance(model, nn.TransformerEncoder | nn.TransformerDecoder):
        model = model.layers[0]
    if isinstance(model, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
        model = model.self_attn
    return bool(getattr(model, "batch_first", True))


def pad_id(config: Any, given: int | None) -> int:
    """The id that padding is made of: as given, else the config's, else 0."""
    found = getattr(config, "pad_token_id", None) if given is None else given
    return found if isinstance(found, int) and found >= 0 else 0
