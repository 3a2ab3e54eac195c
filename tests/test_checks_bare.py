"""for_attention on sound attention, on what it cannot take, and on numbers worked out by hand."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import headwise
from headwise.checks.bare import BARE_CHECKS, for_attention
from headwise.checks.signature import (
    Projections,
    Signature,
    headwise_attention,
    headwise_layer,
    torch_mha,
    torch_sdpa,
)
from headwise.record import Record

FLAG = Signature(causal="end", arguments={"causal": "is_causal"})


def by_name(records: list[Record]) -> dict[str, Record]:
    return {str(record.where["check"]): record for record in records}


def failed(records: list[Record]) -> dict[str, str | None]:
    """check → cause of what failed."""
    return {
        str(r.where["check"]): r.values["cause"] for r in records if r.values["status"] == "failed"
    }


def messages(records: list[Record]) -> list[str]:
    return [r.values["message"] for r in records if r.values["status"] == "failed"]


# --- no false alarms -----------------------------------------------------------------------------


class TimmStyle(nn.Module):
    """A vision block's attention: one fused projection, torch's function, no mask."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(batch, length, width))


TIMM = Signature(
    layout="ble", heads=3, head_dim=8, projections=Projections(fused="qkv", output="proj")
)


class LlamaAdapter(nn.Module):
    """transformers' Llama attention with the mask that its model would hand it."""

    def __init__(self, implementation: str) -> None:
        super().__init__()
        config = transformers.LlamaConfig(
            hidden_size=24,
            num_attention_heads=6,
            num_key_value_heads=2,
            max_position_embeddings=32,
            attn_implementation=implementation,
        )
        kind = transformers.models.llama.modeling_llama
        self.attention = kind.LlamaAttention(config, layer_idx=0)
        self.rotary = kind.LlamaRotaryEmbedding(config)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        length = x.shape[1]
        keep = torch.ones(length, length, dtype=torch.bool).tril()
        keep = keep[None, None] if mask is None else keep & mask
        added = torch.zeros(keep.shape, dtype=x.dtype).masked_fill(~keep, torch.finfo(x.dtype).min)
        places = torch.arange(length)[None]
        cos, sin = self.rotary(x, places)
        return self.attention(x, position_embeddings=(cos, sin), attention_mask=added)[0]


LLAMA = Signature(
    layout="ble",
    heads=6,
    kv_heads=2,
    head_dim=4,
    causal="end",
    mask="keep",
    mask_axes=("b1ls", "11ls"),
    arguments={"mask": "mask"},
    empty_rows="nan",
    projections=Projections(
        query="attention.q_proj",
        key="attention.k_proj",
        value="attention.v_proj",
        output="attention.o_proj",
        rotary=headwise.Rotary(),
    ),
)


class BertAdapter(nn.Module):
    """transformers' BERT self-attention, whose additive mask is built from 0 and −inf."""

    def __init__(self, implementation: str) -> None:
        super().__init__()
        config = transformers.BertConfig(
            hidden_size=24, num_attention_heads=4, attn_implementation=implementation
        )
        self.attention = transformers.models.bert.modeling_bert.BertSelfAttention(config)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.attention(x, attention_mask=attention_mask)[0]


BERT = Signature(
    layout="ble",
    heads=4,
    head_dim=6,
    mask="additive",
    mask_axes=("b1ls", "b11s"),
    arguments={"mask": "attention_mask"},
    empty_rows="nan",
    projections=Projections(query="attention.query", key="attention.key", value="attention.value"),
)


def _layer(**options: object) -> headwise.MultiHeadAttention:
    torch.manual_seed(3)
    layer = headwise.MultiHeadAttention(32, 4, **options)  # type: ignore[arg-type]
    if layer.sinks is not None:
        nn.init.normal_(layer.sinks)
    return layer


