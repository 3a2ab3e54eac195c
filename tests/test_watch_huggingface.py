"""Watching Hugging Face models: tiny random ones, eager and sdpa, with caches and padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise import masks
from headwise.errors import NothingToWatch
from headwise.reference import attention_steps
from headwise.watch import watch
from watching import assert_all_reproduce, assert_reproduces, assert_same_bits, watched

transformers = pytest.importorskip("transformers")

VOCABULARY = 97


def llama(implementation: str = "eager", **options: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=66,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=10,
        attn_implementation=implementation,
        pad_token_id=0,
        eos_token_id=None,
        **options,
    )
    return transformers.LlamaForCausalLM(config).eval()


def gpt2(implementation: str = "eager", **options: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=64,
        n_embd=33,
        n_layer=2,
        n_head=3,
        attn_implementation=implementation,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        **options,
    )
    return transformers.GPT2LMHeadModel(config).eval()


def t5(implementation: str = "eager") -> Any:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=22,
        d_kv=5,
        d_ff=31,
        num_layers=2,
        num_heads=3,
        decoder_start_token_id=0,
        relative_attention_num_buckets=8,
    )
    config._attn_implementation = implementation
    model = transformers.T5ForConditionalGeneration(config).eval()
    with torch.no_grad():  # its biases start near 0; here they have to matter
        for name, parameter in model.named_parameters():
            if "relative_attention_bias" in name:
                parameter.normal_(std=2.0)
    return model


def bart(implementation: str = "eager") -> Any:
    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=VOCABULARY,
        d_model=24,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=31,
        decoder_ffn_dim=31,
        max_position_embeddings=64,
        attn_implementation=implementation,
        forced_eos_token_id=None,
        eos_token_id=None,
    )
    return transformers.BartForConditionalGeneration(config).eval()


def bert(implementation: str = "eager", **options: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=33,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=31,
        max_position_embeddings=64,
        attn_implementation=implementation,
        **options,
    )
    return transformers.BertModel(config).eval()


def tokens(batch: int = 2, length: int = 11, seed: int = 1) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (batch, length), generator=made)


def padded(side: str) -> Tensor:
    real = torch.ones(2, 11, dtype=torch.long)
    if side == "left":
        real[0, :4] = 0
    elif side == "right":
        real[0, 7:] = 0
    return real


IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["eager", "sdpa"])


# --- decoders ------------------------------------------------------------------------------------


@IMPLEMENTATIONS
@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_causal_models(make: Any, implementation: str, side: str) -> None:
    model, ids, real = make(implementation), tokens(), padded(side)
    run = lambda: model(input_ids=ids, attention_mask=real)  # noqa: E731
    seen, _ = watched(model, run)
    assert_all_reproduce(seen, 2)
    assert [c.id for c in seen] == ["self/0", "self/1"]
    assert {c.route for c in seen} == {f"Hugging Face {implementation}"}
    words = {
        "none": "causal",
        "left": "causal + padding (4 rows see no key)",
        "right": "causal + padding",
    }
    assert {c.mask_words for c in seen} == {words[side]}
    if make is llama:  # keys are seen before they are repeated
        assert seen[0].call.groups == 3
    # The mask is right, not only harmless: real rows see the real keys up to their own.
    visible = seen[0].call.visible.tile().expand(2, 1, 11, 11)[:, 0]
    wanted = torch.ones(11, 11).tril().bool() & real.bool()[:, None]
    assert torch.equal(visible, wanted)


@pytest.mark.parametrize("make", [llama, gpt2])
def test_weights_are_the_models_own(make: Any) -> None:
    model, ids = make("eager"), tokens()
    with torch.no_grad(), watch(model) as seen:
        own = model(ids, output_attentions=True).attentions
    for index, theirs in enumerate(own):
        mine = seen.weights(index)
        # Weights are at most 1; a score's error of a few eps is the weight's relative error.
        limit = 16 * torch.finfo(torch.float32).eps
        assert (mine - theirs).abs().max() < limit
        assert mine.shape == theirs.shape


@IMPLEMENTATIONS
@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize("cached", [True, False])
def test_generation(make: Any, implementation: str, cached: bool) -> None:
    model, ids, real = make(implementation), tokens(), padded("left")

    def run() -> Tensor:
        return model.generate(
            ids, attention_mask=real, max_new_tokens=3, do_sample=False, use_cache=cached
        )

    seen, out = watched(model, run)
    assert out.shape == (2, 14)
    assert_all_reproduce(seen, 6)
    assert [c.index for c in seen if c.layer == 0] == [0, 1, 2]
    lengths = [(c.call.query_length, c.call.key_length) for c in seen if c.layer == 0]
    assert lengths == ([(11, 11), (1, 12), (1, 13)] if cached else [(11, 11), (12, 12), (13, 13)])
    assert {c.kind for c in seen} == {"self"}  # L ≠ S is not what makes a call cross-attention


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_kept_calls_do_not_change_when_a_cache_is_written_again(kind: str) -> None:
    model, ids = llama("sdpa"), tokens()
    run = lambda: model.generate(  # noqa: E731
        ids, max_new_tokens=4, do_sample=False, cache_implementation=kind, disable_compile=True
    )
    seen, _ = watched(model, run)
    assert_all_reproduce(seen, 8)


@IMPLEMENTATIONS
def test_prompt_in_two_chunks(implementation: str) -> None:
    model, ids = llama(implementation), tokens()

    def run() -> Any:
        first = model(ids[:, :6], use_cache=True)
        return model(ids[:, 6:], past_key_values=first.past_key_values).logits

    seen, _ = watched(model, run)
    assert_all_reproduce(seen, 4)
    assert (seen[2].call.query_length, seen[2].call.key_length) == (5, 11)
    assert [c.mask_words for c in seen] == ["causal"] * 4
    grid = seen[2].call.visible.tile().expand(2, 1, 5, 11)[0, 0]
    assert torch.equal(grid, torch.ones(5, 11).tril(6).bool())


def test_gpt2_with_upcast_scores() -> None:
    model, ids = gpt2("eager", reorder_and_upcast_attn=True), tokens()
    seen, _ = watched(model, lambda: model(ids))
    assert_all_reproduce(seen, 2)
    assert seen[0].route == "Hugging Face upcast and reordered"


@IMPLEMENTATIONS
def test_sliding_window(implementation: str) -> None:
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        vocab_size=VOCABULARY,
        hidden_size=40,
        intermediate_size=31,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=4,
        attn_implementation=implementation,
    )
    model = transformers.MistralForCausalLM(config).eval()
    ids = tokens()
    seen, _ = watched(model, lambda: model(ids))
    assert_all_reproduce(seen, 1)
    assert seen[0].mask_words == "causal + window 4"
    seen, _ = watched(model, lambda: model.generate(ids, max_new_tokens=4, do_sample=False))
    assert_all_reproduce(seen, 4)


def test_softcap() -> None:
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        vocab_size=VOCABULARY,
        hidden_size=40,
        intermediate_size=31,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=10,
        sliding_window=4,
        attn_logit_softcapping=0.02,
        query_pre_attn_scalar=7,
        attn_implementation="eager",
    )
    model = transformers.Gemma2ForCausalLM(config).eval()
    seen, _ = watched(model, lambda: model(tokens()))
    assert_all_reproduce(seen, 2)
    assert [c.call.softcap for c in seen] == [0.02, 0.02]
    assert sorted(c.mask_words for c in seen) == ["causal", "causal + window 4"]
    assert seen[0].call.scale_value == pytest.approx(7**-0.5, rel=1e-12)


def test_learned_sinks() -> None:
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        vocab_size=VOCABULARY,
        hidden_size=40,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=10,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=4,
        attn_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    model = transformers.GptOssForCausalLM(config).eval()
    for layer in model.model.layers:
        nn.init.normal_(layer.self_attn.sinks)
    seen, _ = watched(model, lambda: model(tokens()))
    assert_all_reproduce(seen, 2)
    for call, layer in zip(seen, model.model.layers, strict=True):
        assert call.call.sinks is not None
        assert torch.equal(call.call.sinks, layer.self_attn.sinks)


# --- encoders and encoder-decoders ---------------------------------------------------------------


@IMPLEMENTATIONS
def test_encoder_with_padding(implementation: str) -> None:
    model = bert(implementation)
    seen, _ = watched(model, lambda: model(tokens(), attention_mask=padded("right")))
    assert_all_reproduce(seen, 2)
    assert {c.mask_words for c in seen} == {"padding"}
    assert seen[0].module == "encoder.layer.0.attention.self"
    assert seen[0].real_queries is not None
    assert torch.equal(seen[0].real_queries, padded("right").bool())


@IMPLEMENTATIONS
@pytest.mark.parametrize("make", [t5, bart])
def test_encoder_decoders(make: Any, implementation: str) -> None:
    model = make(implementation)
    source, target, real = tokens(), tokens(length=7, seed=2), padded("right")

    def run() -> Any:
        return model(input_ids=source, attention_mask=real, decoder_input_ids=target)

    seen, _ = watched(model, run)
    assert_all_reproduce(seen, 6)
    assert [(c.id, c.mask_words) for c in seen] == [
        ("encoder.self/0", "padding"),
        ("encoder.self/1", "padding"),
        ("decoder.self/0", "causal"),
        ("decoder.cross/0", "padding"),
        ("decoder.self/1", "causal"),
        ("decoder.cross/1", "padding"),
    ]
    # T5 adds learned biases and does not scale; neither gives biases to cross-attention.
    biased = [c.call.bias is not None for c in seen]
    assert biased == [make is t5 and c.kind == "self" for c in seen]
    assert all((c.call.scale_value == 1.0) == (make is t5) for c in seen)


@IMPLEMENTATIONS
@pytest.mark.parametrize("make", [t5, bart])
def test_encoder_decoder_generation(make: Any, implementation: str) -> None:
    model = make(implementation)

    def run() -> Tensor:
        return model.generate(
            tokens(), attention_mask=padded("right"), max_new_tokens=3, do_sample=False
        )

    seen, _ = watched(model, run)
    assert_all_reproduce(seen, 2 + 3 * 4)
    cross = [c for c in seen if c.kind == "cross" and c.layer == 1]
    assert [(c.index, c.call.query_length, c.call.key_length) for c in cross] == [
        (0, 1, 11),
        (1, 1, 11),
        (2, 1, 11),
    ]


def test_cross_attention_of_equal_lengths_is_still_cross() -> None:
    model = bart()
    with torch.no_grad(), watch(model) as seen:
        model(input_ids=tokens(), decoder_input_ids=tokens(seed=2))
    assert [c.kind for c in seen][2:] == ["self", "cross"] * 2


def test_bert_decoder_names_its_cross_attention() -> None:
    model = bert(is_decoder=True, add_cross_attention=True)
    memory = torch.randn(2, 11, 33)
    seen, _ = watched(model, lambda: model(tokens(), encoder_hidden_states=memory))
    assert_all_reproduce(seen, 4)
    assert [c.id for c in seen] == ["self/0", "cross/0", "self/1", "cross/1"]


def test_weights_shared_by_layers_count_as_layers() -> None:
    torch.manual_seed(0)
    config = transformers.AlbertConfig(
        vocab_size=VOCABULARY,
        embedding_size=12,
        hidden_size=33,
        num_hidden_layers=3,
        num_attention_heads=3,
        intermediate_size=31,
        max_position_embeddings=64,
    )
    model = transformers.AlbertModel(config).eval()
    seen, _ = watched(model, lambda: (model(tokens()), model(tokens(seed=2))))
    assert_all_reproduce(seen, 6)
    assert [(c.id, c.index) for c in seen] == [
        ("self/0", 0), ("self/1", 1), ("self/2", 2), ("self/0", 3), ("self/1", 4), ("self/2", 5),
    ]  # fmt: skip


def test_two_towers_have_names_of_their_own() -> None:
    torch.manual_seed(0)
    small = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
    small["intermediate_size"] = 31
    text = {**small, "vocab_size": VOCABULARY, "max_position_embeddings": 16, "eos_token_id": 3}
    vision = {**small, "image_size": 28, "patch_size": 14}
    model = transformers.CLIPModel(
        transformers.CLIPConfig(text_config=text, vision_config=vision)
    ).eval()
    pixels = torch.randn(2, 3, 28, 28)
    seen, _ = watched(model, lambda: model(input_ids=tokens(), pixel_values=pixels))
    assert_all_reproduce(seen, 2)
    assert {c.id for c in seen} == {"text_model.self/0", "vision_model.self/0"}


# --- other attention functions -------------------------------------------------------------------


def function_registered(name: str, function: Any) -> Any:
    transformers.AttentionInterface.register(name, function)
    return llama(name)


def test_registered_function_without_a_mask_function_is_read_by_its_output() -> None:
    """transformers hands it no mask at all, so only its output says what it did."""

    def own_causal(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **k: Any):
        key, value = (x.repeat_interleave(3, 1) for x in (key, value))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=k["scaling"])
        return out.transpose(1, 2).contiguous(), None

    def own_full(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **k: Any):
        key, value = (x.repeat_interleave(3, 1) for x in (key, value))
        out = F.scaled_dot_product_attention(query, key, value, scale=k["scaling"])
        return out.transpose(1, 2).contiguous(), None

    def odd(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **k: Any):
        return query.transpose(1, 2).contiguous(), None

    for function, words in ((own_causal, "causal"), (own_full, "full")):
        model = function_registered(f"hw_{function.__name__}", function)
        seen, _ = watched(model, lambda model=model: model(tokens()))
        assert_all_reproduce(seen, 2)
        assert {c.mask_words for c in seen} == {words}
    model = function_registered("hw_odd", odd)
    seen, _ = watched(model, lambda: model(tokens()), allow_nothing=True)
    assert len(seen) == 0
    assert "its output is not that of attention" in seen.not_caught[0]


@pytest.mark.parametrize("side", ["none", "right", "packed"])
def test_flash_attention_masks(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The flash library needs a GPU; its entry point is stood in for, transformers' part is not."""
    from transformers.integrations import flash_attention

    grids: list[Tensor] = []

    def stand_in(query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        length = q.shape[2]
        place = torch.arange(length)
        back = place[:, None] - place
        grid = (back >= 0) & (back < options["sliding_window"])
        if mask is not None:
            grid = grid & mask.bool()[:, None, None]
        if side == "packed":
            document = (place >= 5).long()
            grid = grid & (document[:, None] == document)
        grids.append(grid.expand(2 if side == "right" else 1, 1, length, length))
        scale = options["softmax_scale"]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=grid, scale=scale)
        return out.transpose(1, 2)

    monkeypatch.setattr(flash_attention, "_flash_attention_forward", stand_in)
    model = llama("eager")
    layer = model.model.layers[0].self_attn
    batch = 2 if side == "right" else 1
    q, k, v = torch.randn(batch, 6, 11, 10), *torch.randn(2, batch, 2, 11, 10)
    options: dict[str, Any] = {"scaling": 0.3, "sliding_window": 4}
    if side == "packed":
        options["position_ids"] = torch.cat((torch.arange(5), torch.arange(6)))[None]

    class Runs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self) -> Tensor:
            function = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["flash_attention_2"]
            mask = padded("right") if side == "right" else None
            return function(self.layer, q, k, v, mask, **options)[0]

    model = Runs()
    seen, _ = watched(model, model)
    assert len(seen) == 1 and seen[0].module == "layer"
    assert_reproduces(seen[0])
    visible = seen[0].call.visible.tile().expand(grids[0].shape)
    assert torch.equal(visible, grids[0])


