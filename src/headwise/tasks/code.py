"""Python source, by a decoder: what comes next, and does what it writes parse?"""

from __future__ import annotations

import ast
import sysconfig
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from headwise.errors import BadInput
from headwise.tasks.decoder import draw
from headwise.tasks.texts import BEGIN, Document, TextTask

# Tests, tables of characters, and what others installed there.
PASSED_OVER = frozenset(
    ("test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data")
)
LARGEST = 200_000  # bytes of a file: larger ones are tables
PROMPTS, PROMPT, LINES = 32, 48, 48  # texts to write on, tokens of each, tokens to write


class Code(TextTask):
    """What comes next in Python?"""

    name = "code"
    title = "What comes next in this Python source?"
    source = "the standard library of the Python that runs"
    licence = "PSF"

    def documents(self, say: Callable[[str], None]) -> list[Document]:
        return python_files(self.data)

    def judge(self, model: nn.Module) -> dict[str, float]:
        """The share of whole lines that parse, among those that are drawn after test texts."""
        prompts = [ids[:PROMPT] for ids, _ in self.parts["test"] if len(ids) >= PROMPT][:PROMPTS]
        if not prompts:
            return {}
        text = draw(model, torch.tensor([[BEGIN, *ids] for ids in prompts]), LINES, seed=0)
        written = [self.tokenizer.decode(ids) for ids in text.tolist()]
        real = [self.tokenizer.decode(ids) for ids, _ in self.parts["test"]]
        return {"lines that parse": _share(written), "of the test text's": _share(real)}


def _share(texts: Sequence[str]) -> float:
    # The first line was begun by the prompt, the last is cut off.
    lines = [line for text in texts for line in text.split("\n")[1:-1] if line.strip()]
    return sum(map(parses, lines)) / len(lines) if lines else 0.0


def python_files(path: Path | None) -> list[Document]:
    """The lines of every Python file under a folder, the standard library where None.

    Raises:
        BadInput: no folder, or no Python file in it that is UTF-8 text.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if path is None else path
    if not root.is_dir():
        raise BadInput(f"code: wanted a folder of Python files, got {root}")
    found: list[Document] = []
    for file in sorted(root.rglob("*.py")):
        if path is None and PASSED_OVER & set(file.relative_to(root).parts):
            continue
        try:
            if file.stat().st_size > LARGEST:
                continue
            found.append(file.read_text(encoding="utf-8").splitlines())
        except (OSError, UnicodeDecodeError):
            continue  # not in UTF-8: some are written so on purpose
    if not found:
        raise BadInput(f"code: {root} holds no Python file that is UTF-8 text")
    return found


def parses(line: str) -> bool:
    """Is the line, by itself or as the head of a block, Python?

    A head (`if x:`, `else:`, `except E:`, `case 1:`, a decorator) is completed with what it needs.
    """
    text = line.strip()
    tries: Sequence[str] = (
        text,
        f"{text}\n pass",
        f"if x:\n pass\n{text}\n pass",
        f"try:\n pass\n{text}\n pass",
        f"{text}\n pass\nfinally:\n pass",
        f"match x:\n {text}\n  pass",
        f"{text}\ndef f(): pass",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # escapes that Python will refuse one day
        return any(map(_is_python, tries))


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    return True