def _sound() -> list[tuple[str, object, Signature]]:
    torch.manual_seed(2)
    options = headwise.AttentionOptions
    layers = {
        "layer": _layer(),
        "grouped layer, norms": _layer(num_kv_heads=2, options=options(qk_norm=True)),
        "rotary layer, sinks": _layer(position=headwise.Rotary(), options=options(sinks=True)),
        "interleaved layer": _layer(position=headwise.Rotary(interleaved=True)),
        "window layer, softcap": _layer(options=options(window=3, softcap=2.0, scale=0.5)),
    }
    first = nn.MultiheadAttention(16, 4, batch_first=True, dropout=0.1)
    last = nn.MultiheadAttention(16, 2)
    return [
        ("torch's function", F.scaled_dot_product_attention, torch_sdpa()),
        ("nn.MultiheadAttention", first, torch_mha(first)),
        ("nn.MultiheadAttention, length first", last, torch_mha(last)),
        ("headwise, chosen", headwise.attention, headwise_attention()),
        ("headwise, reference", headwise.attention, headwise_attention("reference")),
        *((name, layer, headwise_layer(layer)) for name, layer in layers.items()),
        ("timm's style", TimmStyle(24, 3), TIMM),
        ("Llama, eager", LlamaAdapter("eager"), LLAMA),
        ("Llama, sdpa", LlamaAdapter("sdpa"), LLAMA),
        ("BERT, eager", BertAdapter("eager"), BERT),
        ("BERT, sdpa", BertAdapter("sdpa"), BERT),
    ]


SOUND = _sound()


@pytest.mark.parametrize(
    ("fn", "signature"), [(f, s) for _, f, s in SOUND], ids=[name for name, _, _ in SOUND]
)
def test_sound_attention_raises_no_alarm(fn, signature) -> None:
    records = for_attention(fn, signature)
    assert [r.where["check"] for r in records] == list(BARE_CHECKS)
    assert not failed(records), messages(records)
    passed = {r.where["check"] for r in records if r.values["status"] == "passed"}
    assert {"measured mask", "batch", "alignment", "shapes", "agreement", "eval"} <= passed
    assert all(r.values["message"] and r.values["seconds"] >= 0 for r in records)


def test_a_sound_layer_is_not_passed_by_luck() -> None:
    """The same layers, each with one thing declared that it does not do."""
    layer = _layer(options=headwise.AttentionOptions(window=3))
    wrong = headwise_layer(layer).but(window=2)
    assert failed(for_attention(layer, wrong, only=["alignment"])) == {
        "alignment": "window-off-by-one"
    }
    layer = _layer(position=headwise.Rotary())
    where = headwise_layer(layer).projections
    assert where is not None
    wrong = headwise_layer(layer).but(
        projections=Projections(
            query=where.query,
            key=where.key,
            value=where.value,
            output=where.output,
            rotary=headwise.Rotary(interleaved=True),
        )
    )
    assert failed(for_attention(layer, wrong)) == {"agreement": "rope-layout-mixed"}


# --- torch's real differences, told as what they are ---------------------------------------------


def test_torch_flag_stands_at_the_first_key() -> None:
    records = by_name(for_attention(F.scaled_dot_product_attention, FLAG))
    found = records["alignment"].values
    assert (found["status"], found["cause"]) == ("failed", "top-left-causal")
    assert "causal 2×5: query 0 does not read key 1, which is visible" in found["message"]
    assert found["declared"] == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    measured = [[int(move > 0) for move in row] for row in found["measured"]]
    assert measured == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0]]
    assert records["cache"].values["cause"] == "top-left-causal"
    # Square and uncached the two alignments are one.
    assert records["future leak"].values["status"] == "passed"


def test_torch_rows_without_a_key_are_nan_where_zeros_are_declared() -> None:
    module = nn.MultiheadAttention(16, 4, batch_first=True)
    wanted = torch_mha(module).but(empty_rows="zeros")
    found = failed(for_attention(module, wanted, only=["alignment", "gradients"]))
    assert found["alignment"] == "nan-from-empty-row"
    (declared,) = for_attention(module, torch_mha(module), only=["alignment"])
    assert declared.values["status"] == "passed"
    assert "rows with no key are declared not to give zeros" in declared.values["message"]


