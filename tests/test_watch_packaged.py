"""Watching the four packaged models: the same bits, and every call gives the model's output."""

from __future__ import annotations

import pytest
import torch

from headwise.models import Loaded
from headwise.watch import watch
from watching import assert_all_reproduce, watched

SENTENCE = "After Maya placed the book on the table, she left."


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_smollm2(smollm2: Loaded, implementation: str) -> None:
    model, tokenizer = smollm2.model, smollm2.processor
    inputs = tokenizer([SENTENCE], return_tensors="pt")
    before = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    try:
        seen, _ = watched(model, lambda: model(**inputs))
        assert_all_reproduce(seen, 30)
        seen_again, _ = watched(
            model, lambda: model.generate(**inputs, max_new_tokens=2, do_sample=False)
        )
        assert_all_reproduce(seen_again, 60)
    finally:
        model.set_attn_implementation(before)
    assert [c.id for c in seen] == [f"self/{layer}" for layer in range(30)]
    assert {(c.mask_words, c.call.num_heads, c.call.num_kv_heads) for c in seen} == {
        ("causal", 9, 3)
    }
    # The link that the model is known for: "she" looks at " Maya" in layer 9, head 4.
    words = [tokenizer.decode(token) for token in inputs["input_ids"][0]]
    weight = seen.weights(9)[0, 4, words.index(" she"), words.index(" Maya")]
    assert float(weight) == pytest.approx(0.577, abs=5e-4)


def test_minilm(minilm: Loaded) -> None:
    inputs = minilm.processor([SENTENCE, "She left."], padding=True, return_tensors="pt")
    seen, _ = watched(minilm.model, lambda: minilm.model(**inputs))
    assert_all_reproduce(seen, 6)
    assert [(c.id, c.mask_words) for c in seen] == [(f"self/{i}", "padding") for i in range(6)]
    for call in seen:
        assert call.real_queries is not None
        assert torch.equal(call.real_queries, inputs["attention_mask"].bool())


def test_whisper(whisper_tiny: Loaded) -> None:
    model = whisper_tiny.model
    sound = 0.1 * torch.randn(1, 80, 3000, generator=torch.Generator().manual_seed(0))
    start = torch.tensor([[model.config.decoder_start_token_id, 50362, 440, 1266]])

    def run() -> object:
        return model(input_features=sound, decoder_input_ids=start)

    seen, _ = watched(model, run)
    assert_all_reproduce(seen, 12)
    assert [c.id for c in seen] == [f"encoder.self/{i}" for i in range(4)] + [
        f"decoder.{kind}/{i}" for i in range(4) for kind in ("self", "cross")
    ]
    assert {(c.id.split("/")[0], c.mask_words) for c in seen} == {
        ("encoder.self", "full"),
        ("decoder.self", "causal"),
        ("decoder.cross", "full"),
    }


def test_dino(dino: Loaded) -> None:
    pixels = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    seen, _ = watched(dino.model, lambda: dino.model(pixel_values=pixels))
    assert_all_reproduce(seen, 12)
    assert {(c.kind, c.mask_words, c.call.key_length) for c in seen} == {("self", "full", 257)}


def test_padding_leaves_no_trace_between_watches(minilm: Loaded) -> None:
    """Two watches of one model, one after the other, see the same calls."""
    inputs = minilm.processor([SENTENCE], return_tensors="pt")
    with torch.no_grad():
        with watch(minilm.model) as first:
            minilm.model(**inputs)
        with watch(minilm.model) as second:
            minilm.model(**inputs)
    for one, two in zip(first, second, strict=True):
        assert (one.id, one.index) == (two.id, two.index)
        assert torch.equal(one.call.query, two.call.query)
