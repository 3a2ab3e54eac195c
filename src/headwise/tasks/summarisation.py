"""A Python function in, one line on what it does, by an encoder-decoder."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable
from typing import Literal

import numpy as np

from headwise._extras import require
from headwise.errors import BadInput
from headwise.tasks.code import python_files
from headwise.tasks.pairs import Pair, PairTask
from headwise.tasks.task import Score

FEWEST_WORDS, MOST_WORDS = 3, 14
FIRST_WORDS = 8
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[^\W\d_A-Z]+|\d+|[^\w\s]+")
_WORD = re.compile(r"[A-Za-z][a-z]+|[A-Z]+|[^\W\d_]+")


class Summarisation(PairTask):
    """A function, its summary."""

    name = "summarisation"
    title = "What does this Python function do, in one line?"
    metric = "ROUGE-L"
    better: Literal["higher", "lower"] = "higher"
    source = "functions of the standard library of the Python that runs, with their docstrings"
    licence = "PSF"
    longest = 64
    held_out = 300

    def groups(self, say: Callable[[str], None]) -> list[list[Pair]]:
        found = [summaries("\n".join(lines)) for lines in python_files(None)]
        groups = [pairs for pairs in found if pairs]
        if sum(map(len, groups)) < 1000:
            raise BadInput(
                f"summarisation: the standard library here has {sum(map(len, groups))} functions "
                "with a docstring, wanted 1,000; give your own pairs with --data"
            )
        return groups

    def reads(self, line: str) -> str:
        """Names fall into their words, so that a word of a name is the word of a sentence."""
        return " ".join(_PART.findall(line)).lower()

    def judge(self, written: list[str], wanted: list[str]) -> Score:
        """ROUGE-L (Lin 2004), its F of each line in percent, the mean as the value; ROUGE-1 too."""
        text = require("torchmetrics.functional.text", extra="tasks", purpose="summarisation")
        keys = ("rougeL", "rouge1")
        both = [
            text.rouge_score(a, b, rouge_keys=keys) for a, b in zip(written, wanted, strict=True)
        ]
        longest, single = (
            100 * np.array([float(found[f"{key}_fmeasure"]) for found in both]) for key in keys
        )
        return Score(float(longest.mean()), longest, {"ROUGE-1": float(single.mean())})

    def baselines(self) -> dict[str, Callable[[], Score]]:
        sources = [source for source, _ in self.parts["test"]]
        wanted = [target for _, target in self.parts["test"]]

        def most_alike() -> Score:
            return self.judge(nearest(self.parts["train"], sources), wanted)

        return {
            "first words": lambda: self.judge(
                [" ".join(_WORD.findall(line)[:FIRST_WORDS]) for line in sources], wanted
            ),
            "summary of the most alike function": most_alike,
            "GRU without attention": self.recurrent,
        }


def summaries(source: str) -> list[Pair]:
    """(the function without its docstring, the docstring's first line) of each function that has
    one of a few words; nothing where the text is no Python."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # escapes that Python will refuse one day
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError):
            return []
    found: list[Pair] = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node)
        if not text or len(node.body) < 2:
            continue
        line = text.strip().splitlines()[0].strip()
        if not FEWEST_WORDS <= len(line.split()) <= MOST_WORDS or not line[0].isalpha():
            continue
        node.body, node.decorator_list = node.body[1:], []
        found.append((" ".join(ast.unparse(node).split()), line))
    return found


def nearest(known: list[Pair], sources: list[str]) -> list[str]:
    """For each source the target of the known source that is most alike: cosine of tf-idf."""
    text = require("sklearn.feature_extraction.text", extra="tasks", purpose="summarisation")
    count = text.TfidfVectorizer(token_pattern=_WORD.pattern, sublinear_tf=True)
    rows = count.fit_transform([source for source, _ in known])
    found = (count.transform(sources) @ rows.T).tocsr()
    return [known[int(found[row].toarray().argmax())][1] for row in range(len(sources))]
