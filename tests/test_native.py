"""The compiled module is there and says what the CPU can run."""

from __future__ import annotations

import os
import platform
import re
import subprocess
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
    order = X86 if machine in {"x86_64", "amd64"} else []
    assert names == [name for name in order if name in names] + ["portable"]
    # A better x86 set includes every worse one, so what is missing is missing from the front.
    if order == X86:
        assert names[:-1] == X86[len(X86) - (len(names) - 1) :]


def test_the_kernels_say_that_the_best_of_what_was_compiled_runs() -> None:
    assert set(native.runnable()) <= set(native.supported())
    wanted = os.environ.get("HEADWISE_ISA") or native.runnable()[0]
    assert native.isa() == wanted


@pytest.mark.parametrize(
    ("name", "kind"), [("sse9", "is not known"), ("avx512", "cannot run on this CPU")]
)
def test_a_forced_instruction_set_that_cannot_run_is_an_error(name: str, kind: str) -> None:
    if name in native.runnable():
        pytest.skip(f"this CPU has {name}")
    code = "from headwise import native; native.isa()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "HEADWISE_ISA": name},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert f"HEADWISE_ISA={name}: this instruction set {kind}; wanted one of" in done.stderr
    assert "portable" in done.stderr


@pytest.mark.parametrize("name", native.runnable())
def test_a_forced_instruction_set_runs(name: str) -> None:
    code = (
        "import torch, headwise; from headwise import native; x = torch.ones(1, 1, 3, 4);"
        "assert headwise.attention(x, x, x, backend='native').equal(x); print(native.isa())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "HEADWISE_ISA": name},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == name


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


def test_without_the_module_torch_computes_and_it_is_said_once() -> None:
    code = """
import sys, warnings
sys.modules["headwise._native"] = None
import torch, headwise
x = torch.ones(1, 1, 3, 4)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for _ in range(3):
        assert headwise.attention(x, x, x).equal(x)
assert len(said) == 1 and said[0].category is RuntimeWarning, said
print(said[0].message)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "native module cannot be loaded" in done.stdout
    assert "torch's kernels compute" in done.stdout
