"""Hugging Face models on headwise's attention: the same numbers, with masks as row intervals."""

import pytest
import torch

import headwise.hf
from headwise.attention import observers
from headwise.hf import mask_function
from headwise.watch import watch

transformers = pytest.importorskip("transformers")

SMALL = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))


def mistral():
    config = transformers.MistralConfig(**SMALL, sliding_window=4)
    return transformers.MistralForCausalLM(config)


def gemma2():
    config = transformers.Gemma2Config(
        **SMALL, head_dim=8, sliding_window=4, attn_logit_softcapping=2.0, query_pre_attn_scalar=8
    )
    return transformers.Gemma2ForCausalLM(config)


def gpt_oss():
    config = transformers.GptOssConfig(
        **SMALL, head_dim=8, sliding_window=4, num_local_experts=2, num_experts_per_tok=1
    )
    return transformers.GptOssForCausalLM(config)


def gpt2():
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    )


DECODERS = [llama, mistral, gemma2, gpt_oss, gpt2]


def ready(make):
    torch.manual_seed(0)
    model = make().eval()
    for parameter in model.parameters():  # some sinks start at 0, which hides a sign
        if parameter.dim() == 1:
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return model


def rounding(logits: torch.Tensor) -> float:
    """Two layers of float32 sums of up to 64 numbers, relative to the largest logit."""
    return 64 * torch.finfo(torch.float32).eps * float(logits.abs().max() + 1)


@pytest.mark.parametrize("make", DECODERS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_decoders_give_the_numbers_of_eager(make, side):
    model = ready(make)
    ids = torch.randint(0, 64, (2, 11), generator=torch.Generator().manual_seed(1))
    real = torch.ones(2, 11, dtype=torch.long)
    if side == "left":
        real[1, :5] = 0
    elif side == "right":
        real[1, 6:] = 0
    given = {"input_ids": ids, "attention_mask": real}
    with torch.no_grad():
        model.set_attn_implementation("eager")
        wanted = model(**given).logits
        model.set_attn_implementation("headwise")
        seen = []
        observers.append(lambda call, output: seen.append(call))
        try:
            got = model(**given).logits
        finally:
            observers.pop()
    assert len(seen) == 2, "every layer goes through headwise.attention"
    assert all(call.visible.bits is None for call in seen), "masks arrive as row intervals"
    mine = real.bool()
    assert torch.allclose(got[mine], wanted[mine], rtol=0, atol=rounding(wanted))


@pytest.mark.parametrize("make", DECODERS, ids=lambda make: make.__name__)
def test_generation_with_a_cache_gives_the_same_tokens(make):
    model = ready(make)
    ids = torch.randint(1, 64, (2, 6), generator=torch.Generator().manual_seed(1))
    real = torch.tensor([[1] * 6, [0, 0] + [1] * 4])
    tokens = []
    for name in ("eager", "headwise"):
        model.set_attn_implementation(name)
        tokens.append(
            model.generate(
                input_ids=ids,
                attention_mask=real,
                max_new_tokens=8,
                min_new_tokens=8,
                do_sample=False,
                pad_token_id=0,
            )
        )
    assert torch.equal(*tokens)


def bert():
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=48,
    )  # fmt: skip
    return transformers.BertModel(config)


def test_encoders_see_both_ways_and_no_padding():
    model = ready(bert)
    ids = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    real = torch.tensor([[1] * 9, [1] * 5 + [0] * 4])
    results = []
    with torch.no_grad():
        for name in ("eager", "headwise"):
            model.set_attn_implementation(name)
            results.append(model(input_ids=ids, attention_mask=real).last_hidden_state)
    mine = real.bool()
    assert torch.allclose(results[0][mine], results[1][mine], rtol=0, atol=rounding(results[0]))


def test_encoder_decoder_with_cross_attention():
    config = transformers.BartConfig(
        vocab_size=64, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48,
        max_position_embeddings=32,
    )  # fmt: skip
    model = ready(lambda: transformers.BartModel(config))
    generator = torch.Generator().manual_seed(1)
    given = {
        "input_ids": torch.randint(3, 64, (2, 9), generator=generator),
        "attention_mask": torch.tensor([[1] * 9, [1] * 5 + [0] * 4]),
        "decoder_input_ids": torch.randint(3, 64, (2, 7), generator=generator),
    }
    results = []
    with torch.no_grad():
        for name in ("eager", "headwise"):
            model.set_attn_implementation(name)
            results.append(model(**given).last_hidden_state)
    assert torch.allclose(*results, rtol=0, atol=rounding(results[0]))


def test_training_gives_the_gradients_of_eager():
    model = ready(llama).train()
    ids = torch.randint(0, 64, (2, 11), generator=torch.Generator().manual_seed(1))
    grads = []
    for name in ("eager", "headwise"):
        model.set_attn_implementation(name)
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    for one, two in zip(*grads, strict=True):
        # a gradient sums over 22 tokens; both sides round
        assert torch.allclose(one, two, rtol=1e-4, atol=rounding(one))


