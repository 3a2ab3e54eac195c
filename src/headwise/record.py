"""Record: one finding, statistic, timing or score, as one JSON line. Knows no torch."""

from __future__ import annotations

import base64
import json
import math
import os
import tempfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headwise.errors import BadFile, HeadwiseError

# JSON has no NaN and no infinity; a debugging tool must not turn them into null.
_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True)
class Record:
    """A plain fact: what `kind` of fact, `where` it holds, and its `values`.

    `where` maps names to a string, an integer or None. `values` holds what JSON can hold: strings,
    numbers (NaN and infinities survive), booleans, None, lists and mappings of these.
    """

    kind: str
    where: Mapping[str, str | int | None] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """One line of strict JSON.

        Raises:
            TypeError: a value that JSON cannot hold.
        """
        body = {"kind": self.kind, "where": _encode(self.where), "values": _encode(self.values)}
        return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> Record:
        """The record that `to_json` wrote.

        Raises:
            ValueError: the line is not JSON, or is not a record.
        """
        body = json.loads(line)
        if not isinstance(body, dict) or not isinstance(body.get("kind"), str):
            raise ValueError("not a record: wanted an object with a 'kind'")
        where, values = body.get("where", {}), body.get("values", {})
        if not isinstance(where, dict) or not isinstance(values, dict):
            raise ValueError("not a record: 'where' and 'values' must be objects")
        return cls(body["kind"], _decode(where), _decode(values))


def _encode(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"}
    if isinstance(value, Mapping):
        return {str(key): _encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(item) for item in value]
    if isinstance(value, np.generic):
        return _encode(value.item())
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {"$float"} and value["$float"] in _WORDS:
            return _WORDS[value["$float"]]
        return {key: _decode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_decode(item) for item in value]
    return value


def pack(array: np.ndarray) -> dict[str, Any]:
    """An array as {"dtype", "shape", "data"}: little-endian bytes, zlib, base64."""
    array = np.asarray(array, order="C")
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    data = base64.b64encode(zlib.compress(little.tobytes(), 6)).decode("ascii")
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": data}


def unpack(packed: Mapping[str, Any]) -> np.ndarray:
    """The array that `pack` packed, bit for bit.

    Raises:
        ValueError: the bytes do not fill the shape, or the dtype is not a plain number.
    """
    dtype = np.dtype(packed["dtype"])
    if dtype.kind not in "fiub":
        raise ValueError(f"unpack: dtype {packed['dtype']!r} is not a plain number")
    shape = [int(n) for n in packed["shape"]]
    if any(n < 0 for n in shape):
        raise ValueError(f"unpack: negative size in shape {shape}")
    size = math.prod(shape) * dtype.itemsize
    # A bounded read, so that a small hostile file cannot claim gigabytes.
    stream = zlib.decompressobj()
    data = stream.decompress(base64.b64decode(packed["data"], validate=True), size + 1)
    if len(data) != size:
        raise ValueError(f"unpack: shape {shape} of {dtype} needs {size} bytes, got {len(data)}")
    return np.frombuffer(data, dtype.newbyteorder("<")).astype(dtype, copy=True).reshape(shape)


def write(path: str | os.PathLike[str], records: Iterable[Record]) -> None:
    """Write records as JSON lines. The file appears whole or not at all.

    Raises:
        HeadwiseError: the path cannot be written.
    """
    write_text(path, (record.to_json() + "\n" for record in records))


def write_text(path: str | os.PathLike[str], chunks: Iterable[str]) -> None:
    """Write text to `path` atomically: into a temporary file beside it, then renamed over it.

    Raises:
        HeadwiseError: the path cannot be written.
    """
    target = Path(path)
    try:
        if target.is_dir():
            raise IsADirectoryError(21, "it is a directory", str(target))
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent or ".")
    except OSError as error:
        raise HeadwiseError(_cannot_write(target, error)) from None
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.writelines(chunks)
        # mkstemp makes files that only the owner reads; a report is an ordinary file.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, target)
    except OSError as error:
        raise HeadwiseError(_cannot_write(target, error)) from None
    finally:
        Path(name).unlink(missing_ok=True)


def check_writable(path: str | os.PathLike[str]) -> None:
    """Say before long work that its result could not be written after it.

    Raises:
        HeadwiseError: the path cannot be written.
    """
    target = Path(path)
    try:
        if target.is_dir():
            raise IsADirectoryError(21, "it is a directory", str(target))
        with tempfile.NamedTemporaryFile(prefix=f".{target.name}.", dir=target.parent or "."):
            pass
    except OSError as error:
        raise HeadwiseError(_cannot_write(target, error)) from None


def _cannot_write(target: Path, error: OSError) -> str:
    reason = (error.strerror or str(error)).lower()
    return f"cannot write {target}: {reason}; choose another place for the output"


def read(path: str | os.PathLike[str]) -> list[Record]:
    """Read records from JSON lines.

    Raises:
        BadFile: the file cannot be read, or a line is not a record (its number is named).
    """
    records = []
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    records.append(Record.from_json(line))
                except ValueError as error:
                    raise BadFile(
                        f"{path}, line {number}: not a headwise record ({error})"
                    ) from None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise BadFile(f"cannot read {path}: {reason}") from None
    except UnicodeDecodeError:
        raise BadFile(f"{path}: not text; wanted JSON lines written by headwise") from None
    return records
