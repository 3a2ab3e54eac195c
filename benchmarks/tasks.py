"""Every task at its quick budget, beside its baselines. `make tasks` runs it.

Each task runs in a process of its own, on one thread, so that its CPU seconds are its own. The
table is printed and written to bench/tasks.json; `--write-docs` puts it into docs/tasks.md. The
exit code is 1 where an attention model does not beat its simplest baseline, or takes more than
three minutes of CPU to train and test (the table's seconds are with the baselines' training).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

BEGIN = "<!-- measured: begin (python -m benchmarks.tasks --write-docs) -->"
END = "<!-- measured: end -->"
DOCS = Path("docs/tasks.md")
MOST_SECONDS = 180


def run_one(name: str) -> None:
    """In the child: train one task, score it and its baselines, print one line of JSON."""
    import torch

    from headwise.tasks import load_task
    from headwise.tasks.training import train

    torch.set_num_threads(1)
    task = load_task(name)
    started, cpu = time.perf_counter(), time.process_time()
    task.prepare(lambda line: print(line, file=sys.stderr))
    clock = [time.process_time()]

    def lap() -> float:
        clock.append(time.process_time())
        return clock[-1] - clock[-2]

    design = task.default_design()
    trained = train(task, design, task.budget("quick"), seed=0)
    row: dict[str, Any] = {
        "task": name,
        "metric": task.metric,
        "better": task.better,
        "design": design.label,
        "parameters": sum(weight.numel() for weight in trained.model.parameters()),
        "steps": trained.steps,
        "cpu_training": lap(),
    }
    score = task.evaluate(trained.model, "test")
    row |= {
        "value": score.value,
        "extra": dict(score.extra),
        "examples": len(score.per_example),
        "cpu_testing": lap(),
        "baselines": [],
    }
    for label, fit in task.baselines().items():
        found = fit()
        row["baselines"].append(
            {"name": label, "value": found.value, "extra": dict(found.extra), "cpu": lap()}
        )
    row["cpu"] = time.process_time() - cpu
    row["seconds"] = time.perf_counter() - started
    print(json.dumps(row))


def better(row: dict[str, Any], baseline: dict[str, Any]) -> bool:
    """Is the attention model better than this baseline?"""
    gain = row["value"] - baseline["value"]
    return bool(gain > 0 if row["better"] == "higher" else gain < 0)


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The rows as a Markdown table; the best of each task is bold."""
    lines = [
        "| task | metric | attention | baselines, the simplest first | test examples "
        "| CPU s, baselines too |",
        "| --- | --- | --- | --- | ---: | ---: |",
    ]
    for row in rows:
        pick = max if row["better"] == "higher" else min
        best = pick([row["value"], *(part["value"] for part in row["baselines"])])

        def shown(value: float, best: float = best) -> str:
            return f"**{value:.4g}**" if value == best else f"{value:.4g}"

        others = ", ".join(f"{part['name']} {shown(part['value'])}" for part in row["baselines"])
        sign = "↑" if row["better"] == "higher" else "↓"
        lines.append(
            f"| {row['task']} | {row['metric']} {sign} | {shown(row['value'])} | {others} "
            f"| {row['examples']:,} | {row['cpu']:.0f} |"
        )
    return lines


def told(rows: list[dict[str, Any]], machine: str) -> str:
    """The table, and in words where a simpler model wins."""
    lines = [*table(rows), ""]
    for row in rows:
        ahead = [part["name"] for part in row["baselines"] if not better(row, part)]
        if ahead:
            lines.append(
                f"- {row['task']}: attention is not better than {', '.join(ahead)} at this budget."
            )
    lines += ["" if lines[-1] else None, f"Measured on {machine}, one seed, one thread a task."]
    return "\n".join(line for line in lines if line is not None)


def write_docs(text: str) -> None:
    """Put the text between the two marks of docs/tasks.md."""
    page = DOCS.read_text(encoding="utf-8")
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        sys.exit(f"{DOCS}: wanted the two marks {BEGIN!r} and {END!r}, once each")
    before, rest = page.split(BEGIN)
    partial = DOCS.with_suffix(".partial")
    partial.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}", encoding="utf-8")
    os.replace(partial, DOCS)


def main() -> int:
    from headwise.tasks import TASKS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", nargs="*", help=f"some of {', '.join(TASKS)}; all where none")
    parser.add_argument("--out", default="bench/tasks.json")
    parser.add_argument("--write-docs", action="store_true", help="all tasks only")
    parser.add_argument("--one", metavar="TASK", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        run_one(options.one)
        return 0
    unknown = [name for name in options.tasks if name not in TASKS]
    if unknown:
        parser.error(f"no task is named {unknown[0]!r}: tasks are {', '.join(TASKS)}")
    if options.write_docs and options.tasks:
        parser.error("--write-docs writes the table of all tasks: name none")
    rows = []
    for name in options.tasks or TASKS:
        child = [sys.executable, "-m", "benchmarks.tasks", "--one", name]
        print(f"{name} …", end=" ", file=sys.stderr, flush=True)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(child, stdout=subprocess.PIPE, text=True, env=environment)
        if done.returncode:
            print(f"the task {name} failed, exit code {done.returncode}", file=sys.stderr)
            return 2
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(f"{rows[-1]['seconds']:.0f} s", file=sys.stderr, flush=True)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    text = told(rows, machine)
    print(text)
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_suffix(".partial")
    partial.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    os.replace(partial, out)
    print(f"written to {out}", file=sys.stderr)
    if options.write_docs:
        write_docs(text)
        print(f"the table in {DOCS} is written anew", file=sys.stderr)
    failed = [row["task"] for row in rows if not better(row, row["baselines"][0])]
    slow = [row["task"] for row in rows if row["cpu_training"] + row["cpu_testing"] > MOST_SECONDS]
    for names, why in ((failed, "not better than its simplest baseline"), (slow, "over 3 minutes")):
        for name in names:
            print(f"{name}: {why}", file=sys.stderr)
    return 1 if failed or slow else 0


if __name__ == "__main__":
    sys.exit(main())
