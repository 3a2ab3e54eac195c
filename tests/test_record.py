"""Records survive the way to a file and back, and files appear whole or not at all."""

import json
import math
import os
import stat

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise.errors import BadFile, HeadwiseError
from headwise.record import Record, pack, read, unpack, write

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def same(a, b) -> bool:
    if isinstance(a, float) and math.isnan(a):
        return isinstance(b, float) and math.isnan(b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@given(st.text(), st.dictionaries(st.text(), VALUES, max_size=5))
def test_a_line_gives_the_record_back(kind, values):
    line = Record(kind, {"layer": 3, "attention": "self", "none": None}, values).to_json()
    assert "\n" not in line
    json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    back = Record.from_json(line)
    assert back.kind == kind
    assert back.where == {"layer": 3, "attention": "self", "none": None}
    assert same(values, back.values)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "uint8", "bool"])
def test_arrays_survive_bit_for_bit(dtype):
    array = (np.arange(30).reshape(5, 6) * 0.7).astype(dtype)
    back = unpack(json.loads(json.dumps(pack(array))))
    assert back.dtype == array.dtype
    assert np.array_equal(back, array)
    assert np.array_equal(unpack(pack(array.T)), array.T)


def test_hostile_arrays_are_refused():
    packed = pack(np.zeros(4, dtype=np.float32))
    with pytest.raises(ValueError, match="needs 8 bytes, got 9"):
        unpack({**packed, "shape": [2]})
    with pytest.raises(ValueError, match="negative"):
        unpack({**packed, "shape": [-4]})
    with pytest.raises(ValueError, match="not a plain number"):
        unpack({**packed, "dtype": "object"})


def test_numpy_numbers_are_numbers():
    assert Record.from_json(Record("x", {}, {"n": np.float32(0.5)}).to_json()).values["n"] == 0.5


def test_files_round_trip_and_look_ordinary(tmp_path):
    path = tmp_path / "records.jsonl"
    records = [Record("head", {"head": i}, {"entropy": i / 7}) for i in range(5)]
    write(path, records)
    assert read(path) == records
    assert stat.S_IMODE(os.stat(path).st_mode) & 0o400
    assert os.listdir(tmp_path) == ["records.jsonl"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "records.jsonl"
    write(path, [Record("old")])

    def broken():
        yield Record("new")
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write(path, broken())
    assert [record.kind for record in read(path)] == ["old"]
    assert os.listdir(tmp_path) == ["records.jsonl"]


def test_what_cannot_be_written_or_read_is_named(tmp_path):
    with pytest.raises(HeadwiseError, match=r"cannot write .*no such file"):
        write(tmp_path / "nowhere" / "x.jsonl", [])
    with pytest.raises(HeadwiseError, match="it is a directory"):
        write(tmp_path, [])
    with pytest.raises(BadFile, match=r"cannot read .*no such file"):
        read(tmp_path / "missing.jsonl")
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"kind":"x"}\nnonsense\n')
    with pytest.raises(BadFile, match="line 2: not a headwise record"):
        read(bad)
    bad.write_text('["kind"]\n')
    with pytest.raises(BadFile, match="wanted an object"):
        read(bad)
    bad.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadFile, match="not text"):
        read(bad)
