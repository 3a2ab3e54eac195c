"""Recommendation: who is held out, ranks over all items, left padding, a person's own file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from headwise.errors import BadInput
from headwise.tasks import Design, RunInput, load_task
from headwise.tasks.recommendation import LENGTH, NextItem, Recommendation, in_order, left_padded

ITEMS = 30


def cycle(users: int = 40, length: int = 16) -> list[tuple[str, str, float]]:
    """Everybody watches the items in the same circle, from another start; lines are shuffled."""
    rows = [
        (f"u{user}", f"film {(user + step) % ITEMS:02}", float(step))
        for user in range(users)
        for step in range(length)
    ]
    order = np.random.default_rng(0).permutation(len(rows))
    return [rows[index] for index in order]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Recommendation:
    file = tmp_path_factory.mktemp("events") / "events.csv"
    lines = [f"{user},{item},{time}" for user, item, time in cycle()]
    file.write_text("user,item,time\n" + "\n".join(lines))
    loaded = load_task("recommendation", file)
    loaded.prepare()
    assert isinstance(loaded, Recommendation)
    return loaded


@pytest.fixture(scope="module")
def model(task: Recommendation) -> NextItem:
    built = task.build(Design(embed_dim=32, num_heads=2), seed=0)
    assert isinstance(built, NextItem)
    return built.eval()


def test_histories_are_in_order_of_time_and_ties_keep_the_files_order() -> None:
    rows = [("a", item, time) for item, time in zip("vwxyz", [3, 1, 2, 1, 0], strict=True)]
    histories, names = in_order(iter([*rows, ("b", "q", 0.0)]))
    assert names == ["v", "w", "x", "y", "z"], "a user with one event is left out, and so is q"
    assert [names[item - 1] for item in histories[0]] == ["z", "w", "y", "x", "v"]


def test_the_last_two_items_are_never_trained_on(task: Recommendation) -> None:
    whole, kept = task.histories, [task.batch(index, 0) for index in range(10)]
    try:
        task.histories = [np.r_[history[:-2], [1, 1]] for history in whole]
        for index, (items, follows) in enumerate(kept):
            again = task.batch(index, 0)
            assert torch.equal(again[0], items) and torch.equal(again[1], follows)
    finally:
        task.histories = whole
    train = np.concatenate([history[:-2] for history in whole])
    assert task.liked.tolist() == np.bincount(train, minlength=ITEMS + 1).tolist()


def test_what_follows_an_item_is_the_next_one(task: Recommendation) -> None:
    items, follows = task.batch(0, 0)
    assert ((items > 0) == (follows > 0)).all() and items.shape == (32, LENGTH)
    assert torch.equal(items[:, 1:][items[:, :-1] > 0], follows[:, :-1][items[:, :-1] > 0])
    assert (items[:, -1] > 0).all(), "padding is on the left"


def test_ranks_by_hand(task: Recommendation) -> None:
    """The wanted item gets a chosen rank among those not had; items had before score higher."""
    for rank, gain in ((1, 1.0), (2, 1 / np.log2(3)), (10, 1 / np.log2(11)), (11, 0.0)):

        def scores(histories, rank=rank):
            found = np.zeros((len(histories), ITEMS + 1))
            for row, history in enumerate(histories):
                user = next(h for h in task.histories if np.array_equal(h[: len(history)], history))
                free = [i for i in range(1, ITEMS + 1) if i not in history and i != user[-1]]
                found[row, user[-1]] = 1.0
                found[row, free[: rank - 1]] = 2.0
                found[row, history] = 3.0
                found[row, 0] = 4.0
            return found

        score = task.rank(scores)
        assert score.value == pytest.approx(gain)
        assert score.extra["hit rate@10"] == (rank <= 10)
        assert len(score.per_example) == len(task.histories)


def test_equal_scores_gain_nothing(task: Recommendation) -> None:
    score = task.rank(lambda histories: np.ones((len(histories), ITEMS + 1)))
    # 15 items had, 15 left: the middle rank is 8, everybody's the same.
    assert score.value == pytest.approx(1 / np.log2(9))


def test_validation_and_test_ask_for_different_items(task: Recommendation) -> None:
    asked: dict[str, list[int]] = {}
    for split in ("validation", "test"):
        lengths: list[int] = []

        def scores(histories, lengths=lengths):
            lengths += [len(history) for history in histories]
            return np.zeros((len(histories), ITEMS + 1))

        task.rank(scores, split)  # type: ignore[arg-type]
        asked[split] = lengths
    assert asked["validation"] == [len(h) - 2 for h in task.histories]
    assert asked["test"] == [len(h) - 1 for h in task.histories]


def test_left_padding_changes_nothing(model: NextItem) -> None:
    items = torch.tensor([[3, 7, 1, 9, 4]])
    wide = torch.nn.functional.pad(items, (11, 0))
    noisy = wide.clone()
    noisy[:, :11] = 5
    real = wide > 0
    with torch.inference_mode():
        plain = model(items, items > 0)
        torch.testing.assert_close(model(wide, real)[:, 11:], plain, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(model(noisy, real)[:, 11:], plain, atol=1e-5, rtol=1e-5)


def test_no_score_knows_a_later_item(model: NextItem) -> None:
    items = torch.tensor([[3, 7, 1, 9, 4, 2]])
    real = items > 0
    with torch.inference_mode():
        before = model(items, real)
        for place in range(6):
            changed = items.clone()
            changed[0, place] = 20
            after = model(changed, real)
            assert torch.equal(after[:, :place], before[:, :place])
            assert (after[:, place:] != before[:, place:]).any(-1).all()


def test_item_knn_by_hand(task: Recommendation) -> None:
    like = task.likeness()
    users = np.zeros((len(task.histories), ITEMS + 1))
    for row, history in enumerate(task.histories):
        users[row, history[:-2]] = 1
    both = (users[:, 4] * users[:, 9]).sum()
    norms = [np.sqrt(users[:, item].sum() + 20) for item in (4, 9)]
    assert like[4, 9] == pytest.approx(both / np.prod(norms), rel=1e-5)
    assert (np.diag(like) == 0).all()


def test_a_fresh_model_ranks_by_popularity(task: Recommendation, model: NextItem) -> None:
    with torch.no_grad():
        still = NextItem(Design(embed_dim=32, num_heads=2), ITEMS, task.liked).eval()
        still.item.weight.zero_()
    assert task.evaluate(still, "test").value == task.baselines()["popularity"]().value


def test_it_learns_the_circle(task: Recommendation) -> None:
    from headwise.tasks.plain import fit

    model = fit(
        lambda: task.build(Design(embed_dim=32, num_heads=2, layers=1, dropout=0.0), 0),
        task.loss,
        lambda i: task.batch(i, 0),
        steps=120,
        learning_rate=1e-2,
    )
    found = task.evaluate(model, "test")
    assert found.value > 0.95 > task.baselines()["popularity"]().value + 0.2
    assert task.evaluate(model, "test").per_example.tolist() == found.per_example.tolist()
    history = [f"film {number:02}" for number in range(5)]
    assert task.recommend(model, history)[0] == "film 05"
    assert not set(history) & set(task.recommend(model, history, 100))
    again = Recommendation()
    again.restore(task.state())
    assert again.run(model, RunInput()).lines == task.run(model, RunInput()).lines
    assert again.run(model, RunInput(tuple(history))).lines[0] == " 1  film 05"


def test_an_unknown_item_is_named(task: Recommendation, model: NextItem) -> None:
    with pytest.raises(BadInput, match=r"no item 'Film 0' among 30; did you mean 'film 00', 'fil"):
        task.recommend(model, ["Film 0"])
    with pytest.raises(BadInput, match=r"no item 'xyz' among 30$"):
        task.recommend(model, ["xyz"])


def test_only_the_last_fifty_items_count() -> None:
    padded = left_padded([np.arange(1, 80), np.array([7])])
    assert padded[0].tolist() == list(range(30, 80))
    assert padded[1].tolist() == [0] * 49 + [7]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("u,i,1\nu,i\n", "line 2: wanted user,item,time with a number as time, got 'u,i'"),
        ("u,i,1\nu,i,late\n", "line 2: wanted user,item,time"),
        ("u,i,1\nu,i,nan\n", "line 2: wanted user,item,time"),
        ("a\tb\t1\n", "line 1: wanted user,item,time"),
        ("u,i,1\n", "0 users with at least 5 events and 0 items; wanted at least 10 users"),
        ("", "0 users"),
    ],
)
def test_a_bad_table_is_one_line(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "events.csv"
    file.write_text(text)
    with pytest.raises(BadInput, match=says):
        load_task("recommendation", file).prepare()
    with pytest.raises(BadInput, match="no such file"):
        load_task("recommendation", tmp_path / "none.csv").prepare()


@pytest.mark.packaged
def test_movielens_is_what_it_was() -> None:
    task = load_task("recommendation")
    task.prepare()
    assert isinstance(task, Recommendation)
    assert len(task.histories) == 943 and len(task.names) == len(set(task.names)) == 1682
    assert sum(map(len, task.histories)) == 100_000
    assert "Toy Story (1995)" in task.names
    popular = task.baselines()["popularity"]()
    assert (popular.value, popular.extra["hit rate@10"]) == pytest.approx(
        (0.0436, 0.0838), abs=1e-4
    )
