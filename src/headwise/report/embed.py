"""What the page carries: arrays deflated, at the finest resolution that the byte budget allows.

Three forms of a weight, each stated on the page:
- `f32`: as recorded.
- `u16`: 60 steps to a thousandth, with edges where a third decimal rounds up, so that three
  decimals on the page are three decimals of the weight. Code 0 is an exact zero.
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
        "checks": run.checks[:2000],
        "costs": run.costs,
        "growths": run.growths,
        "studies": run.studies,
        "baselines": run.baselines,
        "answers": run.answers,
        "rollouts": run.rollouts,
    }
    left = BUDGET - len(json.dumps(data, ensure_ascii=False).encode())
    if left < 200_000:
        raise BadFile(
            f"report: texts and statistics need {(BUDGET - left) / 1e6:.1f} MB of the page's "
            f"{BUDGET / 1e6:.1f} MB, which leaves no room for maps; draw fewer modules or tokens"
        )
    received, used_received = _received(run.modules, int(left * RECEIVED_SHARE))
    _, _, used_top = _tops(run.modules, int(left * TOP_SHARE))
    blobs, used_maps = _maps(run.modules, left - used_top - used_received)
    # Where every single weight is there to 3 decimals, top keys and sums are read from the map.
    pooled = [m for m, blob in zip(run.modules, blobs, strict=True) if _coarse(blob)]
    top, kept, _ = _tops(pooled, left - used_received - used_maps)
    data["top"] = kept
    tops = dict(zip([m.id for m in pooled], top, strict=True))
    for entry, sums in zip(data["modules"], received, strict=True):
        entry["top"] = tops.get(entry["id"])
        entry["received"] = sums if entry["id"] in tops else None
    for entry, blob in zip(data["modules"], blobs, strict=True):
        entry["map"] = blob
    return data


def _coarse(blob: Any) -> bool:
    return blob is None or blob["bits"] == "u8"


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


def _maps(modules: list[Module], budget: int) -> tuple[list[Any], int]:
    """The finest form of each size of map that fits: (one blob a module, bytes).

    The smallest maps choose first, from an equal share each; what they leave goes to the larger.
    """
    groups: dict[tuple[Any, ...], list[int]] = {}
    for at, module in enumerate(modules):
        if module.maps:
            shape = next(iter(module.maps.values())).shape
            groups.setdefault((module.section, shape, module.block), []).append(at)

    def cells(key: tuple[Any, ...]) -> int:
        return key[1][0] * key[1][1] * sum(modules[at].heads for at in groups[key])

    blobs: list[Any] = [None] * len(modules)
    left = budget
    ordered = sorted(groups, key=cells)
    for place, key in enumerate(ordered):
        found, used = _group([modules[at] for at in groups[key]], left // (len(ordered) - place))
        left -= used
        for at, blob in zip(groups[key], found, strict=True):
            blobs[at] = blob
    return blobs, budget - left


def _group(modules: list[Module], room: int) -> tuple[list[dict[str, Any]], int]:
    shares = [_shares(module) for module in modules]
    forms = [("f32", 1), ("u16", 1)] if modules[0].block == (1, 1) else []
    for bits, pool in forms + [("u8", pool) for pool in POOLS]:
        limit = min(room, FLOAT_BUDGET) if bits == "f32" else room
        if _hopeless(shares, bits, pool, limit):
            continue
        blobs = [_blob(m, s, bits, pool) for m, s in zip(modules, shares, strict=True)]
        used = sum(len(blob["data"]) + 200 for blob in blobs)
        if used <= limit:
            return blobs, used
    raise BadFile(
        f"report: the maps of {sum(m.heads for m in modules)} heads do not fit into "
        f"{room / 1e6:.2f} MB of the page; draw fewer modules"
    )


def _hopeless(shares: list[np.ndarray], bits: str, pool: int, room: int) -> bool:
    """Every eighth head tells the size well enough to skip a form that is far too large."""
    used = 0.0
    for share in shares:
        part = share[::8]
        used += len(deflate(_encode(_pool(part, pool), bits))) * len(share) / len(part)
        if used > 1.1 * room:
            return True
    return False


def _shares(module: Module) -> np.ndarray:
    """(heads, rows, cols): the weight that a block's keys get from a query of the block's rows."""
    assert module.block is not None
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
    _, rows, cols = share.shape
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
    return {
        "bits": bits, "rows": cells.shape[1], "cols": cells.shape[2],
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