def test_block_masks_are_evaluated() -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    from headwise.watch.hf_routes import _block_mask

    block = create_block_mask(lambda b, h, q, k: (q >= k) & (k >= b), 2, None, 11, 11, device="cpu")
    mask = _block_mask(block, (2, 6, 11, 11))
    assert isinstance(mask, masks.Mask)
    grid = mask.dense(11, 11, batch=2)[:, 0]
    wanted = (
        torch.ones(11, 11).tril().bool() & (torch.arange(11) >= torch.arange(2)[:, None])[:, None]
    )
    assert torch.equal(grid, wanted)


@pytest.mark.slow
# transformers asks torch for block masks with a flag that torch 2.13 retired.
@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning")
def test_flex_attention() -> None:
    """Compiled C++ on a CPU; its block mask is evaluated beside it."""
    model, ids = llama("flex_attention"), tokens()
    seen, _ = watched(model, lambda: model(ids, attention_mask=padded("left")))
    assert_all_reproduce(seen, 2)
    assert {(c.route, c.call.groups) for c in seen} == {("Hugging Face flex", 3)}
    assert seen[0].mask_words == "causal + padding (4 rows see no key)"


def test_attention_written_by_hand_is_named() -> None:
    torch.manual_seed(0)
    config = transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=24, n_layer=2, n_head=4)
    model = transformers.BloomModel(config).eval()
    said = pytest.raises(NothingToWatch, match=r"BloomModel.*h\.0\.self_attention")
    with said, watch(model):
        model(tokens())
    with watch(model, allow_nothing=True) as seen:
        model(tokens())
    assert seen.not_caught == [
        "h.0.self_attention, h.1.self_attention (BloomAttention): it ran, but called neither "
        "headwise.attention, F.scaled_dot_product_attention, nn.MultiheadAttention nor a Hugging "
        "Face attention function: its class computes the softmax by hand"
    ]


