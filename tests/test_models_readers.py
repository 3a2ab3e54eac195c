"""The readers of other people's files: right on good ones, one clear line on damaged ones."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import gguf as gguf_library
import numpy as np
import onnx
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from headwise.errors import BadFile
from headwise.models import dino_onnx, gguf, whisper_ct2

WIDTH, FFN, VOCABULARY, LAYERS = 6, 10, 7, 2


def _text(value: str) -> bytes:
    raw = value.encode() + b"\0"
    return struct.pack("<H", len(raw)) + raw


def _variable(name: str, array: np.ndarray) -> bytes:
    code = {"float32": 0, "int8": 1, "int16": 2, "int32": 3, "float16": 4}[array.dtype.name]
    head = (
        _text(name) + struct.pack("<B", array.ndim) + struct.pack(f"<{array.ndim}I", *array.shape)
    )
    return head + struct.pack("<BI", code, array.nbytes) + array.tobytes()


def _whisper_variables() -> dict[str, np.ndarray]:
    """A small Whisper with CTranslate2's names; every weight different."""
    rng = np.random.default_rng(0)
    found: dict[str, np.ndarray] = {}

    def put(name: str, *shape: int) -> None:
        found[name] = rng.standard_normal(shape).astype(np.float16)

    def linear(name: str, rows: int, columns: int) -> None:
        put(f"{name}/weight", rows, columns)
        put(f"{name}/bias", rows)

    def norm(name: str) -> None:
        put(f"{name}/gamma", WIDTH)
        put(f"{name}/beta", WIDTH)

    for stack in ("encoder", "decoder"):
        for layer in range(LAYERS):
            here = f"{stack}/layer_{layer}"
            norm(f"{here}/self_attention/layer_norm")
            linear(f"{here}/self_attention/linear_0", 3 * WIDTH, WIDTH)
            found[f"{here}/self_attention/linear_0/bias"][WIDTH : 2 * WIDTH] = 0
            linear(f"{here}/self_attention/linear_1", WIDTH, WIDTH)
            if stack == "decoder":
                norm(f"{here}/attention/layer_norm")
                linear(f"{here}/attention/linear_0", WIDTH, WIDTH)
                linear(f"{here}/attention/linear_1", 2 * WIDTH, WIDTH)
                found[f"{here}/attention/linear_1/bias"][:WIDTH] = 0
                linear(f"{here}/attention/linear_2", WIDTH, WIDTH)
            norm(f"{here}/ffn/layer_norm")
            linear(f"{here}/ffn/linear_0", FFN, WIDTH)
            linear(f"{here}/ffn/linear_1", WIDTH, FFN)
        norm(f"{stack}/layer_norm")
        put(f"{stack}/position_encodings/encodings", 5, WIDTH)
        found[f"{stack}/num_heads"] = np.array(2, np.int16)
    put("encoder/conv1/weight", WIDTH, 4, 3)
    put("encoder/conv1/bias", WIDTH)
    put("encoder/conv2/weight", WIDTH, WIDTH, 3)
    put("encoder/conv2/bias", WIDTH)
    put("decoder/embeddings/weight", VOCABULARY, WIDTH)
    for name, value in {"activation": 1, "alibi": 0, "pre_norm": 1, "scale_embeddings": 0}.items():
        found[f"decoder/{name}"] = np.array(value, np.int8)
    return found


def _whisper_bytes(
    variables: dict[str, np.ndarray], *, version: int = 6, spec: str = "WhisperSpec"
) -> bytes:
    parts = [struct.pack("<I", version), _text(spec), struct.pack("<II", 3, len(variables))]
    parts += [_variable(name, array) for name, array in variables.items()]
    alias = _text("decoder/projection/weight") + _text("decoder/embeddings/weight")
    return b"".join([*parts, struct.pack("<I", 1), alias])


