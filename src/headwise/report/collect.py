"""Records into one validated run. Everything that comes in is untrusted: shapes, numbers, texts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headwise.errors import BadFile
from headwise.record import Record, unpack
from headwise.report import costs, studies

PICTURE = re.compile(r"data:image/png;base64,[A-Za-z0-9+/]+={0,2}")

# A bound on what one file may make the page hold; far above any model that runs today.
MOST_TOKENS = 4_000_000
MOST_HEADS = 65_536
MOST_CELLS = 2_048
MOST_CHECKED = 256

LABELS = {"sink", "previous-token", "local", "broad", "redundant", "induction", "duplicate-token"}


@dataclass
class Axis:
    """What the tokens of one axis are: text pieces, picture patches or stretches of sound."""

    name: str
    kind: str
    tokens: list[str]
    special: list[int]
    real: list[int]
    words: list[int] | None = None
    text: str = ""
    image: str | None = None
    grid: tuple[int, int] | None = None
    size: tuple[int, int] | None = None
    seconds: float = 0.0
    step: float = 0.0
    envelope: list[float] = field(default_factory=list)


@dataclass
class Top:
    """The strongest keys of chosen queries of one head: rows (n,), keys and weights (n, k)."""

    rows: np.ndarray
    keys: np.ndarray
    weights: np.ndarray


@dataclass
class Module:
    """One attention module and what is known of its heads, by head number."""

    id: str
    values: dict[str, Any]
    heads: int
    queries: int
    keys: int
    query_axis: str
    key_axis: str
    stats: dict[int, dict[str, Any]] = field(default_factory=dict)
    block: tuple[int, int] | None = None
    maps: dict[int, np.ndarray] = field(default_factory=dict)
    top: dict[int, Top] = field(default_factory=dict)
    received: dict[int, tuple[int, np.ndarray]] = field(default_factory=dict)
    similarity: dict[str, Any] | None = None
    summary: dict[str, Any] | None = None

    @property
    def section(self) -> str:
        """Modules of one section share a grid: the same stack, the same kind of attention."""
        stack, kind = str(self.values.get("stack") or ""), str(self.values.get("attention") or "")
        return f"{stack} {kind}".strip()

    @property
    def layer(self) -> int:
        return int(self.values.get("layer") or 0)


# Kinds that are drawn as rows of a table, in the order of `Run`'s last fields.
TABLES = {
    "cost": costs.cost,
    "growth": costs.growth,
    "study": studies.design,
    "study_baseline": studies.baseline,
    "study_answer": studies.answer,
}
MOST_ROWS = 500


@dataclass
class Run:
    """One run, ready to be drawn."""

    facts: dict[str, Any]
    axes: dict[str, Axis]
    modules: list[Module]
    links: list[dict[str, Any]]
    checks: list[dict[str, Any]] = field(default_factory=list)
    costs: list[dict[str, Any]] = field(default_factory=list)
    growths: list[dict[str, Any]] = field(default_factory=list)
    studies: list[dict[str, Any]] = field(default_factory=list)
    baselines: list[dict[str, Any]] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)
    rollouts: list[dict[str, Any]] = field(default_factory=list)


def collect(records: Iterable[Record]) -> Run:
    """Sort records into a run and check each one against the attention it belongs to.

    Kinds that the report does not draw are passed over.

    Raises:
        BadFile: a record is malformed, or the records do not make one run.
    """
    kinds: dict[str, list[Record]] = {}
    for record in records:
        kinds.setdefault(record.kind, []).append(record)
    runs = kinds.get("run", [])
    if len(runs) != 1:
        raise BadFile(
            f"report: wanted one 'run' record, got {len(runs)}; "
            "pass the records of one `headwise report` run"
        )
    axes: dict[str, Axis] = {}
    for record in kinds.get("axis", []):
        with _reading(record):
            axis = _axis(record)
            axes[axis.name] = axis
    modules: dict[str, Module] = {}
    for record in kinds.get("attention", []):
        with _reading(record):
            module = _module(record, axes)
            if module.id in modules:
                raise ValueError("the same id twice")
            modules[module.id] = module
    checks = []
    for record in kinds.get("check", []):
        with _reading(record):
            checks.append(_check(record))
    found: dict[str, list[dict[str, Any]]] = {}
    for kind, read in TABLES.items():
        found[kind] = []
        for record in kinds.get(kind, [])[:MOST_ROWS]:
            with _reading(record):
                found[kind].append(read(record))
    if not modules and not checks and not found["cost"] and not found["study"]:
        raise BadFile(
            "report: no 'attention', 'check', 'cost' or 'study' record, so there is nothing to draw"
        )
    if sum(module.heads for module in modules.values()) > MOST_HEADS:
        raise BadFile(f"report: more than {MOST_HEADS} heads; draw fewer modules at once")
    readers = {
        "head": _head, "map": _map, "top": _top, "received": _received,
        "similarity": _similarity, "layer_summary": _summary,
    }  # fmt: skip
    for kind, reader in readers.items():
        for record in kinds.get(kind, []):
            with _reading(record):
                reader(_owner(record, modules), record)
    links = []
    for record in kinds.get("link", []):
        with _reading(record):
            links.append(_link(_owner(record, modules), record))
    rollouts = []
    for record in kinds.get("rollout", [])[:MOST_ROWS]:
        with _reading(record):
            rollouts.append(_rollout(record, axes))
    with _reading(runs[0]):
        facts = _plain(dict(runs[0].values))
        if not isinstance(facts.get("not_caught", []), list):
            raise ValueError("not_caught: wanted a list of texts")
        if not isinstance(facts.get("thresholds") or {}, dict):
            raise ValueError("thresholds: wanted names and numbers")
    order = {"encoder": 0, "": 1, "decoder": 2}
    ordered = sorted(
        modules.values(),
        key=lambda m: (
            order.get(str(m.values.get("stack") or ""), 3),
            m.values.get("attention") == "cross",
            m.layer,
        ),
    )
    run = Run(facts, axes, ordered, links, checks, *found.values())
    run.rollouts = rollouts
    return run


@contextmanager
def _reading(record: Record) -> Iterator[None]:
    """Turn whatever a malformed record causes into one line that names the record."""
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError, OverflowError, AttributeError) as error:
        where = ", ".join(f"{k} {v}" for k, v in record.where.items())
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        name = f"'{record.kind}' record" + (f" of {where}" if where else "")
        line = f"report: {name}: {reason}".replace("\n", " ")
        raise BadFile(line if len(line) < 400 else line[:400] + "…") from None


def _axis(record: Record) -> Axis:
    values = record.values
    name, kind = str(record.where["axis"]), str(values["kind"])
    if kind not in ("text", "image", "audio"):
        raise ValueError(f"kind {kind[:40]!r}; wanted text, image or audio")
    tokens = [_text(token) for token in _list(values, "tokens")]
    count = len(tokens)
    if not 0 < count <= MOST_TOKENS:
        raise ValueError(f"{count} tokens; wanted 1 to {MOST_TOKENS}")
    axis = Axis(name, kind, tokens, _flags(values, "special", count, 0),
                _flags(values, "real", count, 1))  # fmt: skip
    if kind == "text":
        axis.text = _text(values.get("text") or "")
        if values.get("words") is not None:
            words = [int(word) for word in _list(values, "words")]
            if len(words) != count:
                raise ValueError(f"{len(words)} words for {count} tokens")
            axis.words = words
    elif kind == "image":
        rows, cols = (int(n) for n in _list(values, "grid"))
        patches = count - sum(axis.special)
        if rows < 1 or cols < 1 or rows * cols != patches:
            raise ValueError(f"a grid of {rows} × {cols} for {patches} plain patches")
        axis.grid = (rows, cols)
        if values.get("size") is not None:
            width, height = (int(n) for n in _list(values, "size"))
            if not (0 < width <= 100_000 and 0 < height <= 100_000):
                raise ValueError(f"size {width} × {height} pixels")
            axis.size = (width, height)
        if values.get("image") is not None:
            picture = values["image"]
            if not isinstance(picture, str) or not PICTURE.fullmatch(picture):
                raise ValueError("image: wanted data:image/png;base64,…")
            axis.image = picture
    else:
        axis.seconds, axis.step = float(values["seconds"]), float(values["step"])
        if not (axis.step > 0 and 0 < axis.seconds < math.inf):
            raise ValueError(f"{axis.seconds} seconds in steps of {axis.step}")
        axis.envelope = [float(x) for x in values.get("envelope") or []][:4096]
        axis.envelope = [min(1.0, max(0.0, x)) if x == x else 0.0 for x in axis.envelope]
    return axis


def _module(record: Record, axes: Mapping[str, Axis]) -> Module:
    values = _plain(dict(record.values))
    heads, queries, keys = (_count(values, name) for name in ("heads", "queries", "keys"))
    for side, size in (("query_axis", queries), ("key_axis", keys)):
        axis = axes.get(str(values[side]))
        if axis is None:
            raise ValueError(f"{side} {str(values[side])[:40]!r} has no 'axis' record")
        if len(axis.tokens) != size:
            raise ValueError(f"{side} has {len(axis.tokens)} tokens, the attention has {size}")
    if values.get("attention") not in ("self", "cross"):
        raise ValueError("attention: wanted 'self' or 'cross'")
    return Module(
        _text(record.where["id"]), values, heads, queries, keys,
        str(values["query_axis"]), str(values["key_axis"]),
    )  # fmt: skip


def _owner(record: Record, modules: Mapping[str, Module]) -> Module:
    identifier = str(record.where["id"])
    if identifier not in modules:
        raise ValueError("no 'attention' record with this id")
    return modules[identifier]


def _which(module: Module, record: Record) -> int:
    head = record.where["head"]
    if isinstance(head, bool) or not isinstance(head, int) or not 0 <= head < module.heads:
        raise ValueError(f"head {head!r} of {module.heads}")
    return head


def _head(module: Module, record: Record) -> None:
    values = _plain(dict(record.values))
    labels = values.get("labels") or []
    if not isinstance(labels, list):
        raise ValueError("labels: wanted a list of texts")
    values["labels"] = [_text(label)[:60] for label in labels]
    histogram = values.get("distance_histogram")
    if histogram is not None:
        values["distance_histogram"] = [float(x) for x in histogram][:64]
    module.stats[_which(module, record)] = values


def _map(module: Module, record: Record) -> None:
    head = _which(module, record)
    rows, cols = (int(n) for n in record.values["block"])
    if not (0 < rows <= module.queries and 0 < cols <= module.keys):
        raise ValueError(f"block {rows} × {cols} of {module.queries} × {module.keys} weights")
    if module.block not in (None, (rows, cols)):
        raise ValueError(f"block {rows} × {cols}, but {module.block} in another head of the module")
    wanted = [-(-module.queries // rows), -(-module.keys // cols)]
    if max(wanted) > MOST_CELLS:
        raise ValueError(f"{wanted[0]} × {wanted[1]} cells; at most {MOST_CELLS} a side")
    module.maps[head] = _array(record.values["cells"], wanted, "cells").astype(np.float32)
    module.block = (rows, cols)


def _top(module: Module, record: Record) -> None:
    head = _which(module, record)
    shape = [int(n) for n in record.values["keys"]["shape"]]
    if len(shape) != 2 or shape[0] > module.queries or shape[1] > 4096:
        raise ValueError(f"keys of shape {shape}; wanted (rows, k)")
    rows = _array(record.values["rows"], shape[:1], "rows").astype(np.int64)
    keys = _array(record.values["keys"], shape, "keys").astype(np.int64)
    weights = _array(record.values["weights"], shape, "weights").astype(np.float32)
    if rows.size and not (rows.min() >= 0 and rows.max() < module.queries):
        raise ValueError(f"a row outside 0…{module.queries - 1}")
    # A key of −1 fills up a row that sees fewer than k keys.
    if keys.size and not (keys.min() >= -1 and keys.max() < module.keys):
        raise ValueError(f"a key outside 0…{module.keys - 1}")
    module.top[head] = Top(rows, keys, weights)


def _received(module: Module, record: Record) -> None:
    block = _count(record.values, "block")
    wanted = [-(-module.keys // block)]
    sums = _array(record.values["sums"], wanted, "sums").astype(np.float32)
    module.received[_which(module, record)] = (block, sums)


def _similarity(module: Module, record: Record) -> None:
    found: dict[str, Any] = {}
    for name in ("cosine", "bhattacharyya"):
        if record.values.get(name) is not None:
            table = np.asarray(record.values[name], dtype=np.float64)
            if table.shape != (module.heads, module.heads):
                raise ValueError(f"{name} of shape {table.shape} for {module.heads} heads")
            found[name] = table
    clusters = [int(c) for c in record.values.get("clusters") or range(module.heads)]
    if len(clusters) != module.heads:
        raise ValueError(f"{len(clusters)} cluster numbers for {module.heads} heads")
    module.similarity = {**found, "clusters": clusters}


def _summary(module: Module, record: Record) -> None:
    module.summary = _plain(dict(record.values))


def _link(module: Module, record: Record) -> dict[str, Any]:
    values = record.values
    query, key = int(values["query"]), int(values["key"])
    if not (0 <= query < module.queries and 0 <= key < module.keys):
        raise ValueError(f"link {query} → {key} outside {module.queries} × {module.keys} weights")
    return {
        "id": module.id, "head": _which(module, record), "query": query, "key": key,
        "weight": _plain(float(values["weight"])), "asked": bool(values.get("asked")),
    }  # fmt: skip


def _rollout(record: Record, axes: Mapping[str, Axis]) -> dict[str, Any]:
    """How much of a token's last vector rolls back to each token of its axis."""
    name, query = str(record.where["axis"]), record.where["query"]
    if name not in axes:
        raise ValueError("no 'axis' record of this name")
    count = len(axes[name].tokens)
    if isinstance(query, bool) or not isinstance(query, int) or not 0 <= query < count:
        raise ValueError(f"query {query!r} of {count} tokens")
    shares = np.asarray(_list(record.values, "shares"), dtype=np.float64)
    if shares.shape != (count,):
        raise ValueError(f"shares of shape {shares.shape}; wanted one for each of {count} tokens")
    if not (np.isfinite(shares).all() and shares.min() >= 0):
        raise ValueError("shares: wanted finite numbers, not below 0")
    return {
        "axis": name, "query": query, "text": _text(record.values["text"])[:200],
        "tokens": _count(record.values, "tokens"), "layers": _count(record.values, "layers"),
        "shares": [float(f"{share:.4g}") for share in shares],
    }  # fmt: skip


