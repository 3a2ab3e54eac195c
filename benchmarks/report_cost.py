"""Time and peak memory of `headwise report smollm2` as the context grows. `make bench` runs it.

Each length runs in a process of its own, so that its peak memory is its own. The text is English
that every Python carries: the help pages of the language.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LENGTHS = (1024, 2048, 4096, 8000)
# What the maps alone would take, materialised in float32: layers × heads × N² × 4 bytes.
HEADS = 30 * 9


def long_text(tokens: int) -> str:
    """The first `tokens` tokens of the help pages, as text."""
    from pydoc_data.topics import topics

    from headwise.models import load

    tokenizer = load("smollm2").processor
    text = "\n".join(str(topics[name]) for name in sorted(topics))[: tokens * 8]
    ends = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
    return text[: ends[tokens - 1][1]]


def run_one(path: str, tokens: int) -> None:
    """In the child: run the command, check what it wrote, say what it cost."""
    with tempfile.TemporaryDirectory() as place:
        out, records = Path(place) / "report.html", Path(place) / "records.jsonl"
        started = time.perf_counter()
        command = [sys.executable, "-m", "headwise", "report", "smollm2", "--file", path]
        subprocess.run(
            [*command, "--out", str(out), "--records", str(records)],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        seconds = time.perf_counter() - started
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        from headwise.record import read

        heads = [record for record in read(records) if record.kind == "head"]
        assert len(heads) == HEADS, len(heads)
        rows = {record.values["rows"] for record in heads}
        assert abs(max(rows) - tokens) <= 2, rows
        page = out.stat().st_size
        assert page < 5_000_000, page
    print(json.dumps({"tokens": max(rows), "seconds": seconds, "peak": peak, "page": page}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--out", default="bench/report_cost.json")
    parser.add_argument("--one", nargs=2, metavar=("FILE", "TOKENS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        run_one(options.one[0], int(options.one[1]))
        return
    rows = []
    print(f"{'tokens':>7} {'seconds':>8} {'peak GiB':>9} {'page MB':>8} {'maps alone GB':>14}")
    for tokens in map(int, options.lengths.split(",")):
        with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
            file.write(long_text(tokens))
            file.flush()
            child = [
                sys.executable,
                "-m",
                "benchmarks.report_cost",
                "--one",
                file.name,
                str(tokens),
            ]
            done = subprocess.run(child, check=True, stdout=subprocess.PIPE, text=True)
        row = json.loads(done.stdout.splitlines()[-1])
        row["maps"] = HEADS * row["tokens"] ** 2 * 4
        rows.append(row)
        print(
            f"{row['tokens']:>7,} {row['seconds']:>8.1f} {row['peak'] / 2**30:>9.2f} "
            f"{row['page'] / 1e6:>8.2f} {row['maps'] / 1e9:>14.1f}",
            flush=True,
        )
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    Path(options.out).parent.mkdir(parents=True, exist_ok=True)
    Path(options.out).write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    print(f"on {machine}; written to {options.out}")


if __name__ == "__main__":
    main()
