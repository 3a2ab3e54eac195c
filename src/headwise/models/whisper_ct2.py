"""Whisper from CTranslate2's binary (version 6) into transformers' WhisperForConditionalGeneration.

The format, little-endian: uint32 version; string spec; uint32 revision; uint32 count; then for each
variable: string name, uint8 rank, uint32 × rank shape, uint8 type, uint32 bytes, data; then uint32
aliases and for each two strings (alias, name). A string is uint16 length (its NUL counted), bytes,
NUL. (CTranslate2 `src/models/model.cc` and `python/ctranslate2/specs/model_spec.py`.)
"""

from __future__ import annotations

import json
import math
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise._extras import require
from headwise.errors import BadFile
from headwise.models.assemble import assemble

_TYPES = {0: "<f4", 1: "<i1", 2: "<i2", 3: "<i4", 4: "<f2"}

# Settings rather than weights, all scalars. Those that change the arithmetic are checked in
# `weights`.
_SETTINGS = {
    "encoder/num_heads",
    "decoder/num_heads",
    "decoder/activation",
    "decoder/alibi",
    "decoder/alignment_heads",
    "decoder/alignment_layer",
    "decoder/pre_norm",
    "decoder/scale_embeddings",
    "decoder/start_from_zero_embedding",
}


class _Cursor:
    """Reads forward through the file's bytes and never past their end."""

    def __init__(self, data: memoryview, path: Path):
        self.data = data
        self.path = path
        self.at = 0

    def take(self, count: int, what: str) -> memoryview:
        left = len(self.data) - self.at
        if count > left:
            raise BadFile(
                f"{self.path}: {what} at byte {self.at:,} needs {count:,} bytes and {left:,} are "
                "left; the file is cut short or is not a CTranslate2 model"
            )
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, code: str, what: str) -> int:
        return int(struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))[0])

    def string(self, what: str) -> str:
        raw = bytes(self.take(self.number("H", what), what))
        if not raw.endswith(b"\0"):
            raise BadFile(f"{self.path}: {what} before byte {self.at:,} does not end in NUL")
        try:
            return raw[:-1].decode("utf-8")
        except UnicodeDecodeError:
            raise BadFile(f"{self.path}: {what} before byte {self.at:,} is not text") from None


def read(path: Path) -> dict[str, np.ndarray]:
    """Every variable of the file by name, aliases too, as read-only arrays of the stored type.

    Raises:
        BadFile: not a version-6 Whisper file, cut short, or inconsistent.
    """
    cursor = _Cursor(memoryview(path.read_bytes()), path)
    version = cursor.number("I", "the version")
    if version != 6:
        raise BadFile(f"{path}: version {version}, wanted a CTranslate2 binary of version 6")
    spec, revision = cursor.string("the model's type"), cursor.number("I", "the revision")
    if spec != "WhisperSpec":
        raise BadFile(f"{path}: holds a {spec} (revision {revision}), wanted WhisperSpec")
    variables: dict[str, np.ndarray] = {}
    for _ in range(cursor.number("I", "the count of variables")):
        name = cursor.string("a variable's name")
        rank = cursor.number("B", f"the rank of {name}")
        shape = tuple(cursor.number("I", f"the shape of {name}") for _ in range(rank))
        code = cursor.number("B", f"the type of {name}")
        if code not in _TYPES:
            raise BadFile(f"{path}: {name} has type {code}, known are {sorted(_TYPES)}")
        dtype = np.dtype(_TYPES[code])
        size = cursor.number("I", f"the size of {name}")
        if size != math.prod(shape) * dtype.itemsize:
            raise BadFile(f"{path}: {name} of shape {shape} and {dtype} claims {size:,} bytes")
        if name in variables:
            raise BadFile(f"{path}: {name} occurs twice")
        variables[name] = np.frombuffer(cursor.take(size, name), dtype).reshape(shape)
    for _ in range(cursor.number("I", "the count of aliases")):
        alias, name = cursor.string("an alias"), cursor.string("an alias's target")
        if name not in variables:
            raise BadFile(f"{path}: alias {alias} names {name}, which is not there")
        variables[alias] = variables[name]
    if cursor.at != len(cursor.data):
        raise BadFile(f"{path}: {len(cursor.data) - cursor.at:,} bytes follow the last alias")
    return variables


def _layers(variables: dict[str, np.ndarray], stack: str) -> int:
    found = {int(m[1]) for name in variables if (m := re.match(rf"{stack}/layer_(\d+)/", name))}
    return max(found) + 1 if found else 0


