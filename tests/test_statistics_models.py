"""The reference values of real models: numbers that do not come from this code."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import headwise
from headwise.statistics import head_statistics, sink_rate

pytestmark = pytest.mark.packaged


def test_minilm_layer_0_in_float64(minilm: Any) -> None:
    """Entropies of layer 0 and what head 2 does, to the four digits that are known."""
    inputs = minilm.prepare(text="The quick brown fox jumps over the lazy dog.")
    model = minilm.model.double()
    try:
        with headwise.watch(model) as seen, torch.no_grad():
            model(**inputs.kwargs)
    finally:
        model.float()
    call = seen.calls[0].call
    assert call.query.dtype == torch.float64 and call.query_length == 12
    got = head_statistics(call)
    want = [2.1608, 2.0696, 0.0020, 2.2058, 1.9375, 1.3979,
            1.9885, 1.9995, 1.6434, 1.8214, 1.9812, 1.9854]  # fmt: skip
    assert [round(float(h), 4) for h in got.entropy[0]] == want
    assert round(float(got.distance[0, 2]), 4) == 0.9166
    assert round(float(got.sink[0, 2, 0]), 4) == 0.1667


def test_smollm2_sink_rate(smollm2: Any) -> None:
    """Gu 2024's rate on four random texts of 64 tokens, no BOS: heads of all 30 layers."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, 40000, (4, 64), generator=draw)
    with headwise.watch(smollm2.model) as seen, torch.no_grad():
        smollm2.model(input_ids=ids)
    assert len(seen.calls) == 30
    layers = [head_statistics(item.call, pairs=False, top=0) for item in seen.calls]
    rates = [[sink_rate(layer, place) for layer in layers] for place in (1, 2)]
    first, second = (sum(rate) / len(rate) for rate in rates)
    assert round(first, 2) == 80.83, first
    assert round(second, 2) == 0.09, second
