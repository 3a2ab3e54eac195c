"""Text that a model writes on: generation with and without caches, n-grams, bits, what parses."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from headwise.errors import BadInput
from headwise.tasks import Design, RunInput
from headwise.tasks.code import Code, parses, python_files
from headwise.tasks.decoder import Decoder, draw, greedy
from headwise.tasks.language import Language
from headwise.tasks.ngram import NGram
from headwise.tasks.texts import BEGIN, LENGTH, begun
from headwise.tasks.unattended import GatedRecurrent, Mixer


def decoder(seed: int = 0, vocabulary: int = 20) -> Decoder:
    """Random weights large enough that what it writes changes from step to step."""
    torch.manual_seed(seed)
    made = Decoder(Design(embed_dim=16, num_heads=4, num_kv_heads=2), vocabulary).eval()
    for weight in made.parameters():
        if weight.ndim > 1:
            nn.init.normal_(weight, std=0.5)
    return made


PROMPTS = torch.tensor([[0, 3, 7, 7], [0, 19, 2, 5]])


@pytest.mark.parametrize("seed", range(4))
def test_text_with_caches_equals_text_without(seed: int) -> None:
    made = decoder(seed)
    found = greedy(made, PROMPTS, 30)
    assert found.shape == (2, 30)
    assert torch.equal(found, greedy(made, PROMPTS, 30, cached=False))
    drawn = draw(made, PROMPTS, 30, seed=seed)
    assert torch.equal(drawn, draw(made, PROMPTS, 30, seed=seed, cached=False))
    assert len(set(drawn.flatten().tolist())) > 3


@torch.inference_mode()
def test_greedy_is_the_likeliest_of_the_whole_text() -> None:
    made = decoder()
    found = greedy(made, PROMPTS, 12)
    whole = made(torch.cat([PROMPTS, found], dim=1))
    assert torch.equal(whole[:, 3:-1].argmax(-1), found)


def test_drawing_follows_the_seed_and_the_nucleus() -> None:
    made = decoder()
    before = torch.get_rng_state()
    assert torch.equal(draw(made, PROMPTS, 20, seed=1), draw(made, PROMPTS, 20, seed=1))
    assert not torch.equal(draw(made, PROMPTS, 20, seed=1), draw(made, PROMPTS, 20, seed=2))
    assert torch.equal(before, torch.get_rng_state())
    # The likeliest id alone holds a thousandth of the chance.
    assert torch.equal(draw(made, PROMPTS, 20, top_p=0.001), greedy(made, PROMPTS, 20))


class Fixed(nn.Module):
    """The same chances after any text."""

    def __init__(self, chances: list[float]) -> None:
        super().__init__()
        self.logits = torch.tensor(chances).log()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.logits.expand(*ids.shape, -1)


def test_drawn_ids_have_their_chances_and_rare_ones_never_come() -> None:
    made = Fixed([0.5, 0.3, 0.15, 0.05])
    prompt = torch.zeros(400, 1, dtype=torch.int64)
    ids = draw(made, prompt, 20, temperature=1.0, top_p=0.9).flatten()
    shares = torch.bincount(ids, minlength=4) / len(ids)
    # 0.5 + 0.3 + 0.15 first reach 0.9.
    assert shares.numpy() == pytest.approx([0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0], abs=0.02)
    cold = draw(made, prompt, 20, temperature=0.5, top_p=1.0).flatten()
    squares = np.array([0.25, 0.09, 0.0225, 0.0025])
    found = (torch.bincount(cold, minlength=4) / len(cold)).numpy()
    assert found == pytest.approx(squares / squares.sum(), abs=0.02)


@torch.inference_mode()
def test_models_without_attention_see_no_future() -> None:
    torch.manual_seed(0)
    design = Design(embed_dim=16, num_heads=4, layers=2)
    ids = torch.randint(0, 20, (3, 12))
    changed = ids.clone()
    changed[:, 8] = (changed[:, 8] + 1) % 20
    for model in (GatedRecurrent(20, 16), Mixer(design, 20, 16)):
        one, other = model(ids), model(changed)
        assert one.shape == (3, 12, 20)
        assert torch.equal(one[:, :8], other[:, :8])
        assert not torch.allclose(one[:, 8:], other[:, 8:])
        assert not torch.allclose(one[:, 11], other[:, 11], atol=1e-6), "it reads what is behind"


@torch.inference_mode()
def test_ngrams_are_kneser_ney_by_hand() -> None:
    # a b a b a c: the runs of two are ab ×2, ba ×2, ac ×1.
    text = np.array([1, 2, 1, 2, 1, 3])
    model = NGram(text, 2, 5)
    chances = model(torch.tensor([[1, 2, 3]])).exp().double()[0].numpy()
    # Of two: one seen once, two seen twice: D = 1 / 5. Of one, counted by what comes before:
    # b after a; a after b; c after a: each one way, n1 = 3, n2 = 0: D = 1, all goes to 1 / V.
    lower = np.full(5, 0.2)
    after_a = 0.2 * 2 / 3 * lower
    after_a[2] += 1.8 / 3
    after_a[3] += 0.8 / 3
    after_b = 0.2 * 1 / 2 * lower
    after_b[1] += 1.8 / 2
    assert chances[0] == pytest.approx(after_a, rel=1e-6)
    assert chances[1] == pytest.approx(after_b, rel=1e-6)
    assert chances[2] == pytest.approx(lower, rel=1e-6), "nothing ever followed c"


@torch.inference_mode()
@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_ngrams_are_chances_and_longer_ones_fit_better(order: int) -> None:
    rng = np.random.default_rng(0)
    step = rng.dirichlet(np.full(7, 0.2), size=(7, 7))
    text = [0, 1]
    for _ in range(4000):
        text.append(int(rng.choice(7, p=step[text[-2], text[-1]])))
    ids = torch.tensor([text[3000:3060]])
    found = NGram(np.array(text[:3000]), order, 7)(ids)
    assert found.exp().sum(-1).numpy() == pytest.approx(np.ones((1, 60)), rel=1e-5)
    bits = -found[0, 1:-1].gather(1, ids[0, 2:, None]).mean() / math.log(2)
    best = np.mean(
        [
            -math.log2(step[a, b, c])
            for a, b, c in zip(*(ids[0, i : 58 + i].tolist() for i in range(3)), strict=True)
        ]
    )
    assert float(bits) >= best - 0.05
    if order >= 3:
        assert float(bits) < best + 0.35, "two tokens before tell nearly all"
    if order == 1:
        assert float(bits) > best + 0.5


def test_an_order_that_overflows_is_refused() -> None:
    with pytest.raises(ValueError, match="order 7 over 1024 ids"):
        NGram(np.arange(10), 7, 1024)


@pytest.mark.parametrize(
    "line",
    ["x = 1", "    return x", "if x:", "else:", "elif y:", "for a in b:", "try:", "except E:",
     "finally:", "with open(f) as g:", "@cached", "def f(a, b=1):", "class A(B):", "case 1:",
     "# words", "break", "async def f():", "import os"],
)  # fmt: skip
def test_lines_of_python_parse(line: str) -> None:
    assert parses(line)


@pytest.mark.parametrize(
    "line", ["x = = 1", "if x", "def f(", "return return", "the cat sat", "x = 'a", "):", "f(1))"]
)
def test_other_lines_do_not(line: str) -> None:
    assert not parses(line)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Language:
    """A text of 400 lines, each with its own number."""
    file = tmp_path_factory.mktemp("text") / "lines.txt"
    words = ["the", "cat", "sees", "a", "bird", "über", "house"]
    rng = np.random.default_rng(0)
    lines = [f"{n} " + " ".join(rng.choice(words, rng.integers(3, 12))) for n in range(400)]
    file.write_text("\n\n".join(lines), encoding="utf-8")
    task = Language(file)
    task.prepare()
    return task


def test_what_is_held_out_is_never_trained_on(small: Language) -> None:
    def numbers(text: str) -> set[int]:
        return {int(line.split()[0]) for line in text.splitlines()}

    trained = numbers(small.tokenizer.decode(small.text.tolist()))
    held = [
        numbers("".join(small.tokenizer.decode(ids) for ids, _ in small.parts[name]))
        for name in ("validation", "test")
    ]
    assert len(trained) > 300 and all(held)
    assert not trained & held[0] and not trained & held[1] and not held[0] & held[1]


def test_pieces_are_whole_lines_and_their_bytes(small: Language) -> None:
    for ids, size in small.parts["test"] + small.parts["validation"]:
        text = small.tokenizer.decode(ids)
        assert len(ids) <= LENGTH and text.endswith("\n") and size == len(text.encode())


def test_bits_per_byte_of_a_model_that_knows_nothing(small: Language) -> None:
    size = small.tokenizer.get_vocab_size()
    score = small.evaluate(Fixed([1 / size] * size), "test")
    pieces = small.parts["test"]
    tokens, size_ = (sum(part) for part in ([len(i) for i, _ in pieces], [b for _, b in pieces]))
    assert score.value == pytest.approx(tokens * math.log2(size) / size_, rel=1e-6)
    assert score.value == pytest.approx(float(score.per_example.mean()))
    assert len(score.per_example) == len(pieces)


def test_each_id_is_read_after_those_before_it(small: Language) -> None:
    batch = small.batch(0, 0)
    assert batch.shape[1] == LENGTH
    given = begun(batch)
    assert given[:, 0].eq(BEGIN).all() and torch.equal(given[:, 1:], batch[:, :-1])
    # Windows begin at lines.
    first = [small.tokenizer.decode(row[:8].tolist()) for row in batch]
    assert all(text[0].isdigit() for text in first)


def test_a_text_is_written_on(small: Language) -> None:
    model = small.build(Design(embed_dim=16, num_heads=2, layers=1), seed=0)
    lines = small.run(model, RunInput(("the cat",))).lines
    assert lines[0] == "the cat" and lines[1].startswith("  likeliest: ")
    assert lines[2].startswith("  drawn:     ")
    with pytest.raises(BadInput, match="wanted the beginning of a text, got ''"):
        small.run(model, RunInput(("",)))


def test_a_step_of_a_study_is_the_same_every_time(small: Language) -> None:
    model = small.build(Design(embed_dim=16, num_heads=2, layers=1), seed=0).eval()
    with torch.inference_mode():
        step = small.decode_step(model)
        for _ in range(3):
            step()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe\x00", "cannot read text: not utf-8 text"),
        (b"", "wanted text of 10 documents at least"),
        (b"one line\n" * 12, "12|tokens|pieces"),
        (None, "cannot read text: no such file"),
    ],
)
def test_bad_text_is_one_line(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "text.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(BadInput, match=message) as caught:
        Language(file).prepare()
    assert "\n" not in str(caught.value)


def test_python_files_are_read_from_a_folder(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="holds no Python file"):
        python_files(tmp_path)
    with pytest.raises(BadInput, match="wanted a folder of Python files"):
        python_files(tmp_path / "nowhere")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.py").write_text("x = 1\ny = 2\n")
    (tmp_path / "b.py").write_bytes(b"\xff\xfe")
    assert python_files(tmp_path) == [["x = 1", "y = 2"]]
    assert len(python_files(None)) > 100


def test_the_share_of_lines_that_parse_is_counted(tmp_path: Path) -> None:
    for number in range(30):
        body = "\n".join(f"def f{n}(a):\n    return a + {n * number}" for n in range(20))
        (tmp_path / f"{number}.py").write_text(body)
    task = Code(tmp_path)
    task.prepare()

    class Writer(nn.Module):
        """Writes one text over and over, whatever came before."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.ids = task.tokenizer.encode(text).ids

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            size = task.tokenizer.get_vocab_size()
            wanted = self.ids[ids.shape[1] % len(self.ids)]
            return nn.functional.one_hot(torch.full(ids.shape, wanted), size) * 50.0

    assert task.judge(Writer("x = 1\n"))["lines that parse"] == 1.0
    assert task.judge(Writer("x = = 1\n"))["lines that parse"] == 0.0
