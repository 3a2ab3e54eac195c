"""The layer against layers that others wrote, with the same weights."""

import copy

import pytest
import torch
from torch import Tensor, nn

from headwise.layer import MultiHeadAttention
from headwise.masks import causal, hide, padding
from headwise.options import AttentionOptions
from headwise.positions import RelativeBias
from headwise.rotary import LinearScaling, Rotary, YaRNScaling
from tolerances import assert_near


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def randomise(module: nn.Module) -> nn.Module:
    """Biases and norms that start at 0 and 1 would hide a mix-up."""
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(0.4 * draw(*parameter.shape, seed=seed).to(parameter.dtype))
    return module


def copied(layer: MultiHeadAttention, **linears: nn.Linear) -> MultiHeadAttention:
    for name, linear in linears.items():
        getattr(layer, name).load_state_dict(linear.state_dict())
    return layer.eval()


# --- nn.MultiheadAttention -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("widths", [(None, None), (7, 5), (12, 5), (7, 12)])
def test_torch_layer_of_any_widths(dtype, batch_first, bias, widths):
    kdim, vdim = widths
    theirs = nn.MultiheadAttention(
        12, 3, bias=bias, kdim=kdim, vdim=vdim, batch_first=batch_first, dtype=dtype
    )
    theirs = randomise(theirs).eval()
    ours = MultiHeadAttention.from_torch(theirs)
    x = draw(2, 6, 12, dtype=dtype)
    keys = draw(2, 9, kdim or 12, dtype=dtype, seed=1)
    values = draw(2, 9, vdim or 12, dtype=dtype, seed=2)
    real = torch.tensor([[1] * 9, [1] * 5 + [0] * 4]).bool()
    inputs = (x, keys, values) if batch_first else (t.transpose(0, 1) for t in (x, keys, values))
    wanted, weights = theirs(*inputs, key_padding_mask=~real, average_attn_weights=False)
    wanted = wanted if batch_first else wanted.transpose(0, 1)
    got, ours_weights = ours(x, (keys, values), mask=padding(real), need_weights=True)
    assert got.dtype == dtype
    assert_near(got, wanted, terms=12)
    assert_near(ours_weights, weights, terms=12)


def test_torch_layer_in_causal_self_attention_and_its_average():
    theirs = randomise(nn.MultiheadAttention(12, 3, batch_first=True)).eval()
    ours, x = MultiHeadAttention.from_torch(theirs), draw(2, 6, 12)
    future = torch.ones(6, 6, dtype=torch.bool).triu(1)
    wanted, weights = theirs(x, x, x, attn_mask=future)
    for mask in (causal(), hide(future)):
        got, mean = ours(x, mask=mask, need_weights=True, average_weights=True)
        assert_near(got, wanted, terms=12)
        assert_near(mean, weights, terms=12)


def test_rows_of_the_fused_weight_are_queries_keys_values():
    theirs = nn.MultiheadAttention(2, 1)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.arange(6.0)[:, None].expand(6, 2))
        theirs.in_proj_bias.copy_(torch.arange(6.0) + 10)
    ours = MultiHeadAttention.from_torch(theirs)
    for first, linear in ((0, ours.q_proj), (2, ours.k_proj), (4, ours.v_proj)):
        assert linear.weight.tolist() == [[first] * 2, [first + 1] * 2]
        assert linear.bias.tolist() == [first + 10, first + 11]


def test_weights_are_copies_and_flags_come_along():
    theirs = nn.MultiheadAttention(8, 2, dropout=0.25).to(torch.bfloat16)
    theirs.in_proj_weight.requires_grad_(False)
    theirs.out_proj.bias.requires_grad_(False)
    ours = MultiHeadAttention.from_torch(theirs)
    assert ours.training and ours.dropout == 0.25
    assert {p.dtype for p in ours.parameters()} == {torch.bfloat16}
    frozen = {name for name, p in ours.named_parameters() if not p.requires_grad}
    assert frozen == {"q_proj.weight", "k_proj.weight", "v_proj.weight", "out_proj.bias"}
    before = copy.deepcopy(theirs.state_dict())
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(1)
    assert all(torch.equal(before[name], value) for name, value in theirs.state_dict().items())
    assert not MultiHeadAttention.from_torch(theirs.eval()).training


