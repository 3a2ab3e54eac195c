"""Do the tests notice? Puts one small fault at a time into a copy of the package and runs them.

    python tests/mutations.py [--only PATTERN] [--jobs N]

For each fault in the folder `mutants`: src and tests are copied to a temporary folder, the fault is
written into the copy, and the named test files run there until one test fails. A fault that no test
notices SURVIVED, and the exit code is 1. At the end the tests that did the killing run on a copy
without a fault, where all of them must pass: red tests prove nothing in a suite that is red anyway.

Not collected by pytest; `make mutants` runs it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 300  # seconds for one fault; the slowest test file takes a tenth of that
PASSED, FAILED = 0, 1  # pytest's own exit codes
WRONG_PACKAGE = 97  # ours: the child imported another headwise than the copy


class Outcome(NamedTuple):
    """What a fault led to: killed (by a test), SURVIVED, or broken (it proves nothing)."""

    mutant: Mutant
    status: str
    detail: str
    seconds: float


# --- in the child ---------------------------------------------------------------------------------


class FirstFailure:
    """A pytest plugin: remembers the first test that failed, and any file that did not import."""

    def __init__(self) -> None:
        self.test: str | None = None
        self.broken: str | None = None

    def pytest_load_initial_conftests(self) -> None:
        # A failing example is enough here: no time for a smaller one. The seed is fixed, so that
        # a fault killed today is killed tomorrow.
        import hypothesis

        phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
        hypothesis.settings.register_profile("mutants", deadline=None, phases=phases, database=None)

    def pytest_runtest_logreport(self, report: object) -> None:
        if getattr(report, "failed", False) and self.test is None:
            self.test = report.nodeid  # type: ignore[attr-defined]

    def pytest_collectreport(self, report: object) -> None:
        if getattr(report, "failed", False):
            self.broken = f"{report.nodeid} does not import"  # type: ignore[attr-defined]


def child(tree: Path, answer: Path, arguments: list[str]) -> int:
    """Run pytest upon the package in `tree`, and upon no other; writes what failed to `answer`."""
    # The import hook of an editable install stands before sys.path: with it in place the tests
    # would quietly import the real package and every fault would survive.
    sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in _home(f)]
    sys.path.insert(0, str(tree / "src"))
    # Looked up and not imported: pytest wants to load plugins itself.
    spec = importlib.util.find_spec("headwise")
    if spec is None or not _inside(spec.origin, tree):
        print(f"found {spec and spec.origin}, wanted a module below {tree}", file=sys.stderr)
        return WRONG_PACKAGE
    import pytest

    watch = FirstFailure()
    options = ["-q", "-p", "no:cacheprovider", "--hypothesis-profile=mutants"]
    arguments = [*options, "--hypothesis-seed=0", *arguments]
    code = int(pytest.main(arguments, plugins=[watch]))
    strays = [
        name
        for name, module in sys.modules.items()
        if name.split(".")[0] == "headwise" and not _inside(module.__file__, tree)
    ]
    if strays:
        print(f"not from the copy: {', '.join(strays)}", file=sys.stderr)
        return WRONG_PACKAGE
    answer.write_text(json.dumps({"test": watch.test, "broken": watch.broken}), encoding="utf-8")
    return code


def _home(finder: object) -> str:
    """Module and class of a finder: an editable install's module is named for what it is."""
    kind = finder if isinstance(finder, type) else type(finder)
    return f"{kind.__module__}.{kind.__qualname__}".lower()


def _inside(file: str | None, tree: Path) -> bool:
    return file is not None and tree in Path(file).resolve().parents


# --- in the parent --------------------------------------------------------------------------------


@contextmanager
def copied() -> Iterator[Path]:
    """A temporary folder with src, tests, the compiled module and what configures pytest."""
    with tempfile.TemporaryDirectory(prefix="headwise-mutant-") as folder:
        tree = Path(folder).resolve()
        for name in ("src", "tests"):
            shutil.copytree(
                ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", ".*")
            )
        shutil.copy(ROOT / "pyproject.toml", tree)
        compiled = importlib.util.find_spec("headwise._native")
        if compiled is None or compiled.origin is None:
            raise SystemExit("mutations: the native module is not installed; run make first")
        shutil.copy(compiled.origin, tree / "src" / "headwise")
        yield tree


