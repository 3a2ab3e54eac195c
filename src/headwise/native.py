"""The thin door to the compiled module `headwise._native`: which instruction set runs.

`HEADWISE_ISA` forces one; a name that is unknown or that this CPU lacks is an error, never a quiet
change to another.
"""

from __future__ import annotations

import os
from types import ModuleType

from headwise.errors import BadSetting

ISAS = ("avx512bf16", "avx512", "avx2", "portable")

_ready: ModuleType | None = None


def module() -> ModuleType:
    """The compiled module, set to the instruction set that runs.

    Raises:
        ImportError: the package was copied instead of installed, so nothing was compiled.
        BadSetting: (a ValueError) HEADWISE_ISA names what is unknown or cannot run here.
    """
    global _ready
    if _ready is None:
        _native = _import()
        wanted = os.environ.get("HEADWISE_ISA")
        if wanted and not _native.use(wanted):
            kind = "cannot run on this CPU" if wanted in ISAS else "is not known"
            raise BadSetting(
                f"HEADWISE_ISA={wanted}: this instruction set {kind}; wanted one of "
                f"{', '.join(_native.runnable())}"
            )
        _ready = _native
    return _ready


def supported() -> list[str]:
    """The instruction sets that this CPU and its operating system support, best first.

    Names: "avx512bf16", "avx512", "avx2" (x86-64) and, always last, "portable" (16-byte vectors:
    NEON on arm64).

    Raises:
        ImportError: as `module`.
    """
    return list(_import().supported())


def runnable() -> list[str]:
    """Those of `supported()` that kernels were compiled for, best first.

    Raises:
        ImportError: as `module`.
    """
    return list(_import().runnable())


def isa() -> str:
    """The instruction set of the kernels that run, as the kernels themselves say.

    Raises:
        ImportError, BadSetting: as `module`.
    """
    return str(module().isa())


def _import() -> ModuleType:
    try:
        from headwise import _native
    except ImportError as error:
        raise ImportError(
            f"headwise's native module cannot be loaded ({error}); install the package with "
            "'pip install .' (or 'make') so that it is compiled for this Python"
        ) from error
    return _native
