"""Signatures: what goes together, and what the ready ones refuse."""

from __future__ import annotations

import pytest
from torch import nn

import headwise
from headwise.checks.signature import Projections, Signature, headwise_layer, torch_mha


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"layout": "bdlh"}, r"layout is one of .*, got 'bdlh'"),
        ({"mask": "keep"}, r"mask='keep' and arguments=\{\} do not go together"),
        ({"arguments": {"mask": "m"}}, r"mask=None and arguments=\{'mask': 'm'\}"),
        ({"arguments": {"masks": "m"}}, r"arguments is one of .*, got 'masks'"),
        ({"heads": 4, "kv_heads": 3}, r"4 query heads cannot share 3 key/value heads"),
        ({"window": 3}, r"a causal flag or a window needs causal='end'"),
        ({"inputs": "qkv"}, r"layout='bhld' is a function of q, k, v"),
        ({"mask_axes": ("hls",)}, r"mask_axes is one of .*, got 'hls'"),
    ],
)
def test_signatures_refuse_what_does_not_go_together(wrong, words) -> None:
    with pytest.raises(ValueError, match=words):
        Signature(**wrong)


def test_projections_are_named_whole() -> None:
    with pytest.raises(ValueError, match=r"name query=, key= and value=, or fused="):
        Projections(query="q", key="k")
    with pytest.raises(ValueError, match=r"name query=, key= and value=, or fused="):
        Projections(query="q", key="k", value="v", fused="qkv")
    with pytest.raises(ValueError, match=r"order is made of q, k and v, got 'qqv'"):
        Projections(fused="qkv", order="qqv")


def test_ready_signatures_refuse_what_they_cannot_declare() -> None:
    with pytest.raises(TypeError, match=r"wanted a torch.nn.MultiheadAttention, got Linear"):
        torch_mha(nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"add_bias_kv or add_zero_attn"):
        torch_mha(nn.MultiheadAttention(8, 2, add_zero_attn=True))
    with pytest.raises(ValueError, match=r"kdim=4 and vdim=6 differ from embed_dim=8"):
        torch_mha(nn.MultiheadAttention(8, 2, kdim=4, vdim=6))
    with pytest.raises(TypeError, match=r"wanted a headwise.MultiHeadAttention, got Linear"):
        headwise_layer(nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"position=ALiBi is not part of the check's definition"):
        headwise_layer(headwise.MultiHeadAttention(32, 4, position=headwise.ALiBi()))
    gated = headwise.MultiHeadAttention(32, 4, options=headwise.AttentionOptions(output_gate=True))
    with pytest.raises(ValueError, match=r"options.output_gate is not part of"):
        headwise_layer(gated)
