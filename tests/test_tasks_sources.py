"""Sources: only what is pinned is unpacked, only what is named, whole or not at all."""

from __future__ import annotations

import hashlib
import io
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from headwise.errors import BadFile, HeadwiseError
from headwise.tasks import sources
from headwise.tasks.sources import SOURCES, Debian, Source, Wheel, fetch


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADWISE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def wheel(path: Path, members: dict[str, bytes]) -> str:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def pin(monkeypatch: pytest.MonkeyPatch, file: Path, package, files: dict[str, str]) -> None:
    """A source named "it", whose package pip or apt answers with `file`."""
    monkeypatch.setitem(SOURCES, "it", Source("it", 1, "MIT", (package,), files))

    def bring(package, place: Path) -> Path:
        return Path(shutil.copy(file, place / file.name))

    monkeypatch.setattr(sources, "_by_pip", bring)
    monkeypatch.setattr(sources, "_by_apt", bring)


def test_the_named_files_come_and_nothing_else(tmp_path, cache, monkeypatch) -> None:
    file = tmp_path / "a.whl"
    members = {"a/x.txt": b"x", "a/d/1": b"one", "a/d/e/2": b"two", "b.txt": b"b"}
    digest = wheel(file, members)
    pin(monkeypatch, file, Wheel("a", "1", digest), {"a/x.txt": "y.txt", "a/d/*": "kept/"})
    said: list[str] = []
    folder = fetch("it", say=said.append)
    found = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    assert found == {"y.txt": b"x", "kept/1": b"one", "kept/e/2": b"two"}
    assert said == ["fetching it (1 MB, MIT)"]
    assert fetch("it", say=said.append) == folder and len(said) == 1


@pytest.mark.parametrize("what", ["hash", "missing", "damaged", "outside"])
def test_what_is_not_as_pinned_leaves_nothing(tmp_path, cache, monkeypatch, what: str) -> None:
    file = tmp_path / "a.whl"
    digest = wheel(file, {"a/x.txt": b"x", "a/../../../evil": b"evil"})
    files = {"a/x.txt": "x.txt"}
    if what == "hash":
        digest = "0" * 64
    if what == "missing":
        files["a/z.txt"] = "z.txt"
    if what == "damaged":
        file.write_bytes(file.read_bytes()[:40])
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if what == "outside":
        files = {"a/*": "all/"}
    pin(monkeypatch, file, Wheel("a", "1", digest), files)
    says = {
        "hash": r"a 1: the file that came has SHA-256 .*, pinned is 0000000000000000…",
        "missing": "it: the packages hold no a/z.txt",
        "damaged": "a: damaged archive",
        "outside": "was not unpacked",
    }[what]
    with pytest.raises(BadFile, match=says):
        fetch("it", say=lambda line: None)
    assert not [path for path in cache.rglob("*") if path.suffix != ".lock"][1:]
    assert not list(tmp_path.rglob("evil"))


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="needs dpkg-deb")
def test_links_in_a_debian_package_are_passed_over(tmp_path, monkeypatch) -> None:
    tree = tmp_path / "tree"
    (tree / "DEBIAN").mkdir(parents=True)
    (tree / "DEBIAN" / "control").write_text(
        "Package: it\nVersion: 1\nArchitecture: all\nMaintainer: A <a@example.org>\n"
        "Description: it\n"
    )
    (tree / "usr").mkdir()
    (tree / "usr" / "real").write_text("real")
    (tree / "usr" / "link").symlink_to("/etc/hostname")
    file = tmp_path / "it.deb"
    command = ["dpkg-deb", "--root-owner-group", "--build", str(tree), str(file)]
    subprocess.run(command, check=True, capture_output=True)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    pin(monkeypatch, file, Debian("it", "1", digest), {"usr/*": "usr/"})
    folder = fetch("it", say=lambda line: None)
    assert [path.name for path in (folder / "usr").iterdir()] == ["real"]


def test_why_a_fetch_failed_is_one_line(tmp_path, cache, monkeypatch) -> None:
    def fail(command, **options):
        text = "W: slow\nE: Version '1' for 'it' was not found\n"
        return subprocess.CompletedProcess(command, 100, "", text)

    monkeypatch.setattr(sources.subprocess, "run", fail)
    monkeypatch.setattr(sources.shutil, "which", lambda tool: f"/usr/bin/{tool}")
    package = Debian("it", "1", "0" * 64)
    monkeypatch.setitem(SOURCES, "it", Source("it", 1, "MIT", (package,), {"x": "x"}))
    with pytest.raises(
        HeadwiseError, match=r"Version '1' for 'it' was not found.*still have"
    ) as one:
        fetch("it", say=lambda line: None)
    assert "\n" not in str(one.value) and "--data" in str(one.value)
    monkeypatch.setattr(sources.shutil, "which", lambda tool: None)
    with pytest.raises(HeadwiseError, match="this machine has no apt-get"):
        fetch("it", say=lambda line: None)


def test_every_source_is_pinned_and_lands_inside_its_folder() -> None:
    for name, source in SOURCES.items():
        assert source.name == name and source.licence and source.files
        for package in source.packages:
            assert len(package.sha256) == 64 and int(package.sha256, 16)
        for target in source.files.values():
            assert ".." not in Path(target).parts and not Path(target).is_absolute()


def test_a_tar_with_a_device_is_read_for_its_files_alone(tmp_path, monkeypatch) -> None:
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as tar:
        device = tarfile.TarInfo("./dev")
        device.type = tarfile.CHRTYPE
        tar.addfile(device)
        entry = tarfile.TarInfo("./a")
        entry.size = 2
        tar.addfile(entry, io.BytesIO(b"ok"))

    def give(command, stdout, check):
        stdout.write(plain.getvalue())

    monkeypatch.setattr(sources.subprocess, "run", give)
    found = [
        (path, opened().read())
        for path, opened in sources._members(Debian("it", "1", ""), tmp_path / "it.deb")
    ]
    assert found == [("a", b"ok")]
