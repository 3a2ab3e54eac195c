"""The int8 cache under Hugging Face models: near the plain cache's numbers, refused in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import headwise.hf
from headwise import models
from headwise.errors import BadInput
from headwise.quantized import BLOCK
from headwise.watch import watch
from test_hf import DECODERS, llama, ready

transformers = pytest.importorskip("transformers")
# transformers renames the argument to `cache`; both names work meanwhile.
pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")


def switched(make: Any) -> Any:
    model = ready(make)
    model.set_attn_implementation("headwise")
    return model


@torch.no_grad()
@pytest.mark.parametrize("make", DECODERS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("padded", [False, True])
def test_decoders_go_on_from_it_in_chunks_and_token_by_token(make: Any, padded: bool) -> None:
    model = switched(make)
    ids = torch.randint(0, 64, (2, 62), generator=torch.Generator().manual_seed(1))
    real = torch.ones(2, 62, dtype=torch.long)
    if padded:
        real[1, :7] = 0
    plain, small = transformers.DynamicCache(), headwise.hf.QuantizedCache(model, capacity=20)
    start = 0
    for stop in (40, *range(41, 50), 60, 61, 62):
        given = {"input_ids": ids[:, start:stop], "attention_mask": real[:, :stop]}
        want = model(**given, past_key_values=plain).logits
        got = model(**given, past_key_values=small).logits
        now = real[:, start:stop].bool()
        off = float((got - want)[now].abs().max() / want[now].abs().max())
        assert off < 0.02, f"{start}…{stop}"
        start = stop
    assert small.get_seq_length() == 62
    assert small.nbytes == sum(layer.store.nbytes for layer in small.layers)


@torch.no_grad()
def test_it_is_what_generate_needs() -> None:
    model = switched(llama)
    model.generation_config.pad_token_id = 0
    ids = torch.randint(1, 64, (2, 12), generator=torch.Generator().manual_seed(2))
    for more in ({}, {"num_beams": 3}):
        cache = headwise.hf.QuantizedCache(model, capacity=8)
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=9,
            min_new_tokens=9, do_sample=False, **more,
        )  # fmt: skip
        assert out.shape == (2, 21) and cache.get_seq_length() == 20
    cache.crop(-5)
    assert cache.get_seq_length() == 15
    cache.batch_select_indices(torch.tensor([0, 2]))
    assert cache.layers[0].store.batch == 2
    cache.batch_repeat_interleave(3)
    assert cache.layers[1].store.batch == 6
    cache.reset()
    assert cache.get_seq_length() == 0


@torch.no_grad()
def test_a_watched_model_shows_what_the_cache_stands_for() -> None:
    model = switched(llama)
    cache = headwise.hf.QuantizedCache(model)
    ids = torch.randint(0, 64, (1, 71), generator=torch.Generator().manual_seed(3))
    model(ids[:, :70], past_key_values=cache)
    with watch(model) as seen:
        model(ids[:, 70:], past_key_values=cache)
    for layer, held in enumerate(cache.layers):
        call = seen[layer].call
        keys, values = held.store.held.dequantized()
        assert torch.equal(call.key, keys)
        assert torch.equal(call.value, values), "a single token reads its own value as int8 too"
        assert call.key.shape[2] == 71


@torch.no_grad()
def test_what_cannot_read_int8_is_told_so() -> None:
    model = ready(llama)
    model.set_attn_implementation("sdpa")
    with pytest.raises(BadInput, match=r"attends with 'sdpa'.*set_attn_implementation"):
        headwise.hf.QuantizedCache(model)
    model.set_attn_implementation("headwise")
    with pytest.raises(BadInput, match="capacity=0"):
        headwise.hf.QuantizedCache(model, capacity=0)
    ids = torch.randint(0, 64, (1, 9))
    for other in ("sdpa", "eager"):
        model.set_attn_implementation("headwise")
        cache = headwise.hf.QuantizedCache(model)
        model(ids[:, :8], past_key_values=cache)
        model.set_attn_implementation(other)
        with pytest.raises(TypeError, match="only headwise's attention can read"):
            model(ids[:, 8:], past_key_values=cache)
    with pytest.raises(ValueError, match="negative number"):
        cache.crop(3)


TEXT = """
A house that has stood for two hundred years has seen most of what can happen to a house. Its roof
was mended after a storm in which the old elm fell, and the stones of its north wall were laid anew
when the river rose to the door. The people who live there now know these things only from letters,
which they found in a box under the stairs: a daughter writes to her brother at sea that the winter
is long, that the cow is well, that their father no longer walks to the village. He answers from a
port in the south, months later, and asks whether the elm still stands. By then it had fallen. What
moves us in such letters is not what they say but how late they come, and that nobody who wrote them
could know what we know. We read them in the evening, by a light that would have astonished them.
"""


@pytest.mark.packaged
@torch.no_grad()
def test_smollm2_loses_less_than_a_hundredth_of_its_perplexity(smollm2: models.Loaded) -> None:
    model = smollm2.model
    before = model.config._attn_implementation
    model.set_attn_implementation("headwise")
    try:
        ids = smollm2.processor(TEXT, return_tensors="pt").input_ids
        first = 2 * BLOCK  # as int8 from here on; more of the text is in benchmarks/int8.py
        assert ids.shape[1] > first + 25
        nats = []
        for cache in (transformers.DynamicCache(), headwise.hf.QuantizedCache(model)):
            logits = [model(ids[:, :first], past_key_values=cache).logits[:, -1:]]
            for at in range(first, ids.shape[1] - 1):
                logits.append(model(ids[:, at : at + 1], past_key_values=cache).logits)
            nats.append(float(cross_entropy(torch.cat(logits, 1)[0].float(), ids[0, first:])))
    finally:
        model.set_attn_implementation(before)
    change = torch.tensor(nats[1] - nats[0]).expm1()
    assert abs(float(change)) < 0.01, f"perplexity changes by {float(change):+.2%}"
    assert nats[0] != nats[1], "the int8 cache was not read"
