"""The thin door to the compiled module `headwise._native`.

The kernels come later; today the module tells which instruction set they would run on.
"""

from __future__ import annotations


def supported() -> list[str]:
    """The instruction sets that this CPU and its operating system support, best first.

    Names: "avx512bf16", "avx512", "avx2" (x86-64), "neon" (arm64) and, always last, "portable".

    Raises:
        ImportError: the package was copied instead of installed, so nothing was compiled.
    """
    try:
        from headwise import _native
    except ImportError as error:
        raise ImportError(
            f"headwise's native module cannot be loaded ({error}); install the package with "
            "'pip install .' (or 'make') so that it is compiled for this Python"
        ) from error
    return list(_native.supported())


def isa() -> str:
    """The best instruction set that this CPU supports: the first of `supported()`.

    Raises:
        ImportError: as `supported`.
    """
    return supported()[0]
