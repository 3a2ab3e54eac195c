"""what_if: the curve starts at the original, goes by importance, and leaves the model as it was."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from headwise.errors import BadInput
from headwise.statistics.importance import Importance
from headwise.surgery import what_if
from headwise.surgery.picture import draw
from headwise.surgery.what_if import least_important


def _model() -> Any:
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        vocab_size=17, hidden_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, intermediate_size=32, max_position_embeddings=64,
    )  # fmt: skip
    return tf.LlamaForCausalLM(config).eval()


def test_the_curve(tmp_path: Path) -> None:
    model = _model()
    ids = (torch.arange(1024) * 5 + torch.arange(1024) // 7) % 17
    before = copy.deepcopy(model.state_dict())
    rows = what_if(
        model, ids, prune=[0.25, 0.5], kv_heads=[2], context=16, windows=4, heal_steps=30
    )
    assert [r.name for r in rows[::2]] == ["original", "2 kv heads", "prune 25%", "prune 50%"]
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    # The first row is the original's own perplexity, by another way of computing it.
    pieces = ids.reshape(64, 16)[[i * 64 // 8 for i in range(0, 8, 2)]]
    with torch.no_grad():
        loss = model(input_ids=pieces, labels=pieces).loss
    assert rows[0].perplexity == pytest.approx(math.exp(float(loss)), rel=1e-5)
    assert rows[0].kv_bytes == 2 * 2 * 4 * 6 * 16 * 4
    by_name = {r.name: r for r in rows}
    assert by_name["2 kv heads"].kv_bytes == by_name["prune 50%"].kv_bytes == rows[0].kv_bytes // 2
    assert by_name["prune 25%"].pruned == 0.25 and by_name["prune 50%"].pruned == 0.5
    assert all(r.prefill_ms > 0 and r.decode_ms > 0 for r in rows)
    for plain, healed in zip(rows[::2], rows[1::2], strict=True):
        assert healed.healed == 30 and healed.perplexity < plain.perplexity
    draw(rows, tmp_path / "curve.png")
    assert [p.name for p in tmp_path.iterdir()] == ["curve.png"]
    assert (tmp_path / "curve.png").read_bytes()[:4] == b"\x89PNG"
    assert rows[0].record().where["variant"] == "original"


def test_least_important_first_and_never_a_whole_layer() -> None:
    values = {"self/0": torch.tensor([0.1, 0.9, 0.3]), "self/1": torch.tensor([0.2, 0.05, 0.01])}
    found = Importance(values, values, values, values, 1)
    assert least_important(found, 2 / 6) == {"self/1": [2, 1]}
    assert least_important(found, 4 / 6) == {"self/1": [2, 1], "self/0": [0, 2]}
    with pytest.raises(BadInput, match=r"each of the 2 layers keeps one: at most 0\.67"):
        least_important(found, 0.9)


def test_bad_input() -> None:
    model, ids = _model(), torch.zeros(100, dtype=torch.long)
    with pytest.raises(BadInput, match="the text has 100 tokens and 8 windows of 16 need 128"):
        what_if(model, ids, context=16, windows=4)
    with pytest.raises(BadInput, match="context=128 is more than the model's 64 positions"):
        what_if(model, ids, context=128, windows=1)
    with pytest.raises(BadInput, match=r"prune=1.5 must be a share in \[0, 1\)"):
        what_if(model, ids, context=16, windows=2, prune=[1.5])
    with pytest.raises(BadInput, match="kv_heads=3 does not divide"):
        what_if(model, ids, context=16, windows=2, kv_heads=[3])
    with pytest.raises(BadInput, match="BertModel is no causal language model"):
        small = tf.BertConfig(
            vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2
        )
        what_if(tf.BertModel(small), ids)