def test_a_mask_declared_the_wrong_way_round_is_named() -> None:
    wrong = torch_sdpa().but(mask="hide")
    (record,) = for_attention(F.scaled_dot_product_attention, wrong, only=["polarity"])
    assert record.values["cause"] == "mask-polarity"
    assert "invert" in record.values["fix"]
    module = nn.MultiheadAttention(16, 4, batch_first=True)
    wrong = torch_mha(module).but(padding="keep")
    (record,) = for_attention(module, wrong, only=["polarity"])
    assert record.values["cause"] == "mask-polarity"


def test_what_a_0_1_float_mask_would_do_is_told() -> None:
    (record,) = for_attention(F.scaled_dot_product_attention, torch_sdpa(), only=["polarity"])
    assert "a 0/1 float mask is added to the scores and hides nothing" in record.values["message"]
    (record,) = for_attention(headwise.attention, headwise_attention(), only=["polarity"])
    assert "a 0/1 float mask is refused" in record.values["message"]
    # Declared as the way to pass a mask, it is the fault itself.
    wrong = torch_sdpa().but(mask="keep01")
    (record,) = for_attention(F.scaled_dot_product_attention, wrong, only=["polarity"])
    assert (record.values["status"], record.values["cause"]) == ("failed", "float-mask-added")


def test_grouped_heads_need_their_flag() -> None:
    """Declared without the flag, torch refuses the call: a finding in one line, no traceback."""
    arguments = {k: v for k, v in torch_sdpa().arguments.items() if k != "grouped"}
    (record,) = for_attention(
        F.scaled_dot_product_attention, torch_sdpa().but(arguments=arguments), only=["shapes"]
    )
    assert record.values["status"] == "failed"
    assert "the call raised RuntimeError" in record.values["message"]
    assert "\n" not in record.values["message"]


def test_float32_inside_is_told_as_rounding() -> None:
    """Llama takes its softmax in float32, also of float64 scores."""
    records = by_name(for_attention(LlamaAdapter("eager"), LLAMA, only=["agreement"]))
    assert "computes in float32 inside: off by" in records["agreement"].values["message"]

    def wrong(q, k, v):
        return torch.softmax((q @ k.mT).float(), -1).to(v.dtype) @ v

    # A real fault is still named, within float32's bounds.
    found = by_name(for_attention(wrong, Signature(), only=["agreement", "gradients"]))
    assert found["agreement"].values["cause"] == "no-scale"
    assert found["gradients"].values["status"] == "passed"
    assert "steps of 3e-3" in found["gradients"].values["message"]


