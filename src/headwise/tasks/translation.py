"""Short verses from English into Spanish, by an encoder-decoder."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

import numpy as np

from headwise._extras import require
from headwise.tasks.pairs import Pair, PairTask
from headwise.tasks.scripture import verses
from headwise.tasks.sources import fetch
from headwise.tasks.task import Score

MOST_WORDS = 16
_WORD = re.compile(r"\w+|[^\w\s]")


class Translation(PairTask):
    """A line in English, a line in Spanish."""

    name = "translation"
    title = "What does this English verse say in Spanish?"
    metric = "chrF"
    better: Literal["higher", "lower"] = "higher"
    source = (
        "Debian sword-text-kjv and sword-text-sparv: verses of at most 16 words, by their place"
    )
    licence = "public domain (the English text is restricted in the UK)"

    def pairs(self, say: Callable[[str], None]) -> list[Pair]:
        folder = fetch("english-spanish", say=say)
        both = zip(verses(folder / "english"), verses(folder / "spanish"), strict=True)
        return [pair for pair in both if all(0 < len(line.split()) <= MOST_WORDS for line in pair)]

    def judge(self, written: list[str], wanted: list[str]) -> Score:
        """chrF (Popović 2015) of each line, its mean over lines as the value; BLEU beside it."""
        metrics = require("sacrebleu.metrics", extra="tasks", purpose="translation")
        chrf = metrics.CHRF()
        each = np.array(
            [chrf.sentence_score(a, [b]).score for a, b in zip(written, wanted, strict=True)]
        )
        # force: no advice on stderr where many lines happen to end in " .".
        bleu = float(metrics.BLEU(force=True).corpus_score(written, [wanted]).score)
        return Score(float(each.mean()), each, {"BLEU": bleu})

    def baselines(self) -> dict[str, Callable[[], Score]]:
        sources = [source for source, _ in self.parts["test"]]
        wanted = [target for _, target in self.parts["test"]]

        def dictionary() -> Score:
            words = word_dictionary(self.parts["train"])
            return self.judge(
                [_WORD.sub(lambda found: words.get(found[0], found[0]), line) for line in sources],
                wanted,
            )

        return {
            "left in English": lambda: self.judge(sources, wanted),
            "word-alignment dictionary": dictionary,
            "GRU without attention": self.recurrent,
        }


def word_dictionary(pairs: list[Pair], rounds: int = 5) -> dict[str, str]:
    """The likeliest word of the other side for each word: IBM Model 1 (Brown et al. 1993), EM."""
    left: dict[str, int] = {}
    right: dict[str, int] = {}
    sources, targets, places = [], [], []
    count = 0
    for a, b in pairs:
        ours = [left.setdefault(word, len(left)) for word in _WORD.findall(a)]
        for word in _WORD.findall(b):
            sources += ours
            targets += [right.setdefault(word, len(right))] * len(ours)
            places += [count] * len(ours)
            count += 1
    source, place = np.array(sources), np.array(places)
    code, entry = np.unique(source * len(right) + np.array(targets), return_inverse=True)
    chance = np.ones(len(code))
    for _ in range(rounds):
        share = chance[entry]
        share = share / np.bincount(place, share, count)[place]
        counted = np.bincount(entry, share, len(code))
        chance = counted / np.bincount(code // len(right), counted, len(left))[code // len(right)]
    names, others = list(left), list(right)
    return {
        names[code[row] // len(right)]: others[code[row] % len(right)]
        for row in np.argsort(chance, kind="stable")
    }
