"""The tasks' own data, fetched by name: wheels by pip, Debian packages by apt, archives by npm,
all pinned.

Nothing that is fetched is installed or imported: the files named here are copied out of packages
whose SHA-256 is the pinned one, into the cache that the packaged models use, whole or not at all.
Whoever cannot fetch gives a file of their own (`--data`).
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from headwise.errors import BadFile, HeadwiseError
from headwise.models.store import keep, tell


@dataclass(frozen=True)
class Wheel:
    """A wheel that pip finds. `platform` and `python` name one build where there are many, so that
    every machine reads the same file."""

    name: str
    version: str
    sha256: str
    platform: str = ""
    python: str = ""


@dataclass(frozen=True)
class Debian:
    """A package of a Debian archive, in the version that the machine's own apt offers."""

    name: str
    version: str
    sha256: str


@dataclass(frozen=True)
class Npm:
    """An archive of files that npm finds. Nothing in it is run."""

    name: str
    version: str
    sha256: str


Package = Wheel | Debian | Npm


@dataclass(frozen=True)
class Source:
    """`files` maps a path inside the packages to its name in the cache; a path that ends in * is
    every file that begins so, and its name what the path before the * becomes."""

    name: str
    megabytes: int
    licence: str
    packages: tuple[Package, ...]
    files: Mapping[str, str]


_LIBRARY = "usr/lib/x86_64-linux-gnu"
_ESPEAK = "1.51+dfsg-10+deb12u2"

SOURCES: dict[str, Source] = {
    source.name: source
    for source in (
        Source(
            name="taylor",
            megabytes=1,
            licence="MIT",
            packages=(
                Wheel(
                    "pmdarima",
                    "2.1.1",
                    "e8148ff1f4cdb9a07164247eb3e6dddc1baef6e226d38528bd3fdf5d160f8dee",
                    platform="manylinux2014_x86_64",
                    python="3.11",
                ),
            ),
            files={"pmdarima/datasets/taylor.py": "taylor.txt"},
        ),
        Source(
            name="movielens-100k",
            megabytes=2,
            licence="GroupLens: research use, no redistribution",
            packages=(
                Wheel(
                    "recbole",
                    "1.2.1",
                    "9c9948202011f37eb0a7c6768129313f00d6403ad221ec940d5e2d5d5f33a407",
                ),
            ),
            files={
                "recbole/dataset_example/ml-100k/ml-100k.inter": "events.tsv",
                "recbole/dataset_example/ml-100k/ml-100k.item": "items.tsv",
            },
        ),
        Source(
            name="asterisk-sounds",
            megabytes=18,
            licence="CC-BY-SA-3.0",
            packages=(
                Debian(
                    "asterisk-core-sounds-en-wav",
                    "1.6.1-1",
                    "2be3ea287d83299d143815fa804f11179a75b7affd4a758b98b55f5afc18a35d",
                ),
            ),
            files={"usr/share/asterisk/sounds/en_US_f_Allison/digits/*": "digits/"},
        ),
        Source(
            name="espeak-ng",
            megabytes=5,
            licence="GPL-3.0-or-later",
            packages=(
                Debian(
                    "libespeak-ng1",
                    _ESPEAK,
                    "2b127a95b50d92cbd7a615968d2ac1566e1cbc87e27bcda0c2894afb2407c6d2",
                ),
                Debian(
                    "espeak-ng-data",
                    _ESPEAK,
                    "573f5661c6a5adcf949018baad158c4c773bf5579390ee5235a890f1cd694106",
                ),
                Debian(
                    "libsonic0",
                    "0.2.0-12",
                    "9d60de6918ace0b10e3e4e95421befd08aaf03b5b2a3d71ceb799e0cf259916f",
                ),
                Debian(
                    "libpcaudio0",
                    "1.2-2",
                    "5309759e4d129c7d9a601240cc6e62820ecfa86a1a98e207992ffa6a572dbcd2",
                ),
            ),
            files={
                f"{_LIBRARY}/libespeak-ng.so.1.1.51": "libespeak-ng.so.1",
                f"{_LIBRARY}/libsonic.so.0.2.0": "libsonic.so.0",
                f"{_LIBRARY}/libpcaudio.so.0.0.1": "libpcaudio.so.0",
                **{
                    f"{_LIBRARY}/espeak-ng-data/{part}": f"espeak-ng-data/{name}"
                    for part, name in {
                        "phon*": "phon",
                        "intonations": "intonations",
                        "en_dict": "en_dict",
                        "lang/gmw/en*": "lang/gmw/en",
                        "voices/!v/*": "voices/!v/",
                    }.items()
                },
            },
        ),
        Source(
            name="fashion-mnist",
            megabytes=31,
            licence="MIT",
            packages=(
                Debian(
                    "dataset-fashion-mnist",
                    "0.0~git20200523.55506a9-1",
                    "39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0",
                ),
            ),
            files={"usr/share/datasets/fashion-mnist/*": ""},
        ),
        Source(
            name="english-text",
            megabytes=4,
            licence="public domain",
            packages=(
                Debian(
                    "sword-text-web",
                    "426.0-1",
                    "930b23670b352f0829a306501de4bebb5e654a2df02cde2cbe86b802177868e1",
                ),
            ),
            files={"usr/share/sword/modules/texts/ztext/engWEB2015eb/*": ""},
        ),
        Source(
            name="english-spanish",
            megabytes=6,
            licence="public domain (the English text is restricted in the UK)",
            packages=(
                Debian(
                    "sword-text-kjv",
                    "14.3-1",
                    "9f463f28ce665f6f528fc723179722bced880a4c5485f7a41bf742838315de57",
                ),
                Debian(
                    "sword-text-sparv",
                    "2.60-1",
                    "5c87f9b2bc97457e8a872f5bae7ea7ce59cb3de1dcee73e4d4740451863694cf",
                ),
            ),
            files={
                "usr/share/sword/modules/texts/ztext/engKJV2006eb/*": "english/",
                "usr/share/sword/modules/texts/ztext/spaRV1909eb/*": "spanish/",
            },
        ),
        Source(
            name="emoji",
            megabytes=62,
            licence="images CC-BY-4.0, names MIT",
            packages=(
                Npm(
                    "emoji-datasource-twitter",
                    "16.0.0",
                    "f64a530c63bca463bd8317fdc4615ce63a53a0c65018e4ce2d848aaba7a28877",
                ),
            ),
            files={
                "package/img/twitter/64/*": "images/",
                "package/emoji.json": "emoji.json",
            },
        ),
    )
}


