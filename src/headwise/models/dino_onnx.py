"""The packaged ViT-S/14 from the initialisers of its ONNX graph into transformers' Dinov2Model.

The exporter kept the names of vectors and renamed matrices (`onnx::MatMul_1966`), transposed. Which
matrix is which is read from the graph: the node that multiplies by it is named after its module.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise._extras import require
from headwise.errors import BadFile
from headwise.models.assemble import assemble

_PREFIX = "backbone."
_MATMUL = re.compile(r"/backbone/(encoder/layer\.\d+/.+)/MatMul$")


def _initialisers(path: Path) -> tuple[Any, dict[str, np.ndarray]]:
    onnx = require("onnx", extra="models", purpose="headwise.models")
    numpy_helper = require("onnx.numpy_helper", extra="models", purpose="headwise.models")
    protobuf = require("google.protobuf.message", extra="models", purpose="headwise.models")
    try:
        model = onnx.load(str(path), load_external_data=False)
        arrays = {item.name: numpy_helper.to_array(item) for item in model.graph.initializer}
    except OSError as error:
        raise BadFile(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from None
    except (protobuf.DecodeError, ValueError, TypeError) as error:
        raise BadFile(f"{path}: corrupt ONNX file ({error}); delete it and run again") from None
    if not arrays:
        raise BadFile(f"{path}: an ONNX graph without weights")
    return model.graph, arrays


def weights(path: Path) -> dict[str, Tensor]:
    """The state dict of Dinov2Model, float32.

    Raises:
        BadFile: the file is corrupt or holds another graph.
    """
    graph, arrays = _initialisers(path)
    state: dict[str, Tensor] = {}

    def put(name: str, array: np.ndarray) -> None:
        if array.dtype != np.float32:
            raise BadFile(f"{path}: {name} is {array.dtype}, wanted float32")
        state[name] = torch.from_numpy(np.array(array, order="C"))

    for name, array in arrays.items():
        if name.startswith(_PREFIX):
            put(name.removeprefix(_PREFIX), array)
    positions: dict[str, np.ndarray] = {}
    for node in graph.node:
        matched = _MATMUL.match(node.name)
        if matched and len(node.input) == 2 and node.input[1] in arrays:
            put(matched[1].replace("/", ".") + ".weight", arrays[node.input[1]].T)
        elif node.name.startswith("/backbone/embeddings/"):
            # The table was split in two so that the patches' part can be resized: (1, 1, C), (1, P,
            # C).
            for source in node.input:
                part = arrays.get(source)
                if part is not None and source.startswith("onnx::") and part.ndim == 3:
                    positions["class" if part.shape[1] == 1 else "patches"] = part
    if set(positions) != {"class", "patches"}:
        raise BadFile(f"{path}: no position table for the class token and the patches")
    both = np.concatenate([positions["class"], positions["patches"]], axis=1)
    put("embeddings.position_embeddings", both)
    return state


def load(path: Path) -> Any:
    """Dinov2Model in float32 and eval mode, without a label or a head.

    The origin of these weights is not stated by the package: call it a ViT-S/14, not Meta's DINOv2.

    Raises:
        BadFile: the file is corrupt, or its weights do not fit a ViT-S/14.
    """
    transformers = require("transformers", extra="models", purpose="headwise.models")
    state = weights(path)
    try:
        width, _, patch, _ = state["embeddings.patch_embeddings.projection.weight"].shape
        side = round((state["embeddings.position_embeddings"].shape[1] - 1) ** 0.5)
        layers = 1 + max(int(m[1]) for n in state if (m := re.match(r"encoder\.layer\.(\d+)\.", n)))
    except (KeyError, ValueError) as error:
        raise BadFile(f"{path}: not a ViT in DINOv2's layout (missing {error})") from None
    config = transformers.Dinov2Config(
        hidden_size=width,
        num_hidden_layers=layers,
        # The file does not store the head count; every ViT of this family has heads of 64.
        num_attention_heads=width // 64,
        mlp_ratio=4,
        patch_size=patch,
        image_size=side * patch,
        use_mask_token=False,
    )
    return assemble(transformers.Dinov2Model, config, state, path)
