"""A call that was made before takes a short cut; nothing else about it may differ."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from headwise import again, attention, causal, keep, padding, window
from headwise.attention import observers
from headwise.intervals import Mask


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    again._known.clear()
    yield
    again._known.clear()


def made(
    length: int = 9, keys: int = 9, heads: int = 4, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    shapes = ((2, heads, length, 16), (2, 2, keys, 16), (2, 2, keys, 8))
    return [torch.randn(*shape).to(dtype) for shape in shapes]


def known() -> int:
    """Calls that are taken the short way."""
    return sum(plan is not None for plan in again._known.values())


@pytest.mark.parametrize(
    "mask", [None, causal(), causal(align="start"), window(3), causal(offset=2)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_later_calls_are_the_first_one_bit_for_bit(mask: Mask | None, dtype: torch.dtype) -> None:
    query, key, value = made(dtype=dtype)
    first = attention(query, key, value, mask, scale=0.3)
    for calls in range(2, 5):
        assert torch.equal(attention(query, key, value, mask, scale=0.3), first), calls
    assert known() == 1


def test_it_reads_what_the_tensors_hold_now() -> None:
    for _ in range(3):
        query, key, value = made()
        wanted = attention(query, key, value, causal(), backend="reference")
        torch.testing.assert_close(attention(query, key, value, causal()), wanted)
    assert known() == 1


def test_every_difference_is_another_call() -> None:
    """One call after the other, none mistaken for one before it."""
    query, key, value = made()
    turned = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (query, key, value)]
    calls = [
        (query, key, value, None, None),
        (*turned, None, None),
        (query, key.expand(2, 2, 9, 16), value[:1].expand(2, 2, 9, 8), None, None),
        (query, key, value, None, 0.5),
        (query, key, value, causal(), None),
        (query, key, value, causal(align="start", offset=None), None),
        (query, key, value, causal(offset=3), None),
        (query, key, value, window(2), None),
        (query[:, :, :5], key, value, causal(), None),
        (query, key[:, :, :5], value[:, :, :5], None, None),
        (query, key[:, :1], value[:, :1], None, None),
        (query, key, value[..., :4], None, None),
        (query.double(), key.double(), value.double(), None, None),
    ]
    for _ in range(3):
        for q, k, v, mask, scale in calls:
            wanted = attention(q, k, v, mask, scale=scale, backend="reference")
            torch.testing.assert_close(attention(q, k, v, mask, scale=scale), wanted)
    assert known() == len(calls)


def test_gradients_lse_and_observers_are_not_passed_by() -> None:
    query, key, value = made()
    for _ in range(3):
        output = attention(query, key, value)
    assert known() == 1
    leaf = query.clone().requires_grad_()
    attention(leaf, key, value).sum().backward()
    assert leaf.grad is not None and leaf.grad.abs().sum() > 0
    both = attention(query, key, value, return_lse=True)
    assert torch.equal(both[0], output) and both[1].shape == (2, 4, 9)
    seen: list[Tensor] = []
    observers.append(lambda call, out: seen.append(out))
    try:
        attention(query, key, value)
    finally:
        observers.clear()
    assert len(seen) == 1


def test_mistakes_are_still_told_after_a_right_call() -> None:
    query, key, value = made()
    for _ in range(3):
        attention(query, key, value)
    assert known() == 1
    with pytest.raises(ValueError, match=r"key is torch\.float64"):
        attention(query, key.double(), value)
    with pytest.raises(TypeError, match="does not say what it means"):
        attention(query, key, value, torch.ones(9, 9, dtype=torch.bool))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="scale"):
        attention(query, key, value, scale=-1.0)
    with pytest.raises(ValueError, match="dropout"):
        attention(query, key, value, dropout=1.5)
    with pytest.raises(ValueError, match="unknown backend"):
        attention(query, key, value, backend="fast")


def test_masks_that_hold_tensors_are_read_each_time() -> None:
    query, key, value = made()
    lengths = torch.tensor([9, 4])
    real = torch.ones(9, 9, dtype=torch.bool).tril()
    offset = torch.tensor([0, 2])
    for mask in (
        padding(lengths=lengths),
        keep(real),
        causal(offset=offset),
        causal() & keep(real),
    ):
        for _ in range(3):
            attention(query, key, value, mask)
    assert not again._known


def test_no_tensor_is_kept_alive_and_few_calls_are() -> None:
    query, key, value = made()
    for _ in range(3):
        output = attention(query, key, value, causal())
    assert known() == 1
    gone = [weakref.ref(t) for t in (query, key, value, output)]
    del query, key, value, output
    gc.collect()
    assert all(ref() is None for ref in gone)
    for keys in range(1, 2 * again.MOST):
        attention(torch.ones(1, 1, 1, 4), torch.ones(1, 1, keys, 4), torch.ones(1, 1, keys, 4))
        assert len(again._known) <= again.MOST


def test_a_compiled_graph_does_not_take_the_short_cut() -> None:
    query, key, value = made()
    for _ in range(3):
        output = attention(query, key, value, causal())
    assert known() == 1
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, causal()), fullgraph=True)
    torch.testing.assert_close(compiled(query, key, value), output)
    meta = attention(query.to("meta"), key.to("meta"), value.to("meta"), causal())
    assert meta.is_meta and meta.shape == output.shape


def test_fake_tensors_do_not_reach_the_kernel() -> None:
    query, key, value = made()
    for _ in range(3):
        attention(query, key, value)
    assert known() == 1
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(tensor) for tensor in (query, key, value)]
    output = attention(*fakes)
    assert isinstance(output, FakeTensor) and output.shape == (2, 4, 9, 8)
