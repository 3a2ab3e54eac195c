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
from headwise.surgery import Trial, importance, prune_heads, what_if
from headwise.surgery.picture import draw
from headwise.surgery.what_if import least_important
from headwise.tasks import Budget, Design, load_task, runs, variants
from headwise.tasks.training import train


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
    assert rows[0].quality == pytest.approx(math.exp(float(loss)), rel=1e-5)
    assert rows[0].metric == "perplexity" and rows[0].better == "lower"
    assert rows[0].kv_bytes == 2 * 2 * 4 * 6 * 16 * 4
    by_name = {r.name: r for r in rows}
    assert by_name["2 kv heads"].kv_bytes == by_name["prune 50%"].kv_bytes == rows[0].kv_bytes // 2
    assert by_name["prune 25%"].pruned == 0.25 and by_name["prune 50%"].pruned == 0.5
    assert all(r.prefill_ms > 0 and r.decode_ms and r.decode_ms > 0 for r in rows)
    for plain, healed in zip(rows[::2], rows[1::2], strict=True):
        assert healed.healed == 30 and healed.quality < plain.quality
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
    with pytest.raises(BadInput, match="BertModel is no causal language model; give a Trial"):
        small = tf.BertConfig(
            vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2
        )
        what_if(tf.BertModel(small), ids)


def _vit() -> Any:
    torch.manual_seed(0)
    config = tf.ViTConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32,
        image_size=8, patch_size=4, num_labels=3,
    )  # fmt: skip
    return tf.ViTForImageClassification(config).double().train()


def test_any_quality_of_any_model(tmp_path: Path) -> None:
    """A metric of one's own, of a model that is no language model: larger is better, nothing is
    decoded, and the heads that go are those on which this loss leans least."""
    model = _vit()
    pictures, labels = torch.randn(12, 3, 8, 8).double(), torch.arange(12) % 3
    asked: list[bool] = []

    def margin(variant: Any) -> float:
        asked.append(variant.training or torch.is_grad_enabled())
        return float(variant(pictures).logits[range(12), labels].mean())

    def loss(variant: Any, batch: Any) -> torch.Tensor:
        assert not variant.training
        logits = variant(pictures[batch]).logits
        return torch.nn.functional.cross_entropy(logits, labels[batch], reduction="none")

    trial = Trial(
        metric="margin", better="higher", quality=margin, run=lambda m: m(pictures[:1]), tokens=5,
        loss=loss, calibration=[slice(0, 4), slice(4, 8)],
    )  # fmt: skip
    rows = what_if(model, trial, prune=[0.25])
    assert asked == [False, False] and model.training
    assert [(r.metric, r.better, r.decode_ms) for r in rows] == 2 * [("margin", "higher", None)]
    model.eval()
    found = least_important(importance(model, [slice(0, 8)], loss), 0.25)
    with torch.no_grad():
        assert rows[0].quality == margin(model)
        assert rows[1].quality == margin(prune_heads(model, found)) != rows[0].quality
    assert (
        rows[0].kv_bytes == 2 * 2 * 4 * 6 * 5 * 8 and rows[1].kv_bytes == rows[0].kv_bytes * 3 / 4
    )
    draw(rows, tmp_path / "curve.svg")
    assert "margin (higher is better)" in (tmp_path / "curve.svg").read_text()
    with pytest.raises(BadInput, match="ranking heads needs the Trial's loss"):
        what_if(model, Trial("m", "higher", margin, lambda m: None, 5))
    with pytest.raises(BadInput, match="healing needs the Trial's loss and training batches"):
        what_if(model, trial, heal_steps=1)
    with pytest.raises(BadInput, match=r"the quality 'm' gave tensor\(1\.\), wanted a number"):
        odd: Any = lambda m: torch.tensor(1.0)  # noqa: E731
        what_if(model, Trial("m", "higher", odd, lambda m: None, 5), prune=[])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of `language` on thirty lines, four of whose heads do nothing at all."""
    folder = tmp_path_factory.mktemp("run")
    text = folder / "lines.txt"
    text.write_text("".join(f"line {i} of a short and dull text, as dull as {i % 7}\n" * 4
                            for i in range(80)))  # fmt: skip
    task = load_task("language", text)
    task.prepare()
    design = Design(embed_dim=24, num_heads=4, layers=2, feedforward=32, dropout=0.0)
    budget = Budget(6, 16, 1e-3, 1, 6, 1)
    found = train(task, design, budget, 0, folder=folder / "run")
    with torch.no_grad():
        for block, head in ((0, 1), (0, 2), (1, 0), (1, 3)):
            weight = found.model.stack.blocks[block].attention.out_proj.weight
            weight[:, 6 * head : 6 * head + 6] = 0
    score = task.evaluate(found.model, "test")
    runs.save(folder / "run", task, design, budget, 0, found, score, {})
    return folder / "run"


def test_a_trained_task_is_measured_by_its_own_metric(trained: Path) -> None:
    run = runs.load(trained)
    rows = what_if(run.model, variants.trial(run, healing=3), prune=[0.5], kv_heads=[2],
                   heal_steps=3)  # fmt: skip
    assert {(r.metric, r.better) for r in rows} == {("bits per byte", "lower")}
    by_name = {r.name: r for r in rows}
    first = by_name["original"].quality
    assert first == pytest.approx(run.about["test"]["value"], rel=1e-6)
    # The four dead heads are those that go: nothing is lost, and half of the cache is saved.
    assert by_name["prune 50%"].quality == pytest.approx(first, rel=1e-6)
    assert by_name["prune 50%"].kv_bytes == rows[0].kv_bytes // 2
    assert by_name["2 kv heads"].quality != pytest.approx(first, rel=1e-6)
    assert all(r.decode_ms is not None and r.decode_ms > 0 for r in rows)
    assert by_name["original + healed"].quality < first


def test_a_task_whose_data_changed_is_not_measured(trained: Path) -> None:
    text = trained.parent / "lines.txt"
    before = text.read_text()
    try:
        text.write_text(before.replace("dull", "long"))
        with pytest.raises(BadInput, match="is not what the model was trained on"):
            variants.trial(runs.load(trained))
        text.unlink()
        with pytest.raises(BadInput, match=r"lines\.txt, which is not there any more"):
            variants.trial(runs.load(trained))
    finally:
        text.write_text(before)
