"""from_hf: the imported layer's output beside the module's own, inside the running model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from headwise import MultiHeadAttention
from headwise.errors import BadInput
from headwise.masks import causal
from headwise.surgery import from_hf, sites
from test_surgery import _model


@pytest.mark.parametrize(
    "name", ["llama", "llama-grouped", "qwen3", "gpt2", "bert", "vit", "t5", "whisper"]
)
def test_equal_inside_the_model(name: str) -> None:
    model, inputs = _model(name)
    caught: dict[str, Any] = {}

    def hook(site: Any) -> Any:
        def after(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            x = args[0] if args else kwargs["hidden_states"]
            context = kwargs.get("key_value_states")
            if context is None and "cross" in site.name:
                context = args[1]
            first = output[0] if isinstance(output, tuple) else output
            caught[site.name] = (site, x, context, first)

        return after

    # BERT's norm comes after the projection that the layer ends with.
    for site in sites(model):
        if name == "bert":
            site.module.output.LayerNorm = nn.Identity()
        for p in site.module.parameters():
            nn.init.normal_(p, std=0.3)
        site.module.register_forward_hook(hook(site), with_kwargs=True)
    with torch.no_grad():
        model(**inputs)
    tested = 0
    assert caught
    for site, x, context, wanted in caught.values():
        if name == "t5" and "self" in site.name and not site.module.has_relative_attention_bias:
            continue  # its bias is handed on from layer 0
        layer = from_hf(site.module)
        is_causal = name in ("llama", "llama-grouped", "qwen3", "gpt2") or site.name.startswith(
            "decoder.self"
        )
        with torch.no_grad():
            got = layer(x, context, mask=causal() if is_causal else None)
        got = got + x if name == "bert" else got
        # transformers turns by float32 tables, and T5 takes its softmax in float32, in any model.
        single = name in ("llama", "llama-grouped", "qwen3", "t5")
        limit = 2e-6 * float(wanted.abs().max()) if single else 1e-10
        assert (got - wanted).abs().max() < limit
        tested += 1
    assert tested >= 2


class Fused(nn.Module):
    """The attention of timm's vision_transformer, as it is written there."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.num_heads, self.scale = 3, 4**-0.5
        self.qkv, self.proj = nn.Linear(12, 36, bias=bias), nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, 3, 4).permute(2, 0, 3, 1, 4)
        p = ((q * self.scale) @ k.transpose(-2, -1)).softmax(-1)
        return self.proj((p @ v).transpose(1, 2).reshape(b, n, c))


@pytest.mark.parametrize("bias", [True, False])
def test_fused(bias: bool) -> None:
    torch.manual_seed(0)
    module, x = Fused(bias).double(), torch.randn(2, 5, 12).double()
    torch.testing.assert_close(from_hf(module)(x), module(x), rtol=1e-10, atol=1e-12)


def test_absent_bias_is_zeros_and_missing_weight_an_error() -> None:
    model, _ = _model("whisper")
    module = sites(model)[0].module
    assert MultiHeadAttention.from_hf(module).k_proj.bias.count_nonzero() == 0
    module.q_proj.weight = None
    with pytest.raises(BadInput, match="lacks the weight of a projection"):
        from_hf(module)
    with pytest.raises(BadInput, match="Linear is not of a family that can be read"):
        from_hf(nn.Linear(2, 2))
