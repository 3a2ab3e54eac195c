"""Electricity demand of the next day, with its uncertainty: causal attention over patches.

The model follows PatchTST (Nie et al. 2023, arXiv 2211.14730) in its patches, and is causal: every
patch forecasts what comes after it, so one window trains as many forecasts as it has patches. It
corrects the value of one season earlier, as seasonal differencing does (Box & Jenkins 1970), and
gives nine quantiles, trained by pinball loss (Koenker & Bassett 1978).
"""

from __future__ import annotations

import ast
import csv
import io
import math
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from headwise._extras import require
from headwise.errors import BadFile, BadInput, MissingExtra
from headwise.masks import causal
from headwise.rotary import Rotary
from headwise.tasks.blocks import Encoder
from headwise.tasks.design import Design
from headwise.tasks.sources import fetch
from headwise.tasks.task import Budget, RunInput, RunOutput, Score, Task

QUANTILES = np.arange(1, 10) / 10
# Where training ends, and where validation ends, as shares of the series: seven, two and three of
# the twelve weeks of electricity demand.
TRAIN, VALIDATION = 7 / 12, 9 / 12


@dataclass(frozen=True)
class Frame:
    """How a series is cut, all in time steps: `season`, the lag whose value is nearest; `horizon`,
    how far a forecast goes; `patch`, values of a token; `patches`, tokens of a window."""

    season: int
    horizon: int
    patch: int
    patches: int

    @property
    def reach(self) -> int:
        """Values before a forecast that the model needs."""
        return self.season + self.patch * self.patches


