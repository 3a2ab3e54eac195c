"""The house: which part may import which, what `import headwise` costs, what the repository
holds."""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "headwise"

# From the ground up. A part imports only from the rows above it in this list.
FLOORS: list[set[str]] = [
    {"errors"},
    {"_extras", "_native"},
    {"intervals", "record", "native"},
    {"masks", "rotary"},
    {"call", "positions", "options"},
    {"reference", "quantized"},
    {"backends"},
    {"again"},
    {"attention"},
    {"accelerated"},
    {"cache"},
    {"int8_cache"},
    {"arguments", "trace"},
    {"layer"},
    {"models", "watch"},
    {"hf_cache"},
    {"hf"},
    {"statistics"},
    {"checks"},
    {"links"},
    {"profile", "surgery"},
    {"tasks"},
    {"study"},
    {"report", "terminal"},
    {"examine"},
    {"cli", "pytest_plugin"},
    {"__main__"},
]
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}

# Doors that open only when somebody walks through: an import inside a function, upwards, on
# purpose.
UPWARD = {
    # A watched object shows itself: its statistics, and in a notebook the overview.
    ("watch", "statistics"),
    # A layer made from another library's module, whose families surgery knows.
    ("layer", "surgery"),
    # The directory of a trained task is one of the sources of models.
    ("models", "tasks"),
    ("__init__", "examine"),
    ("__init__", "report"),
}


def _part(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".pyi").removesuffix(".py")


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def _imports(tree: ast.AST, inside: bool = False) -> Iterator[tuple[str, bool]]:
    """(imported module or name, whether inside a function); imports for types alone do not
    count."""
    for node in ast.iter_child_nodes(tree):
        if _is_type_checking(node):
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            if node.module == "headwise":
                yield from ((f"headwise.{alias.name}", inside) for alias in node.names)
            else:
                yield str(node.module), inside
        deeper = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from _imports(node, deeper)


def _sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def _own_imports(path: Path) -> list[tuple[str, bool]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [(name, inside) for name, inside in _imports(tree) if name.split(".")[0] == "headwise"]
    parts = [(name.split(".")[1] if "." in name else "", inside) for name, inside in found]
    # `from headwise import __version__`: a name of the front door, which stands on the statistics.
    return [(name if (PACKAGE / name).exists() or name in FLOOR else "", at) for name, at in parts]


def test_every_part_has_its_floor() -> None:
    parts = {_part(path) for path in _sources()} - {"__init__"}
    assert parts <= set(FLOOR), f"give {sorted(parts - set(FLOOR))} a place in FLOORS"


@pytest.mark.parametrize("path", _sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_downwards(path: Path) -> None:
    part = _part(path)
    for imported, inside in _own_imports(path):
        if imported == part or (inside and (part, imported) in UPWARD):
            continue
        if part == "__init__":
            # The front door shows the public names: it may open any part, but no page and no
            # command.
            floor = FLOOR[imported or "statistics"]
            assert floor <= FLOOR["statistics"], f"headwise imports {imported}"
            continue
        floor = FLOOR[imported or "statistics"]
        assert floor < FLOOR[part], f"{part} imports {imported or 'headwise'}, above it"


def test_the_report_is_drawn_from_records_alone() -> None:
    for path in sorted((PACKAGE / "report").rglob("*.py")):
        own = {name for name, _ in _own_imports(path)}
        assert own <= {"report", "record", "errors", "_extras"}, f"{path.name} imports {own}"
        tree = ast.parse(path.read_text(encoding="utf-8"))
        heavy = {name.split(".")[0] for name, _ in _imports(tree)} & {"torch", "transformers"}
        assert not heavy, f"{path.name} imports {heavy}"


def test_a_record_knows_no_torch() -> None:
    tree = ast.parse((PACKAGE / "record.py").read_text(encoding="utf-8"))
    assert "torch" not in {name.split(".")[0] for name, _ in _imports(tree)}


_PROBE = """
import sys, time
import numpy, torch
before = set(sys.modules)
start = time.process_time()
import headwise
spent = time.process_time() - start
new = {name.split(".")[0] for name in set(sys.modules) - before}
print(spent)
print(" ".join(sorted(new - set(sys.stdlib_module_names))))
"""


def _probe() -> tuple[float, set[str]]:
    result = subprocess.run(
        [sys.executable, "-c", _PROBE], capture_output=True, text=True, check=True
    )
    spent, new = result.stdout.split("\n")[:2]
    return float(spent), set(new.split())


def test_import_needs_torch_and_numpy_only_and_costs_little() -> None:
    """Processor time, so that a busy machine does not change it; the median of three."""
    runs = [_probe() for _ in range(3)]
    allowed = {"headwise", "torch", "numpy"}
    assert runs[0][1] <= allowed, f"import headwise also imports {sorted(runs[0][1] - allowed)}"
    spent = statistics.median(seconds for seconds, _ in runs)
    assert spent < 0.3, f"import headwise takes {spent:.2f} s of processor time beyond torch"


def _tracked() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_no_file_is_over_a_megabyte() -> None:
    large = {path.name: path.stat().st_size for path in _tracked() if path.stat().st_size > 1 << 20}
    assert not large


def test_no_path_of_one_machine_and_no_registry_host_is_in_the_repository() -> None:
    homes = "|".join(("root", "home", "work", "opt", "Users"))
    hosts = "|".join(("pypi" + r"\.org", "pythonhosted" + r"\.org", "download" + r"\.pytorch"))
    pattern = re.compile(rf"(?<![\w./])/(?:{homes})/\w+|{hosts}")
    found = []
    for path in _tracked():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}: {match[0]}" for match in pattern.finditer(text)]
    assert not found
