"""Speech: log-mel frames, clips in one split only, padding, a person's folder of sounds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("soundfile")
pytest.importorskip("transformers")
pytest.importorskip("sklearn")

import soundfile

from headwise.errors import BadInput
from headwise.tasks import Design, RunInput, load_task
from headwise.tasks.sounds import HOP, MELS, RATE, folder_per_class, log_mel, means, varied
from headwise.tasks.speech import STACK, Listener, Speech, padded

CLASSES = {"fall": -1.0, "rise": 1.0, "still": 0.0}


def sweep(direction: float, seed: int, seconds: float = 0.4) -> np.ndarray:
    """A tone that rises, falls or stays, from another pitch each time: means tell little of it."""
    rng = np.random.default_rng(seed)
    time = np.arange(int(seconds * RATE)) / RATE
    middle, width = rng.uniform(900, 1400), 1200 * rng.uniform(0.8, 1.2)
    pitch = middle + direction * width * (time / seconds - 0.5)
    sound = np.sin(2 * np.pi * np.cumsum(pitch) / RATE)
    return (0.5 * sound + rng.normal(0, 0.01, len(time))).astype(np.float32)


def write(folder: Path, each: int = 20) -> Path:
    for number, (name, direction) in enumerate(CLASSES.items()):
        (folder / name).mkdir(parents=True)
        for index in range(each):
            sound = sweep(direction, 100 * number + index, 0.3 + 0.01 * (index % 20))
            soundfile.write(folder / name / f"{index:02}.wav", sound, RATE)
    return folder


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Speech:
    loaded = load_task("speech", write(tmp_path_factory.mktemp("sounds")))
    loaded.prepare()
    assert isinstance(loaded, Speech)
    return loaded


@pytest.fixture(scope="module")
def model(task: Speech) -> Listener:
    built = task.build(Design(embed_dim=32, num_heads=2), seed=0)
    assert isinstance(built, Listener)
    return built.eval()


def test_a_tone_is_loudest_in_its_own_band() -> None:
    time = np.arange(RATE) / RATE
    loudest = [
        int(log_mel(np.sin(2 * np.pi * pitch * time).astype(np.float32)).mean(0).argmax())
        for pitch in (200, 400, 800, 1600, 3200)
    ]
    assert loudest == sorted(set(loudest))
    # The Slaney scale is linear below 1 kHz.
    assert loudest[1] - loudest[0] == pytest.approx((loudest[2] - loudest[1]) / 2, abs=1)


def test_frames_are_ten_milliseconds_loudness_does_not_matter_and_silence_is_cut() -> None:
    sound = sweep(1.0, 0, 0.5)
    frames = log_mel(sound)
    assert frames.shape == (len(sound) // HOP + 1, MELS) and frames.dtype == np.float32
    assert frames.mean() == pytest.approx(0, abs=1e-5)
    assert frames.std() == pytest.approx(1, abs=1e-3)
    np.testing.assert_allclose(log_mel(0.1 * sound), frames, atol=2e-3)
    quiet = np.r_[np.zeros(4000, np.float32), sound, np.zeros(4000, np.float32)]
    assert len(log_mel(quiet)) <= len(frames) + 5
    assert np.isfinite(log_mel(np.zeros(10, np.float32))).all()
    assert len(log_mel(np.tile(sound, 10))) <= 201, "two seconds at most"


def test_no_clip_is_in_two_splits(task: Speech) -> None:
    rows = task.sounds.rows
    every = np.concatenate([rows[split] for split in ("train", "validation", "test")])
    assert sorted(every) == list(range(60))
    for split, count in (("train", 14), ("validation", 3), ("test", 3)):
        assert np.bincount(task.sounds.labels[rows[split]]).tolist() == [count] * 3


def test_copies_count_once_and_other_seeds_split_otherwise(tmp_path: Path) -> None:
    folder = write(tmp_path, each=8)
    plain = folder_per_class(folder, 0)
    for index in range(4):
        content = (folder / "rise" / f"{index:02}.wav").read_bytes()
        (folder / "rise" / f"copy{index}.wav").write_bytes(content)
    (folder / "rise" / "notes.txt").write_text("no sound")
    again = folder_per_class(folder, 0)
    assert len(again.frames) == len(plain.frames) == 24
    other = folder_per_class(folder, 1)
    assert other.rows["test"].tolist() != again.rows["test"].tolist()


def test_variations_are_reproducible_and_keep_a_clip_a_clip() -> None:
    frames = log_mel(sweep(1.0, 0))
    lengths = set()
    for seed in range(30):
        one, two = (varied(frames, np.random.default_rng(seed)) for _ in range(2))
        assert np.array_equal(one, two) and one.shape[1] == MELS and one.dtype == np.float32
        lengths.add(len(one))
        assert len(frames) / 1.5 - 1 <= len(one) <= len(frames) * 1.5 + 1
    assert len(lengths) > 10


def test_tokens_are_four_frames_side_by_side() -> None:
    clips = [np.arange(9 * MELS, dtype=np.float32).reshape(9, MELS), np.ones((4, MELS), np.float32)]
    frames, real = padded(clips)
    assert frames.shape == (2, 3, STACK * MELS)
    assert real.tolist() == [[True, True, True], [True, False, False]]
    assert frames[0].reshape(-1, MELS)[:9].tolist() == clips[0].tolist()
    assert (frames[0, 2, MELS:] == 0).all() and (frames[1, 1:] == 0).all()
    with pytest.raises(BadInput, match="without a single frame"):
        padded([np.zeros((0, MELS))])


def test_padding_changes_nothing(task: Speech, model: Listener) -> None:
    frames, real = padded([task.sounds.frames[0]])
    wide = torch.nn.functional.pad(frames, (0, 0, 0, 9), value=3.0)
    wide[:, -1] = torch.nan
    with torch.inference_mode():
        plain = model(frames, real)
        more = model(wide, torch.nn.functional.pad(real, (0, 9)))
    torch.testing.assert_close(more, plain, atol=1e-5, rtol=1e-5)


def test_order_in_time_matters(task: Speech, model: Listener) -> None:
    frames, real = padded([task.sounds.frames[0]])
    with torch.inference_mode():
        moved = model(frames.flip(1), real) - model(frames, real)
    assert moved.abs().max() > 1e-4


def test_means_of_stretches() -> None:
    clip = np.repeat(np.arange(10.0)[:, None], MELS, 1)
    assert means([clip])[0, 0] == 4.5
    assert means([clip], 5)[0, ::MELS].tolist() == [0.5, 2.5, 4.5, 6.5, 8.5]


def test_it_hears_where_a_tone_goes(task: Speech) -> None:
    from headwise.tasks.plain import fit

    model = fit(
        lambda: task.build(Design(embed_dim=32, num_heads=2, layers=1, dropout=0.0), 0),
        task.loss,
        lambda i: task.batch(i, 0),
        steps=80,
        learning_rate=5e-3,
    )
    found = task.evaluate(model, "test")
    assert found.value == found.per_example.mean() and len(found.per_example) == 9
    assert found.value >= 8 / 9
    names = list(task.baselines())
    assert names[0] == "logistic regression on means"
    assert found.value > task.baselines()[names[0]]().value
    assert task.baselines()[names[1]]().value > 0.5
    sound = str(task.data / "fall" / "03.wav") if task.data else ""
    assert f"{sound}: fall" in task.run(model, RunInput((sound,))).lines[0]
    again = Speech()
    again.restore(task.state())
    assert again.run(model, RunInput()).lines == task.run(model, RunInput()).lines


@pytest.mark.parametrize("what", ["none", "empty", "one", "few", "broken", "both"])
def test_a_bad_folder_is_one_line(tmp_path: Path, what: str) -> None:
    folder = tmp_path / "sounds"
    if what not in ("none", "empty"):
        write(folder, each=4)
    if what == "empty":
        folder.mkdir()
    if what == "one":
        for name in ("rise", "still"):
            (folder / name).rename(tmp_path / name)
    if what == "few":
        (folder / "rise" / "00.wav").unlink()
    if what == "broken":
        (folder / "rise" / "00.wav").write_bytes(b"no sound at all")
    if what == "both":
        (folder / "rise" / "00.wav").write_bytes((folder / "fall" / "00.wav").read_bytes())
    says = {
        "none": "wanted a folder that holds",
        "empty": "at least two classes, found 0 folders",
        "one": "at least two classes, found 1 folders",
        "few": "rise: 3 different sounds .* wanted at least 4",
        "broken": "00.wav: not a sound file",
        "both": "same sound in two classes",
    }[what]
    with pytest.raises(BadInput, match=says) as raised:
        load_task("speech", folder).prepare()
    assert "\n" not in str(raised.value)


@pytest.mark.packaged
@pytest.mark.slow
def test_the_spoken_words_are_split_by_voice() -> None:
    task = load_task("speech")
    task.prepare()
    assert isinstance(task, Speech)
    rows = task.sounds.rows
    assert {split: len(chosen) for split, chosen in rows.items()} == {
        "train": 3000,
        "validation": 400,
        "test": 700,
        "person": 50,
    }
    assert len(np.unique(np.concatenate(list(rows.values())))) == len(task.sounds.frames) == 4150
    simplest = task.baselines()["logistic regression on means"]()
    assert 0.2 < simplest.value < 0.6
    assert 0 < simplest.extra["recorded person"] < 1