def test_a_watch_sees_it_once():
    model = ready(llama)
    model.set_attn_implementation("headwise")
    with torch.no_grad(), watch(model) as seen:
        model(input_ids=torch.arange(9)[None])
    assert len(seen) == 2
    assert seen[0].mask_words == "causal" and seen[0].module == "model.layers.0.self_attn"


def test_a_long_mask_is_intervals_and_small():
    from transformers.masking_utils import sliding_window_causal_mask_function

    mask = mask_function(1, 5000, 5000, mask_function=sliding_window_causal_mask_function(100))
    compiled = mask.compile(batch=1, heads=8, queries=5000, keys=5000)
    assert compiled.bits is None and compiled.intervals.numel() == 5000 * 2
    runs = compiled.intervals[0, 0, :, 0]
    assert runs[4999].tolist() == [4900, 5000] and runs[3].tolist() == [0, 4]


def test_predicates_that_are_no_runs_become_bits():
    mask = mask_function(1, 6, 9, q_offset=3, mask_function=lambda b, h, q, kv: (q + kv) % 2 == 0)
    wanted = (torch.arange(3, 9)[:, None] + torch.arange(9)) % 2 == 0
    assert torch.equal(mask.dense(6, 9, heads=4)[0, 2], wanted)


def test_blocks_of_unlike_rows_join(monkeypatch):
    """Rows with one run, with two, and with many, in blocks of their own."""
    monkeypatch.setattr(headwise.hf, "BLOCK", 9)

    def predicate(b, h, q, kv):
        return torch.where(q < 2, kv <= q, (kv < 2) | (kv == q))

    mask = mask_function(1, 6, 9, mask_function=predicate)
    rows, keys = torch.arange(6)[:, None], torch.arange(9)
    assert torch.equal(mask.dense(6, 9)[0, 0], predicate(0, 0, rows, keys))
    assert mask.compile(batch=1, heads=1, queries=6, keys=9).bits is None

    def ragged(b, h, q, kv):
        return torch.where(q < 2, kv <= q, kv % 2 == 0)

    mask = mask_function(1, 6, 9, mask_function=ragged)
    assert torch.equal(mask.dense(6, 9)[0, 0], ragged(0, 0, rows, keys))


class TestWhatTheFunctionPassesOn:
    """Each keyword reaches the call. Small random models hide some: their scores are near 0."""

    @staticmethod
    def call(mask=None, module=None, training=False, **options):
        caught = []
        observers.append(lambda call, output: caught.append((call, output)))
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(1, heads, 5, 8, generator=generator) for heads in (4, 2, 2))
        try:
            output, weights = headwise.hf.attention_function(
                module or torch.nn.Module(), q, k, v, mask, **options
            )
        finally:
            observers.pop()
        assert weights is None and output.shape == (1, 5, 4, 8)
        ((call, seen),) = caught
        assert torch.equal(output, seen.transpose(1, 2))
        return call

    def test_numbers(self):
        call = self.call(scaling=0.7, softcap=2.0, dropout=0.25, s_aux=torch.ones(4))
        assert (call.scale, call.softcap, call.dropout) == (0.7, 2.0, 0.25)
        assert torch.equal(call.sinks, torch.ones(4))

    def test_without_a_mask_causality_is_what_the_model_says(self):
        causal = torch.nn.Module()
        causal.is_causal = True
        lower = torch.ones(5, 5).tril().bool()
        assert torch.equal(self.call(module=causal).visible.tile()[0, 0], lower)
        assert self.call(module=causal, is_causal=False).visible.is_full
        assert torch.equal(self.call(is_causal=True).visible.tile()[0, 0], lower)
        causal.is_causal = False
        assert self.call(module=causal).visible.is_full

    def test_dense_masks_of_other_makers(self):
        hidden = torch.zeros(1, 1, 5, 5, dtype=torch.bool)
        hidden[..., 3] = True
        for mask in (~hidden, torch.where(hidden, torch.finfo(torch.float32).min, 0.0)):
            call = self.call(mask)
            assert torch.equal(call.visible.tile().expand(1, 1, 5, 5), ~hidden)
        scores = torch.randn(1, 4, 5, 5, generator=torch.Generator().manual_seed(1))
        assert torch.equal(self.call(scores).bias, scores)
        both = self.call(scores, position_bias=scores)
        assert torch.equal(both.bias, 2 * scores)


def test_a_cache_longer_than_what_is_in_it_hides_its_end():
    """Static caches: 10 slots, three queries that stand at 2, 3 and 4."""
    mask = mask_function(1, 3, 10, q_offset=2)
    wanted = torch.arange(10) <= torch.arange(2, 5)[:, None]
    assert torch.equal(mask.dense(3, 10)[0, 0], wanted)
