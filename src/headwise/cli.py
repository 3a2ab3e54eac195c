"""The command line: parse, call, print. Exit codes: 0 fine, 1 findings, 2 could not run."""

from __future__ import annotations

import shlex
import sys
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

    _one_input(model, from_, text=text, file=file, image=image, audio=audio)
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

            given["text"] = sys.stdin.read() if file == "-" else read_text(file)
        found = _examine(model, given, _links(link), dtype, device)
        if records is not None:
            write(records, found)
    write_report(found, out)
    console = _console()
    print_summary(console, found)
    console.print(f"wrote {out}" + (f" and {records}" if records else ""), highlight=False)


def _one_input(model: str | None, from_: Path | None, **inputs: Any) -> None:
    named = [f"--{name}" for name, value in inputs.items() if value is not None]
    if from_ is not None:
        if model is not None or named:
            raise BadInput(
                f"report: --from draws old records and runs nothing; leave out "
                f"{', '.join([model] if model else named)}"
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
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from headwise import models
    from headwise.examine import examine

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = _console(stderr=True)
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task(f"loading {source}", total=None)

        def say(line: str) -> None:
            bar.update(task, description=line)
            if hidden:
                print(line, file=sys.stderr)

        loaded = models.load(source, dtype=dtype, device=device, say=say)
        given = {name: value for name, value in given.items() if value is not None}
        if not given and loaded.takes and loaded.takes[0] == "text":
            given["text"] = SENTENCE
        say("reading the input")
        inputs = loaded.prepare(**given)
        bar.update(task, description=f"running {loaded.name}")

        def progress(done: int, expected: int | None, name: str) -> None:
            bar.update(task, completed=done, total=expected, description=f"measured {name}")

        command = shlex.join(["headwise", *sys.argv[1:]])
        found = examine(loaded, inputs, links=links, progress=progress, command=command)
        bar.update(task, description="drawing the page")
    return found


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
