"""What the page carries: every array deflated, at the finest resolution that the byte budget allows.

Three forms of a weight, each stated on the page:
- `f32`: as recorded.
- `u16`: 60 steps to a thousandth, with edges where a third decimal rounds up, so that three decimals
  read from the page are three decimals of the weight. Code 0 is an exact zero.
- `u8`: 254 steps of the square root. For colour, not for reading: the error at weight p is about
  √p / 254.
"""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

import numpy as np

from headwise.errors import BadFile
from headwise.report.collect import Axis, Module, Run

STEPS = 60_000  # codes of u16 to a weight of 1
NAN16, NAN8 = 65_535, 255

# The whole file stays under 5 MB; the page itself (template, style, scripts) needs about 0.15 MB.
BUDGET = 4_650_000
# Exact floats deflate badly. Past this size u16 says the same three decimals in half the bytes.
FLOAT_BUDGET = 1_200_000
PICTURE_BUDGET = 1_500_000
POOLS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)
# Shares of what is left after texts and statistics. Maps take theirs last, so what others save
# is theirs.
TOP_SHARE, RECEIVED_SHARE = 0.38, 0.1


def deflate(array: np.ndarray) -> str:
    """Little-endian bytes, zlib, base64: what DecompressionStream("deflate") reads."""
    little = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False)
    return base64.b64encode(zlib.compress(little.tobytes(), 6)).decode("ascii")


def code16(weights: np.ndarray) -> np.ndarray:
    """Weights in [0, 1] as u16: (code − ½)/60000 − ½/1000 decodes, to 3 decimals exactly."""
    exact = np.asarray(weights, dtype=np.float64)
    with np.errstate(invalid="ignore"):
        codes = 1 + np.floor((np.clip(exact, 0, 1.05) + 0.0005) * STEPS)
        codes = np.where(exact == 0, 0, np.clip(codes, 0, NAN16 - 1))
    return np.where(np.isnan(exact), NAN16, codes).astype(np.uint16)


def code8(weights: np.ndarray) -> np.ndarray:
    """Weights in [0, 1] as u8: (code/254)² decodes. A weight above 0 never becomes 0."""
    with np.errstate(invalid="ignore"):
        codes = np.rint(254 * np.sqrt(np.clip(weights, 0, 1)))
        codes = np.where((weights > 0) & (codes == 0), 1, codes)
    return np.where(np.isnan(weights), NAN8, codes).astype(np.uint8)


def payload(run: Run) -> dict[str, Any]:
    """All that the page is drawn from, as JSON values, within the byte budget.

    Raises:
        BadFile: texts and statistics alone are over the budget.
    """
    data: dict[str, Any] = {
        "run": run.facts,
        "axes": {name: _axis(axis) for name, axis in run.axes.items()},
        "modules": [_module(module) for module in run.modules],
        "links": run.links[:2000],
    }
    left = BUDGET - len(json.dumps(data, ensure_ascii=False).encode())
    if left < 200_000:
        raise BadFile(
            f"report: texts and statistics need {(BUDGET - left) / 1e6:.1f} MB of the page's "
            f"{BUDGET / 1e6:.1f} MB, which leaves no room for maps; draw fewer modules or tokens"
        )
    # Where every single weight is there to 3 decimals, top keys and sums can be read from it.
    form, blobs, used = _maps(run.modules, left)
    if form["bits"] == "u8":
        received, used_received = _received(run.modules, int(left * RECEIVED_SHARE))
        top, kept, used_top = _tops(run.modules, int(left * TOP_SHARE))
        form, blobs, used = _maps(run.modules, left - used_top - used_received)
        form["top"] = kept
        for entry, module_top, module_received in zip(data["modules"], top, received, strict=True):
            entry["top"], entry["received"] = module_top, module_received
    for entry, blob in zip(data["modules"], blobs, strict=True):
        entry["map"] = blob
    data["form"] = form
    return data


