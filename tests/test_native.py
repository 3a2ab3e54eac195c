"""The compiled module is there and says what the CPU can run."""

from __future__ import annotations

import platform
import re
import sys
from pathlib import Path

import pytest

from headwise import native

X86 = ["avx512bf16", "avx512", "avx2"]


def test_supported_lists_known_names_best_first_and_ends_with_portable() -> None:
    names = native.supported()
    assert names[-1] == "portable"
    assert len(set(names)) == len(names)
    machine = platform.machine().lower()
    order = X86 if machine in {"x86_64", "amd64"} else ["neon"] if "arm" in machine else []
    order = ["neon"] if machine == "aarch64" else order
    assert names == [name for name in order if name in names] + ["portable"]
    # A better x86 set includes every worse one, so what is missing is missing from the front.
    if order == X86:
        assert names[:-1] == X86[len(X86) - (len(names) - 1) :]


def test_isa_is_the_best_supported() -> None:
    assert native.isa() == native.supported()[0]


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="the kernel's view is Linux's")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags' names are x86's")
def test_supported_agrees_with_what_the_kernel_reports() -> None:
    """Linux lists a flag only where it saves the registers too, so it must say what we say."""
    found = re.search(r"^flags\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    assert found is not None
    flags = set(found[1].split())
    avx2 = {"avx", "avx2", "fma", "f16c"} <= flags
    avx512 = avx2 and {"avx512f", "avx512dq", "avx512bw", "avx512vl"} <= flags
    bf16 = avx512 and "avx512_bf16" in flags
    wanted = [name for name, there in zip(X86, (bf16, avx512, avx2), strict=True) if there]
    assert native.supported() == [*wanted, "portable"]


def test_a_package_that_was_not_compiled_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import headwise

    monkeypatch.delattr(headwise, "_native", raising=False)
    monkeypatch.setitem(sys.modules, "headwise._native", None)
    with pytest.raises(ImportError, match=r"native module cannot be loaded.*pip install"):
        native.supported()
