"""Short verses from English into Spanish, by an encoder-decoder."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from headwise._extras import require
from headwise.tasks.alignment import chances
from headwise.tasks.pairs import Pair, PairTask, in_blocks
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

    def groups(self, say: Callable[[str], None]) -> list[list[Pair]]:
        folder = fetch("english-spanish", say=say)
        both = zip(verses(folder / "english"), verses(folder / "spanish"), strict=True)
        return in_blocks(
            [pair for pair in both if all(0 < len(line.split()) <= MOST_WORDS for line in pair)]
        )

    def lexicon(self) -> Tensor | None:
        """What each piece of a word is likely to become, from the training pairs."""
        ours, theirs, chance = chances([a for a, _ in self.coded], [b for _, b in self.coded])
        keep = chance > 0.05  # the rest is noise of words that met by chance
        ours, theirs, chance = ours[keep], theirs[keep], chance[keep]
        chance = chance / np.bincount(ours, chance)[ours]
        # A piece that training never saw on the left is taken over as it is.
        size = self.tokenizer.get_vocab_size()
        other = np.setdiff1d(np.arange(size), ours)
        places = np.stack([np.append(ours, other), np.append(theirs, other)])
        values = np.append(chance, np.ones(len(other))).astype(np.float32)
        return torch.sparse_coo_tensor(
            torch.from_numpy(places), torch.from_numpy(values), (size, size), check_invariants=True
        ).coalesce()

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


def word_dictionary(pairs: list[Pair]) -> dict[str, str]:
    """The likeliest word of the other side for each word."""
    left: dict[str, int] = {}
    right: dict[str, int] = {}
    sources = [[left.setdefault(word, len(left)) for word in _WORD.findall(a)] for a, _ in pairs]
    targets = [[right.setdefault(word, len(right)) for word in _WORD.findall(b)] for _, b in pairs]
    ours, theirs, chance = chances(sources, targets)
    names, others = list(left), list(right)
    # The likeliest comes last, and stays.
    order = np.argsort(chance, kind="stable")
    return {names[ours[row]]: others[theirs[row]] for row in order}
