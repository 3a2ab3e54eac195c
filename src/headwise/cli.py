"""The command line: parse, call, print. Exit codes: 0 fine, 1 findings, 2 could not run."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from headwise._extras import require
from headwise.errors import BadInput, HeadwiseError

if TYPE_CHECKING:
    import typer
else:
    try:
        typer = require("typer", extra="report", purpose="the headwise command")
        require("rich", extra="report", purpose="the headwise command")
    except HeadwiseError as error:
        sys.exit(f"headwise: {error}")

# How shells report Ctrl-C.
INTERRUPTED = 130
# What a text model reads when it is given nothing.
SENTENCE = "After Maya placed the book on the table, she left."

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


@app.command()
def report(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A packaged model (headwise models), a Hugging Face directory or hub id, "
            "a GGUF file, or package.module:factory.",
            show_default=False,
        ),
    ] = None,
    text: Annotated[str | None, typer.Option(help="The text to read.")] = None,
    file: Annotated[str | None, typer.Option(help="A text file to read; - is stdin.")] = None,
    image: Annotated[Path | None, typer.Option(help="A picture, for vision models.")] = None,
    audio: Annotated[Path | None, typer.Option(help="A sound, for speech models.")] = None,
    link: Annotated[
        list[str] | None,
        typer.Option(
            metavar="'QUERY -> KEY'",
            help="Name the heads that let QUERY read KEY most. May be repeated.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    records: Annotated[
        Path | None, typer.Option(help="Also write the records, one JSON line each.")
    ] = None,
    from_: Annotated[
        Path | None, typer.Option("--from", help="Draw the page again from records; no model runs.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16, float16, float64; default: as stored.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, mps …")] = "cpu",
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of a failure.")
    ] = False,
) -> None:
    """See what every attention head of a model does on one input: one page, exact statistics."""
    from headwise.record import check_writable, read, write
    from headwise.report import write_report
    from headwise.terminal import print_summary

    inputs = {"text": text, "file": file, "image": image, "audio": audio}
    _one_input(model, from_, **inputs, link=link, records=records, dtype=dtype)
    _apart(out=out, records=records, from_=from_)
    for path in (out, records):
        if path is not None:
            check_writable(path)
    if from_ is not None:
        found = read(from_)
    else:
        assert model is not None
        given = {"text": text, "image": image, "audio": audio}
        if file is not None:
            from headwise.models import read_text

            given["text"] = _read_stdin() if file == "-" else read_text(file)
        found = _examine(model, given, _links(link), dtype, device)
        if records is not None:
            write(records, found)
    write_report(found, out)
    console = _console()
    print_summary(console, found)
    # Not markup: a path may hold [brackets].
    line = f"wrote {out}" + (f" and {records}" if records else "")
    console.print(line, highlight=False, markup=False)


def _read_stdin() -> str:
    """What `read_text` is for a file: UTF-8, whatever the terminal's encoding is."""
    if sys.stdin is None:
        raise BadInput("--file -: standard input is closed; pipe a text into it")
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(
            f"standard input: not UTF-8 text (byte {error.start}); convert it first"
        ) from None


def _apart(**paths: Path | None) -> None:
    """One file is never written over another of the same run."""
    known: dict[Path, str] = {}
    for name, path in paths.items():
        option = "--" + name.rstrip("_")
        if path is not None and known.setdefault(path.resolve(), option) != option:
            raise BadInput(
                f"report: {known[path.resolve()]} and {option} are both {path}; "
                "give each a file of its own"
            )


def _one_input(model: str | None, from_: Path | None, **inputs: Any) -> None:
    named = [f"--{name}" for name, value in inputs.items() if value is not None and value != []]
    if from_ is not None:
        if model is not None or named:
            raise BadInput(
                f"report: --from draws old records and runs nothing; leave out "
                f"{', '.join([model, *named] if model else named)}"
            )
    elif model is None:
        raise BadInput("report: name a model (see headwise models), or --from RECORDS")
    if "--text" in named and "--file" in named:
        raise BadInput("report: give --text or --file, not both")
    if "--image" in named and "--audio" in named:
        raise BadInput("report: give --image or --audio, not both")


def _links(given: list[str] | None) -> list[tuple[str, str]]:
    pairs = []
    for text in given or []:
        query, arrow, key = text.partition("->")
        if not (arrow and query.strip() and key.strip()):
            raise BadInput(
                f"--link: wanted 'QUERY -> KEY', for example 'she -> Maya', got {text!r}"
            )
        pairs.append((query.strip(), key.strip()))
    return pairs


def _examine(
    source: str, given: dict[str, Any], links: list[tuple[str, str]], dtype: str | None, device: str
) -> list[Any]:
    from headwise import models
    from headwise.examine import examine

    with _working(f"loading {source}") as work:
        loaded = models.load(source, dtype=dtype, device=device, say=work.say)
        given = {name: value for name, value in given.items() if value is not None}
        if not given and loaded.takes and loaded.takes[0] == "text":
            given["text"] = SENTENCE
        inputs = loaded.prepare(**given)
        command = shlex.join(["headwise", *sys.argv[1:]])
        return examine(
            loaded,
            inputs,
            links=links,
            progress=lambda done, total, name: work.update(done, total, f"measured {name}"),
            command=command,
        )