def fetch(name: str, *, say: Callable[[str], None] = tell) -> Path:
    """The folder of a source's files, fetched where the cache lacks it.

    Raises:
        KeyError: no such source. HeadwiseError: pip, apt or the cache failed, with the reason.
        BadFile: what came is not what is pinned.
    """
    source = SOURCES[name]
    digest = hashlib.sha256(repr(source).encode()).hexdigest()[:8]

    def build(directory: Path) -> None:
        say(f"fetching {name} ({source.megabytes} MB, {source.licence})")
        missing = set(source.files)
        with tempfile.TemporaryDirectory(prefix=".download-", dir=directory) as download:
            for number, package in enumerate(source.packages):
                place = Path(download) / str(number)
                place.mkdir()
                file = _bring(package, place)
                _check(package, file)
                for rule, target, content in _wanted(package, file, source.files):
                    missing.discard(rule)
                    path = directory / target
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with path.open("wb") as out:
                        shutil.copyfileobj(content, out)
        if missing:
            raise BadFile(f"{name}: the packages hold no {', '.join(sorted(missing))}")

    return keep(f"data-{name}-{digest}", build, say=say)


def _bring(package: Package, place: Path) -> Path:
    if isinstance(package, Wheel):
        return _by_pip(package, place)
    return _by_apt(package, place) if isinstance(package, Debian) else _by_npm(package, place)


def _by_pip(package: Wheel, place: Path) -> Path:
    # Wheels only: to read an sdist's metadata pip would run its code.
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(place)]
    if package.platform:
        command += ["--platform", package.platform, "--python-version", package.python]
    return _run([*command, f"{package.name}=={package.version}"], place, "pip", package)


def _by_apt(package: Debian, place: Path) -> Path:
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise HeadwiseError(
                f"cannot fetch {package.name}: it is a Debian package and this machine has no "
                f"{tool}; give your own data with --data"
            )
    command = ["apt-get", "download", f"{package.name}={package.version}"]
    return _run(command, place, "apt-get", package)