def _axis(axis: Axis) -> dict[str, Any]:
    body: dict[str, Any] = {"kind": axis.kind, "count": len(axis.tokens)}
    # A picture's patches and the steps of a sound are named by their place; only special tokens
    # carry a text of their own.
    tokens = axis.tokens
    if axis.kind != "text":
        tokens = [t if s else "" for t, s in zip(tokens, axis.special, strict=True)]
    if len(tokens) > 4096:
        text = json.dumps(tokens, ensure_ascii=False).encode()
        body["tokens_deflated"] = base64.b64encode(zlib.compress(text, 9)).decode("ascii")
    else:
        body["tokens"] = tokens
    body["special"] = [i for i, flag in enumerate(axis.special) if flag]
    body["padding"] = [i for i, flag in enumerate(axis.real) if not flag]
    if axis.words is not None:
        body["words"] = deflate(np.asarray(axis.words, dtype=np.int32))
    if axis.text:
        body["text"] = axis.text[:400] + ("…" if len(axis.text) > 400 else "")
    if axis.kind == "image":
        body |= {"grid": axis.grid, "size": axis.size}
        if axis.image and len(axis.image) <= PICTURE_BUDGET:
            body["image"] = axis.image
        elif axis.image:
            body["image_left_out"] = f"{len(axis.image) / 1e6:.1f} MB"
    if axis.kind == "audio":
        envelope = [round(x, 3) for x in axis.envelope]
        body |= {"seconds": axis.seconds, "step": axis.step, "envelope": envelope}
    return body


def _module(module: Module) -> dict[str, Any]:
    stats: dict[str, list[Any]] = {}
    for head in range(module.heads):
        for name, value in module.stats.get(head, {}).items():
            stats.setdefault(name, [None] * module.heads)[head] = value
    similarity = None
    if module.similarity:
        similarity = {
            name: deflate(code16(table)) if isinstance(table, np.ndarray) else table
            for name, table in module.similarity.items()
        }
    return {
        **module.values, "id": module.id, "section": module.section, "layer": module.layer,
        "stats": stats, "similarity": similarity, "summary": module.summary,
    }  # fmt: skip


def _maps(modules: list[Module], budget: int) -> tuple[dict[str, Any], list[Any], int]:
    """The finest form of all maps that fits: (the form, one blob a module, bytes)."""
    single = all(m.block == (1, 1) for m in modules if m.maps)
    forms = [("f32", 1), ("u16", 1)] if single else []
    forms += [("u8", pool) for pool in POOLS]
    shares = [_shares(module) for module in modules]
    for bits, pool in forms:
        room = min(budget, FLOAT_BUDGET) if bits == "f32" else budget
        # Every eighth head tells the size well enough to skip a hopeless form early.
        if _hopeless(shares, bits, pool, room):
            continue
        blobs, used = [], 0
        for module, share in zip(modules, shares, strict=True):
            blob = _blob(module, share, bits, pool) if share is not None else None
            used += len(blob["data"]) + 200 if blob else 0
            blobs.append(blob)
        if used <= room:
            return {"bits": bits, "pool": pool}, blobs, used
    raise BadFile(f"report: the maps of {len(modules)} modules do not fit into {budget / 1e6:.1f} MB")


def _hopeless(shares: list[Any], bits: str, pool: int, room: int) -> bool:
    sample = total = 0
    for share in shares:
        if share is not None:
            total += len(share)
            part = share[::8]
            sample += len(part)
            room -= len(deflate(_encode(_pool(part, pool), bits))) * len(share) // len(part)
            if room * sample < -0.02 * total:  # already over, with the modules still to come
                return True
    return False


def _shares(module: Module) -> np.ndarray | None:
    """(heads, rows, cols): the weight that a block's keys get from a query of the block's rows."""
    if not module.maps or module.block is None:
        return None
    wanted = next(iter(module.maps.values())).shape
    full = np.full((module.heads, *wanted), np.nan, dtype=np.float32)
    for head, cells in module.maps.items():
        full[head] = cells
    rows = module.block[0]
    sizes = np.minimum(rows, module.queries - rows * np.arange(wanted[0]))
    return full if rows == 1 else full / sizes[:, None].astype(np.float32)


def _pool(share: np.ndarray, pool: int) -> np.ndarray:
    """Blocks of `pool` × `pool` cells: sums over keys, means over queries."""
    if pool == 1:
        return share
    heads, rows, cols = share.shape
    edges_rows, edges_cols = np.arange(0, rows, pool), np.arange(0, cols, pool)
    summed = np.add.reduceat(np.add.reduceat(share, edges_rows, axis=1), edges_cols, axis=2)
    sizes = np.diff(np.append(edges_rows, rows))
    return summed / sizes[None, :, None].astype(np.float32)


