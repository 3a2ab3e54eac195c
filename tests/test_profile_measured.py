"""Measured beside counted: real processes, on a small saved model and on packaged ones."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from headwise import cli
from headwise.errors import BadInput, HeadwiseError
from headwise.models import load
from headwise.profile import cost, from_config
from headwise.profile.measured import Measured, OutOfMemory, measure
from headwise.profile.quality import cache_quality
from headwise.record import read
from tinymodels import save_bert, save_llama, save_t5, save_tokenizer, save_vit, save_whisper


def test_a_saved_model_is_measured(tmp_path) -> None:
    save_llama(tmp_path)
    shape = from_config(load(tmp_path).model.config)
    lines: list[str] = []
    found = list(measure(str(tmp_path), [32, 16], say=lambda done, total, line: lines.append(line)))
    assert lines == ["measuring 16 tokens", "measuring 32 tokens", "measured"]
    assert [m.context for m in found] == [16, 32]
    for one in found:
        assert isinstance(one, Measured)
        assert one.kv_bytes == cost(shape, one.context).kv_bytes
        assert 0 < one.attention_share < 1 and one.prefill > 0
        assert one.decode is not None and one.decode > 0


def test_an_encoder_does_not_decode(tmp_path) -> None:
    save_bert(tmp_path)
    (one,) = measure(str(tmp_path), [8], attention="sdpa")
    assert isinstance(one, Measured) and one.decode is None and one.kv_bytes == 0


@pytest.mark.parametrize(
    ("save", "context"),
    [(save_t5, 8), (save_whisper, 6), (save_vit, 10)],
    ids=["t5", "sound", "vit"],
)
def test_other_kinds_are_measured_too(save, context: int, tmp_path) -> None:
    save(tmp_path)
    (one,) = measure(str(tmp_path), [context])
    assert isinstance(one, Measured) and one.prefill > 0 and 0 < one.attention_share < 1
    counted = cost(from_config(load(tmp_path).model.config), context)
    assert one.kv_bytes == counted.kv_bytes
    assert (one.decode is None) == (save is save_vit) == (one.kv_bytes == 0)


def test_a_picture_has_a_square_number_of_patches(tmp_path, monkeypatch, capsys) -> None:
    save_vit(tmp_path)
    monkeypatch.setattr(sys, "argv", ["headwise", "profile", str(tmp_path), "--contexts", "10,12"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    printed = capsys.readouterr()
    assert left.value.code == 2 and printed.out == ""
    assert "no square picture has 12 tokens; those nearest have 10, 17" in printed.err
    monkeypatch.setattr(sys, "argv", ["headwise", "profile", str(tmp_path), "--count-only"])
    with pytest.raises(SystemExit):
        cli.main()
    own = load(tmp_path).model.config
    tokens = (own.image_size // own.patch_size) ** 2 + 1
    assert f"\n{tokens:>7}  " in capsys.readouterr().out


def test_the_last_positions_of_a_model_can_be_measured(tmp_path) -> None:
    save_tokenizer(tmp_path, wrap=False)
    config = transformers.GPT2Config(vocab_size=11, n_embd=24, n_layer=1, n_head=2, n_positions=32)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    (one,) = measure(str(tmp_path), [32])
    assert isinstance(one, Measured) and one.decode is not None
    assert one.kv_bytes == 2 * 24 * 32 * 4


def test_memory_that_ends_is_an_answer(tmp_path, monkeypatch) -> None:
    save_llama(tmp_path)
    import headwise.profile.measured as module

    ask = module._ask
    monkeypatch.setattr(module, "_ask", lambda q: None if q["context"] > 20 else ask(q))
    found = list(measure(str(tmp_path), [16, 32, 64]))
    assert isinstance(found[0], Measured) and found[1:] == [OutOfMemory(32)]


def test_what_stops_a_process_is_told(tmp_path) -> None:
    with pytest.raises(HeadwiseError, match=r"measuring 16 tokens failed: .*nowhere"):
        list(measure(str(tmp_path / "nowhere"), [16]))


def saved(path: Path, positions: int = 160) -> Path:
    """A decoder whose few large key channels make int8 show."""
    save_llama(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": positions}))
    return path


def test_the_int8_caches_perplexity_is_that_of_the_same_tokens(tmp_path) -> None:
    model = load(saved(tmp_path)).model
    ids = torch.randint(4, 11, (3 * 160 + 5,))
    lines: list[str] = []
    before = model.config._attn_implementation
    found = cache_quality(model, ids, text="t", context=200, windows=2, say=lines.append)
    assert model.config._attn_implementation == before and len(lines) == 2
    # By one pass over whole windows, the first and the second of three.
    rows = ids[:480].reshape(3, 160)[[0, 1]]
    with torch.no_grad():
        logits = model(rows).logits[:, 79:-1]
    nats = torch.nn.functional.cross_entropy(logits.transpose(1, 2), rows[:, 80:])
    assert found.tokens == 2 * 80
    assert found.plain == pytest.approx(float(nats.exp()), rel=1e-5)
    assert found.int8 == pytest.approx(found.plain, rel=0.01) and found.int8 != found.plain
    assert found.line().startswith("perplexity of 160 tokens of t, each alone on the cache: ")
    with pytest.raises(BadInput, match="the text has 3 tokens; wanted at least 4"):
        cache_quality(model, ids[:3])


def test_the_command_sets_int8_beside_plain_with_its_perplexity(tmp_path) -> None:
    saved(tmp_path / "m")
    text = tmp_path / "book.txt"
    text.write_text("maya placed the book , she left the book . " * 60)
    out = subprocess.run(
        [sys.executable, "-m", "headwise", "profile", str(tmp_path / "m"), "--contexts", "64,128",
         "--cache", "plain,int8", "--text-file", str(text), "--csv", str(tmp_path / "c.csv"),
         "--records", str(tmp_path / "r.jsonl"), "--latency", "1ms"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    # The latency that nothing reaches is known only in the end: what was measured is kept.
    assert out.returncode == 2 and "takes" in out.stderr.splitlines()[-1], out.stderr
    assert "of book.txt, each alone on the cache" in out.stdout
    rows = list(csv.DictReader((tmp_path / "c.csv").read_text().splitlines()))
    assert [(row["cache"], row["context"]) for row in rows] == [
        ("plain", "64"), ("plain", "128"), ("int8", "64"), ("int8", "128")
    ]  # fmt: skip
    plain, int8 = float(rows[0]["perplexity"]), float(rows[2]["perplexity"])
    assert 1 < plain != int8 and int8 == pytest.approx(plain, rel=0.05)
    assert float(rows[2]["perplexity_plain"]) == plain
    assert int(rows[2]["kv_bytes"]) == int(rows[0]["kv_bytes"]) // 4
    records = read(tmp_path / "r.jsonl")
    assert {r.values["perplexity"] for r in records if r.kind == "cost"} == {plain, int8}
    (said,) = [
        r for r in records if r.kind == "growth" and r.where["model"].endswith(", int8 cache")
    ]
    assert any(line.startswith("perplexity of ") for line in said.values["lines"])


def test_an_encoder_has_no_cache_to_keep_in_int8(tmp_path, monkeypatch, capsys) -> None:
    save_bert(tmp_path)
    monkeypatch.setattr(
        sys, "argv", ["headwise", "profile", str(tmp_path), "--contexts", "8", "--cache", "int8"]
    )
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    assert "keeps no cache of what it read" in capsys.readouterr().err


def test_the_shorter_model_of_two_says_what_it_left_out(tmp_path, monkeypatch, capsys) -> None:
    saved(tmp_path / "long")
    save_bert(tmp_path / "short")
    monkeypatch.setattr(
        sys, "argv",
        ["headwise", "profile", str(tmp_path / "long"), "--compare", str(tmp_path / "short"),
         "--contexts", "8,64", "--count-only", "--memory", "1GiB"],
    )  # fmt: skip
    with pytest.raises(SystemExit) as left:
        cli.main()
    printed = capsys.readouterr().out
    assert not left.value.code
    assert printed.count("left out: 64 tokens, beyond the 13 positions that ") == 1
    monkeypatch.setattr(sys, "argv", [*sys.argv[:-1], "1KiB"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    printed = capsys.readouterr()
    assert left.value.code == 2 and printed.out == "" and "and --memory is 1 KiB" in printed.err


@pytest.mark.slow
@pytest.mark.packaged
@pytest.mark.parametrize(
    ("name", "context"),
    [("smollm2", 512), ("smollm2", 1024), ("minilm", 512),
     ("whisper-tiny", 448), ("dino", 257)],
)  # fmt: skip
def test_counted_peaks_are_within_a_tenth_of_measured(name: str, context: int) -> None:
    shape = from_config(load(name).model.config, name)
    (one,) = measure(name, [context])
    assert isinstance(one, Measured)
    counted = cost(shape, context)
    assert one.kv_bytes == counted.kv_bytes
    assert one.peak == pytest.approx(counted.fused_peak, rel=0.1)