def frame_of(season: int) -> Frame:
    """The cut for a season: a forecast of a season, at most 48 steps, in patches of half of it.
    A window spans a season, at least eight and at most sixteen patches."""
    horizon = min(season, 48)
    patch = max(1, horizon // 2)
    return Frame(season, horizon, patch, min(16, max(8, season // patch)))


def find_season(values: np.ndarray) -> int:
    """The lag at which the series is like itself, of 2 up to a quarter of its length.

    Differences are compared, so that a trend is no season. Multiples of a season are about as like,
    so the first peak within a tenth of the highest is taken. 1 where nothing recurs (correlation
    under 0.2).
    """
    moves = np.diff(values)
    moves = moves - moves.mean()
    power = float((moves**2).sum())
    if power == 0:
        return 1
    spectrum = np.abs(np.fft.rfft(moves, 2 * len(moves))) ** 2
    raw = np.fft.irfft(spectrum)[: len(moves)] / power
    longest = len(values) // 4
    like = raw[: longest + 2] * len(moves) / (len(moves) - np.arange(longest + 2))
    peaks = np.flatnonzero((like[2:-1] >= like[1:-2]) & (like[2:-1] >= like[3:])) + 2
    if not len(peaks) or like[peaks].max() < 0.2:
        return 1
    return int(peaks[like[peaks] >= 0.9 * like[peaks].max()][0])


class Forecaster(nn.Module):
    """A linear embedding of patches, causal blocks with rotary positions, quantiles of the horizon.

    forward: (B, L, F) → (B, L, horizon, 9) quantiles, standardised, of the `horizon` values that
    follow each patch; F = 2 patch + horizon, see `Series.features`.
    """

    def __init__(self, design: Design, frame: Frame) -> None:
        super().__init__()
        self.frame = frame
        self.embed = nn.Linear(2 * frame.patch + frame.horizon, design.embed_dim)
        self.encoder = Encoder(design, position=Rotary())
        self.change = nn.Linear(design.embed_dim, frame.horizon * len(QUANTILES))
        # How much of today's distance to a season ago is still there, step by step ahead.
        self.carry = nn.Parameter(torch.linspace(0.9, 0.3, frame.horizon))
        self.spread = nn.Parameter(torch.linspace(-0.1, 0.1, len(QUANTILES)))
        nn.init.zeros_(self.change.weight)
        nn.init.zeros_(self.change.bias)

    def forward(self, patches: Tensor) -> Tensor:
        tokens = self.encoder(self.embed(patches), mask=causal())
        patch = self.frame.patch
        distance, earlier = patches[..., 2 * patch - 1, None], patches[..., 2 * patch :]
        change = self.change(tokens).unflatten(-1, (self.frame.horizon, len(QUANTILES)))
        return (earlier + self.carry * distance)[..., None] + self.spread + 0.3 * change


class Series(Task):
    """Half-hourly electricity demand, the next day; or a person's own series."""

    name = "series"
    title = "How much electricity will be needed tomorrow?"
    metric = "MASE"
    better: Literal["higher", "lower"] = "lower"
    source = (
        "taylor, pmdarima 2.1.1: half-hourly demand in England and Wales, 5 June to 27 August 2000"
    )
    licence = "MIT (pmdarima)"
    causal = True
    generates = False
    values: np.ndarray
    frame: Frame

    def prepare(self, say: Callable[[str], None] = lambda line: None) -> None:
        if self.data is None:
            self.values, season = _taylor(say), 336
        else:
            self.values = read_series(Path(self.data))
            season = find_season(self.values[: int(TRAIN * len(self.values))])
            say(f"season: {season} steps" if season > 1 else "no season found: last value instead")
        self.frame = frame_of(season)
        self.ends = [
            round(share * len(self.values) / self.frame.patch) * self.frame.patch
            for share in (TRAIN, VALIDATION)
        ]
        needed = self.frame.reach + 2 * self.frame.horizon
        held_out = min(self.ends[1] - self.ends[0], len(self.values) - self.ends[1])
        if self.ends[0] < needed or held_out < 2 * self.frame.horizon:
            raise BadInput(
                f"{self.data}: {len(self.values)} values are too few for a season of {season}: the "
                f"first {TRAIN:.0%}, to train on, hold {self.ends[0]} and {needed} are needed; "
                f"each held-out part holds {held_out} and {2 * self.frame.horizon} are needed"
            )
        train = self.values[: self.ends[0]]
        self.mean, self.deviation = float(train.mean()), float(train.std()) or 1.0
        self.unit = float(np.abs(train[season:] - train[:-season]).mean())
        if self.unit == 0:
            raise BadInput(
                f"{self.data}: the values repeat exactly every {season} steps, so there is nothing "
                "to forecast and MASE would divide by 0"
            )

    def scaled(self) -> np.ndarray:
        """The series with the mean and deviation of its training part taken out, float32."""
        return ((self.values - self.mean) / self.deviation).astype(np.float32)

    def features(self, series: np.ndarray, at: np.ndarray) -> Tensor:
        """(B, patches, F) what is known before each of the times `at` (B,).

        A token is a patch of values, its distances to one season earlier, and the `horizon` values
        that followed one season earlier: all of them lie before the end of its patch.
        """
        frame = self.frame
        starts = at[:, None] + frame.patch * np.arange(-frame.patches, 0)
        own = starts[..., None] + np.arange(frame.patch)
        # A season shorter than the horizon comes again and again.
        ahead = np.arange(frame.horizon) % frame.season
        after = starts[..., None] + frame.patch - frame.season + ahead
        parts = (series[own], series[own] - series[own - frame.season], series[after])
        return torch.from_numpy(np.concatenate(parts, axis=-1))

    def default_design(self) -> Design:
        return Design(embed_dim=64, num_heads=4, layers=2, dropout=0.1)

    def budget(self, name: str = "quick") -> Budget:
        steps = {"quick": 300, "full": 2000}[name]
        return Budget(
            steps=steps,
            batch_size=32,
            learning_rate=2e-3,
            warmup=50,
            evaluate_every=50,
            patience=6 if name == "quick" else 10,
        )

    def build(self, design: Design, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return Forecaster(design, self.frame)

    def batch(self, index: int, seed: int) -> tuple[Tensor, Tensor]:
        frame, series = self.frame, self.scaled()
        last = self.ends[0] - frame.horizon
        at = np.random.default_rng((seed, index)).integers(frame.reach, last + 1, size=32)
        ends = at[:, None] + frame.patch * np.arange(1 - frame.patches, 1)
        return self.features(series, at), torch.from_numpy(
            series[ends[..., None] + np.arange(frame.horizon)]
        )

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        patches, follows = batch
        levels = torch.from_numpy(QUANTILES).to(patches)
        missed = follows[..., None] - model(patches)
        return torch.maximum(levels * missed, (levels - 1) * missed).mean()

    def origins(self, split: Literal["validation", "test"]) -> np.ndarray:
        """(days, 4) times at which a forecast begins: four in each horizon, spread evenly.

        A row is one example: forecasts within it overlap, those of one row and the next but one
        do not.
        """
        begin, end = self.ends if split == "validation" else (self.ends[1], len(self.values))
        frame = self.frame
        days = np.arange(begin, end - 2 * frame.horizon + 1, frame.horizon)
        return days[:, None] + np.arange(4) * frame.horizon // 4

    def evaluate(self, model: nn.Module, split: Literal["validation", "test"]) -> Score:
        at = self.origins(split)
        with torch.inference_mode():
            found = model.eval()(self.features(self.scaled(), at.ravel()))[:, -1].numpy()
        return self.score(
            found.reshape(*at.shape, *found.shape[1:]) * self.deviation + self.mean, at
        )

    def score(self, quantiles: np.ndarray, at: np.ndarray) -> Score:
        """MASE of the medians (Hyndman & Koehler 2006, eq. 5, the scale of the training part's
        seasonal naive error), mean pinball loss in the same unit, and coverage of 10 to 90 %.

        `quantiles` (days, 4, horizon, 9) in the series' own unit.
        """
        truth = self.values[at[..., None] + np.arange(self.frame.horizon)]
        missed = truth[..., None] - quantiles
        pinball = np.maximum(QUANTILES * missed, (QUANTILES - 1) * missed)
        inside = (truth >= quantiles[..., 0]) & (truth <= quantiles[..., -1])
        error = np.abs(missed[..., len(QUANTILES) // 2]).mean((1, 2)) / self.unit
        extra = {
            "pinball": float(pinball.mean() / self.unit),
            "inside 10 to 90 %, %": 100 * float(inside.mean()),
        }
        return Score(float(error.mean()), error, extra)

    def baselines(self) -> dict[str, Callable[[], Score]]:
        return {"seasonal naive": self._naive, "ETS": self._ets, "linear": self._linear}

    def _spread(self, point: Callable[[np.ndarray], np.ndarray]) -> Score:
        """The score of a point forecast (N,) → (N, horizon); its quantiles are its own errors on
        the validation part, step by step ahead (empirical residuals)."""
        steps = np.arange(self.frame.horizon)
        held = self.origins("validation").ravel()
        errors = self.values[held[:, None] + steps] - point(held)
        around = np.quantile(errors, QUANTILES, axis=0).T
        # MASE is of the forecast itself: what the errors say about it must not move the median.
        around = around - around[:, [len(QUANTILES) // 2]]
        at = self.origins("test")
        found = point(at.ravel())[..., None] + around
        return self.score(found.reshape(*at.shape, *found.shape[1:]), at)

    def _naive(self) -> Score:
        season = self.frame.season
        ahead = np.arange(self.frame.horizon) % season - season
        return self._spread(lambda at: self.values[at[:, None] + ahead])

    def _linear(self) -> Score:
        """Ridge regression from one season and one horizon of values to the whole horizon; its
        strength is chosen on the validation part."""
        linear = require("sklearn.linear_model", extra="tasks", purpose="linear forecasts")
        series, frame = self.scaled().astype(np.float64), self.frame
        back = np.arange(-(frame.season + frame.horizon), 0)
        ahead = np.arange(frame.horizon)
        times = np.arange(len(back), self.ends[0] - frame.horizon + 1)
        held = self.origins("validation").ravel()
        models = [
            linear.Ridge(alpha=alpha).fit(
                series[times[:, None] + back], series[times[:, None] + ahead]
            )
            for alpha in (0.01, 0.1, 1.0, 10.0, 100.0)
        ]

        def forecast(model: Any, at: np.ndarray) -> np.ndarray:
            return np.asarray(model.predict(series[at[:, None] + back]))

        def error(model: Any) -> float:
            return float(np.abs(forecast(model, held) - series[held[:, None] + ahead]).mean())

        best = min(models, key=error)
        return self._spread(lambda at: forecast(best, at) * self.deviation + self.mean)

    def _ets(self) -> Score:
        """Exponential smoothing with additive errors and season (Hyndman et al. 2008), fitted to
        the training part once and then run, with its parameters fixed, up to each forecast."""
        ets = require(
            "statsmodels.tsa.exponential_smoothing.ets", extra="tasks", purpose="ETS forecasts"
        )
        season, horizon = self.frame.season, self.frame.horizon
        form: dict[str, Any] = {"error": "add", "initialization_method": "heuristic"}
        if season > 1:
            form |= {"seasonal": "add", "seasonal_periods": season}
        with warnings.catch_warnings():
            # A fit that stops early is still a fixed set of parameters, scored as it is.
            warnings.simplefilter("ignore")
            params = ets.ETSModel(self.values[: self.ends[0]], **form).fit(disp=False).params

            def point(at: np.ndarray) -> np.ndarray:
                return np.stack(
                    [
                        ets.ETSModel(self.values[:time], **form).smooth(params).forecast(horizon)
                        for time in at
                    ]
                )

            return self._spread(point)

    def example(self) -> dict[str, Any]:
        at = np.array([len(self.values)])
        names = [
            f"steps {-self.frame.patch * (self.frame.patches - i)} to "
            f"{-self.frame.patch * (self.frame.patches - 1 - i) - 1}"
            for i in range(self.frame.patches)
        ]
        return {"inputs": {"patches": self.features(self.scaled(), at)}, "tokens": names}

    def state(self) -> dict[str, Any]:
        """Scaling, the cut, and the last values: enough to go on from where the series ends."""
        return {
            "frame": asdict(self.frame),
            "mean": self.mean,
            "deviation": self.deviation,
            "unit": self.unit,
            "values": self.values[-self.frame.reach :].tolist(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.frame = Frame(**state["frame"])
        self.mean, self.deviation = float(state["mean"]), float(state["deviation"])
        self.unit = float(state["unit"])
        self.values = np.array(state["values"], dtype=np.float64)
        self.ends = [len(self.values), len(self.values)]

    def forecast(self, model: nn.Module, values: np.ndarray) -> np.ndarray:
        """(horizon, 9) quantiles of what follows `values` (T,), in their own unit.

        Raises:
            BadInput: fewer values than the model looks back over.
        """
        if len(values) < self.frame.reach:
            raise BadInput(
                f"series: a forecast looks back over {self.frame.reach} values, got {len(values)}"
            )
        series = ((values - self.mean) / self.deviation).astype(np.float32)
        with torch.inference_mode():
            found = model.eval()(self.features(series, np.array([len(values)])))[0, -1].numpy()
        return np.asarray(found.astype(np.float64) * self.deviation + self.mean)

    def run(self, model: nn.Module, args: RunInput) -> RunOutput:
        """Forecast what follows the series in a file, or the series of the training without one.

        The plot, forecast.svg, is among the files.
        """
        if len(args.given) > 1:
            raise BadInput(f"series: wanted one file of values, got {' '.join(args.given)}")
        values = read_series(Path(args.given[0])) if args.given else self.values
        found = self.forecast(model, values)
        lines = ["step   10 %   median   90 %"]
        lines += [
            f"{step:4}   {low:.6g}   {middle:.6g}   {high:.6g}"
            for step, (low, middle, high) in enumerate(found[:, [0, 4, 8]], start=1)
        ]
        try:
            plot = {"forecast.svg": _plot(values[-2 * self.frame.horizon :], found)}
        except MissingExtra as missing:
            # The numbers stand without it, and the line says how to get it.
            plot = {}
            lines.append(str(missing))
        return RunOutput(tuple(lines), plot)


def _plot(past: np.ndarray, quantiles: np.ndarray) -> bytes:
    """An SVG of the last values and the forecast with its 10 to 90 % band."""
    figures = require("matplotlib.figure", extra="plots", purpose="a plot of the forecast")
    figure = figures.Figure(figsize=(8, 3), layout="constrained")
    axes = figure.subplots()
    steps = np.arange(1, len(quantiles) + 1)
    axes.plot(np.arange(1 - len(past), 1), past, color="black", label="so far")
    axes.plot(steps, quantiles[:, 4], color="C0", label="median forecast")
    axes.fill_between(
        steps, quantiles[:, 0], quantiles[:, -1], color="C0", alpha=0.25, label="10 to 90 %"
    )
    axes.set_xlabel("steps from now")
    axes.legend(loc="upper left")
    drawn = io.BytesIO()
    figure.savefig(drawn, format="svg")
    return drawn.getvalue()


def _taylor(say: Callable[[str], None]) -> np.ndarray:
    """The 4,032 values out of the text of pmdarima's module, which is read and never run."""
    text = (fetch("taylor", say=say) / "taylor.txt").read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.List) and len(node.elts) == 4032:
            return np.array(ast.literal_eval(node), dtype=np.float64)
    raise BadFile("taylor: the module holds no list of 4032 numbers")


def read_series(path: Path) -> np.ndarray:
    """The values (T,) of a CSV file: one column, or time,value; a first line of names is skipped.

    Raises:
        BadInput: no such file, a line that is neither, with its number; under 60 values.
    """
    try:
        rows = list(csv.reader(path.read_text(encoding="utf-8").splitlines()))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise BadInput(f"{path}: cannot read a series: {reason.lower()}") from None
    values: list[float] = []
    for number, row in enumerate(rows, start=1):
        if not row:
            continue
        try:
            value = float(row[-1]) if len(row) <= 2 else math.nan
        except ValueError:
            if number == 1:
                continue
            value = math.nan
        if not math.isfinite(value):
            raise BadInput(
                f"{path}, line {number}: wanted a number, or time,number, got {','.join(row)!r}"
            )
        values.append(value)
    if len(values) < 60:
        raise BadInput(f"{path}: {len(values)} values; a series to learn from has at least 60")
    return np.array(values)
