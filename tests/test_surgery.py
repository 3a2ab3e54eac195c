"""Pruned and shared models against the full model with heads zeroed, every family, saved too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from headwise import MultiHeadAttention
from headwise.errors import BadInput
from headwise.surgery import load, prune_heads, share_kv, sites

IDS = torch.tensor([[3, 5, 7, 11, 2, 9], [1, 4, 6, 8, 10, 12]])


def _model(name: str) -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    common = {"vocab_size": 23, "hidden_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "intermediate_size": 32}
    if name in ("llama", "llama-grouped"):
        kv = 2 if name == "llama-grouped" else 4
        config = tf.LlamaConfig(**common, **heads, num_key_value_heads=kv, attention_bias=True)
        return tf.LlamaForCausalLM(config).double().eval(), {"input_ids": IDS}
    if name == "qwen3":
        config = tf.Qwen3Config(**common, **heads, num_key_value_heads=2, head_dim=8)
        return tf.Qwen3ForCausalLM(config).double().eval(), {"input_ids": IDS}
    if name == "gpt2":
        config = tf.GPT2Config(vocab_size=23, n_embd=24, n_layer=2, n_head=4, n_positions=16)
        return tf.GPT2LMHeadModel(config).double().eval(), {"input_ids": IDS}
    if name == "bert":
        model = tf.BertModel(tf.BertConfig(**common, **heads))
        return model.double().eval(), {"input_ids": IDS}
    if name == "vit":
        small = {"hidden_size": 24, "num_hidden_layers": 2, "image_size": 8, "patch_size": 4}
        model = tf.ViTModel(tf.ViTConfig(**small, **heads))
        return model.double().eval(), {"pixel_values": torch.randn(2, 3, 8, 8).double()}
    if name == "t5":
        config = tf.T5Config(
            vocab_size=23,
            d_model=24,
            d_kv=6,
            d_ff=32,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
            pad_token_id=0,
        )
        model = tf.T5ForConditionalGeneration(config)
        return model.double().eval(), {"input_ids": IDS, "decoder_input_ids": IDS[:, :4]}
    config = tf.WhisperConfig(
        vocab_size=23,
        d_model=24,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        num_mel_bins=4,
        max_source_positions=6,
        max_target_positions=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = tf.WhisperForConditionalGeneration(config)
    audio = torch.randn(2, 4, 12).double()
    return model.double().eval(), {"input_features": audio, "decoder_input_ids": IDS[:, :4]}


FAMILIES = ["llama", "llama-grouped", "qwen3", "gpt2", "bert", "vit", "t5", "whisper"]


def _out(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs)[0]


def _zeroed(model: Any, inputs: dict[str, Any], gone: dict[str, list[int]]) -> torch.Tensor:
    """The full model, the named heads' part of the output projection's input set to 0."""
    handles = []
    for site in sites(model):
        width = site.value_dim * (site.heads // site.kv_heads)
        heads = gone.get(site.name, [])

        def zero(_m: Any, args: Any, kv: list[int] = heads, w: int = width) -> Any:
            x = args[0].clone()
            for head in kv:
                x[..., head * w : (head + 1) * w] = 0
            return (x,)

        handles.append(site.output.register_forward_pre_hook(zero))
    out = _out(model, inputs)
    for handle in handles:
        handle.remove()
    return out


@pytest.mark.parametrize("name", FAMILIES)
def test_pruned_equals_zeroed_and_survives_saving(name: str, tmp_path: Path) -> None:
    model, inputs = _model(name)
    before = _out(model, inputs)
    found = sites(model)
    # Uneven on purpose, and every kind of layer.
    gone = {
        s.name: [0] if i % 2 else [s.kv_heads - 1, *([1] if s.kv_heads > 2 else [])]
        for i, s in enumerate(found)
    }
    gone.pop(found[0].name) if len(found) > 2 else None
    pruned = prune_heads(model, gone)
    wanted = _zeroed(model, inputs, gone)
    assert (wanted - before).abs().max() > 1e-4
    torch.testing.assert_close(_out(pruned, inputs), wanted, rtol=1e-9, atol=1e-10)
    assert torch.equal(_out(model, inputs), before), "the original changed"
    assert sum(p.numel() for p in pruned.parameters()) < sum(p.numel() for p in model.parameters())
    pruned.save_pretrained(tmp_path)
    torch.testing.assert_close(_out(load(tmp_path), inputs), wanted, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", ["llama", "llama-grouped", "qwen3", "vit"])
def test_even_heads_load_with_plain_transformers(name: str, tmp_path: Path) -> None:
    model, inputs = _model(name)
    pruned = prune_heads(model, {0: [0], 1: [1]})
    pruned.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=torch.float64).eval()
    torch.testing.assert_close(_out(again, inputs), _out(pruned, inputs), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", FAMILIES)
def test_uneven_heads_are_never_loaded_wrong_by_plain_transformers(
    name: str, tmp_path: Path
) -> None:
    model, inputs = _model(name)
    pruned = prune_heads(model, {sites(model)[0].name: [0]})
    pruned.save_pretrained(tmp_path)
    # transformers' own config cannot say these shapes: it stops and names them.
    with pytest.raises(RuntimeError, match=r"(?s)size|shape"):
        type(model).from_pretrained(tmp_path, dtype=torch.float64)
    torch.testing.assert_close(_out(load(tmp_path), inputs), _out(pruned, inputs))


@pytest.mark.parametrize("uneven", [True, False])
def test_load_takes_another_dtype(uneven: bool, tmp_path: Path) -> None:
    model, inputs = _model("llama-grouped")
    pruned = prune_heads(model, {0: [0]} if uneven else {0: [0], 1: [1]})
    pruned.save_pretrained(tmp_path)
    for dtype in (torch.float32, torch.bfloat16, "float32"):
        again = load(tmp_path, dtype=dtype)
        wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        assert {p.dtype for p in again.parameters()} == {wanted}
        assert [(s.heads, s.kv_heads) for s in sites(again)] == [
            (s.heads, s.kv_heads) for s in sites(pruned)
        ]
        tolerance = 1e-5 if wanted == torch.float32 else 0.05
        out = _out(again, inputs).double()
        torch.testing.assert_close(out, _out(pruned, inputs), rtol=tolerance, atol=tolerance)
    assert {p.dtype for p in load(tmp_path).parameters()} == {torch.float64}, "as it was saved"


@pytest.mark.parametrize("by", ["mean", "similar"])
@pytest.mark.parametrize("name", FAMILIES)
def test_shared_is_exact_where_heads_are_equal(name: str, by: str, tmp_path: Path) -> None:
    model, inputs = _model(name)
    original = _out(model, inputs)
    count = sites(model)[0].kv_heads // 2
    shared = share_kv(model, count, by=by)  # type: ignore[arg-type]
    out = _out(shared, inputs)
    assert (out - original).abs().max() > 1e-5
    if name in ("llama", "llama-grouped", "qwen3"):
        assert shared.config.num_key_value_heads == sites(shared)[0].kv_heads == count
    shared.save_pretrained(tmp_path)
    again = load(tmp_path)
    torch.testing.assert_close(_out(again, inputs), out, rtol=1e-9, atol=1e-10)
    # Make the original's groups equal by hand, in an order that "mean" would pair wrongly.
    if name == "llama":
        pairs = [(0, 1), (2, 3)] if by == "mean" else [(0, 2), (1, 3)]
        with torch.no_grad():
            for site in sites(model):
                for part in "kv":
                    for a, b in pairs:
                        for p in site.projections[part].parameters():
                            p[b * 6 : (b + 1) * 6] = p[a * 6 : (a + 1) * 6]
        equal = share_kv(model, 2, by=by)  # type: ignore[arg-type]
        torch.testing.assert_close(_out(equal, inputs), _out(model, inputs), rtol=1e-9, atol=1e-10)


def test_uneven_pruning_then_sharing_survives_saving(tmp_path: Path) -> None:
    model, inputs = _model("llama")
    small = share_kv(prune_heads(model, {0: [0, 2]}), 2)
    assert [(s.heads, s.kv_heads) for s in sites(small)] == [(2, 2), (4, 2)]
    small.save_pretrained(tmp_path)
    torch.testing.assert_close(_out(load(tmp_path), inputs), _out(small, inputs))


@pytest.mark.parametrize("by", ["mean", "similar"])
def test_headwise_layer(by: str) -> None:
    torch.manual_seed(1)
    layer = MultiHeadAttention(24, 4).double().eval()
    x = torch.randn(2, 5, 24).double()
    pruned = prune_heads(layer, {0: [1, 3]})
    with torch.no_grad():
        layer.out_proj.weight[:, 6:12] = 0
        layer.out_proj.weight[:, 18:] = 0
        torch.testing.assert_close(pruned(x), layer(x), rtol=1e-10, atol=1e-12)
        pairs = [(0, 1), (2, 3)] if by == "mean" else [(0, 2), (1, 3)]
        for linear in (layer.k_proj, layer.v_proj):
            for a, b in pairs:
                linear.weight[b * 6 : (b + 1) * 6] = linear.weight[a * 6 : (a + 1) * 6]
        shared = share_kv(layer, 2, by=by)  # type: ignore[arg-type]
        assert shared.num_kv_heads == 2 and layer.num_kv_heads == 4
        torch.testing.assert_close(shared(x), layer(x), rtol=1e-10, atol=1e-12)


def test_bad_input_is_one_line() -> None:
    model, _ = _model("llama-grouped")
    for heads, words in (
        ({0: [0, 1]}, "all 2 key/value heads would go"),
        ({0: [2]}, "key/value heads 0 to 1, got 2"),
        ({5: [0]}, "no layer 5; the 2 layers are self/0, self/1"),
        ({0: [1, 1]}, "named twice"),
    ):
        with pytest.raises(BadInput, match=words):
            prune_heads(model, heads)
    with pytest.raises(BadInput, match="num_kv_heads=3 does not divide the 2"):
        share_kv(model, 3)
    falcon = tf.FalconModel(
        tf.FalconConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    )
    with pytest.raises(BadInput, match="FalconAttention is not of a family"):
        prune_heads(falcon, {0: [0]})