def test_whisper_weights_go_where_they_belong(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    stored = _whisper_variables()
    path.write_bytes(_whisper_bytes(stored))
    state = whisper_ct2.weights(whisper_ct2.read(path), path)

    def same(name: str, array: np.ndarray) -> None:
        assert state[name].dtype == torch.float32
        assert torch.equal(state[name], torch.from_numpy(array.astype(np.float32))), name

    fused = stored["encoder/layer_1/self_attention/linear_0/weight"]
    bias = stored["encoder/layer_1/self_attention/linear_0/bias"]
    for number, part in enumerate("qkv"):
        rows = slice(number * WIDTH, (number + 1) * WIDTH)
        same(f"model.encoder.layers.1.self_attn.{part}_proj.weight", fused[rows])
        if part != "k":
            same(f"model.encoder.layers.1.self_attn.{part}_proj.bias", bias[rows])
    both = stored["decoder/layer_0/attention/linear_1/weight"]
    same("model.decoder.layers.0.encoder_attn.k_proj.weight", both[:WIDTH])
    same("model.decoder.layers.0.encoder_attn.v_proj.weight", both[WIDTH:])
    query = stored["decoder/layer_0/attention/linear_0/weight"]
    same("model.decoder.layers.0.encoder_attn.q_proj.weight", query)
    same("model.decoder.layers.1.fc2.weight", stored["decoder/layer_1/ffn/linear_1/weight"])
    same("proj_out.weight", stored["decoder/embeddings/weight"])
    assert not [name for name in state if name.endswith("k_proj.bias")]


def _changed(name: str, change: str) -> dict[str, np.ndarray]:
    variables = _whisper_variables()
    if change == "drop":
        del variables[name]
    elif change == "one":
        variables[name] = np.ones_like(variables[name])
    else:
        variables[name] = variables.get(name, np.zeros(2)).astype(change)
    return variables


KEYED = "encoder/layer_0/self_attention/linear_0"


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (_whisper_bytes(_whisper_variables(), version=5), "version 5, wanted .* version 6"),
        (_whisper_bytes(_whisper_variables(), spec="OtherSpec"), "holds a OtherSpec"),
        (_whisper_bytes(_whisper_variables()) + b"x", "1 bytes follow the last alias"),
        (_whisper_bytes(_changed("encoder/conv1/bias", "drop")), "encoder/conv1/bias is missing"),
        (
            _whisper_bytes(_changed("decoder/more", "float32")),
            "1 variables have no place.*/more",
        ),
        (
            _whisper_bytes(_changed(f"{KEYED}/bias", "one")),
            "a bias on its keys, which Whisper has not",
        ),
        (_whisper_bytes(_changed("decoder/alibi", "one")), "decoder/alibi is 1, wanted one of"),
        (
            _whisper_bytes(_changed("encoder/conv1/weight", "int8")),
            "quantised weights are not read",
        ),
        (b"", "the version at byte 0 needs 4 bytes and 0 are left"),
    ],
)
def test_a_whisper_file_that_is_not_one_says_why(tmp_path: Path, data: bytes, wanted: str) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(data)
    with pytest.raises(BadFile, match=wanted):
        whisper_ct2.weights(whisper_ct2.read(path), path)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_whisper_file_raises_only_bad_file(tmp_path: Path, data: st.DataObject) -> None:
    """Cut short anywhere it is refused; with a byte changed it is read or refused, no crash."""
    whole = _whisper_bytes(_whisper_variables())
    path = tmp_path / "model.bin"
    cut = data.draw(st.integers(0, len(whole) - 1))
    path.write_bytes(whole[:cut])
    with pytest.raises(BadFile, match=r"needs [\d,]+ bytes and [\d,]+ (is|are) left"):
        whisper_ct2.read(path)
    changed = bytearray(whole)
    changed[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(changed)
    try:
        whisper_ct2.weights(whisper_ct2.read(path), path)
    except BadFile as error:
        assert str(path) in str(error)


# The packaged ViT's ONNX graph

SIDE, PATCH, CHANNELS = 2, 3, 64


def _vit(drop: str = "", scale: float = 1.0) -> onnx.ModelProto:
    """One layer of a ViT in DINOv2's layout, as torch's exporter writes it."""
    rng = np.random.default_rng(0)
    arrays: dict[str, np.ndarray] = {}
    nodes = []

    def put(name: str, *shape: int) -> None:
        arrays[name] = (rng.standard_normal(shape) * scale).astype(np.float32)

    layer = "backbone.encoder.layer.0"
    put("backbone.embeddings.cls_token", 1, 1, CHANNELS)
    put("backbone.embeddings.patch_embeddings.projection.weight", CHANNELS, 3, PATCH, PATCH)
    put("backbone.embeddings.patch_embeddings.projection.bias", CHANNELS)
    for part in ("norm1", "norm2"):
        put(f"{layer}.{part}.weight", CHANNELS)
        put(f"{layer}.{part}.bias", CHANNELS)
    put(f"{layer}.layer_scale1.lambda1", CHANNELS)
    put(f"{layer}.layer_scale2.lambda1", CHANNELS)
    put("backbone.layernorm.weight", CHANNELS)
    put("backbone.layernorm.bias", CHANNELS)
    put("decoder.final_conv.bias", 1)  # what is not the backbone is left alone
    attention = "attention.attention"
    for number, (part, rows, columns) in enumerate(
        [
            (f"{attention}.query", CHANNELS, CHANNELS),
            (f"{attention}.key", CHANNELS, CHANNELS),
            (f"{attention}.value", CHANNELS, CHANNELS),
            ("attention.output.dense", CHANNELS, CHANNELS),
            ("mlp.fc1", CHANNELS, 4 * CHANNELS),
            ("mlp.fc2", 4 * CHANNELS, CHANNELS),
        ]
    ):
        put(f"{layer}.{part}.bias", columns)
        put(f"onnx::MatMul_{number}", rows, columns)
        name = "/" + f"{layer}.{part}".replace(".", "/").replace("layer/0", "layer.0") + "/MatMul"
        nodes.append(
            helper.make_node("MatMul", [f"x{number}", f"onnx::MatMul_{number}"], ["y"], name)
        )
    put("onnx::Concat_1", 1, 1, CHANNELS)
    put("onnx::Reshape_2", 1, SIDE * SIDE, CHANNELS)
    nodes.append(
        helper.make_node(
            "Reshape", ["onnx::Reshape_2", "s"], ["p"], "/backbone/embeddings/Reshape_1"
        )
    )
    nodes.append(
        helper.make_node(
            "Concat", ["onnx::Concat_1", "p"], ["q"], "/backbone/embeddings/Concat_3", axis=1
        )
    )
    kept = [numpy_helper.from_array(a, n) for n, a in arrays.items() if n != drop]
    return helper.make_model(helper.make_graph(nodes, "vit", [], [], kept))


def test_the_vit_is_rebuilt_with_its_matrices_turned_and_its_positions_joined(
    tmp_path: Path,
) -> None:
    path = tmp_path / "model.onnx"
    model = _vit()
    onnx.save(model, str(path))
    arrays = {item.name: numpy_helper.to_array(item) for item in model.graph.initializer}
    built = dino_onnx.load(path)
    assert not built.training
    assert built.config.image_size == SIDE * PATCH and built.config.num_attention_heads == 1
    first = built.embeddings.position_embeddings[0]
    assert torch.equal(first[:1], torch.from_numpy(arrays["onnx::Concat_1"][0].copy()))
    assert torch.equal(first[1:], torch.from_numpy(arrays["onnx::Reshape_2"][0].copy()))
    stored = {name: tensor for name, tensor in built.state_dict().items() if "fc1.weight" in name}
    (matrix,) = stored.values()
    assert torch.equal(matrix, torch.from_numpy(arrays["onnx::MatMul_4"].T.copy()))


@pytest.mark.parametrize(
    ("drop", "wanted"),
    [
        ("onnx::Concat_1", "no position table for the class token and the patches"),
        ("onnx::MatMul_1", r"1 weights of Dinov2Model are missing, e\.g\. .*layer\.0\.attention"),
        (
            "backbone.layernorm.bias",
            r"1 weights of Dinov2Model are missing, e\.g\. layernorm\.bias",
        ),
        ("backbone.embeddings.patch_embeddings.projection.weight", "not a ViT in DINOv2's layout"),
    ],
)
def test_another_onnx_graph_is_refused(tmp_path: Path, drop: str, wanted: str) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(_vit(drop), str(path))
    with pytest.raises(BadFile, match=wanted):
        dino_onnx.load(path)


def test_a_damaged_onnx_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    whole = _vit().SerializeToString()
    for data in (b"\xff" * 40, whole[: len(whole) // 2]):
        path.write_bytes(data)
        with pytest.raises(BadFile, match="corrupt ONNX file"):
            dino_onnx.load(path)
    path.write_bytes(b"")
    with pytest.raises(BadFile, match="an ONNX graph without weights"):
        dino_onnx.load(path)
    with pytest.raises(BadFile, match=r"cannot read .*gone\.onnx"):
        dino_onnx.load(tmp_path / "gone.onnx")


# GGUF


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "model.gguf"
    writer = gguf_library.GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_tensor("token_embd.weight", np.arange(96, dtype=np.float32).reshape(12, 8))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    yield path


def test_a_gguf_file_cut_short_anywhere_is_refused(tiny_gguf: Path) -> None:
    whole = tiny_gguf.read_bytes()
    gguf.check(tiny_gguf)
    for cut in range(4, len(whole), 7):
        tiny_gguf.write_bytes(whole[:cut])
        with pytest.raises(BadFile, match=r"corrupt GGUF file|cut short|without tensors"):
            gguf.check(tiny_gguf)


def test_a_gguf_file_that_is_not_one_says_what_it_begins_with(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04 and more")
    with pytest.raises(BadFile, match=r"not a GGUF file \(it begins with b'PK"):
        gguf.check(path)
    with pytest.raises(BadFile, match=r"cannot read .*gone\.gguf: no such file"):
        gguf.check(tmp_path / "gone.gguf")


def test_a_gguf_file_without_what_a_model_needs_is_refused_in_one_line(tiny_gguf: Path) -> None:
    with pytest.raises(BadFile, match="transformers cannot read this GGUF file") as caught:
        gguf.load(tiny_gguf)
    assert "\n" not in str(caught.value)
