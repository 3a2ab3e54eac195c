"""Attention over the columns of a table: each cell is a token, and a token of its own reads them.

The model is the FT-Transformer (Gorishniy et al. 2021, arXiv 2106.11959). Which columns the row's
token reads, and which read each other, stands in its attention weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from headwise._extras import require
from headwise.errors import BadFile, BadInput
from headwise.tasks import classifiers
from headwise.tasks.blocks import Encoder
from headwise.tasks.design import Design
from headwise.tasks.tables import Column, Table, breast_cancer, own_table, read_csv
from headwise.tasks.task import Budget, RunInput, RunOutput, Score, Split, Task

BATCH = 64
# Share of cells that are hidden in training: the model learns to do without any one column.
HIDDEN = 0.1


class FTTransformer(nn.Module):
    """A token per column and one for the row, blocks, and the row's token to classes.

    A number x of column j becomes x · w_j + b_j, word number c of column j becomes e_jc + b_j, and
    a missing cell m_j. `words` (C,): how many words column j knows; 0 for a column of numbers.
    """

    def __init__(self, design: Design, words: Sequence[int], classes: int) -> None:
        super().__init__()
        width, columns = design.embed_dim, len(words)
        self.numeric: Tensor
        self.first: Tensor
        starts = np.cumsum([0, *words])[:-1]
        self.register_buffer("numeric", torch.tensor([not n for n in words]), persistent=False)
        self.register_buffer("first", torch.tensor(starts.tolist()), persistent=False)
        self.slope = nn.Parameter(torch.randn(columns, width) * columns**-0.25)
        self.offset = nn.Parameter(0.2 * torch.randn(columns, width))
        self.missing = nn.Parameter(0.2 * torch.randn(columns, width))
        self.word = nn.Embedding(max(1, sum(words)), width)
        self.row = nn.Parameter(0.2 * torch.randn(width))
        self.encoder = Encoder(design)
        self.classes = nn.Linear(width, classes)

    def forward(self, values: Tensor) -> Tensor:
        """(B, C, 1), scaled numbers and codes of words, NaN where missing → logits (B, classes).

        Fewer than all columns may come, the first ones; the others then take no part.
        """
        values = values.squeeze(-1)
        here = slice(values.shape[1])
        gone = values.isnan()
        known = values.masked_fill(gone, 0.0)
        codes = torch.where(self.numeric[here], 0, known).long() + self.first[here]
        told = self.word(codes.clamp_max(self.word.num_embeddings - 1))
        told = torch.where(self.numeric[here, None], known[..., None] * self.slope[here], told)
        tokens = torch.where(gone[..., None], self.missing[here], told + self.offset[here])
        row = self.row.expand(len(values), 1, -1)
        return self.classes(self.encoder(torch.cat([row, tokens], dim=1))[:, 0])


def cells(values: np.ndarray) -> Tensor:
    """(B, C) as the model takes it: (B, C, 1), C tokens of one feature."""
    return torch.from_numpy(values)[..., None]


class Tabular(Task):
    """Benign or malignant? Or the target column of a person's CSV file."""

    name = "tabular"
    title = "Is this tumour benign, from 30 measures of its cells?"
    metric = "accuracy"
    better: Literal["higher", "lower"] = "higher"
    source = "scikit-learn breast cancer: 569 rows, 30 columns (UCI Wisconsin Diagnostic)"
    licence = "CC BY 4.0 (UCI), BSD-3-Clause (scikit-learn)"
    causal = False
    generates = False
    table: Table
    columns: tuple[Column, ...]
    names: tuple[str, ...]

    def prepare(self, say: Callable[[str], None] = lambda line: None) -> None:
        if self.data is None:
            self.table = breast_cancer(self.seed)
        else:
            self.table = own_table(Path(self.data), self.seed, say)
        self.columns, self.names = self.table.columns, self.table.classes

    def default_design(self) -> Design:
        return Design(embed_dim=32, num_heads=4, layers=2, dropout=0.2)

    def budget(self, name: str = "quick") -> Budget:
        steps = {"quick": 300, "full": 2000}[name]
        return Budget(
            steps=steps,
            batch_size=BATCH,
            learning_rate=1e-3,
            warmup=30,
            evaluate_every=50,
            patience=steps // 50,
        )

    def build(self, design: Design, seed: int) -> nn.Module:
        words = [len(column.values) for column in self.columns]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return FTTransformer(design, words, len(self.names))

    def batch(self, index: int, seed: int) -> tuple[Tensor, Tensor]:
        rows, random = self.table.rows["train"], np.random.default_rng((seed, index))
        chosen = rows[random.integers(len(rows), size=BATCH)]
        values = self.table.values[chosen]
        hidden = random.random(values.shape) < HIDDEN
        values = np.where(hidden, np.float32(np.nan), values)
        return cells(values), torch.from_numpy(self.table.labels[chosen])

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        values, labels = batch
        return functional.cross_entropy(model(values), labels)

    def evaluate(self, model: nn.Module, split: Split) -> Score:
        values, labels = self.table.part(split)
        return self._score(self._shares(model, values), labels)

    def _shares(self, model: nn.Module, values: np.ndarray) -> np.ndarray:
        model.eval()
        with torch.inference_mode():
            parts = cells(values).split(500)
            return torch.cat([model(part).softmax(-1) for part in parts]).numpy()

    def _score(self, shares: np.ndarray, labels: np.ndarray) -> Score:
        right = (shares.argmax(1) == labels).astype(np.float64)
        return Score(float(right.mean()), right, self._auc(shares, labels))

    def _auc(self, shares: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        """AUC (of several classes, their mean against the rest); none where a class is absent."""
        metrics = require("sklearn.metrics", extra="tasks", purpose="AUC")
        if len(np.unique(labels)) < len(self.names):
            return {}
        if len(self.names) == 2:
            return {"AUC": float(metrics.roc_auc_score(labels, shares[:, 1]))}
        each = np.eye(len(self.names))[labels]
        return {"AUC": float(metrics.roc_auc_score(each, shares, average="macro"))}

    def baselines(self) -> dict[str, Callable[[], Score]]:
        train, known = self.table.part("train")
        test, labels = self.table.part("test")

        def most_frequent() -> Score:
            counts = np.bincount(known, minlength=len(self.names)) / len(known)
            return self._score(np.tile(counts, (len(test), 1)), labels)

        def regression() -> Score:
            return self._score(
                classifiers.logistic_regression(self._flat(train), known, self._flat(test)), labels
            )

        def boosting() -> Score:
            ensemble = require("sklearn.ensemble", extra="tasks", purpose="gradient boosting")
            words = [bool(column.values) for column in self.columns]
            model = ensemble.HistGradientBoostingClassifier(
                random_state=0, categorical_features=words
            )
            with warnings.catch_warnings():
                # A column that is empty in every training row has no bins to find, and none needed.
                warnings.filterwarnings("ignore", category=RuntimeWarning, module="sklearn")
                model.fit(train, known)
            return self._score(model.predict_proba(test), labels)

        return {
            "most frequent class": most_frequent,
            "logistic regression": regression,
            "gradient boosting": boosting,
        }

    def _flat(self, values: np.ndarray) -> np.ndarray:
        """(N, F): numbers with 0 for missing ones, words one-hot, and what is missing."""
        parts = [np.isnan(values).astype(np.float32)]
        for place, column in enumerate(self.columns):
            found = values[:, [place]]
            if column.values:
                parts.append((found == np.arange(len(column.values))).astype(np.float32))
            else:
                parts.append(np.nan_to_num(found))
        return np.concatenate(parts, axis=1)

    def example(self) -> dict[str, Any]:
        """The first test row; its tokens are the row's own and the columns."""
        values, _ = self.table.part("test")
        return {
            "inputs": {"values": cells(values[:1].copy())},
            "tokens": ["[row]", *(column.name for column in self.columns)],
        }

    def state(self) -> dict[str, Any]:
        columns = [column.to_dict() for column in self.columns]
        return {"columns": columns, "classes": list(self.names)}

    def restore(self, state: dict[str, Any]) -> None:
        columns, names = state.get("columns"), state.get("classes")
        if not columns or not names or not isinstance(columns, list):
            raise BadFile("tabular: the saved state has no columns or no classes")
        self.columns = tuple(Column.from_dict(column) for column in columns)
        self.names = tuple(str(name) for name in names)

    def run(self, model: nn.Module, args: RunInput) -> RunOutput:
        """Predict each row of a CSV file that has the columns of the training table.

        Raises:
            BadInput: not one file; a column that is missing; a cell that is no number.
        """
        if len(args.given) != 1:
            raise BadInput(f"tabular predicts the rows of one CSV file, got {len(args.given)}")
        path = Path(args.given[0])
        header, rows, lines = read_csv(path)
        absent = [column.name for column in self.columns if column.name not in header]
        if absent or not rows:
            lacks = f"column {absent[0]!r}" if absent else "rows below its header"
            raise BadInput(f"{path}: the table has no {lacks}")
        encoded = []
        for column in self.columns:
            given = [row[header.index(column.name)] for row in rows]
            encoded.append(column.encode(given, lambda row: f"{path}, line {lines[row]}"))
        shares = self._shares(model, np.stack(encoded, 1))
        return RunOutput(
            tuple(
                f"line {line}: {self.names[int(row.argmax())]} {row.max():.0%}"
                for line, row in zip(lines, shares, strict=True)
            )
        )
