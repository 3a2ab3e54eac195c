"""Sound to Whisper's input, the time axis, and the transcript that the decoder is run on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from headwise._extras import require
from headwise.errors import BadInput
from headwise.models.generate import decoded_offsets, greedy
from headwise.models.loaded import AxisValues, Inputs
from headwise.models.text import check_length, encode, text_axis

RATE = 16_000  # Hz: what Whisper hears
_BARS = 600


def read_audio(path: str | Path, rate: int = RATE) -> np.ndarray:
    """A sound file as mono float32 at `rate` Hz, channels averaged, resampled through its spectrum.

    Raises:
        BadInput: the file cannot be read, or holds no sound.
    """
    soundfile = require("soundfile", extra="models", purpose="reading sound")
    try:
        with open(path, "rb") as file:
            samples, found = soundfile.read(file, dtype="float32", always_2d=True)
    except OSError as error:
        raise BadInput(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from None
    except (soundfile.LibsndfileError, TypeError):
        # TypeError: soundfile's answer to a file without a header, which could be raw samples.
        raise BadInput(
            f"{path}: not a sound file that can be read (WAV, FLAC, OGG and MP3 can)"
        ) from None
    mono = samples.mean(axis=1)
    if not len(mono):
        raise BadInput(f"{path}: the sound file holds no samples")
    if not np.isfinite(mono).all():
        raise BadInput(f"{path}: the sound holds NaN or infinite samples")
    if found == rate:
        return mono
    count = max(1, round(len(mono) * rate / found))
    spectrum = np.fft.rfft(mono.astype(np.float64))
    # irfft cuts the spectrum (an ideal low-pass) or pads it with zeros, and scales by its own
    # length.
    return (np.fft.irfft(spectrum, count) * (count / len(mono))).astype(np.float32)


def audio_axis(samples: np.ndarray, *, window: float, tokens: int, rate: int = RATE) -> AxisValues:
    """The `axis` record's values for `tokens` equal steps of a window of `window` seconds.

    Steps after the end of the sound are padding that the model adds: `real` is 0 there. `envelope`
    is the peak of each of at most 600 equal slices of the window, 1 at the loudest.
    """
    step = window / tokens
    real = min(tokens, -(-len(samples) * tokens // round(window * rate)))
    bars = min(_BARS, tokens)
    whole = np.zeros(round(window * rate), dtype=np.float32)
    whole[: len(samples)] = np.abs(samples[: len(whole)])
    peaks = np.array([part.max(initial=0.0) for part in np.array_split(whole, bars)])
    loudest = float(peaks.max())
    return {
        "kind": "audio",
        "tokens": [f"{number * step:.2f} s" for number in range(tokens)],
        "special": [0] * tokens,
        "real": [1] * real + [0] * (tokens - real),
        "seconds": float(window),
        "step": step,
        "envelope": [round(float(peak) / loudest, 4) if loudest else 0.0 for peak in peaks],
    }


class SpeechPreparer:
    """Sound for Whisper. Without a text the model writes its own transcript, greedily; then one
    pass reads that transcript (teacher forcing), which is what the report shows."""

    takes: tuple[str, ...] = ("audio", "text")

    def __init__(self, tokenizer: Any, name: str, features: Any | None = None):
        self.tokenizer = tokenizer
        self.name = name
        self.features = features

    def __call__(self, model: nn.Module, **given: Any) -> Inputs:
        path, text = given.get("audio"), given.get("text")
        if path is None:
            raise BadInput(f"{self.name} listens to sound: give --audio FILE (WAV, FLAC, OGG, MP3)")
        config: Any = model.config
        transformers = require("transformers", extra="models", purpose="headwise.models")
        features = self.features or transformers.WhisperFeatureExtractor(
            feature_size=config.num_mel_bins
        )
        samples = read_audio(path, features.sampling_rate)
        window = float(features.chunk_length)
        seconds = len(samples) / features.sampling_rate
        if seconds > window:
            raise BadInput(
                f"{path}: {seconds:.1f} s of sound, and {self.name} hears at most {window:.0f} s: "
                "cut it into pieces"
            )
        mel = features(samples, sampling_rate=features.sampling_rate, return_tensors="pt")
        parameter = next(model.parameters())
        sound = mel["input_features"].to(parameter.device, parameter.dtype)
        prompt = self._prompt(model, sound)
        if text is None:
            ids = self._transcribe(model, sound, prompt)
            text, offsets = decoded_offsets(self.tokenizer, ids)
        else:
            # Whisper's words begin with a space, the first one too.
            text = " " + text.strip()
            ids, offsets = encode(self.tokenizer, text, special=False)
        check_length(len(prompt) + len(ids), config.max_target_positions, f"{self.name}'s decoder")
        whole = prompt + ids
        axes = {
            "audio": audio_axis(
                samples,
                window=window,
                tokens=config.max_source_positions,
                rate=features.sampling_rate,
            ),
            "text": text_axis(self.tokenizer, text, whole, [(0, 0)] * len(prompt) + offsets),
        }
        kwargs = {
            "input_features": sound,
            "decoder_input_ids": torch.tensor([whole]),
            "use_cache": False,
        }
        note = "" if given.get("text") is not None else "transcript by the model itself (greedy)"
        return Inputs("audio", axes, {"encoder": "audio", "decoder": "text"}, kwargs, note=note)

    def _prompt(self, model: nn.Module, sound: torch.Tensor) -> list[int]:
        start, end = self.tokenizer.convert_tokens_to_ids(
            ["<|startoftranscript|>", "<|notimestamps|>"]
        )
        generation: Any = model.generation_config
        languages = getattr(generation, "lang_to_id", None)
        if not languages or not getattr(generation, "is_multilingual", False):
            return [start, end]
        # A multilingual Whisper says the language itself: the likeliest language token after the
        # start.
        with torch.inference_mode():
            first = torch.tensor([[start]], device=sound.device)
            logits = model(input_features=sound, decoder_input_ids=first, use_cache=False).logits
        best = max(languages.values(), key=lambda token: float(logits[0, -1, token]))
        return [start, best, generation.task_to_id["transcribe"], end]

    def _transcribe(
        self, model: nn.Module, sound: torch.Tensor, prompt: Sequence[int]
    ) -> list[int]:
        generation: Any = model.generation_config
        config: Any = model.config
        return greedy(
            model,
            {"input_features": sound},
            prompt,
            stop=self.tokenizer.convert_tokens_to_ids("<|endoftext|>"),
            limit=config.max_target_positions - len(prompt),
            suppress=generation.suppress_tokens or (),
            suppress_first=generation.begin_suppress_tokens or (),
        )
