"""Which model a name means, and one clear line where it means none."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headwise import models
from headwise.errors import BadFile, BadInput, HeadwiseError, UnknownModel
from tinymodels import save_bert, save_llama, save_t5, save_vit, save_whisper


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        (
            "smolm2",
            r"unknown model 'smolm2': did you mean smollm2\? packaged models are smollm2, minilm",
        ),
        ("Whisper", r"did you mean whisper-tiny\?"),
        ("zzz", r"unknown model 'zzz': packaged models are"),
        ("  ", r"the model's name is empty; packaged models are"),
        ("./nowhere", r"no such file or directory: \./nowhere"),
        ("/no/where/model.gguf", r"no such file or directory"),
        ("gone.gguf", r"no such file or directory: gone\.gguf"),
        ("no_such_module_here:make", r"no module named 'no_such_module_here'.*current directory"),
        ("torch.nn:NoSuchThing", r"torch\.nn has no 'NoSuchThing'"),
    ],
)
def test_an_unknown_model_is_one_line_that_says_what_to_do(source: str, wanted: str) -> None:
    with pytest.raises(UnknownModel, match=wanted) as caught:
        models.load(source)
    assert "\n" not in str(caught.value)


def test_a_hub_that_has_no_such_model_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    def refuse(*_: object, **__: object) -> None:
        raise OSError("owner/none is not a local folder\nand not a model identifier")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", refuse)
    wanted = r"owner/none: no such directory, and the Hugging Face hub gave no model of that name"
    with pytest.raises(UnknownModel, match=wanted) as caught:
        models.load("owner/none", say=lambda line: None)
    assert "\n" not in str(caught.value)


def test_dtype_and_device_are_checked_first() -> None:
    with pytest.raises(BadInput, match=r"unknown dtype 'fp17': use float64, float32, float16, bfl"):
        models.load("smollm2", dtype="fp17")
    with pytest.raises(BadInput, match=r"device 'nonsense' cannot be used here: "):
        models.load("smollm2", device="nonsense")


# Plain PyTorch


def _write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> str:
    name = f"factory_{abs(hash(body)) % 10**8}"
    (tmp_path / f"{name}.py").write_text("import torch\nfrom torch import nn\n" + body)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, "path", [entry for entry in sys.path if entry not in {"", str(tmp_path)}]
    )
    return f"{name}:make"


@pytest.mark.parametrize(
    ("inputs", "tokens"),
    [
        ("torch.zeros(2, 5, 8)", 5),
        ("(torch.zeros(2, 5, 8),)", 5),
        ("{'src': torch.zeros(2, 7, 8)}", 7),
    ],
)
def test_a_factory_in_the_current_directory_gives_a_module_and_its_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inputs: str, tokens: int
) -> None:
    layer = "nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)"
    source = _write(tmp_path, monkeypatch, f"def make(): return {layer}, {inputs}\n")
    loaded = models.load(source, dtype="float64")
    assert loaded.kind == "module" and loaded.takes == () and not loaded.model.training
    assert loaded.dtype == torch.float64
    prepared = loaded.prepare()
    assert prepared.axes["positions"]["tokens"] == [str(number) for number in range(tokens)]
    assert prepared.stacks == {"": "positions"}
    assert loaded.run(prepared).shape == (2, tokens, 8)
    assert str(tmp_path) not in sys.path


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ("def make(): return 3\n", r"returned a int; wanted a torch\.nn\.Module"),
        ("def make(): raise RuntimeError('oh')\n", r"make\(\) raised RuntimeError: oh"),
        ("make = 3\n", r"is a int, wanted a callable"),
        ("import no_such_dependency\n", r"importing \w+ failed: No module named 'no_such_dep"),
        ("1 / 0\n", r"importing \w+ failed: ZeroDivisionError"),
    ],
)
def test_a_factory_that_fails_says_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, wanted: str
) -> None:
    source = _write(tmp_path, monkeypatch, body)
    with pytest.raises(HeadwiseError, match=wanted):
        models.load(source)


def test_a_module_without_example_inputs_says_what_to_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = models.load(_write(tmp_path, monkeypatch, "def make(): return nn.Linear(2, 2)\n"))
    with pytest.raises(BadInput, match=r"return \(module, inputs\)"):
        loaded.prepare()
    with pytest.raises(BadInput, match="is a module model and takes no input, not --text"):
        loaded.prepare(text="a")


# Hugging Face directories


@pytest.mark.parametrize(
    ("save", "kind", "takes"),
    [
        (save_llama, "causal", ("text",)),
        (save_bert, "encoder", ("text",)),
        (save_t5, "encoder-decoder", ("text",)),
        (save_vit, "vision", ("image",)),
        (save_whisper, "speech", ("audio", "text")),
    ],
)
def test_a_directory_is_read_for_what_it_is(
    tmp_path: Path, save: Callable[[Path], object], kind: str, takes: tuple[str, ...]
) -> None:
    saved = save(tmp_path)
    loaded = models.load(tmp_path, say=lambda line: None)
    assert (loaded.kind, loaded.takes) == (kind, takes)
    assert not loaded.model.training
    assert isinstance(saved, torch.nn.Module)
    mine = loaded.model.state_dict()
    for name, tensor in saved.state_dict().items():
        key = name if name in mine else name.split(".", 1)[1]
        if key in mine:
            assert torch.equal(mine[key], tensor), name


def test_half_precision_on_request_and_the_stored_dtype_otherwise(tmp_path: Path) -> None:
    save_llama(tmp_path)
    assert models.load(tmp_path).dtype == torch.float32
    assert models.load(tmp_path, dtype="bfloat16").dtype == torch.bfloat16


def test_no_progress_bar_and_no_warning_of_others_reaches_the_screen(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save_llama(tmp_path)
    capfd.readouterr()
    models.load(tmp_path)
    assert capfd.readouterr() == ("", "")


def _break(directory: Path, how: str) -> None:
    weights = directory / "model.safetensors"
    config = directory / "config.json"
    if how == "no config":
        config.unlink()
    elif how == "config not JSON":
        config.write_text("{")
    elif how == "no model_type":
        config.write_text("{}")
    elif how == "unknown model_type":
        config.write_text(json.dumps({"model_type": "nobody-knows"}))
    elif how == "cut short":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif how == "not safetensors":
        weights.write_bytes(b"\xff" * 64)
    elif how == "pickle":
        weights.unlink()
        torch.save({}, directory / "pytorch_model.bin")
    elif how == "no weights":
        weights.unlink()
    elif how == "a weight missing":
        from safetensors.torch import load_file, save_file

        tensors = load_file(weights)
        del tensors["model.layers.1.self_attn.q_proj.weight"]
        save_file(tensors, weights, metadata={"format": "pt"})
    elif how == "no tokenizer":
        (directory / "tokenizer.json").unlink()
        (directory / "tokenizer_config.json").unlink()
    else:
        (directory / "tokenizer.json").write_text("{")


@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        ("no config", r"no config\.json; wanted a Hugging Face model directory"),
        ("config not JSON", r"config\.json: not JSON"),
        ("no model_type", r"no model_type; it is not a transformers configuration"),
        ("unknown model_type", r"does not know this configuration .*not run"),
        ("cut short", r"corrupt safetensors file, or cut short"),
        ("not safetensors", r"corrupt safetensors file, or cut short"),
        ("pickle", r"weights only as a pickle \(pytorch_model\.bin\), which can run code"),
        ("no weights", r"no weights \(\*\.safetensors\)"),
        (
            "a weight missing",
            r"1 weights that the model needs are not in the files, e\.g\. .*q_proj",
        ),
        ("no tokenizer", r"no tokenizer that can be loaded"),
        ("tokenizer not JSON", r"no tokenizer that can be loaded"),
    ],
)
def test_a_broken_directory_is_one_line(tmp_path: Path, how: str, wanted: str) -> None:
    save_llama(tmp_path)
    _break(tmp_path, how)
    with pytest.raises(BadFile, match=wanted) as caught:
        models.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_vit_without_its_preprocessing_is_refused(tmp_path: Path) -> None:
    save_vit(tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(BadFile, match=r"no preprocessor_config\.json that can be read"):
        models.load(tmp_path)


def test_a_plain_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(BadFile, match="wanted a GGUF file or a Hugging Face directory"):
        models.load(tmp_path / "model.bin")