@app.command()
def check(
    model: Annotated[
        str,
        typer.Argument(help="As for report: a packaged name, a directory, a hub id, a file …"),
    ],
    only: Annotated[
        str | None, typer.Option(help="Names of checks, parted by commas; all of them by default.")
    ] = None,
    causal: Annotated[
        bool | None,
        typer.Option(
            "--causal/--bidirectional", help="What the model ought to be, if it can't say."
        ),
    ] = None,
    text: Annotated[
        str | None, typer.Option(help="Check on this text; random tokens else.")
    ] = None,
    image: Annotated[Path | None, typer.Option(help="Check on this picture.")] = None,
    audio: Annotated[Path | None, typer.Option(help="Check on this sound.")] = None,
    records: Annotated[Path | None, typer.Option(help="Also write the records.")] = None,
    html: Annotated[Path | None, typer.Option(help="Also write a page.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 …; default: as stored.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, mps …")] = "cpu",
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of a failure.")
    ] = False,
) -> None:
    """Prove a model's attention right, or name the layer and head that let a key through.

    Exit code 0: every check that could run passed. 1: one failed. 2: none could run.
    """
    from headwise.checks import CHECKS
    from headwise.record import check_writable, write
    from headwise.report import write_report
    from headwise.terminal import print_checks

    names = None if only is None else [name.strip() for name in only.split(",") if name.strip()]
    unknown = [name for name in names or [] if name not in CHECKS]
    if unknown or names == []:
        what = repr(unknown[0]) if unknown else "''"
        raise BadInput(f"--only: no check is named {what}; there are {', '.join(CHECKS)}")
    for path in (records, html):
        if path is not None:
            check_writable(path)
    found = _check(
        model, {"text": text, "image": image, "audio": audio}, names, causal, dtype, device
    )
    if records is not None:
        write(records, found)
    if html is not None:
        write_report(found, html)
    console = _console()
    print_checks(console, found)
    for path in (html, records):
        if path is not None:
            console.print(f"wrote {path}", highlight=False)
    statuses = {record.values["status"] for record in found if record.kind == "check"}
    if "failed" in statuses:
        raise typer.Exit(1)
    if "passed" not in statuses:
        raise typer.Exit(2)


def _check(
    source: str,
    given: dict[str, Any],
    names: list[str] | None,
    causal: bool | None,
    dtype: str | None,
    device: str,
) -> list[Any]:
    from headwise import checks, models
    from headwise.examine import model_facts
    from headwise.record import Record

    with _working(f"loading {source}") as work:
        loaded = models.load(source, dtype=dtype, device=device, say=work.say)
        given = {name: value for name, value in given.items() if value is not None}
        inputs = loaded.prepare(**given) if given else None
        found = checks.check(
            loaded,
            inputs,
            only=names,
            causal=causal,
            progress=lambda done, total, name: work.update(done, total, f"checking {name}"),
        )
    command = shlex.join(["headwise", *sys.argv[1:]])
    return [Record("run", {}, {**model_facts(loaded), "command": command}), *found]


@app.command()
def models() -> None:
    """List the packaged models: real ones, fetched once by pip and loaded offline."""
    from rich.table import Table

    from headwise.models import PACKAGED

    table = Table(box=None, pad_edge=False)
    for name in ("name", "what", "download", "licence"):
        table.add_column(name)
    for package in PACKAGED.values():
        table.add_row(package.name, package.about, f"{package.megabytes} MB", package.licence)
    _console().print(table)


@app.command()
def info() -> None:
    """Say what runs here: versions, instruction sets, backends."""
    import platform

    import torch

    from headwise import __version__, native
    from headwise.backends import BACKENDS

    try:
        isa = ", ".join(native.supported())
    except ImportError as error:
        isa = f"unknown: {error}"
    console = _console()
    for name, value in (
        ("headwise", __version__),
        ("torch", f"{torch.__version__}, {torch.get_num_threads()} threads"),
        ("python", f"{platform.python_version()} on {platform.machine()}"),
        ("instruction sets", isa),
        ("backends", ", ".join(backend.name for backend in BACKENDS)),
    ):
        console.print(f"{name:<17} {value}", highlight=False, markup=False)


class _Work:
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
def _working(first: str) -> Iterator[_Work]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = _console(stderr=True)
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        yield _Work(bar, bar.add_task(first, total=None), hidden)


def _console(stderr: bool = False) -> Any:
    from rich.console import Console

    return Console(stderr=stderr, soft_wrap=not sys.stdout.isatty())


def main() -> None:
    """The `headwise` command. A failure that a person can mend is one line and exit code 2."""
    debug = "--debug" in sys.argv[1:]
    try:
        code = app(standalone_mode=False)
    except HeadwiseError as error:
        if debug:
            raise
        _stop(str(error), 2)
    except MemoryError:
        if debug:
            raise
        _stop("out of memory; a shorter input or --dtype bfloat16 needs less", 2)
    except Exception as error:
        if debug:
            raise
        if type(error).__module__.startswith(("typer", "click")) and hasattr(
            error, "format_message"
        ):
            _stop(error.format_message(), 2)
        first = (str(error).strip().splitlines() or [""])[0]
        _stop(f"{type(error).__name__}: {first} (--debug shows where)", 2)
    except KeyboardInterrupt:
        code = INTERRUPTED
    if code == INTERRUPTED:
        _stop("interrupted; nothing was written", INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)


def _stop(message: str, code: int) -> NoReturn:
    print(f"headwise: {message}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
