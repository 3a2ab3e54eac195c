"""Finds the name of a picture among many names: two towers, then cross-attention over the best."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from headwise._extras import require
from headwise.errors import BadFile, BadInput
from headwise.tasks.captions import (
    PAD,
    UNKNOWN,
    Captioned,
    emoji,
    folder_with_captions,
    numbers,
    vocabulary,
)
from headwise.tasks.design import Design
from headwise.tasks.pictures import SIDE, picture
from headwise.tasks.plain import fit
from headwise.tasks.sources import fetch
from headwise.tasks.task import Budget, RunInput, RunOutput, Score, Split, Task
from headwise.tasks.towers import PATCH, Side, TwoTowers, contrastive, mean

BATCH = 64
# So many names that the towers like best are judged again by the crossing.
AGAIN = 20
SHOWN = 5
Batch = tuple[Tensor, Tensor, Tensor]


class Multimodal(Task):
    """Emoji and their names; or a person's folder of pictures with a line of text each."""

    name = "multimodal"
    title = "What is this picture called?"
    metric = "recall@10"
    better: Literal["higher", "lower"] = "higher"
    source = (
        "emoji-datasource-twitter 16.0.0: emoji without the flags of countries, and their names"
    )
    licence = "images CC-BY-4.0 (Twemoji), names MIT"
    causal = False
    generates = False
    pairs: Captioned
    known: dict[str, int]
    names: tuple[str, ...]

    def prepare(self, say: Callable[[str], None] = lambda line: None) -> None:
        if self.data is None:
            self.pairs = emoji(fetch("emoji", say=say), self.seed)
        else:
            self.pairs = folder_with_captions(Path(self.data), self.seed)
        lines = self.pairs.captions
        self.known = vocabulary(lines[row] for row in self.pairs.rows["train"])
        self.names = tuple(sorted(set(lines)))
        place = {line: number for number, line in enumerate(self.names)}
        self._name = np.array([place[line] for line in lines])
        self._words = torch.from_numpy(numbers(self.names, self.known))
        rows = self.pairs.rows["train"]
        size = np.bincount(self.pairs.groups)[self.pairs.groups[rows]]
        # A person in six tones and three forms must not outweigh seventeen fruits.
        self._weight = size**-0.5 / (size**-0.5).sum()

    def default_design(self) -> Design:
        return Design(embed_dim=64, num_heads=4, layers=2, dropout=0.1)

    def budget(self, name: str = "quick") -> Budget:
        steps = {"quick": 350, "full": 6000}[name]
        return Budget(
            steps=steps,
            batch_size=BATCH,
            learning_rate=1e-3,
            warmup=50,
            evaluate_every=max(50, steps // 20),
            patience=10,
        )

    def build(self, design: Design, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return TwoTowers(design, SIDE, len(self.known) + UNKNOWN + 1)

    def batch(self, index: int, seed: int) -> Batch:
        random = np.random.default_rng((seed, index))
        rows = self.pairs.rows["train"]
        chosen = random.choice(rows, min(BATCH, len(rows)), replace=False, p=self._weight)
        images = shifted(self.pairs.images[chosen], random)
        name = torch.from_numpy(self._name[chosen])
        return torch.from_numpy(images), self._words[name], name

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return towers(model).loss(*batch)

    def evaluate(self, model: nn.Module, split: Split) -> Score:
        model.eval()
        rows = self.pairs.rows[split]
        candidates, right = self._candidates(split)
        with torch.inference_mode():
            pictures = seen(model, torch.from_numpy(self.pairs.images[rows]))
            texts = towers(model).read(self._words[candidates])
            scores = judged(model, pictures, texts, min(AGAIN, len(candidates)))
        return self._score(scores.numpy(), right, self.pairs.groups[rows])

    def _candidates(self, split: Split) -> tuple[np.ndarray, np.ndarray]:
        """The names of a part, and the place among them of each picture's own."""
        return np.unique(self._name[self.pairs.rows[split]], return_inverse=True)

    def _score(self, scores: np.ndarray, right: np.ndarray, groups: np.ndarray) -> Score:
        """Scores (N, names), the right name (N,). The example is a group: its pictures are alike.
        Of names that score the same as the right one, half are taken to stand before it."""
        own = scores[np.arange(len(right)), right][:, None]
        before = (scores > own).sum(1) + ((scores == own).sum(1) - 1) / 2
        _, group = np.unique(groups, return_inverse=True)

        def recall(most: int) -> np.ndarray:
            return np.bincount(group, before < most) / np.bincount(group)

        ten = recall(10)
        return Score(float(ten.mean()), ten, {"recall@1": float(recall(1).mean())})

    def baselines(self) -> dict[str, Callable[[], Score]]:
        rows, train = self.pairs.rows["test"], self.pairs.rows["train"]
        candidates, right = self._candidates("test")
        groups = self.pairs.groups[rows]

        def colours() -> Score:
            linear = require("sklearn.linear_model", extra="tasks", purpose="ridge regression")
            size = len(self.known) + UNKNOWN + 1
            bags = bag_of_words(self._words[self._name[train]].numpy(), size)
            rare = np.log(len(bags) / (1 + (bags > 0).sum(0)))
            model = linear.Ridge(alpha=1.0).fit(histogram(self.pairs.images[train]), bags * rare)
            found = unit(model.predict(histogram(self.pairs.images[rows])))
            wanted = unit(bag_of_words(self._words[candidates].numpy(), size) * rare)
            return self._score(found @ wanted.T, right, groups)

        def without() -> Score:
            model = fit(
                lambda: PlainTowers(len(self.known) + UNKNOWN + 1),
                lambda plain, batch: contrastive(plain(*batch[:2]), batch[2]),
                lambda index: self.batch(index, 0),
                steps=self.budget("quick").steps,
            )
            with torch.inference_mode():
                images = torch.from_numpy(self.pairs.images[rows])
                scores = model(images, self._words[candidates])
            return self._score(scores.numpy(), right, groups)

        return {
            "colour histogram + bag of words": colours,
            "CNN + mean of words, no attention": without,
        }

    def example(self) -> dict[str, Any]:
        """The first test picture with its own name, and the picture's patches."""
        row = self.pairs.rows["test"][0]
        words = self._words[self._name[row]]
        inputs = {
            "images": torch.from_numpy(self.pairs.images[row : row + 1].copy()),
            "words": words[words != PAD][None],
        }
        across = range(SIDE // PATCH)
        return {
            "inputs": inputs,
            "tokens": [f"row {r}, column {c}" for r in across for c in across],
        }

    def state(self) -> dict[str, Any]:
        return {"words": list(self.known), "names": list(self.names)}

    def restore(self, state: dict[str, Any]) -> None:
        self.known = {str(word): place for place, word in enumerate(state["words"], UNKNOWN + 1)}
        self.names = tuple(str(name) for name in state["names"])
        if not self.names:
            raise BadFile(f"{self.name}: the saved state has no names")

    def run(self, model: nn.Module, args: RunInput) -> RunOutput:
        """The five names that fit each picture file best, of all that the data has.

        Raises:
            BadInput: no file, or one that is no picture.
        """
        if not args.given:
            raise BadInput(f"{self.name} names pictures: give one file or more (PNG, JPEG)")
        images = np.stack([picture(Path(given), 3, SIDE) for given in args.given])
        model.eval()
        with torch.inference_mode():
            texts = towers(model).read(torch.from_numpy(numbers(self.names, self.known)))
            pictures = seen(model, torch.from_numpy(images))
            scores = judged(model, pictures, texts, min(AGAIN, len(self.names)))
        best = scores.topk(min(SHOWN, len(self.names))).indices.tolist()
        lines = []
        for given, row in zip(args.given, best, strict=True):
            lines.append(f"{given}:")
            lines += [f"  {self.names[place]}" for place in row]
        return RunOutput(tuple(lines))


def towers(model: nn.Module) -> TwoTowers:
    """The model, known to be one that this task built."""
    if not isinstance(model, TwoTowers):
        raise TypeError(f"multimodal: wanted a TwoTowers, got {type(model).__name__}")
    return model


def seen(model: nn.Module, images: Tensor) -> Side:
    """`model.see` in parts, so that many pictures need little memory."""
    see = towers(model).see
    sides = [see(part) for part in images.split(256)]
    return Side(
        *(torch.cat([getattr(s, key) for s in sides]) for key in ("vector", "tokens", "real"))
    )


def judged(model: nn.Module, pictures: Side, texts: Side, again: int) -> Tensor:
    """Scores (pictures, texts): the `again` best of each picture by towers and crossing, and all
    others below them, in the order of the towers."""
    model = towers(model)
    scores = model.alike(pictures, texts)
    best = scores.topk(again, dim=1).indices
    parts = torch.arange(len(best)).split(64)
    fits = torch.cat(
        [
            model.fit(
                pictures.at(part.repeat_interleave(again)), texts.at(best[part].flatten())
            ).view(-1, again)
            for part in parts
        ]
    )
    lowest = fits.min(1, keepdim=True).values
    below = scores - scores.max(1, keepdim=True).values + lowest - 1
    return below.scatter(1, best, fits)


def shifted(images: np.ndarray, random: np.random.Generator, most: int = 2) -> np.ndarray:
    """Each picture moved by up to `most` pixels, its edge repeated. Never mirrored: an arrow to
    the left is no arrow to the right."""
    wide = np.pad(images, ((0, 0), (0, 0), (most, most), (most, most)), mode="edge")
    moved = np.empty_like(images)
    moves = random.integers(0, 2 * most + 1, (len(images), 2))
    for place, (down, across) in enumerate(moves):
        moved[place] = wide[place, :, down : down + SIDE, across : across + SIDE]
    return moved


def histogram(images: np.ndarray, levels: int = 4) -> np.ndarray:
    """Shares of the levels³ colours in each picture, square roots: (N, 3, side, side) → (N, 64)."""
    step = np.minimum((images * levels).astype(np.int64), levels - 1)
    colour = (step[:, 0] * levels + step[:, 1]) * levels + step[:, 2]
    counts = np.stack([np.bincount(row.ravel(), minlength=levels**3) for row in colour])
    return np.sqrt(counts / counts.sum(1, keepdims=True))


def bag_of_words(table: np.ndarray, size: int) -> np.ndarray:
    """How often each word is in each line: (N, L) → (N, size). PAD counts for nothing."""
    bags = np.stack([np.bincount(row, minlength=size) for row in table]).astype(np.float64)
    bags[:, PAD] = 0
    return bags


def unit(rows: np.ndarray) -> np.ndarray:
    """Each row at length 1."""
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)


class PlainTowers(nn.Module):
    """The towers without attention: two convolutions, and the mean of the words' vectors."""

    def __init__(self, vocabulary: int, width: int = 64) -> None:
        super().__init__()
        self.pictures = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * (SIDE // 4) ** 2, width),
        )
        self.embedding = nn.Embedding(vocabulary, width)
        self.log_scale = nn.Parameter(torch.tensor(2.66))

    def forward(self, images: Tensor, words: Tensor) -> Tensor:
        """(B, 3, side, side), (T, L) → (B, T)."""
        pictures = nn.functional.normalize(self.pictures(images), dim=-1)
        texts = nn.functional.normalize(mean(self.embedding(words), words != PAD), dim=-1)
        return self.log_scale.exp() * pictures @ texts.T
