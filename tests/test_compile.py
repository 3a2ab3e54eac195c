"""torch.compile, torch.export and torch's own checks of an operator."""

import pytest
import torch
from torch import Tensor

from headwise.attention import attention
from headwise.masks import causal, keep, padding, prefix, window


def qkv(batch=2, queries=5, keys=7) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(batch, 4, queries, 8, generator=generator),
        torch.randn(batch, 2, keys, 8, generator=generator),
        torch.randn(batch, 2, keys, 6, generator=generator),
    )


def features(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
    mask = causal() & (window(3) | prefix(1)) & padding(real)
    return attention(q, k, v, mask, softcap=4.0, sinks=q.new_ones(4))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_into_one_graph_with_gradients(backend):
    q, k, v = qkv()
    real = torch.tensor([[1] * 7, [0] * 3 + [1] * 4]).bool()
    results = []
    for function in (features, torch.compile(features, fullgraph=True, backend=backend)):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        out = function(*leaves, real)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for one, two in zip(*results, strict=True):
        assert torch.allclose(one, two, atol=1e-6)


def test_compiled_shapes_may_change_without_a_graph_for_each():
    count = 0

    def counting(graph, example_inputs):
        nonlocal count
        count += 1
        return graph.forward

    run = torch.compile(
        lambda q, k, v: attention(q, k, v, causal()), fullgraph=True, dynamic=True, backend=counting
    )
    for length in (5, 6, 7, 8, 9):
        q, k, v = qkv(queries=length, keys=length)
        assert torch.allclose(run(q, k, v), attention(q, k, v, causal()), atol=1e-6)
    assert count <= 2


def test_compiled_dropout_stays_random():
    run = torch.compile(
        lambda q, k, v: attention(q, k, v, dropout=0.5), fullgraph=True, backend="aot_eager"
    )
    q, k, v = qkv()
    assert not torch.equal(run(q, k, v), run(q, k, v))


class Model(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, causal())


def test_export_runs_at_other_shapes():
    batch, queries = torch.export.Dim("batch", min=1), torch.export.Dim("queries", min=2)
    keys = torch.export.Dim("keys", min=2)
    shapes = ({0: batch, 2: queries}, {0: batch, 2: keys}, {0: batch, 2: keys})
    program = torch.export.export(Model(), qkv(2, 10, 12), dynamic_shapes=shapes).module()
    for sizes in ((2, 10, 12), (1, 7, 12), (3, 10, 16)):
        args = qkv(*sizes)
        assert torch.allclose(program(*args), Model()(*args), atol=1e-6)


def test_torchs_own_checks_of_the_operator():
    q, k, v = (t.requires_grad_() for t in qkv())
    sizes = dict(batch=2, heads=4, queries=5, keys=7)
    mask = keep(torch.rand(2, 1, 5, 7, generator=torch.Generator().manual_seed(0)) > 0.3)
    compiled = mask.compile(**sizes)
    bias = torch.randn(1, 4, 5, 7).requires_grad_()
    args = (q, k, v, compiled.intervals, compiled.bits, False, False, bias, None, None)
    torch.library.opcheck(
        torch.ops.headwise.attention.default, (*args, 0.3, None, 0.0, True, "sdpa")
    )


def test_inference_mode_and_autocast():
    q, k, v = qkv()
    with torch.inference_mode():
        assert torch.equal(attention(q, k, v, causal()), Model()(q, k, v))