def _check(record: Record) -> dict[str, Any]:
    """What a check found. Grids are small: they are drawn cell by cell."""
    values = _plain(dict(record.values))
    if values.get("status") not in ("passed", "failed", "not run"):
        raise ValueError("status: wanted 'passed', 'failed' or 'not run'")
    for name in ("declared", "measured"):
        grid = values.get(name)
        if grid is None:
            continue
        table = np.asarray(grid, dtype=np.float64)
        if table.ndim != 2 or max(table.shape) > MOST_CHECKED:
            raise ValueError(f"{name} of shape {table.shape}; at most {MOST_CHECKED} a side")
    place = values.get("where")
    if place is not None and not isinstance(place, dict):
        raise ValueError("where: wanted names and numbers")
    named = {name: record.where.get(name) for name in ("check", "path", "case")}
    return {**values, **{name: None if n is None else _text(str(n)) for name, n in named.items()}}


def _array(packed: Any, wanted: list[int], name: str) -> np.ndarray:
    """Unpack only after the claimed shape is known to be the right one."""
    if not isinstance(packed, Mapping):
        raise ValueError(f"{name}: wanted a packed array")
    shape = list(packed["shape"])
    if shape != wanted:
        raise ValueError(f"{name} of shape {shape}; wanted {wanted}")
    try:
        return unpack(packed)
    except Exception as error:  # zlib, base64 and numpy each have their own kind
        raise ValueError(f"{name}: {error}") from None


