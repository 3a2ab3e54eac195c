"""`headwise train` and `headwise run`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from headwise.cli.common import app, working
from headwise.cli.common import console as terminal
from headwise.errors import BadInput

DEBUG = typer.Option("--debug", help="Show the traceback of a failure.")


@app.command()
def train(
    task: Annotated[str, typer.Argument(help="vision, tabular, … (a wrong name lists all).")],
    heads: Annotated[int | None, typer.Option(help="Query heads.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Key/value heads.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Features of a head.")] = None,
    embed_dim: Annotated[int | None, typer.Option(help="Features of a token.")] = None,
    layers: Annotated[int | None, typer.Option(help="Blocks of a stack.")] = None,
    budget: Annotated[str, typer.Option(help="quick (minutes) or full.")] = "quick",
    steps: Annotated[int | None, typer.Option(help="Steps, in place of the budget's.")] = None,
    seconds: Annotated[float | None, typer.Option(help="Stop training after so long.")] = None,
    seed: Annotated[int, typer.Option(help="Of weights, batches and dropout.")] = 0,
    data: Annotated[Path | None, typer.Option(help="Your own data (docs/tasks.md).")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder to keep it in; TASK-run if not given.")
    ] = None,
    baselines: Annotated[bool, typer.Option(help="Also train the simpler models.")] = True,
    debug: Annotated[bool, DEBUG] = False,
) -> None:
    """Train a task's model, and print its metric beside simpler models. Goes on after a kill."""
    from rich.table import Table

    from headwise.tasks import Score, load_task, runs
    from headwise.tasks.training import train as fit

    if budget not in ("quick", "full"):
        raise BadInput(f"--budget: wanted quick or full, got {budget!r}")
    if data is not None and not data.exists():
        raise BadInput(f"--data: no such file or folder: {data}")
    chosen = load_task(task, data)
    given = {
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "embed_dim": embed_dim,
        "layers": layers,
    }
    default = chosen.default_design()
    design = replace(default, **{name: n for name, n in given.items() if n is not None})
    plan = chosen.budget(budget)
    if steps is not None:
        plan = replace(plan, steps=steps, evaluate_every=max(1, min(plan.evaluate_every, steps)))
    if seconds is not None:
        plan = replace(plan, seconds=seconds)
    folder = Path(f"{task}-run") if out is None else out
    with working(f"{task}: reading the data") as work:
        chosen.prepare(work.say)
        trained = fit(
            chosen,
            design,
            plan,
            seed,
            folder=folder,
            progress=lambda done, total, line: work.update(done, total, line),
        )
        work.update(0, None, f"{task}: testing")
        test = chosen.evaluate(trained.model, "test")
        others: dict[str, Score] = {}
        for name, simpler in chosen.baselines().items() if baselines else ():
            work.update(0, None, f"{task}: {name}")
            others[name] = simpler()
        runs.save(folder, chosen, design, plan, seed, trained, test, others)
    out_ = terminal()
    extras = list(test.extra)
    table = Table(box=None, pad_edge=False)
    table.add_column("model")
    arrow = "↑" if chosen.better == "higher" else "↓"
    for heading in (f"{chosen.metric} {arrow}", *extras):
        table.add_column(heading, justify="right")
    for name, score in {f"attention, {design.label}": test, **others}.items():
        rest = (f"{score.extra[key]:.4g}" if key in score.extra else "" for key in extras)
        table.add_row(name, f"{score.value:.4g}", *rest)
    out_.print(table)
    out_.print(
        f"{len(test.per_example):,} test examples; {trained.steps:,} steps in "
        f"{trained.seconds:.0f} s, ended by {trained.stopped}; kept in {folder}",
        markup=False,
        highlight=False,
    )


@app.command()
def run(
    folder: Annotated[Path, typer.Argument(help="What headwise train wrote.")],
    given: Annotated[
        list[str] | None, typer.Argument(metavar="[INPUT]...", help="Files, or words.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the files it makes (a forecast's picture).")
    ] = None,
    debug: Annotated[bool, DEBUG] = False,
) -> None:
    """Use a trained task: classify a picture, predict a table's rows, recommend, forecast."""
    import os

    from headwise.tasks import RunInput, runs

    read = runs.load(folder)
    output = read.task.run(read.model, RunInput(tuple(given or ())))
    for line in output.lines:
        print(line)
    for name, content in output.files.items():
        if out is None:
            print(f"{name} is made too: --out FOLDER keeps it there")
            continue
        path = out / name
        partial = path.with_name(path.name + ".partial")
        try:
            out.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(content)
            os.replace(partial, path)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise BadInput(f"--out: cannot write {path}: {reason}") from None
        print(f"written: {path}")
