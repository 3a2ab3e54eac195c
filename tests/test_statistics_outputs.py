"""Ranks and CKA from running sums against the whole matrices in float64."""

from __future__ import annotations

import pytest
import torch
import transformers

from headwise.errors import BadInput
from headwise.statistics import HeadOutputs, head_outputs


def test_against_the_definitions() -> None:
    torch.manual_seed(0)
    x = torch.randn(37, 3, 5).double() + 2
    x[:, 2] = x[:, 0] @ torch.linalg.qr(torch.randn(5, 5).double())[0]
    x[:, 1, 2:] *= 0.05
    sums = HeadOutputs(3, 5)
    for piece in x.split(11):
        sums.add(piece)
    for head in range(3):
        values = torch.linalg.svdvals(x[:, head])
        p = values / values.sum()
        rank = (-(p * p.log()).sum()).exp()
        torch.testing.assert_close(sums.effective_rank()[head], rank)
        stable = x[:, head].square().sum() / torch.linalg.matrix_norm(x[:, head], 2) ** 2
        torch.testing.assert_close(sums.stable_rank()[head], stable)
    c = x - x.mean(0)
    k = [c[:, h] @ c[:, h].T for h in range(3)]
    wanted = torch.tensor(
        [[float((a * b).sum() / (a.norm() * b.norm())) for b in k] for a in k]
    ).double()
    torch.testing.assert_close(sums.cka(), wanted, rtol=1e-6, atol=1e-6)
    # CKA does not see a rotation.
    assert sums.cka()[0, 2] == pytest.approx(1, abs=1e-9) and sums.cka()[0, 1] < 0.9


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_every_layer_of_a_model(attention: str) -> None:
    """Against what the output projections read, over two passes, one of them padded."""
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=24, num_hidden_layers=2, num_attention_heads=3,
        intermediate_size=32,
    )  # fmt: skip
    model = transformers.BertModel(config).eval()
    model.set_attn_implementation(attention)
    ids = torch.randint(0, 20, (2, 30))
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[1, 20:] = 0
    read: dict[str, list[torch.Tensor]] = {"self/0": [], "self/1": []}
    hooks = [
        layer.attention.output.dense.register_forward_pre_hook(
            lambda _module, args, name=f"self/{at}": read[name].append(args[0].double())
        )
        for at, layer in enumerate(model.encoder.layer)
    ]
    inputs = [{"input_ids": ids, "attention_mask": mask}, {"input_ids": ids[:, :17]}]
    found = head_outputs(model, inputs)
    for hook in hooks:
        hook.remove()
    assert list(found) == ["self/0", "self/1"]
    for name, sums in found.items():
        first, second = read[name]
        rows = torch.cat([first[mask.bool()], second.flatten(0, 1)]).unflatten(1, (3, 8))
        assert sums.rows == len(rows) == 50 + 34
        wanted = HeadOutputs(3, 8)
        wanted.add(rows)
        torch.testing.assert_close(sums.cka(), wanted.cka(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            sums.effective_rank(), wanted.effective_rank(), rtol=1e-4, atol=1e-4
        )
    with pytest.raises(BadInput, match="head_outputs: no inputs were given"):
        head_outputs(model, [])


def test_bad_input() -> None:
    sums = HeadOutputs(2, 3)
    with pytest.raises(BadInput, match=r"wanted \(rows, 2, 3\), got \(4, 3, 2\)"):
        sums.add(torch.zeros(4, 3, 2))
    with pytest.raises(BadInput, match="no rows"):
        sums.effective_rank()
    with pytest.raises(BadInput, match="at least 2 rows, got 0"):
        sums.cka()