@pytest.mark.parametrize("name", ["add_bias_kv", "add_zero_attn"])
def test_extra_keys_are_refused_by_name(name):
    with pytest.raises(ValueError, match=f"from_torch: the module was built with {name}=True"):
        MultiHeadAttention.from_torch(nn.MultiheadAttention(8, 2, **{name: True}))


def test_from_torch_refuses_another_class():
    with pytest.raises(TypeError, match=r"wanted a torch\.nn\.MultiheadAttention, got Linear"):
        MultiHeadAttention.from_torch(nn.Linear(2, 2))


# --- transformers --------------------------------------------------------------------------------

ROPES = {
    "default": ({"rope_type": "default"}, None),
    "linear": ({"rope_type": "linear", "factor": 4.0}, LinearScaling(4.0)),
    "yarn": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        YaRNScaling(4.0, 16),
    ),
}


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("rope", ROPES)
def test_llama_attention_whole_and_token_by_token(kv_heads, rope):
    from transformers import DynamicCache, LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

    parameters, scaling = ROPES[rope]
    config = LlamaConfig(
        hidden_size=24,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=8,
        attention_bias=True,
        max_position_embeddings=64,
        rope_parameters={"rope_theta": 1000.0} | parameters,
        attn_implementation="eager",
    )
    theirs = randomise(LlamaAttention(config, layer_idx=0)).eval()
    turn = LlamaRotaryEmbedding(config)
    ours = copied(
        MultiHeadAttention(
            24,
            4,
            num_kv_heads=kv_heads,
            head_dim=8,
            position=Rotary(base=1000.0, scaling=scaling),
        ),
        q_proj=theirs.q_proj,
        k_proj=theirs.k_proj,
        v_proj=theirs.v_proj,
        out_proj=theirs.o_proj,
    )
    x, index = draw(2, 11, 24), torch.arange(11)[None]
    future = torch.full((1, 1, 11, 11), -torch.inf).triu(1)
    with torch.no_grad():
        wanted, _ = theirs(x, turn(x, index), attention_mask=future)
        assert_near(ours(x, mask=causal()), wanted, terms=24)

        their_cache, our_cache = DynamicCache(config=config), ours.make_cache(2, 11)
        for start, stop in ((0, 7), (7, 8), (8, 9), (9, 11)):
            part = x[:, start:stop]
            step, _ = theirs(
                part,
                turn(part, index[:, start:stop]),
                attention_mask=future[..., start:stop, :stop],
                cache=their_cache,
            )
            assert_near(ours(part, mask=causal(), cache=our_cache), step, terms=24)
            assert_near(step, wanted[:, start:stop], terms=24)


def test_qwen3_attention_with_normed_queries_and_keys():
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RotaryEmbedding

    config = Qwen3Config(
        hidden_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        attn_implementation="eager",
    )
    theirs = randomise(Qwen3Attention(config, layer_idx=0)).eval()
    ours = copied(
        MultiHeadAttention(
            24,
            4,
            num_kv_heads=2,
            head_dim=8,
            bias=False,
            position=Rotary(base=config.rope_parameters["rope_theta"]),
            options=AttentionOptions(qk_norm=True, qk_norm_eps=config.rms_norm_eps),
        ),
        q_proj=theirs.q_proj,
        k_proj=theirs.k_proj,
        v_proj=theirs.v_proj,
        out_proj=theirs.o_proj,
        q_norm=theirs.q_norm,
        k_norm=theirs.k_norm,
    )
    x = draw(2, 9, 24)
    turns = Qwen3RotaryEmbedding(config)(x, torch.arange(9)[None])
    future = torch.full((1, 1, 9, 9), -torch.inf).triu(1)
    with torch.no_grad():
        wanted, _ = theirs(x, turns, attention_mask=future)
        assert_near(ours(x, mask=causal()), wanted, terms=24)


