"""A team shares out its jobs: attention inside one model, over workers and places together.

Each worker sees where it stands and how fast it moves; each place is where somebody has to go. The
answer is joint: every place gets one worker, and the sum of the travel times should be small. The
best answer is known (Kuhn 1955, "The Hungarian method"; here scipy's), so the metric is exact.

A pair's score is minus its travel time, scaled, plus a product of what attention has told worker
and place about all others. Reading off the highest score first is the same rule for the model and
for the greedy baseline, so what differs is what the score knows.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from headwise._extras import require
from headwise.errors import BadInput
from headwise.masks import padding
from headwise.tasks.blocks import Encoder
from headwise.tasks.design import Design
from headwise.tasks.plain import fit
from headwise.tasks.task import Budget, RunInput, RunOutput, Score, Task

SMALLEST, LARGEST = 5, 12
SLOWEST, FASTEST = 0.5, 2.0
Rule = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Teams:
    """B teams of up to N workers with as many places; coordinates lie in [0, 1].

    `workers` (B, N, 3): x, y, speed. `places` (B, N, 2): x, y. `real` (B, N) bool: True for a
    worker, and the place of that number, that exists. `best` (B, N): the place of each worker in
    the best assignment; N where there is no worker.
    """

    workers: np.ndarray
    places: np.ndarray
    real: np.ndarray
    best: np.ndarray

    def times(self, index: int) -> np.ndarray:
        """Travel times (n, n) of one team, workers by places, in units of side / speed."""
        n = int(self.real[index].sum())
        workers, places = self.workers[index, :n], self.places[index, :n]
        away = workers[:, None, :2].astype(np.float64) - places[None]
        return np.asarray(np.sqrt((away**2).sum(-1)) / workers[:, 2:])


def draw(rng: np.random.Generator, count: int) -> Teams:
    """`count` random teams of 5 to 12, everything uniform, with their best assignments."""
    sizes = rng.integers(SMALLEST, LARGEST + 1, count)
    workers = rng.random((count, LARGEST, 3))
    workers[..., 2] = SLOWEST + (FASTEST - SLOWEST) * workers[..., 2]
    places = rng.random((count, LARGEST, 2))
    real = np.arange(LARGEST)[None] < sizes[:, None]
    # What stands at a padded place is zero: nothing about a team depends on it.
    workers, places = workers * real[..., None], places * real[..., None]
    empty = np.full((count, LARGEST), LARGEST)
    teams = Teams(workers.astype(np.float32), places.astype(np.float32), real, empty)
    for index in range(count):
        empty[index, : sizes[index]] = optimal(teams.times(index))
    return teams


def optimal(times: np.ndarray) -> np.ndarray:
    """The place of each worker that makes the sum of `times` (n, n) smallest."""
    optimize = require("scipy.optimize", extra="tasks", purpose="planning")
    return np.asarray(optimize.linear_sum_assignment(times)[1])


def highest_first(scores: np.ndarray) -> np.ndarray:
    """Take the highest score (n, n) of a free worker and a free place until all have one."""
    scores = np.array(scores, dtype=np.float64)
    chosen = np.zeros(len(scores), dtype=np.int64)
    for _ in range(len(scores)):
        worker, place = divmod(int(scores.argmax()), len(scores))
        chosen[worker] = place
        scores[worker], scores[:, place] = -np.inf, -np.inf
    return chosen


def in_turn(scores: np.ndarray) -> np.ndarray:
    """Each worker in turn takes its best free place: greedy nearest."""
    scores = np.array(scores, dtype=np.float64)
    chosen = np.zeros(len(scores), dtype=np.int64)
    for worker in range(len(scores)):
        chosen[worker] = scores[worker].argmax()
        scores[:, chosen[worker]] = -np.inf
    return chosen


def largest_regret(scores: np.ndarray) -> np.ndarray:
    """The worker that would lose most by taking its second choice chooses next (Vogel's rule)."""
    scores = np.array(scores, dtype=np.float64)
    chosen = np.zeros(len(scores), dtype=np.int64)
    waiting = list(range(len(scores)))
    while waiting:
        left = np.sort(scores[waiting], axis=1)
        loss = left[:, -1] - left[:, -2] if len(waiting) > 1 else np.zeros(1)
        worker = waiting.pop(int(loss.argmax()))
        chosen[worker] = scores[worker].argmax()
        scores[:, chosen[worker]] = -np.inf
    return chosen


def gaps(teams: Teams, scores: Callable[[int], np.ndarray], rule: Rule) -> np.ndarray:
    """(B,) by how many per cent each team's total time is above the best one."""
    found = np.empty(len(teams.real))
    for index in range(len(found)):
        times = teams.times(index)
        rows, n = np.arange(len(times)), len(times)
        chosen = rule(scores(index)[:n, :n])
        best = times[rows, teams.best[index, :n]].sum()
        found[index] = 100 * (times[rows, chosen].sum() / best - 1)
    return found


class Planner(nn.Module):
    """Workers and places in one encoder that has no positions, so order cannot matter.

    `attends=False` leaves the attention out and keeps the rest: each pair is scored alone.
    """

    def __init__(self, design: Design, attends: bool = True) -> None:
        super().__init__()
        width = design.embed_dim
        self.worker = nn.Linear(3, width)
        self.place = nn.Linear(2, width)
        self.encoder = Encoder(design) if attends else None
        self.alone = None if attends else _alone(design)
        self.ask = nn.Linear(width, width)
        self.offer = nn.Linear(width, width)
        self.haste = nn.Parameter(torch.tensor(5.0))

    def forward(self, workers: Tensor, places: Tensor, real: Tensor) -> Tensor:
        """(B, N, 3), (B, N, 2), real (B, N) bool → scores (B, N, N), worker by place; 0 where the
        worker or the place is padding. A higher score is a better pair."""
        tokens = torch.cat([self.worker(workers), self.place(places)], dim=1)
        if self.encoder is not None:
            tokens = self.encoder(tokens, mask=padding(torch.cat([real, real], dim=1)))
        else:
            assert self.alone is not None
            tokens = self.alone(tokens)
        known = workers.shape[1]
        ask, offer = self.ask(tokens[:, :known]), self.offer(tokens[:, known:])
        away = (workers[:, :, None, :2] - places[:, None]).square().sum(-1).clamp_min(1e-12).sqrt()
        times = away / workers[..., 2:].clamp_min(1e-3)
        scores = ask @ offer.transpose(1, 2) / math.sqrt(ask.shape[-1]) - self.haste * times
        return scores * (real[:, :, None] & real[:, None, :])


def _alone(design: Design) -> nn.Sequential:
    width = design.embed_dim
    layers: list[nn.Module] = []
    for _ in range(design.layers):
        layers += [nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.GELU()]
    return nn.Sequential(*layers, nn.LayerNorm(width))


class Planning(Task):
    """Who goes where."""

    name = "planning"
    title = "Who of a team goes where, so that all arrive soon?"
    metric = "gap to the best assignment, %"
    better: Literal["higher", "lower"] = "lower"
    source = "random teams of 5 to 12, drawn anew for every batch; best assignments from scipy"
    licence = "none needed: the data is made here"
    causal = False
    generates = False

    def __init__(self, data: Path | None = None, seed: int = 0) -> None:
        if data is not None:
            raise BadInput(
                f"planning draws its own teams and takes no --data, got {data}; to share out the "
                "jobs of your own team, train it and then give the file to headwise run"
            )
        super().__init__(data, seed)

    def prepare(self, say: Callable[[str], None] = lambda line: None) -> None:
        # Streams 0 and 1 are held out; training batches come from the streams (seed, 2, index).
        self.held_out = {
            name: draw(np.random.default_rng((self.seed, stream)), count)
            for stream, (name, count) in enumerate({"validation": 500, "test": 2000}.items())
        }

    def default_design(self) -> Design:
        return Design(embed_dim=64, num_heads=4, layers=3, dropout=0.0)

    def budget(self, name: str = "quick") -> Budget:
        steps = {"quick": 1000, "full": 6000}[name]
        return Budget(
            steps=steps,
            batch_size=64,
            learning_rate=2e-3,
            warmup=100,
            evaluate_every=200,
            patience=steps // 200,
        )

    def build(self, design: Design, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return Planner(design)

    def batch(self, index: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
        """What the model takes of 64 new teams, and their best assignments (64, N)."""
        teams = draw(np.random.default_rng((seed, 2, index)), 64)
        return _tensors(teams), torch.from_numpy(teams.best)

    def loss(self, model: nn.Module, batch: tuple[dict[str, Tensor], Tensor]) -> Tensor:
        """Cross-entropy of each worker's best place, and of each place's best worker."""
        given, best = batch
        real, scores = given["real"], model(**given)
        scores = scores.masked_fill(~(real[:, :, None] & real[:, None, :]), -1e9)
        workers = functional.cross_entropy(scores[real], best[real])
        # Sorting the best places of a team gives, for each place, its worker; padding sorts last.
        back = torch.argsort(best, dim=1, stable=True)
        places = functional.cross_entropy(scores.transpose(1, 2)[real], back[real])
        return workers + places

    def evaluate(self, model: nn.Module, split: Literal["validation", "test"]) -> Score:
        teams = self.held_out[split]
        with torch.inference_mode():
            scores = model.eval()(**_tensors(teams)).numpy()
        return _score(gaps(teams, lambda index: scores[index], highest_first))

    def baselines(self) -> dict[str, Callable[[], Score]]:
        teams = self.held_out["test"]

        def nearest(rule: Rule) -> Callable[[], Score]:
            return lambda: _score(gaps(teams, lambda index: -teams.times(index), rule))

        def alone() -> Score:
            model = fit(
                lambda: Planner(self.default_design(), attends=False),
                self.loss,
                lambda index: self.batch(index, 0),
                steps=400,
            )
            return self.evaluate(model, "test")

        return {
            "greedy nearest": nearest(in_turn),
            "shortest trip first": nearest(highest_first),
            "each pair alone, learned": alone,
            "largest regret first": nearest(largest_regret),
        }

    def example(self) -> dict[str, Any]:
        teams = _cut(_example())
        return {"inputs": _tensors(teams), "tokens": _names(int(teams.real.sum()))}

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Nothing to restore: a team is its own data."""

    def run(self, model: nn.Module, args: RunInput) -> RunOutput:
        """Share out the jobs of the team in a file, or of an example team without one."""
        if len(args.given) > 1:
            raise BadInput(f"planning: wanted one file of a team, got {' '.join(args.given)}")
        teams = read_team(Path(args.given[0])) if args.given else _cut(_example())
        with torch.inference_mode():
            scores = model.eval()(**_tensors(teams))[0].numpy()
        times, best = teams.times(0), teams.best[0]
        chosen, rows = highest_first(scores), np.arange(len(best))
        lines = [
            f"worker {row + 1} → place {place + 1}   time {times[row, place]:.3f}"
            for row, place in enumerate(chosen)
        ]
        total, least = times[rows, chosen].sum(), times[rows, best].sum()
        nearest = times[rows, in_turn(-times)].sum()
        # Where everybody stands at a goal, the best total is 0 and a share of it says nothing.
        above = f" ({100 * (total / least - 1):.1f} % above)" if least > 0 else ""
        lines.append(
            f"total {total:.3f}; the best there is {least:.3f}{above}; greedy nearest {nearest:.3f}"
        )
        if not SMALLEST <= len(best) <= LARGEST:
            lines.append(
                f"note: trained on teams of {SMALLEST} to {LARGEST}; this one has {len(best)}"
            )
        return RunOutput(tuple(lines))


def _score(found: np.ndarray) -> Score:
    # A rounding error above the best assignment still is the best assignment.
    return Score(float(found.mean()), found, {"best found, %": 100 * float((found < 1e-6).mean())})


def _tensors(teams: Teams) -> dict[str, Tensor]:
    return {
        "workers": torch.from_numpy(teams.workers),
        "places": torch.from_numpy(teams.places),
        "real": torch.from_numpy(teams.real),
    }


def _cut(teams: Teams) -> Teams:
    """One team without its padding."""
    n = int(teams.real[0].sum())
    parts = (teams.workers, teams.places, teams.real, teams.best)
    return Teams(*(part[:, :n] for part in parts))


def _example() -> Teams:
    return draw(np.random.default_rng((0, 3)), 1)


def _names(n: int) -> list[str]:
    return [f"worker {i + 1}" for i in range(n)] + [f"place {i + 1}" for i in range(n)]


def read_team(path: Path) -> Teams:
    """A team from a CSV file: `worker,x,y,speed` or `place,x,y` in each line; # begins a comment.

    Coordinates and speeds may have any unit; they are scaled to what the model was trained on.

    Raises:
        BadInput: the file and line, and what is wrong there; or counts that differ.
    """
    found: dict[str, list[list[float]]] = {"worker": [], "place": []}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise BadInput(f"{path}: cannot read a team: {reason.lower()}") from None
    for number, row in enumerate(csv.reader(lines), start=1):
        if not row or row[0].startswith("#"):
            continue
        kind = row[0].strip()
        wanted = {"worker": 4, "place": 3}.get(kind)
        if wanted is None or len(row) != wanted:
            raise BadInput(
                f"{path}, line {number}: wanted worker,x,y,speed or place,x,y, "
                f"got {','.join(row)!r}"
            )
        try:
            numbers = [float(cell) for cell in row[1:]]
        except ValueError:
            numbers = [math.nan]
        if not all(map(math.isfinite, numbers)) or (kind == "worker" and numbers[2] <= 0):
            raise BadInput(
                f"{path}, line {number}: coordinates are finite numbers and a speed is above 0, "
                f"got {','.join(row)!r}"
            )
        found[kind].append(numbers)
    workers, places = found["worker"], found["place"]
    if not workers or len(workers) != len(places):
        raise BadInput(
            f"{path}: a team has as many places as workers, at least one; got {len(workers)} "
            f"workers and {len(places)} places"
        )
    team, goals = np.array(workers), np.array(places)
    everything = np.concatenate([team[:, :2], goals])
    low, side = everything.min(0), float(np.ptp(everything, axis=0).max()) or 1.0
    team[:, :2], goals = (team[:, :2] - low) / side, (goals - low) / side
    # Only ratios of speeds matter: the largest becomes the fastest that training drew.
    team[:, 2] *= FASTEST / team[:, 2].max()
    real = np.ones((1, len(team)), dtype=bool)
    best = np.zeros(real.shape, dtype=np.int64)
    teams = Teams(team[None].astype(np.float32), goals[None].astype(np.float32), real, best)
    best[0] = optimal(teams.times(0))
    return teams
