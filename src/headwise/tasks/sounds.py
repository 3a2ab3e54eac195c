"""Spoken words as log-mel frames, and their split: espeak-ng's voices, or a folder per class.

The split is by voice: nobody who is heard in training is heard in validation or test. A recorded
person, whom training never hears either, says the same words for a score of its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd
from pathlib import Path

import numpy as np
import torch

from headwise._extras import require
from headwise.errors import BadInput, HeadwiseError
from headwise.models.speech import read_audio
from headwise.models.store import keep
from headwise.tasks.sources import fetch
from headwise.tasks.voices import Saying, speak

RATE = 8000  # Hz: telephone speech, as the recorded person's clips are
MELS, WINDOW, HOP = 40, 200, 80  # 25 ms windows every 10 ms
LONGEST = 2.0  # seconds
SUFFIXES = (".wav", ".flac", ".ogg", ".mp3")

_COUNT = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
    "twenty",
    "thirty",
    "forty",
    "fifty",
    "sixty",
    "seventy",
    "eighty",
    "ninety",
]
_DAYS = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"]
_MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]
# Word → the file in which the recorded person says it.
WORDS: dict[str, str] = {
    **dict(zip(_COUNT, map(str, [*range(20), *range(20, 100, 10)]), strict=True)),
    **{word: word for word in ("hundred", "thousand", "million")},
    **{day: f"day-{number}" for number, day in enumerate(_DAYS)},
    **{month: f"mon-{number}" for number, month in enumerate(_MONTHS)},
}
_ACCENTS = [
    "en-US",
    "en",
    "en-GB-scotland",
    "en-GB-x-rp",
    "en-GB-x-gbclan",
    "en-GB-x-gbcwmd",
    "en-029",
    "en-US-nyc",
]
_VARIANTS = [
    "Alex",
    "Alicia",
    "Andrea",
    "Andy",
    "Annie",
    "Denis",
    "Diogo",
    "Gene",
    "Henrique",
    "Hugo",
    "Jacky",
    "Lee",
    "Marco",
    "Mario",
    "Michael",
    "Mike",
    "Nguyen",
    "adam",
    "anika",
    "antonio",
    "aunty",
    "belinda",
    "benjamin",
    "boris",
    "caleb",
    "david",
    "ed",
    "edward",
    "f1",
    "f2",
    "f3",
    "f4",
    "f5",
    "grandma",
    "grandpa",
    "john",
    "linda",
    "m1",
    "m2",
    "m3",
    "m4",
    "m5",
    "m6",
    "m7",
    "m8",
    "max",
    "michel",
    "norbert",
    "pablo",
    "paul",
    "rob",
    "robert",
]


@dataclass(frozen=True, eq=False)
class Sounds:
    """`frames`: one (T, 40) float32 array of log-mel frames for each clip; `labels` (N,) int64;
    the names of the classes; `rows` maps train, validation, test, and "person" where there is one,
    to clips, and none is in two of them."""

    frames: list[np.ndarray]
    labels: np.ndarray
    classes: tuple[str, ...]
    rows: dict[str, np.ndarray]


def log_mel(samples: np.ndarray) -> np.ndarray:
    """(T, 40) log10 mel power, one frame every 10 ms, of mean 0 and deviation 1 over the clip.

    `samples` at 8 kHz; silence before and after, 34 dB under the loudest sample, is cut. Only the
    60 dB under the loudest value are kept, as Whisper does with 80 (Radford et al. 2022, section
    2.2).
    """
    loud = np.flatnonzero(np.abs(samples) > 0.02 * np.abs(samples).max(initial=0.0))
    if len(loud):
        samples = samples[max(0, loud[0] - WINDOW) : loud[-1] + WINDOW]
    samples = samples[: int(LONGEST * RATE)]
    if len(samples) < WINDOW:
        samples = np.pad(samples, (0, WINDOW - len(samples)))
    audio = require("transformers.audio_utils", extra="models", purpose="mel filters")
    filters = torch.from_numpy(
        audio.mel_filter_bank(129, MELS, 60.0, 4000.0, RATE, norm="slaney", mel_scale="slaney")
    ).float()
    spectrum = torch.stft(
        torch.from_numpy(np.ascontiguousarray(samples, dtype=np.float32)),
        n_fft=256,
        hop_length=HOP,
        win_length=WINDOW,
        window=torch.hann_window(WINDOW),
        return_complex=True,
    )
    power = torch.log10((spectrum.abs().square().T @ filters).clamp_min(1e-10))
    power = power.clamp_min(power.max() - 6)
    return np.asarray(((power - power.mean()) / power.std().clamp_min(1e-3)).numpy())


def spoken_words(seed: int, say: Callable[[str], None]) -> Sounds:
    """50 words by 52 voices in 8 accents (one clip a word and voice, two of the training voices),
    and once by a recorded person: 30 voices train, 8 validate, 14 test.

    Raises:
        HeadwiseError: the voices or the recordings could not be fetched, or do not run here.
    """
    rng = np.random.default_rng(seed)
    voices = rng.permutation(_VARIANTS)
    parts = {"train": voices[:30], "validation": voices[30:38], "test": voices[38:]}
    sayings: list[Saying] = []
    labels: list[int] = []
    rows: dict[str, np.ndarray] = {}
    for split, chosen in parts.items():
        begin = len(sayings)
        for voice in np.repeat(chosen, 2 if split == "train" else 1):
            for label, word in enumerate(WORDS):
                accent = _ACCENTS[rng.integers(len(_ACCENTS))]
                rate, pitch = int(rng.integers(90, 190)), int(rng.integers(25, 75))
                sayings.append(Saying(word, f"gmw/{accent}+{voice}", rate, pitch))
                labels.append(label)
        rows[split] = np.arange(begin, len(sayings))
    rows["person"] = np.arange(len(sayings), len(sayings) + len(WORDS))
    labels += range(len(WORDS))
    voices_at, person_at = fetch("espeak-ng", say=say), fetch("asterisk-sounds", say=say)

    def build(directory: Path) -> None:
        say(f"speaking {len(sayings):,} words")
        try:
            spoken, rate = speak(voices_at, sayings)
        except (RuntimeError, OSError) as error:
            raise HeadwiseError(
                f"cannot speak the words of the task: {error}; --data takes a folder of sounds"
            ) from None
        frames = [log_mel(resampled(samples, rate)) for samples in spoken]
        for name in WORDS.values():
            frames.append(log_mel(read_audio(person_at / "digits" / f"{name}.wav", RATE)))
        np.savez_compressed(
            directory / "frames.npz",
            frames=np.concatenate(frames).astype(np.float16),
            lengths=np.array([len(clip) for clip in frames]),
        )

    recipe = json.dumps([sayings, RATE, MELS, WINDOW, HOP, voices_at.name, person_at.name])
    digest = hashlib.sha256(recipe.encode()).hexdigest()[:8]
    with np.load(
        keep(f"data-spoken-words-{digest}", build, say=say) / "frames.npz", allow_pickle=False
    ) as kept:
        whole, lengths = kept["frames"].astype(np.float32), kept["lengths"]
    frames = np.split(whole, np.cumsum(lengths)[:-1])
    return Sounds(frames, np.array(labels, dtype=np.int64), tuple(WORDS), rows)


def resampled(samples: np.ndarray, rate: int) -> np.ndarray:
    """At 8 kHz, through scipy's polyphase filter."""
    signal = require("scipy.signal", extra="tasks", purpose="resampling")
    common = gcd(rate, RATE)
    return np.asarray(signal.resample_poly(samples, RATE // common, rate // common), np.float32)


def folder_per_class(folder: Path, seed: int) -> Sounds:
    """A person's sounds, a folder for each class: 70 % train, 15 % validate, 15 % test, of each
    class. Copies of one file count once, so none is in two parts.

    Raises:
        BadInput: no folder, under two classes, a class with under four sounds, a file that cannot
        be read; with its name.
    """
    if not folder.is_dir():
        raise BadInput(f"{folder}: wanted a folder that holds a folder of sounds for each class")
    classes = sorted(path for path in folder.iterdir() if path.is_dir())
    if len(classes) < 2:
        raise BadInput(
            f"{folder}: wanted a folder of sounds for each of at least two classes, found "
            f"{len(classes)} folders"
        )
    rng = np.random.default_rng(seed)
    frames: list[np.ndarray] = []
    labels: list[int] = []
    rows: dict[str, list[int]] = {"train": [], "validation": [], "test": []}
    owner: dict[str, Path] = {}
    for label, place in enumerate(classes):
        files = []
        for file in sorted(path for path in place.iterdir() if path.suffix.lower() in SUFFIXES):
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            if digest not in owner:
                owner[digest] = file
                files.append(file)
            elif owner[digest].parent != place:
                raise BadInput(f"{file} and {owner[digest]} are the same sound in two classes")
        if len(files) < 4:
            raise BadInput(
                f"{place}: {len(files)} different sounds ({', '.join(SUFFIXES)}); wanted at least 4"
            )
        held = max(1, round(0.15 * len(files)))
        order = rng.permutation(len(files)) + len(frames)
        rows["validation"] += order[:held].tolist()
        rows["test"] += order[held : 2 * held].tolist()
        rows["train"] += order[2 * held :].tolist()
        frames += [log_mel(read_audio(file, RATE)) for file in files]
        labels += [label] * len(files)
    return Sounds(
        frames,
        np.array(labels, dtype=np.int64),
        tuple(place.name for place in classes),
        {split: np.array(sorted(chosen)) for split, chosen in rows.items()},
    )


def varied(frames: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A clip as another voice might say it: slower or faster by up to 1.5, pitch and throat shifted
    by up to three mel bands (Jaitly & Hinton 2013), another microphone, noise, and a short gap in
    time and in frequency (SpecAugment, Park et al. 2019, arXiv 1904.08779)."""
    count = max(8, round(len(frames) * 1.5 ** rng.uniform(-1, 1)))
    frames = _between(frames, np.linspace(0, len(frames) - 1, count))
    shifted = np.clip(np.arange(MELS) + rng.uniform(-3, 3), 0, MELS - 1)
    frames = _between(frames.T, shifted).T
    frames = frames + rng.normal(0, 0.2, (1, MELS)) + rng.normal(0, 0.2, frames.shape)
    for axis in (0, 1):
        width = int(rng.integers(0, 6))
        begin = int(rng.integers(0, frames.shape[axis] - width + 1))
        np.moveaxis(frames, axis, 0)[begin : begin + width] = 0
    return frames.astype(np.float32)


def _between(rows: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Rows at fractional places, linearly."""
    low = np.floor(places).astype(int)
    high, share = np.minimum(low + 1, len(rows) - 1), (places - low)[:, None]
    return np.asarray(rows[low] * (1 - share) + rows[high] * share)


def means(frames: Sequence[np.ndarray], parts: int = 1) -> np.ndarray:
    """(N, 40 parts): the mean frame of each of `parts` equal stretches of a clip."""
    return np.stack(
        [np.concatenate([part.mean(0) for part in np.array_split(clip, parts)]) for clip in frames]
    )
