"""Runs the examples of a Markdown page and compares what they print with what the page shows.

A ```python block runs; the blocks of a page share their names. A ```text block after it is what it
prints. `python tests/running_docs.py PAGE…` writes the printed text into the pages anew.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path

BLOCK = re.compile(r"```python\n(?P<code>.*?)```\n(?:\n```text\n(?P<shown>.*?)```\n)?", re.DOTALL)
ROOT = Path(__file__).resolve().parent.parent


def pages() -> list[Path]:
    """Every page that carries examples."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in found if page.exists() and BLOCK.search(page.read_text("utf-8"))]


def run(page: Path) -> list[tuple[str, str | None, str]]:
    """Each block of a page: its code, what the page shows, what it printed now."""
    names: dict = {"__name__": "page"}
    results = []
    for block in BLOCK.finditer(page.read_text("utf-8")):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block["code"], f"{page.name}", "exec"), names)
        lines = [line.rstrip() for line in printed.getvalue().splitlines()]
        results.append((block["code"], block["shown"], "\n".join(lines) + "\n" if lines else ""))
    return results


def update(page: Path) -> None:
    """Write what the blocks print into the page."""
    printed = iter([now for _, _, now in run(page)])

    def replace(block: re.Match) -> str:
        now = next(printed)
        shown = f"\n```text\n{now}```\n" if now else ""
        return f"```python\n{block['code']}```\n{shown}"

    page.write_text(BLOCK.sub(replace, page.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        update(Path(name))
