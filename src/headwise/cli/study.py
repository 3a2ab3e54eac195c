"""`headwise study`."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwise.cli.common import app, working
from headwise.cli.common import console as terminal
from headwise.errors import BadInput

if TYPE_CHECKING:
    from headwise.study import Judgement, Results
    from headwise.study.judgement import Difference


@app.command()
def study(
    task: Annotated[str | None, typer.Argument(help="vision, tabular … as for train.")] = None,
    heads: Annotated[str, typer.Option(help="Numbers of heads, parted by commas.")] = "1,2,4,8",
    kv_heads: Annotated[str, typer.Option(help="Numbers of key/value heads; '': as heads.")] = "",
    head_dim: Annotated[
        int | None, typer.Option(help="Features of a head, the same for all.")
    ] = None,
    match: Annotated[
        str, typer.Option(help="What is alike: width, parameters, compute.")
    ] = "width",
    seeds: Annotated[int, typer.Option(help="Trainings of each design.")] = 3,
    budget: Annotated[str, typer.Option(help="quick, full, or seconds of one training.")] = "quick",
    steps: Annotated[int | None, typer.Option(help="Steps, in place of the budget's.")] = None,
    storage: Annotated[
        str, typer.Option(help="An SQLite or PostgreSQL URL; workers with one URL share the work.")
    ] = "sqlite:///headwise-study.db",
    from_: Annotated[
        str | None, typer.Option("--from", help="Draw again what this storage holds; run nothing.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Your own data (docs/tasks.md).")] = None,
    baselines: Annotated[bool, typer.Option(help="Also score the simpler models.")] = True,
    picture: Annotated[Path | None, typer.Option(help="Also draw: .png, .svg or .pdf.")] = None,
    records: Annotated[Path | None, typer.Option(help="Also write the records.")] = None,
    html: Annotated[Path | None, typer.Option(help="Also write a page.")] = None,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of a failure.")
    ] = False,
) -> None:
    """How many heads does a task need? Trains designs over seeds, and answers with intervals."""
    from headwise.record import Record, check_writable, write
    from headwise.report import write_report
    from headwise.study import collect, judge
    from headwise.study.picture import draw
    from headwise.study.records import records as to_records

    if picture is not None and picture.suffix not in (".png", ".svg", ".pdf"):
        raise BadInput(f"--picture: {picture} must end in .png, .svg or .pdf")
    for path in (picture, records, html):
        if path is not None:
            check_writable(path)
    if from_ is not None:
        results = collect(from_)
    elif task is None:
        raise BadInput("study: name a task, or --from STORAGE")
    else:
        results = _run(task, heads, kv_heads, head_dim, match, seeds, budget, steps, storage, data,
                       baselines)  # fmt: skip
    console = terminal()
    judged = judge(results)
    if judged is None:
        raise BadInput(
            f"study: {_left(results)}, and the designs have no seed in common yet; the same "
            "headwise study command goes on"
        )
    _print(console, results, judged)
    every = to_records(results, judged)
    facts = Record("run", {}, {"model": f"a study of {results.plan.task}"})
    if records is not None:
        write(records, [facts, *every])
    if html is not None:
        write_report([facts, *every], html)
    if picture is not None:
        draw(results, judged, picture)
    for path in (picture, records, html):
        if path is not None:
            console.print(f"wrote {path}", highlight=False, markup=False)


def _run(
    name: str, heads: str, kv_heads: str, head_dim: int | None, match: str, seeds: int, budget: str,
    steps: int | None, storage: str, data: Path | None, baselines: bool,
) -> Results:  # fmt: skip
    from headwise.study import Plan, designs_for, run
    from headwise.tasks import load_task

    if data is not None and not data.exists():
        raise BadInput(f"--data: no such file or folder: {data}")
    counts = _numbers("--heads", heads)
    shared: list[int | None] = list(_numbers("--kv-heads", kv_heads)) if kv_heads else [None]
    if seeds < 1:
        raise BadInput(f"--seeds: wanted at least 1, got {seeds}")
    chosen = load_task(name, data)
    if budget in ("quick", "full"):
        plan = chosen.budget(budget)
    else:
        try:
            limit = float(budget)
        except ValueError:
            raise BadInput(f"--budget: wanted quick, full or seconds, got {budget!r}") from None
        if not limit > 0:
            raise BadInput(f"--budget: wanted more than 0 seconds, got {budget}")
        plan = replace(chosen.budget("full"), seconds=limit)
    if steps is not None:
        if steps < 1:
            raise BadInput(f"--steps: wanted at least 1, got {steps}")
        plan = replace(plan, steps=steps, evaluate_every=max(1, min(plan.evaluate_every, steps)))
    with working(f"{name}: reading the data") as work:

        def say(done: int, total: int, line: str) -> None:
            work.update(done, total, line)

        chosen.prepare(work.say)
        designs = designs_for(chosen, counts, kv_heads=shared, head_dim=head_dim, match=match)
        whole = Plan(name, designs, tuple(range(seeds)), plan,
                     None if data is None else str(data.resolve()), match)  # fmt: skip
        return run(whole, storage, task=chosen, say=say, baselines=baselines)


def _print(console: Any, results: Results, judged: Judgement) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    arrow = "↑" if results.better == "higher" else "↓"
    plan = results.plan
    console.print(
        f"{results.title} {len(plan.designs)} designs × {len(plan.seeds)} "
        f"seed{'' if len(plan.seeds) == 1 else 's'}, matched by {plan.match}",
        highlight=False, markup=False,
    )  # fmt: skip
    table = Table(box=SIMPLE_HEAD)
    for name in ("design", f"{results.metric} {arrow}", "± seeds", "against the best, 95 %"):
        table.add_column(name, justify="left" if name == "design" else "right")
    for row in judged.rows:
        apart = row.difference
        table.add_row(
            plan.designs[row.design].label + (" ◀" if row.design == judged.smallest else ""),
            f"{row.mean:.4g}",
            "" if row.spread != row.spread else f"{row.spread:.2g}",
            _against(apart),
        )
    for name, value in results.baselines.items():
        table.add_row(name, f"{value:.4g}", "", "")
    console.print(table)
    console.print(_costs(results))
    console.print(judged.answer, highlight=False, markup=False)
    for line in judged.cautions:
        console.print(f"caution: {line}", highlight=False, markup=False)
    for line in judged.limits:
        console.print(f"cannot tell: {line}", highlight=False, markup=False)
    if results.left:
        console.print(_left(results), highlight=False)


def _costs(results: Results) -> Any:
    """Speed and size of each design; one step of generation where the task generates."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    plan = results.plan
    speeds = [results.speed.get(number, {}) for number in range(len(plan.designs))]
    generates = any(speed.get("decode") is not None for speed in speeds)
    table = Table(box=SIMPLE_HEAD)
    names = ["design", "training, batches/s", "latency, ms", "KV B/token", "parameters"]
    if generates:
        names.insert(3, "next token, ms")
    for name in names:
        table.add_column(name, justify="left" if name == "design" else "right")
    for number, (design, speed) in enumerate(zip(plan.designs, speeds, strict=True)):
        cells = [
            design.label,
            _number(speed.get("train")),
            _number(speed.get("latency"), 1e3),
            f"{design.kv_bytes_per_token(4):,}",
            f"{results.parameters[number]:,}" if results.parameters else "",
        ]
        if generates:
            cells.insert(3, _number(speed.get("decode"), 1e3))
        table.add_row(*cells)
    return table


def _against(apart: Difference | None) -> str:
    if apart is None:
        return "best"
    if apart.low == -math.inf:
        return f"{apart.mean:+.2g}"
    return f"{apart.mean:+.2g} ({apart.low:+.2g}, {apart.high:+.2g})"


def _number(value: float | None, unit: float = 1.0) -> str:
    return "" if value is None else f"{unit * value:.3g}"


def _left(results: Results) -> str:
    """How many trainings are missing, in words."""
    whole = len(results.plan.designs) * len(results.plan.seeds)
    return f"{results.left} of {whole} trainings {'is' if results.left == 1 else 'are'} still to do"


def _numbers(option: str, text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise BadInput(f"{option}: wanted whole numbers from 1, parted by commas, got {text!r}")
    return found