def _count(values: Mapping[str, Any], name: str) -> int:
    number = values[name]
    if isinstance(number, bool) or not isinstance(number, int) or not 0 < number <= MOST_TOKENS:
        raise ValueError(f"{name} = {str(number)[:40]}; wanted a whole number above 0")
    return number


def _list(values: Mapping[str, Any], name: str) -> list[Any]:
    found = values[name]
    if not isinstance(found, list | tuple):
        raise ValueError(f"{name}: wanted a list, got {type(found).__name__}")
    return list(found)


def _flags(values: Mapping[str, Any], name: str, count: int, default: int) -> list[int]:
    if values.get(name) is None:
        return [default] * count
    flags = [int(bool(flag)) for flag in _list(values, name)]
    if len(flags) != count:
        raise ValueError(f"{name}: {len(flags)} flags for {count} tokens")
    return flags


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"wanted a text, got {type(value).__name__}")
    # Lone surrogates cannot be written as UTF-8.
    return value.encode("utf-8", "replace").decode("utf-8")


def _plain(value: Any) -> Any:
    """JSON that a browser reads: NaN and infinities become their names, never null."""
    if isinstance(value, bool) or value is None or isinstance(value, int):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return float(f"{value:.6g}")
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Mapping):
        return {_text(str(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    raise ValueError(f"a {type(value).__name__} among the values")