def run(tree: Path, arguments: list[str]) -> tuple[int, dict[str, str | None], str]:
    """pytest in a child: its exit code, what failed, and the end of what it printed."""
    answer = tree / "answer.json"
    command = [sys.executable, str(tree / "tests" / "mutations.py")]
    command += ["--child", str(tree), str(answer), *arguments]
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    surroundings.pop("PYTHONPATH", None)
    done = subprocess.run(
        command, cwd=tree, env=surroundings, capture_output=True, text=True, timeout=LIMIT
    )
    found = json.loads(answer.read_text(encoding="utf-8")) if answer.exists() else {}
    return done.returncode, found, (done.stdout + done.stderr)[-2000:]


def files(tests: str) -> list[str]:
    """ "masks attention::TestDropout" → the paths that pytest takes."""
    paths = []
    for name in tests.split():
        stem, *rest = name.split("::")
        paths.append("::".join((f"tests/test_{stem}.py", *rest)))
    return paths


def misplaced(mutant: Mutant) -> str | None:
    """None where the text to change stands exactly once in its file, else what is wrong."""
    count = (ROOT / "src" / "headwise" / mutant.file).read_text(encoding="utf-8").count(mutant.old)
    if count == 1 and mutant.old != mutant.new:
        return None
    return f"{mutant.what!r} changes {mutant.old!r} in {mutant.file}, which stands there {count}×"


def try_out(mutant: Mutant) -> Outcome:
    start = time.monotonic()

    def outcome(status: str, detail: str) -> Outcome:
        return Outcome(mutant, status, detail, time.monotonic() - start)

    with copied() as tree:
        path = tree / "src" / "headwise" / mutant.file
        source = path.read_text(encoding="utf-8").replace(mutant.old, mutant.new)
        compile(source, str(path), "exec")  # a fault must not be a slip of the pen
        path.write_text(source, encoding="utf-8")
        try:
            code, found, printed = run(tree, ["-x", *files(mutant.tests)])
        except subprocess.TimeoutExpired:
            return outcome("broken", f"no answer within {LIMIT} s")
    if code == PASSED:
        return outcome("SURVIVED", f"all of {mutant.tests} pass")
    if code == FAILED and found.get("test") and not found.get("broken"):
        return outcome("killed", str(found["test"]))
    last = " / ".join(printed.strip().splitlines()[-3:])
    return outcome("broken", found.get("broken") or f"pytest ended with {code}: {last}")


def control(outcomes: list[Outcome]) -> str | None:
    """The tests that killed, on a copy without a fault: None when all pass, else what is wrong."""
    killers = sorted({o.detail for o in outcomes if o.status == "killed"})
    if not killers:
        return None
    with copied() as tree:
        try:
            code, found, printed = run(tree, ["-x", *killers])
        except subprocess.TimeoutExpired:
            return f"the {len(killers)} tests that killed take over {LIMIT} s without a fault"
    if code == PASSED:
        return None
    return f"{found.get('test')} fails without a fault too, so it proves nothing\n{printed}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", metavar="PATTERN", help="faults whose file or name holds this (or matches: *?)"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="copies tested at once")
    options = parser.parse_args()
    pattern = f"*{options.only or ''}*".lower()
    chosen = [m for m in MUTANTS if fnmatch(f"{m.file}: {m.what}".lower(), pattern)]
    if not chosen:
        sys.exit(f"mutations.py: no fault matches {options.only!r}; there are {len(MUTANTS)}")
    stale = [problem for problem in map(misplaced, chosen) if problem]
    if stale:
        sys.exit("mutations.py: bring tests/mutants up to date\n" + "\n".join(stale))
    outcomes = []
    with ThreadPoolExecutor(max(1, options.jobs)) as pool:
        for outcome in pool.map(try_out, chosen):
            outcomes.append(outcome)
            name = f"{outcome.mutant.file}: {outcome.mutant.what}"
            detail = outcome.detail.removeprefix("tests/")
            print(f"{outcome.status:8} {name:76} {outcome.seconds:4.0f} s  {detail}", flush=True)
    wrong = control(outcomes)
    if wrong:
        print(f"control: {wrong}")
    killed = sum(outcome.status == "killed" for outcome in outcomes)
    total = sum(outcome.seconds for outcome in outcomes)
    print(f"{killed} of {len(outcomes)} faults killed, in {total:.0f} s")
    return 1 if wrong or killed < len(outcomes) else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        sys.exit(child(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]))
    sys.exit(main())
