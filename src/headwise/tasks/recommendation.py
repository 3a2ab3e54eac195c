"""What will this person watch next: causal attention over a history of items, padded on the left.

The model follows SASRec (Kang & McAuley 2018, arXiv 1808.09781): item embeddings shared by input
and output, causal blocks, a score for every item after every step. Like gSASRec's and BERT4Rec's
authors (Petrov & Macdonald 2023, arXiv 2308.07192) we train with all items as negatives, and rank
all items that the person has not had yet; sampled ranking misleads (Krichene & Rendle 2020).
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from headwise.errors import BadInput
from headwise.masks import causal, padding
from headwise.rotary import Rotary
from headwise.tasks.blocks import Encoder
from headwise.tasks.design import Design
from headwise.tasks.sources import fetch
from headwise.tasks.task import Budget, RunInput, RunOutput, Score, Task

LENGTH = 50
TOP = 10
# Items of the history that item kNN looks at, the last ones, and neighbours of each; chosen on the
# validation part of MovieLens-100k.
RECENT, NEIGHBOURS = 10, 100
SHRINK = 20.0


class NextItem(nn.Module):
    """Item embeddings, causal blocks with rotary positions, scores by the same embeddings.

    forward: items (B, L) int64, 0 for padding on the left, and real (B, L) bool, True for items →
    scores (B, L, items + 1); column 0 stands for padding and is never recommended.
    """

    def __init__(self, design: Design, items: int, liked: np.ndarray) -> None:
        super().__init__()
        self.item = nn.Embedding(items + 1, design.embed_dim, padding_idx=0)
        nn.init.normal_(self.item.weight, std=0.05)
        with torch.no_grad():
            self.item.weight[0] = 0
        self.dropout = nn.Dropout(design.dropout)
        self.encoder = Encoder(design, position=Rotary())
        # The model begins as the popularity baseline and learns what a history changes.
        self.popular = nn.Parameter(torch.from_numpy(np.log1p(liked)).float())

    def forward(self, items: Tensor, real: Tensor) -> Tensor:
        tokens = self.dropout(self.item(items))
        tokens = self.encoder(tokens, mask=causal() & padding(real))
        scores: Tensor = tokens @ self.item.weight.T + self.popular
        return scores


class Recommendation(Task):
    """MovieLens-100k, or a person's own table of user, item and time."""

    name = "recommendation"
    title = "What will this person watch next?"
    metric = "NDCG@10"
    better: Literal["higher", "lower"] = "higher"
    source = "MovieLens-100k, from recbole 1.2.1: 943 people, 1,682 films, 100,000 ratings"
    licence = "GroupLens: research use, no redistribution; read from the package, never copied"
    causal = True
    generates = False
    histories: list[np.ndarray]
    names: list[str]

    def prepare(self, say: Callable[[str], None] = lambda line: None) -> None:
        if self.data is None:
            rows, titles = _movielens(say)
        else:
            rows, titles = read_events(Path(self.data)), {}
        self.histories, items = in_order(rows)
        self.names = [titles.get(item, item) for item in items]
        if len(self.histories) < 10 or len(items) <= TOP:
            raise BadInput(
                f"{self.data}: {len(self.histories)} users with at least 5 events and "
                f"{len(items)} items; wanted at least 10 users and more than {TOP} items"
            )
        train = np.concatenate([history[:-2] for history in self.histories])
        self.liked = np.bincount(train, minlength=len(items) + 1)

    def default_design(self) -> Design:
        return Design(embed_dim=64, num_heads=2, layers=2, dropout=0.2)

    def budget(self, name: str = "quick") -> Budget:
        steps = {"quick": 700, "full": 4000}[name]
        return Budget(
            steps=steps,
            batch_size=32,
            learning_rate=2e-3,
            warmup=50,
            evaluate_every=100,
            patience=5,
        )

    def build(self, design: Design, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return NextItem(design, len(self.names), self.liked)

    def batch(self, index: int, seed: int) -> tuple[Tensor, Tensor]:
        """Items (32, 50) and what followed each (32, 50), of users drawn by how much they hold."""
        rng = np.random.default_rng((seed, index))
        lengths = np.array([len(history) for history in self.histories])
        runs = []
        for user in rng.choice(len(lengths), 32, p=lengths / lengths.sum()):
            history = self.histories[user][:-2]
            end = int(rng.integers(min(LENGTH + 1, len(history)), len(history) + 1))
            runs.append(history[max(0, end - LENGTH - 1) : end])
        return left_padded([run[:-1] for run in runs]), left_padded([run[1:] for run in runs])

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        items, follows = batch
        real = items > 0
        return functional.cross_entropy(model(items, real)[real], follows[real])

    def evaluate(self, model: nn.Module, split: Literal["validation", "test"]) -> Score:
        model.eval()

        def scores(histories: Sequence[np.ndarray]) -> np.ndarray:
            items = left_padded(histories)
            with torch.inference_mode():
                return np.asarray(model(items, items > 0)[:, -1].numpy())

        return self.rank(scores, split)

    def rank(
        self,
        scores: Callable[[Sequence[np.ndarray]], np.ndarray],
        split: Literal["validation", "test"] = "test",
    ) -> Score:
        """NDCG@10 and hit rate@10 over all items that a user has not had, one user an example.

        `scores` gives (B, items + 1) for B histories. With one item to find, NDCG@10 is
        1 / log2(rank + 1) for ranks 1 to 10, else 0 (Järvelin & Kekäläinen 2002). Among equal
        scores the item takes the middle rank, so a constant scorer gains nothing.
        """
        cut = 1 if split == "test" else 2
        known = [history[:-cut] for history in self.histories]
        target = np.array([history[-cut] for history in self.histories])
        ranks = np.empty(len(known))
        for begin in range(0, len(known), 128):
            part = slice(begin, begin + 128)
            found = scores(known[part]).astype(np.float64)
            for row, history in enumerate(known[part]):
                wanted = found[row, target[begin + row]]
                others = np.delete(found[row], np.unique(np.r_[0, history, target[begin + row]]))
                ranks[begin + row] = 1 + (others > wanted).sum() + (others == wanted).sum() / 2
        gain = np.where(ranks <= TOP, 1 / np.log2(ranks + 1), 0.0)
        return Score(float(gain.mean()), gain, {"hit rate@10": float((ranks <= TOP).mean())})

    def baselines(self) -> dict[str, Callable[[], Score]]:
        def popular(histories: Sequence[np.ndarray]) -> np.ndarray:
            return np.tile(self.liked.astype(np.float64), (len(histories), 1))

        def neighbours() -> Score:
            like = self.likeness()
            return self.rank(
                lambda histories: np.stack([like[h[-RECENT:]].sum(0) for h in histories])
            )

        return {"popularity": lambda: self.rank(popular), "item kNN": neighbours}

    def likeness(self) -> np.ndarray:
        """(items + 1, items + 1): cosine of two items' sets of users, shrunk for rare items, kept
        for the nearest neighbours of each (Sarwar et al. 2001), from the training part alone."""
        users = np.zeros((len(self.histories), len(self.names) + 1), dtype=np.float32)
        for row, history in enumerate(self.histories):
            users[row, history[:-2]] = 1
        norm = np.sqrt(users.sum(0) + SHRINK)
        like = (users.T @ users) / np.outer(norm, norm)
        np.fill_diagonal(like, 0)
        keep = min(NEIGHBOURS, len(like) - 1)
        like[like < np.partition(like, -keep, axis=1)[:, [-keep]]] = 0
        return like

    def example(self) -> dict[str, Any]:
        history = self.shown
        items = torch.from_numpy(history[None])
        return {
            "inputs": {"items": items, "real": items > 0},
            "tokens": [self.names[item - 1] for item in history],
        }

    @property
    def shown(self) -> np.ndarray:
        """The last 20 items of the first history: what `example` shows."""
        return self.histories[0][:-1][-20:]

    def state(self) -> dict[str, Any]:
        return {"names": self.names, "example": self.shown.tolist()}

    def restore(self, state: dict[str, Any]) -> None:
        self.names = [str(name) for name in state["names"]]
        self.liked = np.zeros(len(self.names) + 1, dtype=np.int64)
        self.histories = [np.array([*state["example"], 0], dtype=np.int64)]

    def recommend(self, model: nn.Module, history: Sequence[str], count: int = TOP) -> list[str]:
        """The `count` items that the model puts first after `history`, without those in it.

        Raises:
            BadInput: an item that the model has not seen, with the names nearest to it.
        """
        numbers = {name: number for number, name in enumerate(self.names, start=1)}
        for name in history:
            if name not in numbers:
                like = [other for other in self.names if name.lower() in other.lower()][:3]
                hint = f"; did you mean {', '.join(map(repr, like))}?" if like else ""
                raise BadInput(f"recommendation: no item {name!r} among {len(numbers)}{hint}")
        had = np.array([numbers[name] for name in history], dtype=np.int64)
        items = left_padded([had])
        with torch.inference_mode():
            scores = model.eval()(items, items > 0)[0, -1]
            scores[torch.from_numpy(np.r_[0, had])] = -torch.inf
            best = scores.topk(min(count, len(self.names) - len(set(history)))).indices
        return [self.names[int(item) - 1] for item in best]

    def run(self, model: nn.Module, args: RunInput) -> RunOutput:
        """Recommend after the items given, oldest first; after the example's without any."""
        given = args.given or tuple(self.names[item - 1] for item in self.shown)
        had = [] if args.given else ["after:", *(f"  {name}" for name in given), "next:"]
        found = self.recommend(model, given)
        return RunOutput((*had, *(f"{place:2}  {name}" for place, name in enumerate(found, 1))))


def _movielens(
    say: Callable[[str], None],
) -> tuple[Iterator[tuple[str, str, float]], dict[str, str]]:
    """Events (user, item, time), every rating whatever its stars, and titles with years by item."""
    folder = fetch("movielens-100k", say=say)

    def rows(name: str) -> list[list[str]]:
        text = (folder / name).read_text(encoding="utf-8")
        return [line.split("\t") for line in text.splitlines()[1:]]

    titles: dict[str, str] = {}
    for item, title, year, *_ in rows("items.tsv"):
        name = f"{title} ({year})"
        # Eighteen films stand in the list twice, under two numbers.
        titles[item] = f"{name} [{item}]" if name in titles.values() else name
    return ((user, item, float(time)) for user, item, _, time in rows("events.tsv")), titles


def left_padded(histories: Sequence[np.ndarray]) -> Tensor:
    """(B, 50) int64: the last 50 items of each history, zeros on the left."""
    items = np.zeros((len(histories), LENGTH), dtype=np.int64)
    for row, history in enumerate(histories):
        recent = history[-LENGTH:]
        items[row, LENGTH - len(recent) :] = recent
    return torch.from_numpy(items)


def in_order(rows: Iterator[tuple[str, str, float]]) -> tuple[list[np.ndarray], list[str]]:
    """Each user's items by time, as numbers from 1, and the items' names, sorted.

    Events of one moment keep the file's order. Users with fewer than five events are left out:
    two are held out, and a history needs some to go by.
    """
    users: dict[str, list[tuple[float, str]]] = {}
    for user, item, time in rows:
        users.setdefault(user, []).append((time, item))
    kept = [events for _, events in sorted(users.items()) if len(events) >= 5]
    names = sorted({item for events in kept for _, item in events})
    numbers = {name: number for number, name in enumerate(names, start=1)}
    # Sorting is stable and by time alone.
    ordered = [sorted(events, key=lambda event: event[0]) for events in kept]
    return [np.array([numbers[item] for _, item in events]) for events in ordered], names


def read_events(path: Path) -> Iterator[tuple[str, str, float]]:
    """(user, item, time) of each line of a CSV file `user,item,time`; a first line of names is
    skipped.

    Raises:
        BadInput: no such file; a line of another form, with its number.
    """
    try:
        rows = list(csv.reader(path.read_text(encoding="utf-8").splitlines()))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise BadInput(f"{path}: cannot read histories: {reason.lower()}") from None
    for number, row in enumerate(rows, start=1):
        if not row:
            continue
        try:
            user, item, moment = row
            time = float(moment)
            if not math.isfinite(time):
                raise ValueError
        except ValueError:
            if number == 1 and len(row) == 3:
                continue
            raise BadInput(
                f"{path}, line {number}: wanted user,item,time with a number as time, got "
                f"{','.join(row)!r}"
            ) from None
        yield user, item, time
