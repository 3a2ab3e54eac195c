"""A notebook's overview: one small picture a head, no script, nothing fetched.

The pictures are palette PNGs written here, because a notebook that is not trusted drops scripts.
"""

from __future__ import annotations

import base64
import itertools
import struct
import zlib
from html import escape

import numpy as np

from headwise.report.collect import Module, Run
from headwise.report.embed import _pool, _shares

SIDE = 24
MOST_PICTURES = 1_500
# Dark to light at even steps of lightness (seaborn's "mako"): one hue path, readable to all eyes.
MAKO = ("0b0405", "2e1e3b", "413d7b", "37659e", "348fa7", "40b7ad", "8bdab2", "def5e5")
SHADES = 48


def fragment(run: Run) -> str:
    """An HTML fragment whose style touches nothing outside it."""
    parts = [
        '<div style="font:13px/1.4 system-ui,sans-serif">'
        f'<p style="margin:0 0 6px"><b>{_say(run.facts.get("model"), "model")}</b>: '
        f"{sum(m.heads for m in run.modules)} attention heads. Each picture is one head: "
        "rows are queries, columns are keys, brighter is more weight. "
        "Attention maps are clues, not explanations.</p>"
    ]
    room = MOST_PICTURES
    for section, modules in itertools.groupby(run.modules, key=lambda m: m.section):
        grid = [_row(module) for module in modules if (room := room - module.heads) >= 0]
        parts.append(
            f'<div style="margin:8px 0 2px"><b>{escape(section)}</b></div>'
            '<div style="overflow-x:auto"><table role="presentation" '
            'style="border-collapse:separate;border-spacing:2px;width:auto;margin:0">'
            + "".join(grid)
            + "</table></div>"
        )
    if room < 0:
        parts.append(f"<p>Only the first {MOST_PICTURES} heads are shown.</p>")
    return "".join(parts) + "</div>"


def _row(module: Module) -> str:
    share = _shares(module) if module.maps else None
    cells = [
        '<td style="padding:0 6px 0 0;text-align:right;border:0;'
        f'background:none;font:12px system-ui,sans-serif">{module.layer}</td>'
    ]
    for head in range(module.heads):
        labels = module.stats.get(head, {}).get("labels") or []
        hint = f"layer {module.layer} head {head}" + (f": {', '.join(labels)}" if labels else "")
        if share is None or head not in module.maps:
            inside = f'<span title="{escape(hint)}: no map">·</span>'
        else:
            inside = (
                f'<img src="{_png(share[head])}" width="{SIDE}" height="{SIDE}" '
                f'alt="{escape(hint)}" title="{escape(hint)}" '
                'style="display:block;margin:0;max-width:none;border-radius:2px">'
            )
        cells.append(f'<td style="padding:0;border:0;background:none">{inside}</td>')
    return f'<tr style="background:none">{"".join(cells)}</tr>'


def _png(share: np.ndarray) -> str:
    size = max(share.shape)
    small = _pool(share[None], max(1, -(-size // SIDE)))[0]
    with np.errstate(invalid="ignore"):
        shades = np.rint((SHADES - 1) * np.sqrt(np.clip(small, 0, 1)))
    pixels = np.nan_to_num(shades).astype(np.uint8)
    rows = np.concatenate([np.zeros((len(pixels), 1), np.uint8), pixels], axis=1)  # filter: none
    header = struct.pack(">IIBBBBB", pixels.shape[1], pixels.shape[0], 8, 3, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"PLTE", _palette()), (b"IDAT", zlib.compress(rows.tobytes(), 9))]
    body = b"\x89PNG\r\n\x1a\n"
    for name, data in [*chunks, (b"IEND", b"")]:
        check = zlib.crc32(name + data)
        body += struct.pack(">I", len(data)) + name + data + struct.pack(">I", check)
    return "data:image/png;base64," + base64.b64encode(body).decode("ascii")


def _palette() -> bytes:
    anchors = np.array([[int(c[i : i + 2], 16) for i in (0, 2, 4)] for c in MAKO], dtype=float)
    places = np.linspace(0, len(MAKO) - 1, SHADES)
    columns = [np.interp(places, np.arange(len(MAKO)), anchors[:, c]) for c in range(3)]
    return np.rint(np.stack(columns, axis=1)).astype(np.uint8).tobytes()


def _say(value: object, default: str) -> str:
    return escape(str(value if value is not None else default))
