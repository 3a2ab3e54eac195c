"""Translation and summarisation: generation with caches and without, beams, pairs from files,
verses, alignments, summaries of functions."""

from __future__ import annotations

import itertools
import struct
import zlib
from pathlib import Path

import pytest
import torch

from headwise.errors import BadFile, BadInput
from headwise.tasks import Design
from headwise.tasks.alignment import chances
from headwise.tasks.pairs import collate, in_blocks, read_pairs, split_groups
from headwise.tasks.scripture import plain, verses
from headwise.tasks.seq2seq import BEGIN, END, PAD, Seq2Seq, beam, cut, greedy
from headwise.tasks.summarisation import Summarisation, nearest, summaries
from headwise.tasks.translation import Translation, word_dictionary


def model(vocabulary: int = 12, seed: int = 0) -> Seq2Seq:
    """Random weights large enough that what it writes changes from step to step."""
    torch.manual_seed(seed)
    made = Seq2Seq(Design(embed_dim=16, num_heads=4, num_kv_heads=2), vocabulary).eval()
    for weight in made.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.5)
    return made


def sources() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(3, 12, (5, 7), generator=torch.Generator().manual_seed(1))
    real = torch.arange(7)[None] < torch.tensor([7, 3, 5, 1, 6])[:, None]
    return ids.masked_fill(~real, PAD), real


# Models that write something: other seeds may end at once.
@pytest.mark.parametrize("seed", range(3))
def test_greedy_with_caches_equals_greedy_without_and_ignores_padding(seed: int) -> None:
    made, (ids, real) = model(seed=seed), sources()
    cached = greedy(made, ids, real, 15)
    assert cached == greedy(made, ids, real, 15, cached=False)
    for row, length in enumerate(real.sum(1).tolist()):
        alone = greedy(made, ids[row : row + 1, :length], real[row : row + 1, :length], 15)
        assert alone == cached[row : row + 1]
    assert len({tuple(row) for row in cached}) > 1


@torch.no_grad()
def test_a_step_reads_what_the_whole_forward_reads() -> None:
    made, (ids, real) = model(), sources()
    target = torch.tensor([[BEGIN, 4, 7, 5, 9]]).expand(5, -1)
    whole = made(ids, target, ~real)
    memory = made.remember(ids, real, 5)
    for place in range(5):
        torch.testing.assert_close(made.step(target[:, place], memory), whole[:, place])


@pytest.mark.parametrize("seed", range(4))
def test_a_wide_beam_finds_the_best_of_all_texts(seed: int) -> None:
    made = model(vocabulary=6, seed=seed)
    source, limit = torch.tensor([3, 5, 4]), 3
    with torch.inference_mode():
        best, text = -torch.inf, []
        for length in range(limit):
            for words in itertools.product((PAD, BEGIN, 3, 4, 5), repeat=length):
                target = torch.tensor([[BEGIN, *words]])
                chances = made(source[None], target).log_softmax(-1)[0]
                wanted = torch.tensor([*words, END])
                value = float(chances[torch.arange(length + 1), wanted].sum()) / (length + 1)
                if value > best:
                    best, text = value, list(words)
    # Wide enough that nothing is dropped and no early end stops the search.
    assert beam(made, source, limit, width=200) == text


def test_one_beam_is_greedy() -> None:
    made, (ids, real) = model(), sources()
    found = greedy(made, ids[:1], real[:1], 8)[0]
    assert beam(made, ids[0], 8, width=1) == found
    assert cut([4, 5, END, 6]) == [4, 5] and cut([4, PAD]) == [4] and cut([4]) == [4]


def test_what_is_wanted_is_what_was_given_one_step_later() -> None:
    given, wanted = collate([([5, 6], [7]), ([5], [8, 9])])
    assert given["src"].tolist() == [[5, 6], [5, PAD]]
    assert given["src_key_padding_mask"].tolist() == [[False, False], [False, True]]
    assert given["tgt"].tolist() == [[BEGIN, 7, PAD], [BEGIN, 8, 9]]
    assert wanted.tolist() == [[7, END, PAD], [8, 9, END]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("one\ttwo\nalone\n", r"pairs.tsv, line 2: wanted two columns .* got 1 in 'alone'"),
        ("a\tb\tc\n", r"line 1: wanted two columns .* got 3"),
        ("a\tb\n", r"1 pairs; 100 at least"),
    ],
)
def test_a_file_that_holds_no_pairs_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "pairs.tsv"
    file.write_text(text)
    with pytest.raises(BadInput, match=message):
        read_pairs(file)
    with pytest.raises(BadInput, match=r"missing.tsv: cannot read pairs: no such file"):
        read_pairs(tmp_path / "missing.tsv")


def test_no_source_line_of_training_is_held_out() -> None:
    pairs = [(f"line {number % 900}", f"línea {number}") for number in range(1000)]
    parts = split_groups(in_blocks(pairs), seed=0)
    trained = {source for source, _ in parts["train"]}
    assert len(parts["train"]) >= 700
    for name in ("validation", "test"):
        assert parts[name] and not trained & {source for source, _ in parts[name]}
    groups = in_blocks(pairs)
    assert split_groups(groups, seed=0) == parts != split_groups(groups, seed=1)
    # No group is on two sides.
    sides = [{groups.index(g) for g in groups if set(g) & set(part)} for part in parts.values()]
    assert sum(map(len, sides)) == len(set().union(*sides))