def _by_npm(package: Npm, place: Path) -> Path:
    if shutil.which("npm") is None:
        raise HeadwiseError(
            f"cannot fetch {package.name}: it is an npm package and this machine has no npm; give "
            "your own data with --data"
        )
    # npm pack fetches the archive and neither installs it nor runs its scripts.
    command = ["npm", "pack", "--silent", "--ignore-scripts", f"{package.name}@{package.version}"]
    return _run(command, place, "npm", package)


def _run(command: list[str], place: Path, who: str, package: Package) -> Path:
    result = subprocess.run(
        command, cwd=place, capture_output=True, text=True, errors="replace", check=False
    )
    files = sorted(place.iterdir())
    if result.returncode == 0 and len(files) == 1:
        return files[0]
    lines = result.stderr.strip().splitlines() or [f"{who} gave no reason"]
    reasons = [line for line in lines if line.startswith(("E:", "ERROR", "npm error"))] or lines
    reason = reasons[-1]
    for prefix in ("ERROR: ", "E: ", "npm error "):
        reason = reason.removeprefix(prefix)
    moved = (
        ", is apt-get update fresh, and does its release still have this version"
        if isinstance(package, Debian)
        else ""
    )
    raise HeadwiseError(
        f"cannot fetch {package.name} {package.version}: {who} failed ({reason}); is there a "
        f"network{moved}? --data takes your own file instead"
    )


def _check(package: Package, file: Path) -> None:
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    if found != package.sha256:
        raise BadFile(
            f"{package.name} {package.version}: the file that came has SHA-256 {found[:16]}…, "
            f"pinned is {package.sha256[:16]}…; it was not used"
        )


def _wanted(
    package: Package, file: Path, files: Mapping[str, str]
) -> Iterator[tuple[str, str, IO[bytes]]]:
    """(rule, name in the cache, content) of the files inside that a rule asks for."""
    for path, content in _members(package, file):
        for rule, name in files.items():
            start = rule.removesuffix("*")
            if path == rule or (rule != start and path.startswith(start)):
                target = name + path[len(start) :]
                # The archive's hash is pinned; this holds even where somebody pins a hostile one.
                if ".." in Path(target).parts or Path(target).is_absolute():
                    raise BadFile(f"{package.name}: a file named {path!r} was not unpacked")
                with content() as opened:
                    yield rule, target, opened


def _members(package: Package, file: Path) -> Iterator[tuple[str, Callable[[], IO[bytes]]]]:
    """Paths of the plain files inside, and what opens each; links and devices are passed over."""
    try:
        if isinstance(package, Wheel):
            with zipfile.ZipFile(file) as archive:
                for info in archive.infolist():
                    if not info.is_dir():
                        yield info.filename, partial(archive.open, info)
            return
        if isinstance(package, Npm):
            with tarfile.open(file, mode="r:gz") as tar:
                for member in tar:
                    if member.isfile():
                        yield member.name, partial(_opened, tar, member)
            return
        # dpkg-deb knows every compression that Debian uses and writes a plain tar.
        with tempfile.TemporaryFile() as plain:
            subprocess.run(["dpkg-deb", "--fsys-tarfile", str(file)], stdout=plain, check=True)
            plain.seek(0)
            with tarfile.open(fileobj=plain, mode="r:") as tar:
                for member in tar:
                    if member.isfile():
                        path = member.name.removeprefix("./")
                        yield path, partial(_opened, tar, member)
    except (
        zipfile.BadZipFile,
        tarfile.TarError,
        zlib.error,
        EOFError,
        subprocess.CalledProcessError,
    ) as error:
        raise BadFile(f"{package.name}: damaged archive ({error})") from None


def _opened(tar: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    content = tar.extractfile(member)
    assert content is not None, "a plain file has content"
    return content


def main() -> None:
    """Fetch what is named, or everything: for machines that prepare a cache beforehand."""
    for name in sys.argv[1:] or SOURCES:
        if name not in SOURCES:
            raise SystemExit(f"unknown source {name!r}: sources are {', '.join(SOURCES)}")
        try:
            print(fetch(name))
        except HeadwiseError as error:
            raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
