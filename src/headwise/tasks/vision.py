"""A ViT classifies pictures: attention over patches, in both directions.

The model follows Dosovitskiy et al. 2021 (arXiv 2010.11929) with two changes that small data needs:
patches overlap by half (Yuan et al. 2021, arXiv 2101.11986), and the mean of all patches is
classified, not a token of its own (Beyer et al. 2022, arXiv 2205.01580).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from headwise.errors import BadFile, BadInput
from headwise.tasks import classifiers
from headwise.tasks.blocks import Encoder
from headwise.tasks.design import Design
from headwise.tasks.pictures import Pictures, digits, fashion, folder_per_class, picture, vary
from headwise.tasks.sources import fetch
from headwise.tasks.task import Budget, RunInput, RunOutput, Score, Split, Task

BATCH = 64
# Of the pixels of both data sets, about.
MIDDLE, SPREAD = 0.3, 0.36


class ViT(nn.Module):
    """Overlapping patches, learned positions, `design.layers` blocks, the mean, classes.

    Args:
        channels, side: of the pictures (B, channels, side, side).
        stride: a patch begins every `stride` pixels; it divides `side`. A patch spans
            stride + 2 (stride // 2) pixels, so it overlaps its neighbours by half.
        classes: how many.
    """

    def __init__(self, design: Design, channels: int, side: int, stride: int, classes: int) -> None:
        super().__init__()
        self.stride, self.margin = stride, stride // 2
        self.span = stride + 2 * self.margin
        self.grid = side // stride
        self.patch = nn.Linear(channels * self.span**2, design.embed_dim)
        self.places = nn.Parameter(0.02 * torch.randn(self.grid**2, design.embed_dim))
        self.encoder = Encoder(design)
        self.classes = nn.Linear(design.embed_dim, classes)

    def forward(self, images: Tensor) -> Tensor:
        """(B, channels, side, side) in [0, 1] → logits (B, classes)."""
        images = (images - MIDDLE) / SPREAD
        patches = functional.unfold(images, self.span, padding=self.margin, stride=self.stride)
        tokens = self.encoder(self.patch(patches.transpose(1, 2)) + self.places)
        return self.classes(tokens.mean(1))


def _budget(steps: int, learning_rate: float = 2e-3) -> Budget:
    return Budget(
        steps=steps,
        batch_size=BATCH,
        learning_rate=learning_rate,
        warmup=50,
        evaluate_every=max(100, steps // 10),
        patience=10,
    )


class Vision(Task):
    """Handwritten digits; or a person's folder of pictures, one folder per class."""

    name = "vision"
    title = "Which digit is this?"
    metric = "accuracy"
    better: Literal["higher", "lower"] = "higher"
    source = "scikit-learn digits: 1,797 pictures, 8 × 8 (UCI Optical Recognition of Digits)"
    licence = "CC BY 4.0 (UCI), BSD-3-Clause (scikit-learn)"
    causal = False
    generates = False
    strides: ClassVar[Mapping[int, int]] = {8: 2, 28: 7, 32: 4}
    varied = True
    cnn_steps = 2000
    pictures: Pictures
    names: tuple[str, ...]
    shape: tuple[int, int]

    def prepare(self, say: Callable[[str], None] = lambda line: None) -> None:
        self.pictures = (
            self.read(say) if self.data is None else folder_per_class(Path(self.data), self.seed)
        )
        self.names = self.pictures.classes
        self.shape = (self.pictures.images.shape[1], self.pictures.images.shape[2])

    def read(self, say: Callable[[str], None]) -> Pictures:
        """The task's own pictures."""
        return digits(self.seed)

    def default_design(self) -> Design:
        return Design(embed_dim=64, num_heads=4, layers=2, dropout=0.1)

    def budget(self, name: str = "quick") -> Budget:
        return _budget({"quick": 600, "full": 4000}[name])

    def build(self, design: Design, seed: int) -> nn.Module:
        channels, side = self.shape
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return ViT(design, channels, side, self.strides[side], len(self.names))

    def batch(self, index: int, seed: int) -> tuple[Tensor, Tensor]:
        rows = self.pictures.rows["train"]
        chosen = rows[np.random.default_rng((seed, index)).integers(len(rows), size=BATCH)]
        images = torch.from_numpy(self.pictures.images[chosen])
        if not self.varied:
            return images, torch.from_numpy(self.pictures.labels[chosen])
        return vary(seed * 1_000_003 + index)(images), torch.from_numpy(
            self.pictures.labels[chosen]
        )

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return functional.cross_entropy(model(images), labels)

    def evaluate(self, model: nn.Module, split: Split) -> Score:
        images, labels = self.pictures.part(split)
        model.eval()
        with torch.inference_mode():
            logits = torch.cat([model(part) for part in torch.from_numpy(images).split(500)])
        return self._score(logits.numpy(), labels)

    def _score(self, scores: np.ndarray, labels: np.ndarray) -> Score:
        right = (scores.argmax(1) == labels).astype(np.float64)
        return Score(float(right.mean()), right)

    def baselines(self) -> dict[str, Callable[[], Score]]:
        labels = self.pictures.part("test")[1]

        def regression() -> Score:
            images, known = self.pictures.part("train")
            unseen, _ = self.pictures.part("test")
            flat, flat_unseen = images.reshape(len(images), -1), unseen.reshape(len(unseen), -1)
            return self._score(classifiers.logistic_regression(flat, known, flat_unseen), labels)

        def convolutions() -> Score:
            logits = classifiers.small_cnn(self.pictures, self.cnn_steps, self.varied)
            return self._score(logits.numpy(), labels)

        return {"logistic regression": regression, "small CNN": convolutions}

    def example(self) -> dict[str, Any]:
        """The first test picture, and its patches by row and column."""
        images, _ = self.pictures.part("test")
        return {"inputs": {"images": torch.from_numpy(images[:1].copy())}, "tokens": self.patches}

    @property
    def patches(self) -> list[str]:
        """Names of the tokens."""
        across = range(self.shape[1] // self.strides[self.shape[1]])
        return [f"row {row}, column {column}" for row in across for column in across]

    def state(self) -> dict[str, Any]:
        return {"classes": list(self.names), "channels": self.shape[0], "side": self.shape[1]}

    def restore(self, state: dict[str, Any]) -> None:
        self.names = tuple(str(name) for name in state["classes"])
        self.shape = (int(state["channels"]), int(state["side"]))
        if self.shape[0] not in (1, 3) or self.shape[1] not in self.strides or not self.names:
            raise BadFile(f"{self.name}: the saved state has no classes or an unknown shape")

    def run(self, model: nn.Module, args: RunInput) -> RunOutput:
        """Classify the picture files given: the three likeliest classes of each.

        Raises:
            BadInput: no file, or one that is no picture.
        """
        if not args.given:
            raise BadInput(f"{self.name} classifies pictures: give one file or more (PNG, JPEG)")
        lines = []
        model.eval()
        for given in args.given:
            image = torch.from_numpy(picture(Path(given), *self.shape)[None])
            with torch.inference_mode():
                shares = model(image)[0].softmax(0)
            best = shares.topk(min(3, len(self.names)))
            found = (
                f"{self.names[place]} {share:.0%}"
                for share, place in zip(best.values.tolist(), best.indices.tolist(), strict=True)
            )
            lines.append(f"{given}: {', '.join(found)}")
        return RunOutput(tuple(lines))


class Fashion(Vision):
    """The same model on Fashion-MNIST, which is larger and harder than the digits."""

    name = "fashion"
    title = "Which piece of clothing is this?"
    source = "Fashion-MNIST: 70,000 pictures, 28 × 28 (Debian dataset-fashion-mnist)"
    licence = "MIT"
    # A quick budget sees each picture about once: there is nothing to vary yet.
    varied = False
    cnn_steps = 1000

    def read(self, say: Callable[[str], None]) -> Pictures:
        return fashion(fetch("fashion-mnist", say=say), self.seed)

    def budget(self, name: str = "quick") -> Budget:
        return _budget({"quick": 1200, "full": 20000}[name], learning_rate=4e-3)
