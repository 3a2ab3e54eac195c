"""Tables with a column to predict: scikit-learn's breast cancer table, or a person's CSV file."""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headwise._extras import require
from headwise.errors import BadFile, BadInput

# More different words than this in a column are names, not kinds.
MOST_VALUES = 50
FEWEST_ROWS = 50


@dataclass(frozen=True)
class Column:
    """A column of numbers, with its mean and spread over the training rows; or of words (`values`
    not empty), whose codes count from 0. A cell that is empty, or a word that did not train, is
    NaN."""

    name: str
    mean: float = 0.0
    spread: float = 1.0
    values: tuple[str, ...] = ()

    @classmethod
    def learn(cls, name: str, cells: Sequence[str]) -> Column | None:
        """From training cells; None where they are all empty, or words that are mostly unique."""
        filled = [cell for cell in cells if cell]
        try:
            numbers = np.array([float(cell) for cell in filled])
        except ValueError:
            words = tuple(sorted(set(filled)))
            return cls(name, values=words) if len(words) <= MOST_VALUES else None
        if not len(numbers) or not np.isfinite(numbers).all():
            return None
        return cls(name, float(numbers.mean()), float(numbers.std()) or 1.0)

    def encode(self, cells: Sequence[str], where: Callable[[int], str]) -> np.ndarray:
        """(N,) float32: codes, or numbers in spreads from the mean.

        Raises:
            BadInput: a cell of a column of numbers is none; `where(row)` says where it stands.
        """
        found = np.full(len(cells), np.nan, np.float32)
        code = {word: float(place) for place, word in enumerate(self.values)}
        for row, cell in enumerate(cells):
            if self.values:
                found[row] = code.get(cell, math.nan)
            elif cell:
                try:
                    number = float(cell)
                except ValueError:
                    number = math.inf
                if not math.isfinite(number):
                    raise BadInput(
                        f"{where(row)}: column {self.name!r} holds numbers, got {cell!r}"
                    )
                found[row] = (number - self.mean) / self.spread
        return found

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "mean": self.mean,
            "spread": self.spread,
            "values": list(self.values),
        }

    @classmethod
    def from_dict(cls, saved: Any) -> Column:
        try:
            return cls(
                str(saved["name"]),
                float(saved["mean"]),
                float(saved["spread"]),
                tuple(str(word) for word in saved["values"]),
            )
        except (KeyError, TypeError, ValueError):
            raise BadFile(f"not a saved column: {saved!r}") from None


@dataclass(frozen=True, eq=False)
class Table:
    """`values` (N, C) float32 as the columns encode them, `labels` (N,) int64, names of the classes
    and of the target; `rows` maps train, validation and test to their rows, which share none."""

    columns: tuple[Column, ...]
    values: np.ndarray
    labels: np.ndarray
    classes: tuple[str, ...]
    target: str
    rows: dict[str, np.ndarray]

    def part(self, split: str) -> tuple[np.ndarray, np.ndarray]:
        """Values and labels of one split."""
        return self.values[self.rows[split]], self.labels[self.rows[split]]


def breast_cancer(seed: int) -> Table:
    """569 tumours in 30 measures of their cell nuclei, benign or malignant (UCI, through
    scikit-learn)."""
    datasets = require("sklearn.datasets", extra="tasks", purpose="the breast cancer table")
    read = datasets.load_breast_cancer()
    names = [str(name) for name in read.feature_names]
    cells = [[repr(float(cell)) for cell in row] for row in read.data]
    words = [str(read.target_names[label]) for label in read.target]
    return _table(names, cells, words, "tumour", seed, str, lambda line: None)


