"""The command as a terminal of a given width shows it."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

STYLE = re.compile(r"\x1b\[([\d;]*)m")
MOVE = re.compile(r"\x1b\[[\d;?]*[A-HJKSTfhlnsu]")


def on_terminal(*arguments: str, columns: int, no_colour: bool) -> tuple[list[str], set[int], int]:
    """(the lines of stdout, the numbers of the styles that were set in it, the exit code)."""
    here, there = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    environment |= {"COLUMNS": str(columns), "TERM": "xterm-256color"}
    if no_colour:
        environment["NO_COLOR"] = "1"
    with subprocess.Popen(
        [sys.executable, "-m", "headwise", *arguments],
        stdin=subprocess.DEVNULL, stdout=there, stderr=subprocess.DEVNULL, env=environment,
    ) as process:  # fmt: skip
        os.close(there)
        found = b""
        while True:
            try:
                part = os.read(here, 65536)
            except OSError:  # Linux: the other end was closed
                break
            if not part:
                break
            found += part
        code = process.wait(timeout=120)
    os.close(here)
    text = MOVE.sub("", found.decode())
    styles = {int(n) for codes in STYLE.findall(text) for n in codes.split(";") if n}
    return STYLE.sub("", text).replace("\r", "").splitlines(), styles, code


def colours(styles: set[int]) -> set[int]:
    """Those of the styles that set a colour; the rest is bold, italic and the like."""
    return {n for n in styles if 30 <= n <= 49 or 90 <= n <= 107}