def test_gpt_oss_attention_with_sinks_and_a_window():
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention, GptOssRotaryEmbedding

    config = GptOssConfig(
        hidden_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=4,
        layer_types=["sliding_attention"],
        num_hidden_layers=1,
        attn_implementation="eager",
    )
    rope = config.rope_parameters
    theirs = randomise(GptOssAttention(config, layer_idx=0)).eval()
    ours = copied(
        MultiHeadAttention(
            24,
            4,
            num_kv_heads=2,
            head_dim=8,
            position=Rotary(
                base=rope["rope_theta"],
                scaling=YaRNScaling(
                    rope["factor"],
                    rope["original_max_position_embeddings"],
                    beta_fast=rope["beta_fast"],
                    beta_slow=rope["beta_slow"],
                    truncate=rope["truncate"],
                ),
            ),
            options=AttentionOptions(sinks=True, window=4),
        ),
        q_proj=theirs.q_proj,
        k_proj=theirs.k_proj,
        v_proj=theirs.v_proj,
        out_proj=theirs.o_proj,
    )
    x = draw(2, 9, 24)
    turns = GptOssRotaryEmbedding(config)(x, torch.arange(9)[None])
    seen = torch.ones(9, 9, dtype=torch.bool).tril().triu(-3)
    bias = torch.zeros(1, 1, 9, 9).masked_fill(~seen, -torch.inf)
    with torch.no_grad():
        ours.sinks.copy_(theirs.sinks)
        wanted, _ = theirs(x, turns, attention_mask=bias)
        assert_near(ours(x), wanted, terms=24)


def test_bert_attention_with_padding():
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertSelfAttention

    config = BertConfig(hidden_size=24, num_attention_heads=4, attn_implementation="eager")
    theirs = randomise(BertSelfAttention(config)).eval()
    ours = copied(
        MultiHeadAttention(24, 4), q_proj=theirs.query, k_proj=theirs.key, v_proj=theirs.value
    )
    nn.init.eye_(ours.out_proj.weight)  # in BERT the output projection is another module's
    x, real = draw(2, 9, 24), torch.tensor([[1] * 9, [1] * 4 + [0] * 5]).bool()
    bias = torch.zeros(2, 1, 1, 9).masked_fill(~real[:, None, None], -torch.inf)
    with torch.no_grad():
        wanted, weights = theirs(x, attention_mask=bias)
        got, ours_weights = ours(x, mask=padding(real), need_weights=True)
    assert_near(got, wanted, terms=24)
    assert_near(ours_weights, weights, terms=24)


@pytest.mark.parametrize("decoder", [True, False])
def test_t5_attention_with_relative_bias(decoder):
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5Attention

    config = T5Config(
        d_model=24,
        d_kv=5,
        num_heads=4,
        is_decoder=decoder,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=12,
        attn_implementation="eager",
    )
    theirs = randomise(T5Attention(config, has_relative_attention_bias=True, layer_idx=0)).eval()
    bias = RelativeBias(4, num_buckets=8, max_distance=12, bidirectional=not decoder)
    ours = copied(
        MultiHeadAttention(
            24, 4, head_dim=5, bias=False, position=bias, options=AttentionOptions(scale=1.0)
        ),
        q_proj=theirs.q,
        k_proj=theirs.k,
        v_proj=theirs.v,
        out_proj=theirs.o,
    )
    x = draw(2, 30, 24)
    future = (
        torch.full((1, 1, 30, 30), -torch.inf).triu(1) if decoder else torch.zeros(1, 1, 30, 30)
    )
    with torch.no_grad():
        bias.weight.copy_(theirs.relative_attention_bias.weight)
        wanted = theirs(x, mask=future)[0]
        mask = causal() if decoder else None
        assert_near(ours(x, mask=mask), wanted, terms=24)
        if decoder:
            cache = ours.make_cache(2, 30)
            parts = [ours(part, mask=mask, cache=cache) for part in x.split([13, 1, 1, 15], 1)]
            assert_near(torch.cat(parts, 1), wanted, terms=24)
