"""Labelled pictures and their split: scikit-learn's digits, Fashion-MNIST, a folder per class.

A split keeps together what belongs together. The digits were written by 13 people and stand in the
order of their writers, so whole runs of rows are held out, not single ones. Fashion-MNIST has its
own test set. In a person's folder, copies of one file count once.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headwise._extras import require
from headwise.errors import BadInput

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif")
# Rows that one of the 13 writers of the digits contributed, on average.
_WRITERS = 13
# A person's pictures are brought to this size: 64 patches of 4 × 4.
SIDE = 32


@dataclass(frozen=True, eq=False)
class Pictures:
    """`images` (N, channels, side, side) float32 in [0, 1], `labels` (N,) int64, and the names of
    the classes; `rows` maps train, validation and test to their rows, which share none."""

    images: np.ndarray
    labels: np.ndarray
    classes: tuple[str, ...]
    rows: dict[str, np.ndarray]

    def part(self, split: str) -> tuple[np.ndarray, np.ndarray]:
        """Images and labels of one split."""
        return self.images[self.rows[split]], self.labels[self.rows[split]]


def digits(seed: int) -> Pictures:
    """1,797 handwritten digits, 8 × 8 (UCI, through scikit-learn): 8 thirteenths of the rows train,
    2 validate, 3 test. The rows are a ring, and `seed` says where on it the training part begins.
    """
    datasets = require("sklearn.datasets", extra="tasks", purpose="the digits")
    read = datasets.load_digits()
    count = len(read.target)
    bounds = [round(count * writer / _WRITERS) for writer in (0, 8, 10, 13)]
    ring = np.roll(np.arange(count), -round(count * (seed % _WRITERS) / _WRITERS))
    rows = {
        name: ring[low:high]
        for name, low, high in zip(
            ("train", "validation", "test"), bounds[:-1], bounds[1:], strict=True
        )
    }
    images = (read.images / 16).astype(np.float32)[:, None]
    names = tuple(str(name) for name in read.target_names)
    return Pictures(images, read.target.astype(np.int64), names, rows)


FASHION = (
    "T-shirt or top",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)


def fashion(folder: Path, seed: int) -> Pictures:
    """Fashion-MNIST (Xiao et al. 2017, arXiv 1708.07747) from its four files in `folder`: 70,000
    grey pictures, 28 × 28. Its own 10,000 test; 3,000 of the others, drawn by `seed`, validate.
    """
    parts = []
    for name in ("train", "t10k"):
        labels = _idx(folder / f"{name}-labels-idx1-ubyte.gz", 1)
        images = _idx(folder / f"{name}-images-idx3-ubyte.gz", 3)
        if len(labels) != len(images):
            raise BadInput(
                f"{folder}: {len(images):,} pictures but {len(labels):,} labels in {name}: "
                "the files do not belong together"
            )
        parts.append((images, labels))
    (train, train_labels), (test, test_labels) = parts
    order = np.random.default_rng(seed).permutation(len(train))
    rows = {
        "train": np.sort(order[3000:]),
        "validation": np.sort(order[:3000]),
        "test": np.arange(len(train), len(train) + len(test)),
    }
    images = np.concatenate([train, test]).astype(np.float32)[:, None] / 255
    labels = np.concatenate([train_labels, test_labels]).astype(np.int64)
    return Pictures(images, labels, FASHION, rows)


def _idx(path: Path, dimensions: int) -> np.ndarray:
    """An array of bytes in the IDX form of the MNIST files."""
    try:
        data = gzip.decompress(path.read_bytes())
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise BadInput(f"cannot read {path}: {reason.lower()}") from None
    head = 4 + 4 * dimensions
    sizes = [int.from_bytes(data[at : at + 4], "big") for at in range(4, head, 4)]
    if data[:4] != bytes((0, 0, 8, dimensions)) or len(data) != head + int(np.prod(sizes)):
        raise BadInput(f"{path}: wanted an IDX file of {dimensions}-dimensional bytes, whole")
    return np.frombuffer(data, np.uint8, offset=head).reshape(sizes)


def folder_per_class(folder: Path, seed: int) -> Pictures:
    """A person's pictures: `folder/CLASS/FILE`, brought to 32 × 32 RGB. Of each class 70 % train,
    15 % validate, 15 % test, drawn by `seed`; files with equal bytes count once.

    Raises:
        BadInput: no folder, fewer than two classes, a class with fewer than 5 different pictures,
            a file that is no picture, the same picture in two classes.
    """
    if not folder.is_dir():
        raise BadInput(f"{folder}: wanted a folder that holds one folder of pictures per class")
    groups = sorted(place for place in folder.iterdir() if place.is_dir())
    if len(groups) < 2:
        raise BadInput(
            f"{folder}: wanted one folder of pictures per class, two at least; it holds "
            f"{len(groups)} folder{'' if len(groups) == 1 else 's'}"
        )
    images: list[np.ndarray] = []
    labels: list[int] = []
    chosen: dict[str, list[np.ndarray]] = {"train": [], "validation": [], "test": []}
    seen: dict[str, Path] = {}
    random = np.random.default_rng(seed)
    for label, group in enumerate(groups):
        fresh = []
        for path in sorted(group.rglob("*")):
            if path.suffix.lower() not in SUFFIXES:
                continue
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            if digest in seen and seen[digest].relative_to(folder).parts[0] != group.name:
                raise BadInput(f"{path} and {seen[digest]} are the same picture in two classes")
            if digest not in seen:
                seen[digest] = path
                fresh.append(path)
        if len(fresh) < 5:
            raise BadInput(
                f"{group}: {len(fresh)} different pictures ({', '.join(SUFFIXES)}); a class needs "
                "5 at least to train, validate and test"
            )
        order = random.permutation(len(fresh)) + len(images)
        held = max(1, round(0.15 * len(fresh)))
        chosen["test"].append(order[:held])
        chosen["validation"].append(order[held : 2 * held])
        chosen["train"].append(order[2 * held :])
        images += [picture(path, 3, SIDE) for path in fresh]
        labels += [label] * len(fresh)
    rows = {name: np.sort(np.concatenate(part)) for name, part in chosen.items()}
    names = tuple(group.name for group in groups)
    return Pictures(np.stack(images), np.array(labels, np.int64), names, rows)


def picture(path: Path, channels: int, side: int) -> np.ndarray:
    """One file as (channels, side, side) float32 in [0, 1]; `channels` is 1 (grey) or 3 (RGB).

    Raises:
        BadInput: the file cannot be read as a picture.
    """
    from headwise.models.vision import Preprocessing

    read = Preprocessing(size=side, crop=(side, side)).picture(path)
    pixels = np.asarray(read.convert("L" if channels == 1 else "RGB"), np.float32) / 255
    return pixels[None] if channels == 1 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def vary(seed: int) -> Callable[[Any], Any]:
    """Small turns, shifts and zooms for a batch (B, C, side, side) of tensors: one function of
    `seed` alone, so that a run that is resumed sees the same pictures."""
    import torch
    from torch.nn import functional

    random = torch.Generator().manual_seed(seed)

    def around(count: int, reach: float) -> torch.Tensor:
        return (torch.rand(count, generator=random) * 2 - 1) * reach

    def apply(images: torch.Tensor) -> torch.Tensor:
        count = len(images)
        turn, wide, high = around(count, 0.15), 1 + around(count, 0.1), 1 + around(count, 0.1)
        # 1 is half a picture: an eighth of it is half a pixel of a digit.
        across, down = around(count, 0.125), around(count, 0.125)
        rows = (
            torch.stack([torch.cos(turn) * wide, -torch.sin(turn) * high, across], 1),
            torch.stack([torch.sin(turn) * wide, torch.cos(turn) * high, down], 1),
        )
        grid = functional.affine_grid(torch.stack(rows, 1), list(images.shape), align_corners=False)
        return functional.grid_sample(images, grid, align_corners=False)

    return apply
