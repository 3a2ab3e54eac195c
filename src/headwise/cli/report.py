"""`headwise report`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from headwise.cli.common import app, working
from headwise.cli.common import console as terminal
from headwise.errors import BadInput

# What a text model reads when it is given nothing.
SENTENCE = "After Maya placed the book on the table, she left."


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
    importance: Annotated[
        bool,
        typer.Option(
            "--importance",
            help="Also how much the next-token loss leans on each head: one pass more, forward and "
            "backward.",
        ),
    ] = False,
    rollout: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TOKEN",
            help="How much of TOKEN's last vector rolls back to each input token, in encoders. May "
            "be repeated.",
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
    of_model = {"link": link, "importance": importance or None, "rollout": rollout}
    _one_input(model, from_, **inputs, **of_model, records=records, dtype=dtype)
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
        found = _examine(model, given, _links(link), importance, rollout or [], dtype, device)
        if records is not None:
            write(records, found)
    write_report(found, out)
    console = terminal()
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
    source: str,
    given: dict[str, Any],
    links: list[tuple[str, str]],
    importance: bool,
    rollout: list[str],
    dtype: str | None,
    device: str,
) -> list[Any]:
    from headwise import models
    from headwise.examine import examine

    with working(f"loading {source}") as work:
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
            importance=importance,
            rollout=rollout,
            progress=lambda done, total, name: work.update(done, total, f"measured {name}"),
            command=command,
        )