def _encode(share: np.ndarray, bits: str) -> np.ndarray:
    if bits == "f32":
        return share.astype(np.float32)
    return code16(share) if bits == "u16" else code8(share)


def _blob(module: Module, share: np.ndarray, bits: str, pool: int) -> dict[str, Any]:
    cells = _encode(_pool(share, pool), bits)
    block = module.block or (1, 1)
    # A side with a single cell cannot be pooled further, but a block never exceeds its axis.
    return {
        "rows": cells.shape[1], "cols": cells.shape[2],
        "block": [min(block[0] * pool, module.queries), min(block[1] * pool, module.keys)],
        "missing": [h for h in range(module.heads) if h not in module.maps],
        "data": deflate(cells),
    }  # fmt: skip


def _tops(modules: list[Module], budget: int) -> tuple[list[Any], dict[str, int] | None, int]:
    """Top keys of as many rows and as many keys as fit; rows are thinned evenly."""
    if not any(module.top for module in modules):
        return [None] * len(modules), None, 0
    most = max(top.keys.shape[1] for module in modules for top in module.top.values())
    step = 1
    while step <= 4096:
        for k in sorted({most, min(most, 12), min(most, 8), min(most, 5)}, reverse=True):
            blobs = [_top(module, k, step) for module in modules]
            used = sum(sum(map(len, blob["data"])) + 200 for blob in blobs if blob)
            if used <= budget:
                return blobs, {"keys": k, "step": step}, used
            if used > 4 * budget:
                break
        step *= 2
    return [None] * len(modules), None, 0


def _top(module: Module, k: int, step: int) -> dict[str, Any] | None:
    if not module.top:
        return None
    count = max(len(top.rows[::step]) for top in module.top.values())
    rows = np.full((module.heads, count), -1, dtype=np.int32)
    keys = np.full((module.heads, count, k), -1, dtype=np.int32)
    weights = np.zeros((module.heads, count, k), dtype=np.float32)
    for head, top in module.top.items():
        order = np.argsort(top.rows, kind="stable")[::step]
        width = min(k, top.keys.shape[1])
        best = np.argsort(-top.weights[order], axis=1, kind="stable")[:, :width]
        rows[head, : len(order)] = top.rows[order]
        keys[head, : len(order), :width] = np.take_along_axis(top.keys[order], best, 1)
        weights[head, : len(order), :width] = np.take_along_axis(top.weights[order], best, 1)
    # Heads mostly share their rows, which deflate then writes once. Distances back from the row
    # are smaller numbers than places, and repeat.
    back = np.where(keys < 0, np.int32(2**31 - 1), rows[:, :, None] - keys)
    return {"rows": count, "k": k, "data": [deflate(rows), deflate(back), deflate(code16(weights))]}


def _received(modules: list[Module], budget: int) -> tuple[list[Any], int]:
    """Column sums, as u16 of the head's largest; coarser where they would not fit."""
    for pool in POOLS:
        blobs = [_sums(module, pool) for module in modules]
        used = sum(len(blob["data"]) + 12 * len(blob["scale"]) for blob in blobs if blob)
        if used <= budget:
            return blobs, used
    return [None] * len(modules), 0


def _sums(module: Module, pool: int) -> dict[str, Any] | None:
    if not module.received:
        return None
    block, first = next(iter(module.received.values()))
    table = np.zeros((module.heads, -(-len(first) // pool)), dtype=np.float64)
    for head, (width, sums) in module.received.items():
        if width != block:
            raise BadFile(f"report: 'received' of {module.id}: blocks of {width} and of {block}")
        table[head] = np.add.reduceat(sums.astype(np.float64), np.arange(0, len(sums), pool))
    table = np.nan_to_num(table)
    scale = table.max(axis=1, initial=0)
    parts = np.rint(65_535 * table / np.where(scale > 0, scale, 1)[:, None]).astype(np.uint16)
    scales = [float(f"{x:.6g}") for x in scale]
    return {"block": block * pool, "count": table.shape[1], "scale": scales, "data": deflate(parts)}