def test_bfloat16() -> None:
    model = llama("sdpa").bfloat16()
    assert_all_reproduce(watched(model, lambda: model(tokens()))[0], 2)
    model = llama("eager").bfloat16()
    seen, _ = watched(model, lambda: model(tokens()))
    assert len(seen) == 2
    for call in seen:  # eager rounds scores and weights to bfloat16 on the way
        steps = attention_steps(call.call)
        eps = torch.finfo(torch.bfloat16).eps
        assert call.output is not None
        limit = 4 * eps * float(call.call.value.abs().max())
        assert (steps["output"] - call.output.float()).abs().max() < limit


def test_inference_mode_and_training() -> None:
    model, ids = llama("eager", attention_dropout=0.25), tokens()
    with torch.inference_mode():
        alone = model(ids).logits
        with watch(model) as seen:
            same = model(ids).logits
    assert_same_bits(alone, same)
    assert seen[0].dropout == 0.0
    model.train()

    def loss(watching: bool) -> list[Tensor]:
        torch.manual_seed(3)
        model.zero_grad()
        if watching:
            with watch(model) as seen:
                model(ids, labels=ids).loss.backward()
            assert seen[0].dropout == 0.25
        else:
            model(ids, labels=ids).loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    assert_same_bits([g.clone() for g in loss(False)], loss(True))
