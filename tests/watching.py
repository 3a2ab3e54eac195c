"""For the watch tests: the same bits with and without a watch; calls that give the outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from headwise.reference import attention_steps
from headwise.watch import Seen, SeenCall, watch
from headwise.watch.patches import open_patches


def tensors_of(value: Any) -> list[Tensor]:
    """Every tensor in a model's output, in order."""
    if isinstance(value, Tensor):
        return list(value.unbind()) if value.is_nested else [value]
    if isinstance(value, dict):
        return [x for key in value for x in tensors_of(value[key])]
    if isinstance(value, list | tuple):
        return [x for item in value for x in tensors_of(item)]
    if hasattr(value, "layers") and hasattr(value, "get_seq_length"):  # a key/value cache
        return [x for layer in value.layers for x in (layer.keys, layer.values)]
    return []


def assert_same_bits(one: Any, two: Any) -> None:
    left, right = tensors_of(one), tensors_of(two)
    assert len(left) == len(right) > 0
    for a, b in zip(left, right, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        # NaN is a value here: equal bits, not equal numbers.
        if a.is_floating_point():
            a, b = a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
        assert torch.equal(a, b)


def watched(model: nn.Module, run: Callable[[], Any], **options: Any) -> tuple[Seen, Any]:
    """Run unwatched, watched, unwatched: the same bits each time, and nothing left replaced."""
    options.setdefault("outputs", True)
    with torch.no_grad():
        before = run()
        with watch(model, **options) as seen:
            during = run()
        after = run()
    assert open_patches() == 0
    assert_same_bits(before, during)
    assert_same_bits(before, after)
    return seen, during


def assert_reproduces(call: SeenCall) -> None:
    """The float64 definition on the recorded call gives what the original returned.

    The original accumulates D products for a score and S for an output row in its own dtype; errors
    add like square roots, and a score's absolute error is an output's relative one. Rows that see
    no key have no agreed value and are left out.
    """
    assert call.output is not None, call
    own, output = call.call, call.output
    steps = attention_steps(own.to(torch.float64))
    eps = torch.finfo(output.dtype).eps
    size = float(own.scale_value * steps["scores"].abs().max()) + 1
    limit = 4 * eps * size * (own.head_dim + own.key_length) ** 0.5
    limit *= float(own.value.abs().max())
    live = steps["lse"] > -torch.inf
    assert live.any()
    error = (steps["output"] - output.double()).abs().amax(-1)[live].max()
    assert float(error) <= limit, f"{call}: off by {float(error):.3g}, allowed {limit:.3g}"


def assert_all_reproduce(seen: Seen, calls: int) -> None:
    assert len(seen) == calls, seen
    assert seen.not_caught == []
    for call in seen:
        assert_reproduces(call)