def test_verses_are_read_by_their_place(tmp_path: Path) -> None:
    text = b'In <w lemma="x">the</w> beginning<note>Heb.</note>.<title>no</title>'
    packed = zlib.compress(b"...." + text)
    for part in ("ot", "nt"):
        (tmp_path / f"{part}.bzz").write_bytes(b"!!" + packed)
        (tmp_path / f"{part}.bzs").write_bytes(struct.pack("<III", 2, len(packed), 99))
        places = [(0, 0, 0), (0, 4, len(text))]
        (tmp_path / f"{part}.bzv").write_bytes(b"".join(struct.pack("<IIH", *p) for p in places))
    assert verses(tmp_path) == ["", "In the beginning."] * 2
    assert plain("¶ a &amp;\n b") == "a & b"
    (tmp_path / "nt.bzz").write_bytes(b"no zlib here, only plain words that do not unpack")
    with pytest.raises(BadFile, match=r"nt: not a SWORD text"):
        verses(tmp_path)


def test_words_that_always_meet_are_translations() -> None:
    pairs = [("red house", "casa roja"), ("red book", "libro rojo"), ("the house", "la casa")]
    pairs += [("the book", "el libro"), ("big house", "casa grande"), ("big book", "libro grande")]
    words = word_dictionary(pairs)
    assert words["house"] == "casa" and words["book"] == "libro" and words["big"] == "grande"


def test_chrf_is_the_mean_over_lines() -> None:
    score = Translation().judge(["la casa", "nada"], ["la casa", "xyz"])
    assert score.per_example.tolist() == [100.0, 0.0] and score.value == 50.0


def test_alignments_are_chances_and_settle_on_what_explains_most() -> None:
    # 1 always meets 11; 2 meets 12, both together both.
    sources, targets = [[1], [1, 2], [2, 3]], [[11], [11, 12], [12, 13]]
    ours, theirs, chance = chances(sources, targets, rounds=30)
    for word in (1, 2, 3):
        assert chance[ours == word].sum() == pytest.approx(1.0)
    best = {word: int(theirs[ours == word][chance[ours == word].argmax()]) for word in (1, 2, 3)}
    assert best == {1: 11, 2: 12, 3: 13}
    # One round by hand: of 11 in line 2 a half goes to 1, so 1 has 1 + 0.5 of 11 and 0.5 of 12.
    ours, theirs, chance = chances(sources, targets, rounds=1)
    assert chance[(ours == 1) & (theirs == 11)] == pytest.approx(1.5 / 2.0)


def pair_file(folder: Path) -> Path:
    """Lines in two made-up languages, word for word."""
    words = {"red": "rojo", "house": "casa", "old": "viejo", "tree": "arbol", "sea": "mar"}
    names = list(words)
    lines = []
    for number in range(300):
        chosen = [names[(number * step + step) % 5] for step in (1, 2, 3)]
        lines.append(f"{number} {' '.join(chosen)}\t{number} {' '.join(words[w] for w in chosen)}")
    file = folder / "pairs.tsv"
    file.write_text("\n".join(lines))
    return file


def test_source_words_begin_as_their_likely_translations(tmp_path: Path) -> None:
    task = Translation(pair_file(tmp_path))
    task.prepare()
    assert task.first is not None
    rows = task.first.to_dense()
    assert rows.sum(1).numpy() == pytest.approx(1.0, abs=1e-5)
    made = task.build(Design(embed_dim=16, num_heads=2, layers=1), seed=0)
    assert isinstance(made, Seq2Seq)
    wanted = rows @ made.embedding.weight.detach()
    torch.testing.assert_close(made.source_embedding.weight.detach(), wanted)
    house, casa = (task.tokenizer.token_to_id("▁" + word) for word in ("house", "casa"))
    assert int(rows[house].argmax()) == casa
    # Without a lexicon each id begins as itself, so that words can be copied.
    plain_ = Seq2Seq(Design(embed_dim=16, num_heads=2, layers=1), 12)
    assert torch.equal(plain_.source_embedding.weight, plain_.embedding.weight)
    with torch.inference_mode():
        step = task.decode_step(made.eval())
        step()
        step()


def test_names_fall_into_their_words_before_they_are_read() -> None:
    read = Summarisation().reads
    assert read("def getHTTPReply(self, max_size=10):") == (
        "def get http reply ( self , max size = 10 ):"
    )
    assert read("über_größe") == "über größe"


SOURCE = '''
class A:
    @property
    def size(self):
        """Return the size in bytes.

        More.
        """
        return len(self.data)

    def bare(self):
        """Only a docstring here."""

    def short(self):
        """Two words"""
        return 1

async def fetch(url):
    "Fetch the page at the given address"
    return await get(url)
'''


def test_functions_are_summed_up_by_their_docstrings() -> None:
    assert sorted(summaries(SOURCE)) == [
        ("async def fetch(url): return await get(url)", "Fetch the page at the given address"),
        ("def size(self): return len(self.data)", "Return the size in bytes."),
    ]
    assert summaries("no python (") == []


def test_the_most_alike_function_lends_its_summary() -> None:
    known = [("def open file", "Open it."), ("def close socket", "Close it."), ("x", "None.")]
    assert nearest(known, ["def close the socket", "file open"]) == ["Close it.", "Open it."]


def test_rouge_is_the_mean_over_lines() -> None:
    score = Summarisation().judge(["return the size", "no"], ["Return the size.", "open a file"])
    assert score.per_example.tolist() == pytest.approx([100.0, 0.0])
    assert score.value == pytest.approx(50.0) and score.extra["ROUGE-1"] == pytest.approx(50.0)
