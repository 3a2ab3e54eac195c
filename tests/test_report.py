"""The report as a file: what it holds, what it refuses, how large it is. No browser needed."""

from __future__ import annotations

import base64
import json
import re
import shutil
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import pytest

import fake_records as fake
from headwise import record as record_module
from headwise.errors import HeadwiseError, MissingExtra
from headwise.record import Record, pack
from headwise.report import build, overview, viewer, write_report
from headwise.report.collect import collect
from headwise.report.embed import NAN8, NAN16, code8, code16, payload

HOSTILE = "</script><img src=x onerror=alert(1)>"


def data_of(page: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert found is not None
    return json.loads(found[1])


def decode(blob: dict, heads: int) -> np.ndarray:
    raw = zlib.decompress(base64.b64decode(blob["data"]))
    if blob["bits"] == "f32":
        flat = np.frombuffer(raw, "<f4").astype(float)
    elif blob["bits"] == "u16":
        flat = decode16(np.frombuffer(raw, "<u2"))
    else:
        flat = (np.frombuffer(raw, np.uint8) / 254.0) ** 2
    return flat.reshape(heads, blob["rows"], blob["cols"])


def decode16(codes: np.ndarray) -> np.ndarray:
    """What data.js does."""
    weights = np.maximum(1e-6, (codes.astype(float) - 0.5) / 60000 - 0.0005)
    return np.where(codes == NAN16, np.nan, np.where(codes == 0, 0.0, weights))


def test_page_is_one_file_that_asks_for_nothing() -> None:
    page = build(fake.causal(2, 3))
    assert "https://" not in page and "http://" not in page
    assert not re.search(r"(src|href)\s*=\s*[\"'](?!data:|#)", page)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    text = policy[1].replace("&#39;", "'")
    assert text.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in text and "*" not in text


def test_viewer_builds_no_markup_from_texts() -> None:
    script = viewer()
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(",
                "new Function", "fetch(", "XMLHttpRequest", "import("):  # fmt: skip
        assert way not in script


def test_scripts_are_valid_javascript(tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is missing: the browser tests still run the scripts")
    file = tmp_path / "viewer.js"
    file.write_text(viewer(), encoding="utf-8")
    done = subprocess.run([node, "--check", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_weights_of_a_short_context_are_embedded_as_recorded() -> None:
    records = fake.causal(12, 9)
    module = next(m for m in data_of(build(records))["modules"] if m["id"] == "self/9")
    assert module["map"]["bits"] == "f32"
    got = decode(module["map"], 9)
    want = np.stack([record_module.unpack(r.values["cells"]) for r in records
                     if r.kind == "map" and r.where["id"] == "self/9"])  # fmt: skip
    assert np.array_equal(got.astype(np.float32), want)
    assert f"{got[4, fake.SHE, fake.MAYA]:.3f}" == "0.577"


def test_code16_keeps_three_decimals_of_every_weight() -> None:
    rng = np.random.default_rng(0)
    edges = np.arange(1000) / 1000 + 0.0005
    near = np.concatenate([np.nextafter(edges, 0), np.nextafter(edges, 2), edges])
    weights = np.concatenate([rng.random(20_000), rng.random(5_000) ** 6, near, [0.0, 1.0, 1e-30]])
    got = decode16(code16(weights))
    assert np.array_equal(got == 0, weights == 0)
    # Half a step of 1/60000, and float64's rounding of the arithmetic.
    assert np.abs(got - weights).max() <= 0.5 / 60_000 + 4 * np.finfo(float).eps
    # At an edge itself, which way a half rounds is a matter of the last bit.
    away = np.abs(weights * 1000 % 1 - 0.5) > 1e-9
    thousandths = np.floor(weights[away] * 1000 + 0.5)
    assert np.array_equal(np.floor(got[away] * 1000 + 0.5), thousandths)


def test_codes_keep_nan_and_small_weights() -> None:
    weights = np.array([np.nan, 1e-12, 0.0, 1.0], dtype=np.float32)
    assert code8(weights).tolist() == [NAN8, 1, 0, 254]
    assert code16(weights)[0] == NAN16 and code16(weights)[1] > 0 and code16(weights)[2] == 0


def test_code8_error_is_what_the_page_says() -> None:
    weights = np.linspace(0, 1, 10_001)
    got = (code8(weights) / 254.0) ** 2
    assert np.all(np.abs(got - weights) <= np.sqrt(weights) / 254 + 1 / 254**2)


def test_coarser_pooling_sums_keys_and_means_queries() -> None:
    records = fake.long(2_000, 2, 3, cells=250, rows=20)
    run = collect(records)
    run.modules = run.modules[:1]
    from headwise.report import embed

    share = embed._shares(run.modules[0])
    pooled = embed._pool(share, 3)
    cells = share[1]
    assert pooled[1, 4, 2] == pytest.approx(cells[12:15, 6:9].sum() / 3, rel=1e-5)
    # The last block holds one row only: 250 = 83·3 + 1.
    assert pooled[1, 83].sum() == pytest.approx(cells[249].sum(), rel=1e-5)
    # Pooling loses no weight: a row of a causal map sums to 1.
    assert pooled.sum(2) == pytest.approx(np.ones(pooled.shape[:2]), rel=1e-5)


def test_small_maps_stay_exact_beside_large_ones() -> None:
    modules = data_of(build(fake.speech()))["modules"]
    forms = {m["section"]: m["map"]["bits"] for m in modules}
    assert forms == {"encoder self": "u8", "decoder self": "f32", "decoder cross": "u8"}


@pytest.mark.slow
def test_long_context_stays_under_five_megabytes() -> None:
    records = fake.long()
    started = time.process_time()
    page = build(records)
    assert time.process_time() - started < 60
    assert len(page.encode()) < 5_000_000
    data = data_of(page)
    assert data["modules"][0]["map"]["block"] == [256, 256]
    assert data["top"]["keys"] >= 5 and data["top"]["step"] == 1
    kept = collect(records).modules[3].top[2]
    raw = [zlib.decompress(base64.b64decode(d)) for d in data["modules"][3]["top"]["data"]]
    count, k = data["modules"][3]["top"]["rows"], data["modules"][3]["top"]["k"]
    rows = np.frombuffer(raw[0], "<i4").reshape(9, count)
    keys = rows[:, :, None] - np.frombuffer(raw[1], "<i4").reshape(9, count, k)
    assert np.array_equal(rows[2], kept.rows) and np.array_equal(keys[2], kept.keys[:, :k])


def test_incompressible_maps_are_pooled_until_they_fit() -> None:
    data = payload(collect(fake.long(4_096, 20, 9, rows=8, noise=0.6)))
    assert data["modules"][0]["map"]["block"][0] > 16  # 4096 tokens in 256 cells were 16 each
    assert len(json.dumps(data, ensure_ascii=False).encode()) < 4_900_000


def test_records_alone_rebuild_the_same_page(tmp_path: Path) -> None:
    records = fake.bert(2, 3)
    file = tmp_path / "records.jsonl"
    record_module.write(file, records)
    assert build(record_module.read(file)) == build(records)


def test_write_report_is_atomic(tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    target.write_text("old", encoding="utf-8")
    with pytest.raises(HeadwiseError, match="no 'attention', 'check', 'cost' or 'study' record"):
        write_report([fake.run_record()], target)
    assert target.read_text(encoding="utf-8") == "old"
    write_report(fake.tiny(), target)
    assert target.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


def test_hostile_texts_cannot_leave_their_element() -> None:
    records = fake.bert(1, 2, tokens=["[CLS]", HOSTILE, "\u2028<!--<script>", "\ud800", "[SEP]"])
    records[0] = fake.run_record(model=HOSTILE, not_caught=[HOSTILE], command=HOSTILE)
    page = build(records)
    assert "<img" not in page and "onerror=alert(1)>" not in page
    assert page.count("</script>") == 2
    page.encode("utf-8")
    assert data_of(page)["axes"]["text"]["tokens"][1] == HOSTILE
    assert "<title>&lt;/script&gt;" in page


def changed(kind: str, /, **values: object) -> list[Record]:
    out, done = [], False
    for record in fake.tiny():
        if record.kind == kind and not done:
            record = Record(kind, record.where, {**record.values, **values})
            done = True
        out.append(record)
    assert done
    return out


def without(kind: str, name: str) -> list[Record]:
    def values(record: Record) -> dict:
        return {k: v for k, v in record.values.items() if (record.kind, k) != (kind, name)}

    return [Record(record.kind, record.where, values(record)) for record in fake.tiny()]


IMAGE = {"kind": "image", "tokens": ["[CLS]", "a", "b"], "special": [1, 0, 0], "grid": [1, 2]}
BOMB = {"dtype": "float32", "shape": [3, 3], "data": base64.b64encode(
    zlib.compress(b"\0" * 10_000_000)).decode()}  # fmt: skip
ZEROS = np.zeros((3, 3), np.float32)

MALFORMED = {
    "no records": ([], "wanted one 'run' record, got 0"),
    "two runs": ([*fake.tiny(), fake.run_record()], "wanted one 'run' record, got 2"),
    "no attention": ([fake.run_record()], "no 'attention', 'check', 'cost' or 'study' record"),
    "no field": (without("attention", "queries"), "of id self/0: no 'queries'"),
    "axis size": (changed("attention", keys=4), "key_axis has 3 tokens, the attention has 4"),
    "axis name": (changed("attention", key_axis="x"), "key_axis 'x' has no 'axis' record"),
    "heads": (changed("attention", heads=-1), "heads = -1; wanted a whole number above 0"),
    "kind": (changed("attention", attention="odd"), "wanted 'self' or 'cross'"),
    "shape": (changed("map", cells=pack(ZEROS[:2])), r"cells of shape \[2, 3\]; wanted \[3, 3\]"),
    "block": (changed("map", block=[0, 1]), "block 0 × 1 of 3 × 3 weights"),
    "bytes": (changed("map", cells={**pack(ZEROS), "data": "no!"}), "cells: "),
    "bomb": (changed("map", cells=BOMB), "needs 36 bytes, got 37"),
    "huge": (
        changed("map", cells={**pack(ZEROS), "shape": [10**9, 10**9]}),
        r"cells of shape \[1000000000, 1000000000\]",
    ),
    "not packed": (changed("map", cells=[1, 2]), "cells: wanted a packed array"),
    "top key": (changed("top", keys=pack(np.full((3, 3), 7, np.int32))), "a key outside 0…2"),
    "tokens": (changed("axis", tokens="abc"), "tokens: wanted a list, got str"),
    "token": (changed("axis", tokens=["a", 3, "c"]), "wanted a text, got int"),
    "special": (changed("axis", special=[1]), "special: 1 flags for 3 tokens"),
    "axis kind": (changed("axis", kind="smell"), "kind 'smell'; wanted text, image or audio"),
    "grid": (changed("axis", **{**IMAGE, "grid": [4, 4]}), "a grid of 4 × 4 for 2 plain patches"),
    "picture": (
        changed("axis", **IMAGE, image="data:image/svg+xml;base64,PHN2Zz4="),
        "image: wanted data:image/png;base64",
    ),
    "script url": (changed("axis", **IMAGE, image="javascript:alert(1)"), "image: wanted data:"),
    "similar": (changed("similarity", cosine=[[1, 2]]), r"cosine of shape \(1, 2\) for 1 heads"),
    "labels": (changed("head", labels="sink"), "labels: wanted a list of texts"),
    "orphan": ([*fake.tiny(), Record("head", {"id": "x", "head": 0}, {})], "no 'attention' record"),
    "head number": (
        [*fake.tiny(), Record("head", {"id": "self/0", "head": 5}, {})], "head 5 of 1",
    ),
    "link": (
        [*fake.tiny(), Record("link", {"id": "self/0", "head": 0},
                              {"query": 9, "key": 0, "weight": 1.0})],
        "link 9 → 0 outside 3 × 3",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_records_give_one_line(name: str) -> None:
    records, message = MALFORMED[name]
    with pytest.raises(HeadwiseError, match=message) as caught:
        build(records)
    assert "\n" not in str(caught.value) and str(caught.value).startswith("report: ")


def test_unknown_kinds_are_passed_over() -> None:
    extra = [Record("timing", {}, {"seconds": 1.0})]
    assert build([*fake.tiny(), *extra]) == build(fake.tiny())


def test_nan_is_shown_as_nan_and_not_as_null() -> None:
    records = changed("head", entropy=float("nan"), distance=float("inf"))
    stats = data_of(build(records))["modules"][0]["stats"]
    assert stats["entropy"] == ["nan"] and stats["distance"] == ["inf"]


def test_missing_jinja_is_named_with_its_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingExtra, match=r"needs jinja2: pip install 'headwise\[report\]'"):
        build(fake.tiny())


def test_overview_fragment_is_inert_and_complete() -> None:
    records = fake.causal(3, 4)
    records[0] = fake.run_record(model=HOSTILE)
    part = overview(records)
    assert "<script" not in part and "http" not in part and "<img src=x" not in part
    assert "<style" not in part  # nothing outside the fragment changes its look
    pictures = re.findall(r'src="data:image/png;base64,([^"]+)"', part)
    assert len(pictures) == 12
    assert "layer 2 head 3" in part and "clues, not explanations" in part
    body = base64.b64decode(pictures[0])
    width, height = struct.unpack(">II", body[16:24])
    assert (width, height) == (13, 13)
    start = body.index(b"IDAT") + 4
    length = struct.unpack(">I", body[start - 8 : start - 4])[0]
    pixels = np.frombuffer(zlib.decompress(body[start : start + length]), np.uint8)
    pixels = pixels.reshape(13, 14)[:, 1:]
    assert pixels[0, 0] == 47  # the first query of a causal head gives 1 to itself
    assert not np.triu(pixels, 1).any()


def test_overview_needs_no_jinja(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert "tiny" in overview(fake.tiny())
