"""Words spoken by espeak-ng's voices, in a process of its own.

The library is foreign code that keeps global state, so it is loaded in a child, which this file is:
it imports nothing of headwise. The child reads JSON lines from its standard input and writes the
samples to a file; the parent reads that file whole or not at all.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

# From speak_lib.h of espeak-ng 1.51.
_SYNCHRONOUS, _DONT_EXIT, _RATE, _PITCH, _CHARACTERS, _UTF8 = 2, 0x8000, 1, 3, 1, 1


class Saying(NamedTuple):
    """A word as one voice says it: `voice` in espeak-ng's form accent+variant, `rate` in words a
    minute, `pitch` from 0 to 99."""

    word: str
    voice: str
    rate: int
    pitch: int


def speak(folder: Path, sayings: Sequence[Saying]) -> tuple[list[np.ndarray], int]:
    """The samples of each saying, float32 in [-1, 1], and their rate in Hz.

    `folder` holds the libraries and espeak-ng-data, as `sources.fetch("espeak-ng")` gives it.

    Raises:
        RuntimeError: the library could not be loaded or refused, with its reason.
    """
    with tempfile.TemporaryDirectory(prefix="headwise-voices-") as place:
        target = Path(place) / "spoken.npz"
        result = subprocess.run(
            [sys.executable, "-I", __file__, str(folder), str(target)],
            input="\n".join(json.dumps(saying) for saying in sayings),
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if result.returncode != 0 or not target.exists():
            lines = result.stderr.strip().splitlines() or [f"exit code {result.returncode}"]
            raise RuntimeError(f"espeak-ng: {lines[-1]}")
        with np.load(target, allow_pickle=False) as spoken:
            samples = spoken["samples"].astype(np.float32) / 32768
            lengths, rate = spoken["lengths"], int(spoken["rate"])
    return np.split(samples, np.cumsum(lengths)[:-1]), rate


def _child(folder: Path, target: Path) -> None:
    # In the order in which they need each other: then no search path has to be set.
    for name in ("libsonic.so.0", "libpcaudio.so.0"):
        ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(folder / "libespeak-ng.so.1"))
    rate = library.espeak_Initialize(_SYNCHRONOUS, 0, str(folder).encode(), _DONT_EXIT)
    if rate <= 0:
        raise SystemExit(f"no voices in {folder}")
    heard: list[bytes] = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int16), ctypes.c_int, ctypes.c_void_p)
    def receive(samples: object, count: int, events: object) -> int:
        if samples and count > 0:
            heard.append(ctypes.string_at(samples, 2 * count))  # type: ignore[arg-type]
        return 0

    library.espeak_SetSynthCallback(receive)
    library.espeak_Synth.argtypes = [
        ctypes.c_char_p,
        ctypes.c_size_t,
        ctypes.c_uint,
        ctypes.c_int,
        ctypes.c_uint,
        ctypes.c_uint,
        ctypes.c_void_p,
        ctypes.c_void_p,
    ]
    spoken = []
    for line in sys.stdin:
        saying = Saying(*json.loads(line))
        heard.clear()
        if library.espeak_SetVoiceByName(saying.voice.encode()) != 0:
            raise SystemExit(f"no voice {saying.voice!r}")
        library.espeak_SetParameter(_RATE, saying.rate, 0)
        library.espeak_SetParameter(_PITCH, saying.pitch, 0)
        text = saying.word.encode() + b"\0"
        library.espeak_Synth(text, len(text), 0, _CHARACTERS, 0, _UTF8, None, None)
        library.espeak_Synchronize()
        sound = np.frombuffer(b"".join(heard), dtype="<i2")
        if not len(sound):
            raise SystemExit(f"{saying.voice!r} said nothing for {saying.word!r}")
        spoken.append(sound)
    lengths = np.array([len(sound) for sound in spoken])
    np.savez(target, samples=np.concatenate(spoken), lengths=lengths, rate=rate)


if __name__ == "__main__":
    _child(Path(sys.argv[1]), Path(sys.argv[2]))
