"""Which word was said: self-attention over frames of sound, padded to the longest of a batch.

The model is an encoder as in Whisper's first half (Radford et al. 2022, arXiv 2212.04356), with
four 10 ms frames a token in place of convolutions and the mean of the real tokens classified.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from headwise.errors import BadInput
from headwise.masks import padding
from headwise.models.speech import read_audio
from headwise.rotary import Rotary
from headwise.tasks.blocks import Encoder
from headwise.tasks.classifiers import logistic_regression
from headwise.tasks.design import Design
from headwise.tasks.sounds import (
    HOP,
    MELS,
    RATE,
    Sounds,
    folder_per_class,
    log_mel,
    means,
    spoken_words,
    varied,
)
from headwise.tasks.task import Budget, RunInput, RunOutput, Score, Task

STACK = 4


class Listener(nn.Module):
    """Four frames a token, blocks with rotary positions, the mean of the real tokens, classes.

    forward: frames (B, L, 160) and real (B, L) bool, True for sound → logits (B, classes).
    """

    def __init__(self, design: Design, classes: int) -> None:
        super().__init__()
        self.embed = nn.Linear(STACK * MELS, design.embed_dim)
        self.encoder = Encoder(design, position=Rotary())
        self.classes = nn.Linear(design.embed_dim, classes)

    def forward(self, frames: Tensor, real: Tensor) -> Tensor:
        tokens = self.encoder(self.embed(frames), mask=padding(real))
        # Chosen, not multiplied: what stands at padding, NaN even, reaches nothing.
        heard = tokens.masked_fill(~real[..., None], 0.0).sum(1) / real.sum(1, keepdim=True)
        logits: Tensor = self.classes(heard)
        return logits


class Speech(Task):
    """Fifty spoken words, or a person's folder of sounds, one folder per class."""

    name = "speech"
    title = "Which word is said?"
    metric = "accuracy"
    better: Literal["higher", "lower"] = "higher"
    source = (
        "numbers, days and months spoken by 52 voices of espeak-ng 1.51, split by voice; and by "
        "the person of Debian's asterisk-core-sounds-en-wav 1.6.1"
    )
    licence = "espeak-ng GPL-3.0-or-later, recordings CC-BY-SA-3.0 (Allison Smith)"
    causal = False
    generates = False
    sounds: Sounds
    names: tuple[str, ...]

    def prepare(self, say: Callable[[str], None] = lambda line: None) -> None:
        self.sounds = (
            spoken_words(self.seed, say)
            if self.data is None
            else folder_per_class(Path(self.data), self.seed)
        )
        self.names = self.sounds.classes
        self.shown = self.sounds.frames[self.sounds.rows["test"][0]]

    def default_design(self) -> Design:
        return Design(embed_dim=96, num_heads=4, layers=2, dropout=0.1)

    def budget(self, name: str = "quick") -> Budget:
        steps = {"quick": 600, "full": 4000}[name]
        return Budget(
            steps=steps,
            batch_size=64,
            learning_rate=1.5e-3,
            warmup=50,
            evaluate_every=100,
            patience=steps // 100,
        )

    def build(self, design: Design, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return Listener(design, len(self.names))

    def batch(self, index: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        rng = np.random.default_rng((seed, index))
        rows = rng.choice(self.sounds.rows["train"], 64)
        frames, real = padded([varied(self.sounds.frames[row], rng) for row in rows])
        return frames, real, torch.from_numpy(self.sounds.labels[rows])

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        frames, real, labels = batch
        return functional.cross_entropy(model(frames, real), labels)

    def evaluate(self, model: nn.Module, split: Literal["validation", "test"]) -> Score:
        model.eval()
        return self._score(lambda clips: self._logits(model, clips), split)

    def _logits(self, model: nn.Module, clips: Sequence[np.ndarray]) -> np.ndarray:
        with torch.inference_mode():
            parts = [
                model(*padded(clips[begin : begin + 128])) for begin in range(0, len(clips), 128)
            ]
            return np.asarray(torch.cat(parts).numpy())

    def _score(
        self,
        scores: Callable[[Sequence[np.ndarray]], np.ndarray],
        split: Literal["validation", "test"],
    ) -> Score:
        def right(part: str) -> np.ndarray:
            rows = self.sounds.rows[part]
            found = scores([self.sounds.frames[row] for row in rows]).argmax(1)
            return np.asarray(found == self.sounds.labels[rows], dtype=np.float64)

        hits = right(split)
        # The recorded person is one test more, so it stays out of every choice.
        person = split == "test" and "person" in self.sounds.rows
        extra = {"recorded person": float(right("person").mean())} if person else {}
        return Score(float(hits.mean()), hits, extra)

    def baselines(self) -> dict[str, Callable[[], Score]]:
        rows = self.sounds.rows["train"]
        train = [self.sounds.frames[row] for row in rows]

        def regression(parts: int) -> Callable[[], Score]:
            return lambda: self._score(
                lambda clips: logistic_regression(
                    means(train, parts), self.sounds.labels[rows], means(clips, parts)
                ),
                "test",
            )

        return {
            "logistic regression on means": regression(1),
            "logistic regression on means of five stretches": regression(5),
        }

    def example(self) -> dict[str, Any]:
        frames, real = padded([self.shown])
        step = STACK * HOP / RATE
        return {
            "inputs": {"frames": frames, "real": real},
            "tokens": [f"{number * step:.2f} s" for number in range(frames.shape[1])],
        }

    def state(self) -> dict[str, Any]:
        return {"classes": list(self.names), "example": np.round(self.shown, 3).tolist()}

    def restore(self, state: dict[str, Any]) -> None:
        self.names = tuple(str(name) for name in state["classes"])
        self.shown = np.array(state["example"], dtype=np.float32)

    def run(self, model: nn.Module, args: RunInput) -> RunOutput:
        """The three likeliest words of each sound file, or of the example's sound without any."""
        clips = [log_mel(read_audio(path, RATE)) for path in args.given] or [self.shown]
        model.eval()
        lines = []
        for name, clip in zip(args.given or ("the example's sound",), clips, strict=True):
            logits = torch.from_numpy(self._logits(model, [clip]))[0]
            likely = logits.softmax(0).topk(min(3, len(self.names)))
            best = "   ".join(
                f"{self.names[int(label)]} {100 * float(share):.1f} %"
                for share, label in zip(*likely, strict=True)
            )
            lines.append(f"{name}: {best}")
        return RunOutput(tuple(lines))


def padded(clips: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
    """Clips (T, 40) as tokens (B, L, 160) of four frames, zeros after the end, and real (B, L).

    Raises:
        BadInput: a clip without frames.
    """
    counts = [-(-len(clip) // STACK) for clip in clips]
    if min(counts, default=0) < 1:
        raise BadInput("speech: a sound without a single frame")
    frames = np.zeros((len(clips), max(counts) * STACK, MELS), dtype=np.float32)
    for row, clip in enumerate(clips):
        frames[row, : len(clip)] = clip
    real = np.arange(max(counts))[None] < np.array(counts)[:, None]
    return torch.from_numpy(frames.reshape(len(clips), -1, STACK * MELS)), torch.from_numpy(real)
