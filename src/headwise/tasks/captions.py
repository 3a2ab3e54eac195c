"""Pictures with a line of text each: the emoji and their names, or a person's own folder.

Pictures that show one thing in several ways (skin tones, man and woman) are a group, and a group is
in one part of the split only: no test picture differs from a training picture by a colour alone.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headwise.errors import BadInput
from headwise.tasks.pictures import SIDE, picture

PAD, UNKNOWN = 0, 1
# Longer lines are cut: the longest name of an emoji has fewer words.
MOST_WORDS = 24
FEWEST = 20
_WORD = re.compile(r"[^\W_]+")
_TONES = {
    "1F3FB": "light skin tone",
    "1F3FC": "medium light skin tone",
    "1F3FD": "medium skin tone",
    "1F3FE": "medium dark skin tone",
    "1F3FF": "dark skin tone",
}
# Joiners, "as a picture", the signs of woman and man; and who is shown: person, man, woman, or one
# that faces right.
_SIGNS = {"200D", "FE0F", "2640", "2642"}
_WHO = {"1F9D1", "1F468", "1F469", "27A1"}


@dataclass(frozen=True, eq=False)
class Captioned:
    """`images` (N, 3, 32, 32) float32 in [0, 1], `captions` N lines, `groups` (N,) int64; `rows`
    maps train, validation and test to their rows, which share no group."""

    images: np.ndarray
    captions: tuple[str, ...]
    groups: np.ndarray
    rows: dict[str, np.ndarray]


def words(line: str) -> list[str]:
    """The words of a line, in lower case."""
    return _WORD.findall(line.lower())


def vocabulary(lines: Iterable[str]) -> dict[str, int]:
    """Numbers for the words that `lines` hold twice or more; the others are UNKNOWN, which is so
    learned too."""
    counted = Counter(word for line in lines for word in words(line))
    known = sorted(word for word, count in counted.items() if count > 1)
    return {word: number for number, word in enumerate(known, UNKNOWN + 1)}


def numbers(lines: Sequence[str], known: dict[str, int]) -> np.ndarray:
    """(N, most words of a line) int64, PAD after the end. A line without a word is one UNKNOWN."""
    rows = [[known.get(word, UNKNOWN) for word in words(line)[:MOST_WORDS]] for line in lines]
    rows = [row or [UNKNOWN] for row in rows]
    table = np.full((len(rows), max(map(len, rows))), PAD, np.int64)
    for place, row in enumerate(rows):
        table[place, : len(row)] = row
    return table


def emoji(folder: Path, seed: int) -> Captioned:
    """The emoji in `folder`, each with its kind and name: "food vegetable: garlic". Flags of
    countries are left out: nothing in a flag that was never seen says whose it is."""
    found = list(_emoji(json.loads((folder / "emoji.json").read_text("utf-8"))))
    images = [picture(folder / "images" / name, 3, SIDE) for name, _, _ in found]
    lines = [line for _, line, _ in found]
    return _split(images, lines, [group for _, _, group in found], seed)


def _emoji(entries: list[dict]) -> Iterator[tuple[str, str, str]]:
    """(file, caption, group) of each picture."""
    for entry in entries:
        kind = entry["subcategory"]
        if kind == "country-flag":
            continue
        code = [part for part in entry["unified"].split("-") if part not in _SIGNS]
        group = "-".join([part for part in code if part not in _WHO] or code[:1])
        line = f"{kind.replace('-', ' ')}: {entry['name'].lower()}"
        yield entry["image"], line, group
        for tone, variation in entry.get("skin_variations", {}).items():
            # Two people of two tones: 25 pictures of each, which would outweigh the rest.
            if tone in _TONES:
                yield variation["image"], f"{line}, {_TONES[tone]}", group


def folder_with_captions(folder: Path, seed: int) -> Captioned:
    """A person's pictures: `folder/captions.tsv` names a file, a tab, and its line of text. Files
    with equal bytes or equal lines are one group.

    Raises:
        BadInput: no such file, a line without a tab, a file that is no picture, fewer than 20
            groups.
    """
    table = folder / "captions.tsv"
    try:
        content = table.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise BadInput(
            f"cannot read {table}: {reason.lower()}; wanted a folder of pictures and in it "
            "captions.tsv, each line a file name, a tab, and a text"
        ) from None
    images, lines, groups = [], [], []
    same: dict[str, str] = {}
    for number, row in enumerate(content.splitlines(), 1):
        if not row.strip():
            continue
        name, _, line = (part.strip() for part in row.partition("\t"))
        if not name or not line:
            raise BadInput(
                f"{table}, line {number}: wanted a file name, a tab, and a text, got {row[:60]!r}"
            )
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise BadInput(f"{table}, line {number}: {name!r} is outside the folder")
        images.append(picture(path, 3, SIDE))
        lines.append(line)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        groups.append(_joined(same, "picture " + digest, "text " + " ".join(words(line))))
    groups = [_first(same, group) for group in groups]
    if len(set(groups)) < FEWEST:
        raise BadInput(
            f"{table}: {len(set(groups))} different pictures with different texts; {FEWEST} at "
            "least are needed to train, validate and test"
        )
    return _split(images, lines, groups, seed)


def _first(same: dict[str, str], name: str) -> str:
    while same.setdefault(name, name) != name:
        name = same[name]
    return name


def _joined(same: dict[str, str], one: str, other: str) -> str:
    """Put both into one group."""
    first = _first(same, one)
    same[_first(same, other)] = first
    return first


def _split(images: list[np.ndarray], lines: list[str], groups: list[str], seed: int) -> Captioned:
    """Of the groups, 70 % train, 10 % validate, 20 % test, drawn by `seed`."""
    _, group = np.unique(groups, return_inverse=True)
    count = int(group.max()) + 1
    order = np.random.default_rng(seed).permutation(count)
    held, ends = max(1, round(0.2 * count)), max(1, round(0.1 * count))
    parts = {
        "test": order[:held],
        "validation": order[held : held + ends],
        "train": order[held + ends :],
    }
    rows = {name: np.flatnonzero(np.isin(group, part)) for name, part in parts.items()}
    return Captioned(np.stack(images), tuple(lines), group.astype(np.int64), rows)
