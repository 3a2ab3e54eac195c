"""`headwise whatif`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwise.cli.common import app, working
from headwise.cli.common import console as terminal
from headwise.errors import BadInput

if TYPE_CHECKING:
    from headwise.surgery import Trial, Variant


@app.command()
def whatif(
    model: Annotated[
        str,
        typer.Argument(
            help="A causal language model, as for report; or a folder that headwise train wrote."
        ),
    ],
    text_file: Annotated[
        Path | None,
        typer.Option(
            help="UTF-8 text to measure perplexity on; if not given, the World English Bible."
        ),
    ] = None,
    prune: Annotated[
        str, typer.Option(help="Shares of heads to remove, least important first; '' for none.")
    ] = "0.1,0.2,0.4",
    kv_heads: Annotated[
        str, typer.Option(help="Key/value heads to share down to, parted by commas.")
    ] = "",
    heal: Annotated[int, typer.Option(help="Steps of fine-tuning after each change.")] = 0,
    context: Annotated[
        int | None, typer.Option(help="Tokens of a window; 512 if not given.")
    ] = None,
    windows: Annotated[
        int | None, typer.Option(help="Windows to measure on; 16 if not given.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Picture: .png, .svg or .pdf.")] = None,
    records: Annotated[Path | None, typer.Option(help="Also write the records.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 …")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, mps …")] = "cpu",
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of a failure.")
    ] = False,
) -> None:
    """What fewer heads would cost and save: quality, latency, KV cache, beside the original.

    The quality is perplexity, or the test metric of a trained task.
    """
    from headwise.record import check_writable, write
    from headwise.surgery import what_if
    from headwise.surgery.picture import draw
    from headwise.tasks import runs

    shares, counts = _numbers("--prune", prune, float), _numbers("--kv-heads", kv_heads, int)
    if heal < 0:
        raise BadInput(f"--heal: wanted a number of steps, got {heal}")
    for option, value, least in (("--context", context, 2), ("--windows", windows, 1)):
        if value is not None and value < least:
            raise BadInput(f"{option}: wanted at least {least}, got {value}")
    if out is not None and out.suffix not in (".png", ".svg", ".pdf"):
        raise BadInput(f"--out: {out} must end in .png, .svg or .pdf")
    for path in (out, records):
        if path is not None:
            check_writable(path)
    with working(f"loading {model}") as work:

        def progress(done: int, total: int, line: str) -> None:
            work.update(done, total, line)
            if work.hidden:
                work.say(line)

        changed: Any
        if runs.is_run(Path(model)):
            given = {"--text-file": text_file, "--context": context, "--windows": windows,
                     "--dtype": dtype, "--device": None if device == "cpu" else device}  # fmt: skip
            _task_has_no(model, given)
            changed, trial, title = _task(model, heal, work.say)
        else:
            changed, trial, title = _language(
                model, text_file, context or 512, windows or 16, dtype, device, work.say
            )
        rows = what_if(
            changed,
            trial,
            prune=[float(s) for s in shares],
            kv_heads=[int(c) for c in counts],
            heal_steps=heal,
            say=progress,
        )
    if records is not None:
        write(records, [row.record() for row in rows])
    if out is not None:
        draw(rows, out, title=f"{model}: what if it had fewer heads")
    console = terminal()
    console.print(title, highlight=False, markup=False)
    console.print(_table(rows))
    for path in (out, records):
        if path is not None:
            console.print(f"wrote {path}", highlight=False, markup=False)


def _language(
    model: str,
    text_file: Path | None,
    context: int,
    windows: int,
    dtype: str | None,
    device: str,
    say: Callable[[str], None],
) -> tuple[Any, Trial, str]:
    """(the model, what it is measured by, what the table is of)."""
    import torch

    from headwise import models
    from headwise.cli.texts import read
    from headwise.models.text import encode
    from headwise.surgery import language

    text, name = read(text_file, say)
    loaded = models.load(model, dtype=dtype, device=device, say=say)
    if loaded.kind != "causal":
        raise BadInput(
            f"{model}: whatif measures causal language models and trained tasks, not a model of "
            f"kind {loaded.kind}; headwise.surgery.what_if takes any quality"
        )
    # As many characters as could ever be needed, so that a whole book is not tokenised.
    ids, _ = encode(loaded.processor, text[: 400 * context * windows], special=False)
    trial = language(loaded.model, torch.tensor(ids), context=context, windows=windows)
    return loaded.model, trial, f"{model}, {windows} windows of {context} tokens of {name}"


def _task(folder: str, heal: int, say: Callable[[str], None]) -> tuple[Any, Trial, str]:
    from headwise.tasks import runs, variants

    run = runs.load(Path(folder))
    trial = variants.trial(run, healing=heal, say=say)
    return run.model, trial, f"{folder}: {run.task.name}, its test part"


def _task_has_no(folder: str, given: Mapping[str, object]) -> None:
    named = [option for option, value in given.items() if value is not None]
    if named:
        raise BadInput(
            f"{folder} is a trained task, which is measured as it is on its own test part; leave "
            f"out {', '.join(named)}"
        )


def _table(rows: Sequence[Variant]) -> Any:
    """Columns that all rows lack are left out. In a narrow terminal words wrap, numbers do not."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from headwise.profile.run import words

    first = rows[0]
    arrow = "↓" if first.better == "lower" else "↑"
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    table.add_column("variant", min_width=len("original"))
    columns = {
        f"{first.metric} {arrow}": [f"{row.quality:.4g}" for row in rows],
        "prefill ms": [_ms(row.prefill_ms) for row in rows],
        "token ms": [_ms(row.decode_ms) for row in rows],
        "KV": [words(row.kv_bytes) for row in rows],
        "parameters": [
            f"{row.parameters / 1e6:.1f}M" if row.parameters > 1e6 else f"{row.parameters:,}"
            for row in rows
        ],
    }
    for name, cells in list(columns.items()):
        if all(cell == "" for cell in cells):
            del columns[name]
            continue
        widest = max(map(len, [*cells, *name.split()]))
        table.add_column(fill(name, widest), justify="right", no_wrap=True)
    for number, row in enumerate(rows):
        table.add_row(row.name, *(cells[number] for cells in columns.values()))
    return table


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _numbers(option: str, text: str, kind: type[int] | type[float]) -> list[int | float]:
    try:
        return [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise BadInput(f"{option}: wanted numbers parted by commas, got {text!r}") from None