def weights(variables: dict[str, np.ndarray], path: Path) -> dict[str, Tensor]:
    """The state dict of WhisperForConditionalGeneration, float32.

    CTranslate2 fuses self-attention's query, key and value in `linear_0`, and cross-attention's key
    and value in `linear_1`. Whisper's keys have no bias, so the fused one must be zero there.

    Raises:
        BadFile: a variable is missing, is left over, or a setting is not Whisper's.
    """
    left = dict(variables)
    state: dict[str, Tensor] = {}

    def take(name: str) -> Tensor:
        if name not in left:
            raise BadFile(f"{path}: {name} is missing")
        array = left.pop(name)
        if array.dtype.kind != "f":
            raise BadFile(f"{path}: {name} is {array.dtype}; quantised weights are not read")
        return torch.from_numpy(array.astype(np.float32))

    def put(target: str, source: str, *, names: tuple[str, str] = ("weight", "bias")) -> None:
        state[f"{target}.weight"] = take(f"{source}/{names[0]}")
        state[f"{target}.bias"] = take(f"{source}/{names[1]}")

    def norm(target: str, source: str) -> None:
        put(target, source, names=("gamma", "beta"))

    def fused(target: str, source: str, parts: tuple[str, ...]) -> None:
        matrix, bias = take(f"{source}/weight"), take(f"{source}/bias")
        if len(matrix) != len(bias) or len(matrix) % len(parts):
            raise BadFile(f"{path}: {source} has {len(matrix)} rows, not {len(parts)} equal parts")
        pieces = zip(parts, matrix.chunk(len(parts)), bias.chunk(len(parts)), strict=True)
        for part, rows, offsets in pieces:
            state[f"{target}.{part}_proj.weight"] = rows.contiguous()
            if part != "k":
                state[f"{target}.{part}_proj.bias"] = offsets.contiguous()
            elif offsets.count_nonzero():
                raise BadFile(f"{path}: {source} has a bias on its keys, which Whisper has not")

    for stack in ("encoder", "decoder"):
        for layer in range(_layers(variables, stack)):
            here, there = f"{stack}/layer_{layer}", f"model.{stack}.layers.{layer}"
            norm(f"{there}.self_attn_layer_norm", f"{here}/self_attention/layer_norm")
            fused(f"{there}.self_attn", f"{here}/self_attention/linear_0", ("q", "k", "v"))
            put(f"{there}.self_attn.out_proj", f"{here}/self_attention/linear_1")
            if stack == "decoder":
                norm(f"{there}.encoder_attn_layer_norm", f"{here}/attention/layer_norm")
                fused(f"{there}.encoder_attn", f"{here}/attention/linear_0", ("q",))
                fused(f"{there}.encoder_attn", f"{here}/attention/linear_1", ("k", "v"))
                put(f"{there}.encoder_attn.out_proj", f"{here}/attention/linear_2")
            norm(f"{there}.final_layer_norm", f"{here}/ffn/layer_norm")
            put(f"{there}.fc1", f"{here}/ffn/linear_0")
            put(f"{there}.fc2", f"{here}/ffn/linear_1")
        norm(f"model.{stack}.layer_norm", f"{stack}/layer_norm")
        position = take(f"{stack}/position_encodings/encodings")
        state[f"model.{stack}.embed_positions.weight"] = position
    put("model.encoder.conv1", "encoder/conv1")
    put("model.encoder.conv2", "encoder/conv2")
    state["model.decoder.embed_tokens.weight"] = take("decoder/embeddings/weight")
    state["proj_out.weight"] = take("decoder/projection/weight")

    # 1 and 3 are GELU (tanh and exact) in CTranslate2; Whisper itself is defined with the exact
    # one.
    wanted = {"activation": (1, 3), "pre_norm": (1,), "scale_embeddings": (0,), "alibi": (0,)}
    for setting, allowed in wanted.items():
        value = variables.get(f"decoder/{setting}")
        if value is None or value.size != 1 or int(value.reshape(())) not in allowed:
            raise BadFile(f"{path}: decoder/{setting} is {value}, wanted one of {allowed}")
    unknown = sorted(set(left) - _SETTINGS)
    if unknown:
        raise BadFile(
            f"{path}: {len(unknown)} variables have no place in Whisper, e.g. {unknown[0]}"
        )
    return state


def load(directory: Path) -> tuple[Any, Any]:
    """(WhisperForConditionalGeneration in float32, tokenizer) from model.bin, config.json and
    tokenizer.json. The alignment heads and suppressed tokens go into the generation config.

    Raises:
        BadFile: a file is missing or corrupt, or the weights do not fit.
    """
    transformers = require("transformers", extra="models", purpose="headwise.models")
    path = directory / "model.bin"
    try:
        variables = read(path)
        settings = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        tokenizer_file = directory / "tokenizer.json"
        json.loads(tokenizer_file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadFile(f"cannot read {error.filename}: {(error.strerror or '').lower()}") from None
    except ValueError as error:
        raise BadFile(f"{directory}: not JSON ({error})") from None
    state = weights(variables, path)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer_file),
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        unk_token="<|endoftext|>",
        pad_token="<|endoftext|>",
    )
    start, end = tokenizer.convert_tokens_to_ids(["<|startoftranscript|>", "<|endoftext|>"])
    vocabulary, width = state["model.decoder.embed_tokens.weight"].shape
    ffn = state["model.encoder.layers.0.fc1.weight"].shape[0]
    config = transformers.WhisperConfig(
        vocab_size=vocabulary,
        d_model=width,
        num_mel_bins=state["model.encoder.conv1.weight"].shape[1],
        encoder_layers=_layers(variables, "encoder"),
        decoder_layers=_layers(variables, "decoder"),
        encoder_attention_heads=int(variables["encoder/num_heads"]),
        decoder_attention_heads=int(variables["decoder/num_heads"]),
        encoder_ffn_dim=ffn,
        decoder_ffn_dim=ffn,
        max_source_positions=len(state["model.encoder.embed_positions.weight"]),
        max_target_positions=len(state["model.decoder.embed_positions.weight"]),
        decoder_start_token_id=start,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
    )
    model = assemble(transformers.WhisperForConditionalGeneration, config, state, path)
    generation = model.generation_config
    generation.suppress_tokens = settings.get("suppress_ids")
    generation.begin_suppress_tokens = settings.get("suppress_ids_begin")
    generation.alignment_heads = settings.get("alignment_heads")
    generation.is_multilingual = False
    return model, tokenizer
