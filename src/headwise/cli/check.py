"""`headwise check`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from headwise.cli.common import app, working
from headwise.cli.common import console as terminal
from headwise.errors import BadInput


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
    console = terminal()
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

    with working(f"loading {source}") as work:
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
