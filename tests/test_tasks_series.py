"""Series: what a forecast may know, its score by hand, a person's own file."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("statsmodels")
pytest.importorskip("sklearn")

from headwise.errors import BadInput
from headwise.tasks import RunInput, load_task
from headwise.tasks.series import QUANTILES, Forecaster, Series, find_season, frame_of, read_series

SEASON = 24


def wave(count: int = 1200) -> np.ndarray:
    """A season of 24, a slow wave and a little noise."""
    time = np.arange(count)
    noise = np.random.default_rng(0).normal(0, 0.3, count)
    return 50 + 10 * np.sin(2 * np.pi * time / SEASON) + 3 * np.sin(time / 90) + noise


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Series:
    file = tmp_path_factory.mktemp("series") / "wave.csv"
    file.write_text("time,load\n" + "\n".join(f"{t},{v:.6f}" for t, v in enumerate(wave())))
    said: list[str] = []
    loaded = load_task("series", file)
    loaded.prepare(said.append)
    assert said == ["season: 24 steps"]
    assert isinstance(loaded, Series)
    return loaded


@pytest.fixture(scope="module")
def model(task: Series) -> Forecaster:
    built = task.build(task.default_design(), seed=0)
    assert isinstance(built, Forecaster)
    # A fresh model forecasts by its skip alone; weights make attention take part.
    with torch.random.fork_rng():
        torch.manual_seed(1)
        torch.nn.init.normal_(built.change.weight, std=0.1)
    return built.eval()


@pytest.mark.parametrize("season", [7, 12, 24, 48])
def test_the_season_is_found(season: int) -> None:
    time = np.arange(20 * season)
    shape = np.random.default_rng(season).normal(size=season)
    noise = np.random.default_rng(1).normal(0, 0.2, len(time))
    assert find_season(np.resize(shape, len(time)) + 0.1 * time + noise) == season


def test_no_season_is_found_in_noise_or_in_a_line() -> None:
    assert find_season(np.random.default_rng(0).normal(size=400).cumsum()) == 1
    assert find_season(np.arange(100.0)) == 1


@pytest.mark.parametrize("season", [1, 2, 7, 24, 336])
def test_the_cut_fits_together(season: int) -> None:
    frame = frame_of(season)
    assert frame.season == season
    assert frame.patch * 2 in (frame.horizon, frame.horizon - 1, 2)
    assert 8 <= frame.patches <= 16


def test_features_are_what_they_say(task: Series) -> None:
    frame, series = task.frame, np.arange(2000.0, dtype=np.float32)
    found = task.features(series, np.array([500]))[0].numpy()
    first = 500 - frame.patch * frame.patches
    patch = frame.patch
    assert found[0, :patch].tolist() == list(range(first, first + patch))
    assert (found[:, patch : 2 * patch] == SEASON).all()
    after = first + patch - SEASON
    assert found[0, 2 * patch :].tolist() == list(range(after, after + frame.horizon))


def test_no_feature_and_no_forecast_knows_what_comes_after(task: Series, model: Forecaster) -> None:
    series = task.scaled()
    at = 600
    patch, patches = task.frame.patch, task.frame.patches
    with torch.inference_mode():
        before = model(task.features(series, np.array([at])))
        for token in range(patches):
            end = at - patch * (patches - 1 - token)
            changed = series.copy()
            changed[end:] += np.random.default_rng(token).normal(size=len(series) - end)
            after = model(task.features(changed.astype(np.float32), np.array([at])))
            torch.testing.assert_close(after[:, : token + 1], before[:, : token + 1])
            if token + 1 < patches:
                assert not torch.allclose(after[:, token + 1 :], before[:, token + 1 :], atol=1e-3)


def test_earlier_patches_matter_through_attention(task: Series, model: Forecaster) -> None:
    patches = task.features(task.scaled(), np.array([600]))
    changed = patches.clone()
    changed[:, 0] += 1
    with torch.inference_mode():
        moved = (model(changed) - model(patches)).abs().amax((0, 2, 3))
    assert (moved > 1e-4).all()


def test_training_never_sees_held_out_values(task: Series) -> None:
    whole, kept = task.values, [task.batch(i, 0) for i in range(20)]
    try:
        task.values = whole.copy()
        task.values[task.ends[0] :] = np.nan
        for index, (patches, follows) in enumerate(kept):
            again = task.batch(index, 0)
            assert torch.equal(again[0], patches) and torch.equal(again[1], follows)
            assert follows.isfinite().all()
    finally:
        task.values = whole


def test_targets_are_what_follows_each_patch(task: Series) -> None:
    patches, follows = task.batch(0, 0)
    patch = task.frame.patch
    # What follows a patch begins with the next patch.
    assert torch.equal(follows[:, :-1, :patch], patches[:, 1:, :patch])


def test_every_held_out_forecast_lies_in_its_part(task: Series) -> None:
    validation, test = task.origins("validation"), task.origins("test")
    horizon = task.frame.horizon
    assert validation.min() >= task.ends[0] and validation.max() + horizon <= task.ends[1]
    assert test.min() >= task.ends[1] and test.max() + horizon <= len(task.values)


def test_the_score_by_hand(task: Series) -> None:
    at = task.origins("test")
    truth = task.values[at[..., None] + np.arange(task.frame.horizon)]
    exact = task.score(np.repeat(truth[..., None], 9, -1), at)
    assert exact.value == 0 and exact.extra["pinball"] == 0
    off = task.score(np.repeat(truth[..., None] + 2.0, 9, -1), at)
    train = task.values[: task.ends[0]]
    unit = np.abs(train[SEASON:] - train[:-SEASON]).mean()
    assert off.value == pytest.approx(2 / unit)
    assert off.per_example == pytest.approx(np.full(len(at), 2 / unit))
    # Forecasts above the truth cost 1 - level each.
    assert off.extra["pinball"] == pytest.approx(2 * (1 - QUANTILES).mean() / unit)
    assert off.extra["inside 10 to 90 %, %"] == 0


def test_the_seasonal_naive_forecast_is_one_season_earlier(task: Series) -> None:
    at = task.origins("test")
    steps = at[..., None] + np.arange(task.frame.horizon)
    error = np.abs(task.values[steps] - task.values[steps - SEASON]).mean() / task.unit
    assert task.baselines()["seasonal naive"]().value == pytest.approx(error)


def test_baselines_know_nothing_of_what_they_forecast(task: Series) -> None:
    whole, cut = task.values, task.ends[1] + 4 * task.frame.horizon
    # The first day's forecasts begin before `cut`, so nothing after it may move them.
    scores = {name: run().per_example for name, run in task.baselines().items()}
    try:
        task.values = whole.copy()
        task.values[cut:] += 1000.0
        for name, run in task.baselines().items():
            assert run().per_example[:2] == pytest.approx(scores[name][:2]), name
    finally:
        task.values = whole


def test_it_beats_the_seasonal_naive_forecast(task: Series) -> None:
    from headwise.tasks.plain import fit

    model = fit(
        lambda: task.build(task.default_design(), 0),
        task.loss,
        lambda i: task.batch(i, 0),
        steps=80,
    )
    found = task.evaluate(model, "test")
    assert found.value < task.baselines()["seasonal naive"]().value
    assert found.value == pytest.approx(found.per_example.mean())
    assert 50 < found.extra["inside 10 to 90 %, %"] < 100


def test_a_restored_task_forecasts_the_same(task: Series, model: Forecaster) -> None:
    again = Series()
    again.restore(task.state())
    out = task.run(model, RunInput())
    assert again.run(model, RunInput()).lines == out.lines
    assert len(out.lines) == 1 + task.frame.horizon
    assert out.files["forecast.svg"].lstrip().startswith(b"<?xml")
    inputs = [t.example()["inputs"]["patches"] for t in (task, again)]
    assert torch.equal(*inputs)


def test_without_matplotlib_the_numbers_still_come(task, model, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    out = task.run(model, RunInput())
    assert "pip install 'headwise[plots]'" in out.lines[-1] and not out.files
    assert len(out.lines) == 2 + task.frame.horizon


def test_one_column_and_two_are_read_alike(tmp_path: Path) -> None:
    one, two = tmp_path / "one.csv", tmp_path / "two.csv"
    one.write_text("\n".join(str(v) for v in range(60)))
    two.write_text("when,what\n" + "\n".join(f"2020-01-{v},{v}" for v in range(60)))
    assert read_series(one).tolist() == read_series(two).tolist() == list(range(60))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1\n2\nx\n", "line 3: wanted a number, or time,number, got 'x'"),
        ("1\n2\nnan\n", "line 3: wanted a number"),
        ("t,a\n1,2,3\n", "line 2: wanted a number, or time,number, got '1,2,3'"),
        ("1\n2\n", "2 values; a series to learn from has at least 60"),
        ("", "0 values"),
    ],
)
def test_a_bad_series_is_one_line(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "values.csv"
    file.write_text(text)
    with pytest.raises(BadInput, match=says):
        load_task("series", file).prepare()


def test_series_that_cannot_be_learned_from(tmp_path: Path, task: Series, model) -> None:
    file = tmp_path / "values.csv"
    with pytest.raises(BadInput, match="no such file"):
        read_series(file)
    file.write_text("\n".join(str(v % 12) for v in range(100)))
    with pytest.raises(BadInput, match="too few for a season of 12"):
        load_task("series", file).prepare()
    file.write_text("\n".join(str(v % 12) for v in range(2000)))
    with pytest.raises(BadInput, match="repeat exactly every 12 steps"):
        load_task("series", file).prepare()
    with pytest.raises(BadInput, match="looks back over"):
        task.forecast(model, np.arange(10.0))


@pytest.mark.packaged
def test_the_electricity_demand_is_what_it_was() -> None:
    task = load_task("series")
    task.prepare()
    assert isinstance(task, Series)
    assert len(task.values) == 4032 and task.values[:3].tolist() == [22262, 21756, 22247]
    assert task.ends == [2352, 3024]
    assert find_season(task.values[:2352]) in (48, 336)
    assert task.baselines()["seasonal naive"]().value == pytest.approx(1.572, abs=0.001)