def test_causes_that_the_numbers_cannot_tell_apart_are_both_told() -> None:
    """Four heads of four features: 1/√(heads·head_dim) is 1/head_dim, the scale twice."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (p.unflatten(-1, (4, 4)).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
            return self.proj(((q @ k.mT / 4).softmax(-1) @ v).transpose(1, 2).flatten(-2))

    signature = Signature(
        layout="ble", head_dim=4, projections=Projections(fused="qkv", output="proj")
    )
    (record,) = for_attention(Layer(), signature, only=["agreement"])
    assert record.values["cause"] == "scale-twice"
    assert "applied twice (or the scale is 1/√(heads·head_dim))" in record.values["message"]


def test_a_wrong_gradient_is_no_rounding() -> None:
    """A backward pass that gives 1.01 of the gradient is found, and has no known name."""

    class Stretched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return 1.01 * grad

    def stretched(q, k, v):
        return F.scaled_dot_product_attention(q, k, Stretched.apply(v))

    (record,) = for_attention(stretched, Signature(), only=["gradients"])
    assert record.values["status"] == "failed"
    assert record.values["cause"] is None
    assert "Jacobian mismatch" in record.values["message"]


# --- what cannot run says why --------------------------------------------------------------------


def test_a_signature_without_a_feature_gives_a_reason() -> None:
    records = by_name(for_attention(F.scaled_dot_product_attention, Signature()))
    reasons = {
        "future leak": "declares nothing causal",
        "cache": "nothing decodes",
        "polarity": "no mask or padding argument",
        "broadcast": "no mask or padding argument",
        "padding": "no mask or padding argument",
    }
    for name, words in reasons.items():
        assert records[name].values["status"] == "not run"
        assert words in records[name].values["message"]
    assert records["agreement"].values["status"] == "passed"
    module = TimmStyle(24, 3)
    (record,) = for_attention(module, TIMM.but(projections=None), only=["agreement"])
    assert record.values["status"] == "not run"
    assert "names no projections" in record.values["message"]


def test_a_function_that_never_runs_is_not_run() -> None:
    def broken(q, k, v):
        raise RuntimeError("no such kernel\nand a long story")

    records = for_attention(broken, Signature())
    assert {r.values["status"] for r in records} == {"not run"}
    assert records[0].values["message"] == (
        "the plainest call does not run: the call raised RuntimeError: no such kernel"
    )
    for output, words in ((None, "wanted a tensor back, got NoneType"), ("x", "got str")):
        (record,) = for_attention(lambda q, k, v, o=output: o, Signature(), only=["shapes"])
        assert record.values["status"] == "not run"
        assert words in record.values["message"]
    (record,) = for_attention(lambda q, k, v: q.sum(1), Signature(), only=["shapes"])
    assert (
        "wanted an output of (2, 4, 3, 8) (batch first), got (2, 3, 8)"
        in (record.values["message"])
    )


def test_float32_only_is_checked_in_float32() -> None:
    def single(q, k, v):
        if q.dtype != torch.float32:
            raise TypeError(f"float32 only, got {q.dtype}")
        return F.scaled_dot_product_attention(q, k, v)

    records = by_name(for_attention(single, Signature()))
    assert not failed(list(records.values()))
    assert "float64 is not taken" in records["agreement"].values["message"]
    assert records["gradients"].values["status"] == "not run"

    def wrong(q, k, v):
        return single(q * 0.7, k, v)

    found = by_name(for_attention(wrong, Signature()))["agreement"].values
    assert found["status"] == "failed"
    assert found["cause"] is None  # this scale is no known fault, so none is named
    assert found["worst"] > 100 * found["tolerance"]


def test_no_gradient_is_not_a_pass() -> None:
    def detached(q, k, v):
        return F.scaled_dot_product_attention(q, k, v).detach()

    (record,) = for_attention(detached, Signature(), only=["gradients"])
    assert (record.values["status"], record.values["message"]) == (
        "not run",
        "the output carries no gradient",
    )


def test_random_attention_stops_the_other_checks() -> None:
    def noisy(q, k, v):
        return F.scaled_dot_product_attention(q, k, v) + 1e-3 * torch.randn_like(q)

    records = by_name(for_attention(noisy, Signature()))
    assert records["eval"].values["cause"] == "random-in-eval"
    assert "randn_like is drawn" in records["eval"].values["message"]
    others = [r for name, r in records.items() if name != "eval"]
    assert all(r.values["status"] == "not run" for r in others)
    assert all("mend that first" in r.values["message"] for r in others)


def test_the_callers_module_is_left_as_it_was() -> None:
    module = nn.MultiheadAttention(16, 4, batch_first=True, dropout=0.3).train()
    before = copy.deepcopy(module.state_dict())
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    for_attention(module, torch_mha(module), only=["agreement", "eval"])
    assert module.training
    assert next(module.parameters()).dtype == torch.float32
    assert all(torch.equal(before[name], x) for name, x in module.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert torch.get_num_threads() == threads


def test_only_runs_what_is_asked_for() -> None:
    records = for_attention(F.scaled_dot_product_attention, Signature(), only=["eval", "batch"])
    assert [r.where["check"] for r in records] == ["batch", "eval"]
    with pytest.raises(ValueError, match=r"no check named 'masks'; there are future leak"):
        for_attention(F.scaled_dot_product_attention, Signature(), only=["masks"])
    with pytest.raises(TypeError, match=r"wanted a function or layer and a Signature, got int"):
        for_attention(3, Signature())  # type: ignore[arg-type]


def test_records_survive_json() -> None:
    for record in for_attention(F.scaled_dot_product_attention, FLAG):
        again = Record.from_json(record.to_json())
        assert again.values["message"] == record.values["message"]
        assert again.kind == "check"
