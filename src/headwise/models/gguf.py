"""A GGUF file (llama.cpp's format) to an ordinary float32 transformers model and its tokenizer."""

from __future__ import annotations

import copy
import struct
from pathlib import Path
from typing import Any

from headwise._extras import require
from headwise.errors import BadFile
from headwise.models.quiet import first_line, quiet

# What a parser of somebody else's bytes raises on nonsense. A truncated file most often gives
# IndexError or ValueError out of numpy's memory map.
_PARSE_ERRORS = (
    ValueError,
    IndexError,
    KeyError,
    OSError,
    OverflowError,
    MemoryError,
    TypeError,
    struct.error,
)


def check(path: Path) -> None:
    """Raise where the file is no whole GGUF file.

    Raises:
        BadFile: it cannot be read, has no GGUF mark, or is cut short or corrupt.
    """
    reader = require("gguf", extra="models", purpose="reading GGUF")
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            mark = file.read(4)
    except OSError as error:
        raise BadFile(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from None
    if mark != b"GGUF":
        raise BadFile(f"{path}: not a GGUF file (it begins with {mark!r})")
    try:
        tensors = reader.GGUFReader(str(path)).tensors
        end = max((int(tensor.data_offset) + int(tensor.n_bytes) for tensor in tensors), default=0)
    except _PARSE_ERRORS as error:
        raise BadFile(
            f"{path}: corrupt GGUF file or one that is cut short at {size:,} bytes "
            f"({first_line(error)})"
        ) from None
    if not tensors:
        raise BadFile(f"{path}: a GGUF file without tensors")
    if end > size:
        raise BadFile(f"{path}: cut short: its tensors need {end:,} bytes, the file has {size:,}")


def load(path: Path) -> tuple[Any, Any]:
    """(causal model with float32 weights, tokenizer). The dequantisation is exact; SmolLM2 takes 14
    s.

    Raises:
        BadFile: the file is corrupt, or of an architecture that transformers cannot read.
    """
    check(path)
    transformers = require("transformers", extra="models", purpose="headwise.models")
    require("accelerate", extra="models", purpose="reading GGUF")
    where = {"gguf_file": path.name, "local_files_only": True}
    try:
        with quiet():
            read = transformers.AutoModelForCausalLM.from_pretrained(str(path.parent), **where)
            tokenizer = transformers.AutoTokenizer.from_pretrained(str(path.parent), **where)
    except (*_PARSE_ERRORS, RuntimeError, NotImplementedError) as error:
        raise BadFile(
            f"{path}: transformers cannot read this GGUF file ({first_line(error)})"
        ) from None
    # The model still carries a quantisation config, which makes save_pretrained refuse and says
    # something untrue: its weights are plain float32 now.
    config = copy.deepcopy(read.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = type(read)(config)
    model.load_state_dict(read.state_dict(), strict=True, assign=True)
    model.tie_weights()
    model.generation_config = read.generation_config
    return model.eval(), tokenizer


def convert(path: Path, directory: Path) -> None:
    """Write the GGUF file as a Hugging Face directory: config, float32 safetensors, tokenizer.

    Raises:
        BadFile: as `load`.
    """
    model, tokenizer = load(path)
    with quiet():
        model.save_pretrained(str(directory))
        tokenizer.save_pretrained(str(directory))
