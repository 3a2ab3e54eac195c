"""Multimodal: captions and their split, scores, the towers' parts, a person's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from headwise.errors import BadInput
from headwise.tasks import Design, RunInput
from headwise.tasks.captions import (
    PAD,
    UNKNOWN,
    _emoji,
    folder_with_captions,
    numbers,
    vocabulary,
    words,
)
from headwise.tasks.multimodal import (
    Multimodal,
    bag_of_words,
    histogram,
    judged,
    shifted,
)
from headwise.tasks.towers import TwoTowers, contrastive, mean

COLOURS = {"red": (255, 0, 0), "green": (0, 160, 0), "blue": (0, 0, 255), "white": (250, 250, 250)}
SMALL = Design(embed_dim=16, num_heads=4, num_kv_heads=2, layers=1, dropout=0.0)


def folder(place: Path, count: int = 40) -> Path:
    """Squares of one colour with a bar at a place of their own: 40 pictures, each with its text."""
    lines = []
    for number in range(count):
        name, colour = list(COLOURS.items())[number % 4]
        image = Image.new("RGB", (32, 32), colour)
        image.paste((0, 0, 0), (0, number // 4 * 3, 32, number // 4 * 3 + 2))
        image.save(place / f"{number}.png")
        lines.append(f"{number}.png\t{name} square, bar {number // 4}")
    (place / "captions.tsv").write_text("\n".join(lines) + "\n", "utf-8")
    return place


def ready(place: Path) -> Multimodal:
    task = Multimodal(folder(place))
    task.prepare()
    return task


def entry(unified: str, name: str, *tones: str, kind: str = "person-role") -> dict[str, Any]:
    file = unified.lower() + ".png"
    variations = {tone: {"image": f"{tone.lower()}-{file}"} for tone in tones}
    return {
        "subcategory": kind,
        "unified": unified,
        "name": name,
        "image": file,
        "skin_variations": variations,
    }


def test_emoji_that_show_one_thing_are_one_group() -> None:
    found = list(
        _emoji(
            [
                entry("1F468-200D-1F373", "MAN COOK", "1F3FB", "1F3FB-1F3FF"),
                entry("1F469-200D-1F373", "WOMAN COOK"),
                entry("1F3C3", "RUNNER"),
                entry("1F3C3-200D-2640-FE0F-200D-27A1-FE0F", "WOMAN RUNNING FACING RIGHT"),
                entry("27A1-FE0F", "RIGHT ARROW", kind="arrow"),
                entry("1F468", "MAN", kind="person"),
                entry("1F1EA-1F1EC", "Egypt Flag", kind="country-flag"),
            ]
        )
    )
    assert [(line, group) for _, line, group in found] == [
        ("person role: man cook", "1F373"),
        ("person role: man cook, light skin tone", "1F373"),
        ("person role: woman cook", "1F373"),
        ("person role: runner", "1F3C3"),
        ("person role: woman running facing right", "1F3C3"),
        ("arrow: right arrow", "27A1"),
        ("person: man", "1F468"),
    ]
    assert found[1][0] == "1f3fb-1f468-200d-1f373.png"


def test_words_seen_once_are_unknown_and_padding_comes_last() -> None:
    known = vocabulary(["A cat, a dog", "The cat"])
    assert known == {"a": UNKNOWN + 1, "cat": UNKNOWN + 2}
    table = numbers(["the cat", "a", "…"], known)
    assert table.tolist() == [[UNKNOWN, 3], [2, PAD], [UNKNOWN, PAD]]
    assert words("Top-hat & CANE 9") == ["top", "hat", "cane", "9"]


def test_a_folder_is_split_by_group(tmp_path: Path) -> None:
    place = folder(tmp_path)
    table = place / "captions.tsv"
    # A copy of a picture under another text, and another picture under the text of that.
    (place / "copy.png").write_bytes((place / "0.png").read_bytes())
    Image.new("RGB", (9, 5), (9, 9, 9)).save(place / "other.png")
    table.write_text(table.read_text() + "copy.png\tsomething\n\nother.png\tSomething!\n", "utf-8")
    pairs = folder_with_captions(place, 0)
    assert pairs.images.shape == (42, 3, 32, 32) and pairs.images.dtype == np.float32
    assert pairs.groups[0] == pairs.groups[40] == pairs.groups[41]
    assert len(set(pairs.groups)) == 40
    parts = [set(pairs.groups[rows]) for rows in pairs.rows.values()]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 40
    assert sorted(np.concatenate(list(pairs.rows.values()))) == list(range(42))
    other = folder_with_captions(place, 1)
    assert not np.array_equal(pairs.rows["test"], other.rows["test"])


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (None, "captions.tsv: no such file or directory; wanted a folder of pictures"),
        (b"\xff\xfe\n", "captions.tsv: it is not utf-8"),
        (b"0.png\tred\n1.png red\n", r"captions.tsv, line 2: .* got '1.png red'"),
        (b"0.png\t \n", r"captions.tsv, line 1: wanted a file name"),
        (b"../x.png\tred\n", r"line 1: '../x.png' is outside the folder"),
        (b"captions.tsv\tred\n", "not a picture that can be read"),
        (b"0.png\tred\n1.png\tgreen\n", "2 different pictures with different texts; 20 at least"),
        (b"", "0 different pictures"),
    ],
)
def test_a_bad_folder_says_why(tmp_path: Path, content: bytes | None, wanted: str) -> None:
    folder(tmp_path)
    table = tmp_path / "captions.tsv"
    table.unlink()
    if content is not None:
        table.write_bytes(content)
    with pytest.raises(BadInput, match=wanted):
        folder_with_captions(tmp_path, 0)


def test_recall_is_a_mean_over_groups_and_ties_do_not_help() -> None:
    task = Multimodal()
    scores = np.zeros((3, 30))
    scores[0, 4] = 1.0  # right, first
    scores[1, :10] = 1.0  # ten others stand before the right one
    right, groups = np.array([4, 20, 7]), np.array([5, 5, 8])
    found = task._score(scores, right, groups)
    # The third picture's names all score the same: its own stands in the middle, not first.
    assert found.per_example.tolist() == [0.5, 0.0]
    assert found.value == 0.25 and found.extra["recall@1"] == 0.25
    scores[2, 7], scores[2, :5] = 1.0, 2.0
    found = task._score(scores, right, groups)
    assert found.per_example.tolist() == [0.5, 1.0] and found.extra["recall@1"] == 0.25


@torch.no_grad()
def test_padding_and_neighbours_change_no_score() -> None:
    torch.manual_seed(0)
    model = TwoTowers(SMALL, 32, 20).eval()
    images = torch.rand(3, 3, 32, 32)
    ids = torch.tensor([[3, 4, 5, 6], [7, 8, PAD, PAD], [9, PAD, PAD, PAD]])
    whole = model(images, ids)
    assert whole.shape == (3, 1)
    for row, length in enumerate((4, 2, 1)):
        alone = model(images[row : row + 1], ids[row : row + 1, :length])
        torch.testing.assert_close(alone, whole[row : row + 1])
    tokens, real = torch.tensor([[[1.0], [3.0], [99.0]]]), torch.tensor([[True, True, False]])
    assert mean(tokens, real).item() == 2.0


@torch.no_grad()
def test_the_best_are_judged_again_and_stay_above_the_others() -> None:
    torch.manual_seed(1)
    model = TwoTowers(SMALL, 32, 40).eval()
    torch.nn.init.normal_(model.judge.weight, std=3.0)
    pictures = model.see(torch.rand(5, 3, 32, 32))
    texts = model.read(torch.arange(2, 32).view(10, 3))
    scores, first = judged(model, pictures, texts, 4), model.alike(pictures, texts)
    for row in range(5):
        best = first[row].topk(4).indices
        pair = model.fit(pictures.at(torch.tensor([row] * 4)), texts.at(best))
        torch.testing.assert_close(scores[row, best], pair)
        assert set(scores[row].topk(4).indices.tolist()) == set(best.tolist())
        rest = [place for place in first[row].argsort().tolist() if place not in best.tolist()]
        assert [p for p in scores[row].argsort().tolist() if p in rest] == rest
    again = judged(model, pictures, texts, 10)
    assert not torch.equal(again.argsort(1), first.argsort(1)), "the crossing must matter"


def test_equal_texts_are_no_mistake() -> None:
    scores = torch.tensor([[9.0, 9.0, 0.0], [9.0, 9.0, 0.0], [0.0, 0.0, 9.0]])
    told = contrastive(scores, torch.tensor([4, 4, 6]))
    blind = contrastive(scores, torch.tensor([4, 5, 6]))
    # log 2 in two of the three rows is what cannot be had where two texts are equal.
    assert abs(float(told) - 2 / 3 * np.log(2)) < 1e-3
    assert float(blind) == pytest.approx(float(told), abs=1e-3)
    scores[0, 1] = scores[1, 0] = 0.0
    assert contrastive(scores, torch.tensor([4, 5, 6])) < 0.01
    assert contrastive(scores, torch.tensor([4, 4, 6])) > 1
    torch.manual_seed(0)
    model = TwoTowers(SMALL, 32, 20).eval()
    images, ids = torch.rand(3, 3, 32, 32), torch.tensor([[3, 4]]).expand(3, -1)
    names = torch.zeros(3, dtype=torch.long)
    # No wrong text is left to tell the right one from: what remains is the towers' part.
    towers = contrastive(model.alike(model.see(images), model.read(ids)), names)
    torch.testing.assert_close(model.loss(images, ids, names), towers)
    assert model.loss(images, ids, torch.arange(3)) > towers + 0.5


def test_pictures_move_and_are_not_mirrored() -> None:
    images = np.zeros((50, 1, 32, 32), np.float32)
    images[:, :, 10, 5] = 1
    moved = shifted(images, np.random.default_rng(0))
    places = {tuple(np.argwhere(picture[0])[0] - (10, 5)) for picture in moved}
    assert moved.sum() == 50 and len(places) > 15
    assert places <= {(down, across) for down in range(-2, 3) for across in range(-2, 3)}


def test_histogram_and_bag_count_what_there_is() -> None:
    image = np.zeros((1, 3, 32, 32), np.float32)
    image[0, 0, :16] = 1
    shares = histogram(image)[0] ** 2
    assert shares[0] == pytest.approx(0.5) and shares[3 * 16] == pytest.approx(0.5)
    assert bag_of_words(np.array([[2, 3, 2, PAD]]), 5).tolist() == [[0, 0, 2, 1, 0]]


def test_a_persons_pictures_are_learned_and_named(tmp_path: Path) -> None:
    task = ready(tmp_path)
    model = task.build(SMALL, seed=0)
    chance = task.evaluate(model, "test").extra["recall@1"]
    optimiser = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(60):
        optimiser.zero_grad()
        task.loss(model.train(), task.batch(step, 0)).backward()
        optimiser.step()
    score = task.evaluate(model, "test")
    assert len(score.per_example) == 8
    assert score.extra["recall@1"] > chance
    fresh = Multimodal()
    fresh.restore(task.state())
    lines = fresh.run(model, RunInput(tuple(str(tmp_path / f"{n}.png") for n in range(40)))).lines
    assert len(lines) == 6 * 40 and lines[6] == f"{tmp_path / '1.png'}:"
    right = sum(list(COLOURS)[n % 4] in lines[6 * n + 1] for n in range(40))
    assert right >= 36, f"the colour is right in {right} of 40"
    assert model.training is False
    with pytest.raises(BadInput, match="give one file or more"):
        fresh.run(model, RunInput())
    with pytest.raises(TypeError, match="wanted a TwoTowers, got Linear"):
        task.evaluate(torch.nn.Linear(1, 1), "test")


def test_baselines_on_a_persons_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = ready(tmp_path)
    monkeypatch.setattr(task, "budget", lambda name: type("Few", (), {"steps": 30}))
    colours, plain = (score() for score in task.baselines().values())
    # 8 test names: ten places hold them all; the colour is known, the bar is not.
    assert colours.value == plain.value == 1.0
    assert 0 < colours.extra["recall@1"] < 1
    assert plain.extra["recall@1"] > 1 / 8