def read_csv(path: Path) -> tuple[list[str], list[list[str]], list[int]]:
    """The header, the rows of cells, and the number of the line on which each row ends.

    Raises:
        BadInput: unreadable, empty, no UTF-8, two columns of one name, a row of another length.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            read = [(row, reader.line_num) for row in reader if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or f"no CSV in UTF-8 ({error})"
        raise BadInput(f"{path}: cannot read a table: {reason.lower()}") from None
    if not read:
        raise BadInput(f"{path}: the file is empty; wanted a CSV table with a header")
    header = [cell.strip() for cell in read[0][0]]
    twice = [name for name, count in Counter(header).items() if count > 1]
    if twice:
        raise BadInput(f"{path}, line 1: two columns are named {twice[0]!r}")
    for row, line in read[1:]:
        if len(row) != len(header):
            raise BadInput(
                f"{path}, line {line}: wanted {len(header)} cells as in the header, got {len(row)}"
            )
    rows = [[cell.strip() for cell in row] for row, _ in read[1:]]
    return header, rows, [line for _, line in read[1:]]


def own_table(path: Path, seed: int, say: Callable[[str], None]) -> Table:
    """A person's CSV with a header. The column `target`, or else the last, is the class to predict;
    the others are numbers or words, with empty cells where a value is missing.

    Raises:
        BadInput: what `read_csv` raises; one column; too few rows; a target that is no class.
    """
    header, rows, lines = read_csv(path)
    if len(header) < 2:
        raise BadInput(
            f"{path}, line 1: wanted columns to learn from and one to predict, got one column, "
            f"{header[0]!r}; are the cells separated by commas?"
        )
    place = header.index("target") if "target" in header else len(header) - 1
    words = [row.pop(place) for row in rows]
    target = header.pop(place)
    if len(rows) < FEWEST_ROWS:
        raise BadInput(f"{path}: {len(rows)} rows; wanted {FEWEST_ROWS} at least")
    for word, line in zip(words, lines, strict=True):
        if not word:
            raise BadInput(f"{path}, line {line}: the target {target!r} is empty")
    if not 2 <= len(set(words)) <= MOST_VALUES:
        raise BadInput(
            f"{path}: the target {target!r} has {len(set(words)):,} different values; wanted 2 to "
            f"{MOST_VALUES} classes (name the right column 'target', or put it last)"
        )
    return _table(header, rows, words, target, seed, lambda row: f"{path}, line {lines[row]}", say)


def _table(
    header: list[str],
    cells: list[list[str]],
    words: list[str],
    target: str,
    seed: int,
    where: Callable[[int], str],
    say: Callable[[str], None],
) -> Table:
    rows = _split([tuple(row) for row in cells], seed)
    classes = tuple(sorted({words[row] for row in rows["train"]}))
    for name in ("validation", "test"):
        strange = [row for row in rows[name] if words[row] not in classes]
        if strange:
            raise BadInput(
                f"{where(strange[0])}: class {words[strange[0]]!r} is so rare that no row of it "
                "trains; wanted more rows of it, or none"
            )
    columns, encoded = [], []
    for place, name in enumerate(header):
        all_cells = [row[place] for row in cells]
        column = Column.learn(name, [all_cells[row] for row in rows["train"]])
        if column is None:
            say(f"column {name!r} is left out: empty, or more than {MOST_VALUES} different words")
            continue
        columns.append(column)
        encoded.append(column.encode(all_cells, where))
    if not columns:
        raise BadInput(f"no column is left to predict {target!r} from")
    labels = np.array([classes.index(word) for word in words], np.int64)
    return Table(tuple(columns), np.stack(encoded, 1), labels, classes, target, rows)


def _split(rows: Sequence[tuple[str, ...]], seed: int) -> dict[str, np.ndarray]:
    """60 % train, 15 % validation, 25 % test; rows with equal cells stay together, so that none is
    tested on what it has seen."""
    kinds = {row: number for number, row in enumerate(dict.fromkeys(rows))}
    kind = np.array([kinds[row] for row in rows])
    order = np.random.default_rng(seed).permutation(len(kinds))
    bounds = [round(share * len(kinds)) for share in (0, 0.6, 0.75, 1)]
    names = ("train", "validation", "test")
    return {
        name: np.flatnonzero(np.isin(kind, order[low:high]))
        for name, low, high in zip(names, bounds[:-1], bounds[1:], strict=True)
    }
