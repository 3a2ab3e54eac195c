"""What every command shares: the application, the console, progress."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from headwise._extras import require
from headwise.errors import HeadwiseError

if TYPE_CHECKING:
    import typer
else:
    try:
        typer = require("typer", extra="report", purpose="the headwise command")
        require("rich", extra="report", purpose="the headwise command")
    except HeadwiseError as error:
        sys.exit(f"headwise: {error}")

app = typer.Typer(
    name="headwise",
    help="Multi-head attention that is right, fast, visible and decidable.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _root() -> None:
    """Multi-head attention that is right, fast, visible and decidable."""


class Work:
    """A progress bar on the terminal; plain lines where there is none."""

    def __init__(self, bar: Any, task: Any, hidden: bool) -> None:
        self.bar, self.task, self.hidden = bar, task, hidden

    def say(self, line: str) -> None:
        self.bar.update(self.task, description=line)
        if self.hidden:
            print(line, file=sys.stderr)

    def update(self, done: int, total: int | None, line: str) -> None:
        self.bar.update(self.task, completed=done, total=total, description=line)


@contextmanager
def working(first: str) -> Iterator[Work]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    out = console(stderr=True)
    hidden = not out.is_terminal
    with Progress(*columns, console=out, transient=True, disable=hidden) as bar:
        yield Work(bar, bar.add_task(first, total=None), hidden)


def console(stderr: bool = False) -> Any:
    from rich.console import Console

    return Console(stderr=stderr, soft_wrap=not sys.stdout.isatty())
