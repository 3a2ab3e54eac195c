"""Verses from SWORD modules (compressed texts, zText): plain words, one string a verse."""

from __future__ import annotations

import html
import re
import struct
import zlib
from pathlib import Path

from headwise.errors import BadFile

_LEFT_OUT = re.compile(r"<note.*?</note>|<title.*?</title>", re.DOTALL)
_TAG = re.compile(r"<[^>]*>")


def verses(folder: Path) -> list[str]:
    """Every verse of a module's two testaments, by its place in the versification; "" where there
    is none. Modules of one versification have the same places, so places align translations.

    `*.bzs` holds (offset, size, size unpacked) of each compressed block of `*.bzz`; `*.bzv` holds
    (block, start, size) of each verse.

    Raises:
        BadFile: an index that points outside its text, or a damaged block.
    """
    found: list[str] = []
    for part in ("ot", "nt"):
        try:
            packed = (folder / f"{part}.bzz").read_bytes()
            blocks = [
                zlib.decompress(packed[start : start + size]) if size else b""
                for start, size, _ in struct.iter_unpack(
                    "<III", (folder / f"{part}.bzs").read_bytes()
                )
            ]
            for block, start, size in struct.iter_unpack(
                "<IIH", (folder / f"{part}.bzv").read_bytes()
            ):
                found.append(plain(blocks[block][start : start + size].decode()) if size else "")
        except (OSError, struct.error, zlib.error, IndexError, UnicodeDecodeError) as error:
            raise BadFile(f"{folder / part}: not a SWORD text ({error})") from None
    return found


def plain(marked: str) -> str:
    """The words of a verse without notes, headings and marks."""
    text = html.unescape(_TAG.sub("", _LEFT_OUT.sub("", marked)))
    return " ".join(text.replace("¶", " ").split())
