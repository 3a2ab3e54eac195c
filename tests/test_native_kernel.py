"""The native kernels against the float64 definition, on every instruction set that runs here."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from headwise import attention, backends, causal, documents, keep, native, padding, prefix, window
from headwise.backends.native import draws
from headwise.call import AttentionCall

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
# Relative to the largest value: the arithmetic's rounding, and the output's own.
ROUNDING = {
    torch.float32: 2e-6,
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
    torch.float64: 1e-13,
}


@pytest.fixture(params=native.runnable())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    module = native.module()
    before = module.isa()
    assert module.use(request.param)
    assert native.isa() == request.param
    yield request.param
    assert native.isa() == request.param, "another instruction set ran"
    module.use(before)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# Batch, query heads, key/value heads, queries, keys, dim, value dim: primes, where an axis may be.
SHAPES = [
    (1, 1, 1, 1, 1, 1, 1),
    (2, 3, 1, 5, 7, 11, 13),
    (1, 2, 2, 73, 131, 17, 37),
    (3, 4, 2, 67, 67, 16, 64),
    (2, 6, 3, 1, 1031, 64, 80),
    (1, 5, 5, 2, 521, 48, 19),
    (1, 7, 1, 149, 283, 129, 96),
]


def inputs(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    batch, heads, kv_heads, queries, keys, dim, value_dim = shape
    made = torch.Generator().manual_seed(seed)
    sizes = ((batch, heads, queries, dim), (batch, kv_heads, keys, dim))
    sizes += ((batch, kv_heads, keys, value_dim),)
    return [torch.randn(size, generator=made, dtype=torch.float64).to(dtype) for size in sizes]


def features(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    batch, heads, _, queries, keys, *_ = shape
    made = torch.Generator().manual_seed(1)

    def noise(*size: int) -> Tensor:
        return torch.randn(size, generator=made, dtype=torch.float64).to(dtype)

    bits = torch.rand(batch, heads, queries, keys, generator=made) < 0.4
    lengths = torch.arange(1, batch + 1) * keys // batch
    some = noise(1, heads, queries, keys)
    some[..., ::3] = -math.inf
    return {
        "full": {},
        "causal": {"mask": causal()},
        "causal from the start": {"mask": causal(align="start")},
        "window": {"mask": window(11)},
        "padded": {"mask": padding(lengths=lengths)},
        "padded, causal": {"mask": padding(lengths=lengths) & causal()},
        "bits": {"mask": keep(bits)},
        "no keys": {"mask": keep(torch.zeros(1, 1, queries, keys, dtype=torch.bool))},
        "prefix": {"mask": prefix(3)} if queries == keys else {},
        "bias": {"bias": noise(batch, heads, queries, keys), "mask": causal()},
        "bias of keys": {"bias": noise(batch, 1, 1, keys)},
        "bias of rows": {"bias": noise(1, 1, queries, 1)},
        "bias that hides": {"bias": some},
        "soft cap": {"softcap": 1.7, "bias": noise(queries, keys)},
        "sinks": {"sinks": noise(heads) * 3, "mask": causal()},
        "scale": {"scale": 0.21},
    }


def close(got: Tensor, want: Tensor, dtype: torch.dtype, what: str) -> None:
    size = max(1.0, float(want.nan_to_num(0, 0, 0).abs().max())) if want.numel() else 1.0
    limit = ROUNDING[dtype] * size
    torch.testing.assert_close(
        got.double(), want.double(), rtol=0, atol=limit, equal_nan=True,
        msg=lambda text: f"{what}: {text}",
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_is_the_definition(isa: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    query, key, value = inputs(shape, dtype)
    for name, more in features(shape, dtype).items():
        out, lse = attention(query, key, value, return_lse=True, backend="native", **more)
        wide = {n: m.double() if isinstance(m, Tensor) else m for n, m in more.items()}
        want, want_lse = attention(
            query.double(), key.double(), value.double(),
            return_lse=True, backend="reference", **wide,
        )  # fmt: skip
        close(out, want, dtype, name)
        wide_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        close(lse, want_lse, wide_dtype, f"{name}: lse")
        again = attention(query, key, value, backend="native", **more)
        assert torch.equal(again.nan_to_num(), out.nan_to_num()), f"{name}: not repeatable"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [SHAPES[1], SHAPES[3], SHAPES[5], (9, 2, 1, 83, 83, 8, 24)], ids=str
)
def test_gradients_are_those_of_the_definition(
    isa: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    for name, more in features(shape, dtype).items():
        found: dict[str, list[Tensor]] = {}
        for backend in ("native", "reference"):
            wide = dtype if backend == "native" else torch.float64
            leaves = [t.to(wide).requires_grad_() for t in inputs(shape, dtype)]
            given = dict(more)
            for which in ("bias", "sinks"):
                if which in given:
                    given[which] = given[which].to(wide).requires_grad_()
                    leaves.append(given[which])
            out, lse = attention(
                *leaves[:3], given.pop("mask", None), return_lse=True, backend=backend, **given
            )
            pull = torch.arange(out.numel(), dtype=torch.float64).view(out.shape).sin()
            seen = lse != -torch.inf
            loss = (out.double() * pull).sum() + lse.double()[seen].cos().sum()
            found[backend] = list(torch.autograd.grad(loss, leaves))
        for number, (got, want) in enumerate(zip(*found.values(), strict=True)):
            # The output's gradient comes in the call's dtype, and the output's own rounding enters
            # δ: more than the forward's.
            close(got / 8, want / 8, dtype, f"{name}: gradient {number}")


@pytest.mark.parametrize(
    "shape", [(1, 12, 12, 128, 128, 64, 64), (2, 4, 4, 300, 517, 80, 80)], ids=str
)
def test_bfloat16_errs_no_more_than_torch(isa: str, shape: tuple[int, ...]) -> None:
    """Where weights are rounded to bfloat16 between the two products, as torch's are."""
    leaves = inputs(shape, torch.bfloat16)
    want = attention(*(leaf.double() for leaf in leaves), backend="reference")
    torchs = torch.nn.functional.scaled_dot_product_attention(*leaves)
    mine = attention(*leaves, backend="native")
    off = [float((out.double() - want).square().mean().sqrt()) for out in (mine, torchs)]
    assert off[0] <= 1.01 * off[1], off


@pytest.mark.parametrize(
    "shape", [(1, 12, 12, 128, 128, 64, 64), (2, 4, 4, 301, 301, 80, 80)], ids=str
)
def test_bfloat16_gradients_err_no_more_than_torchs(isa: str, shape: tuple[int, ...]) -> None:
    """Where p and ds are rounded to bfloat16 before they meet the other side, as torch's are."""
    sdpa = torch.nn.functional.scaled_dot_product_attention
    pull = inputs(shape, torch.bfloat16, seed=1)[0]

    def gradients(dtype: torch.dtype, backend: str | None) -> list[Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in inputs(shape, torch.bfloat16)]
        if backend is None:
            out = sdpa(*leaves, is_causal=True)
        else:
            out = attention(*leaves, causal(), backend=backend)
        return [t.double() for t in torch.autograd.grad(out, leaves, pull.to(dtype))]

    exact = gradients(torch.float64, "reference")
    native_grads, torch_grads = gradients(torch.bfloat16, "native"), gradients(torch.bfloat16, None)
    for name, want, mine, its in zip("qkv", exact, native_grads, torch_grads, strict=True):
        off = [float((got - want).square().mean().sqrt()) for got in (mine, its)]
        assert off[0] <= 1.01 * off[1], (name, off)


def test_a_row_that_sees_one_value_gives_it_exactly(isa: str) -> None:
    query, key, value = inputs((2, 4, 2, 67, 67, 24, 24), torch.bfloat16)
    out = attention(query, key, value, window(1), backend="native")
    assert torch.equal(out, value.repeat_interleave(2, 1))
    same = value[:, :, :1].expand_as(value)
    out = attention(query, key, same, causal(), backend="native")
    assert torch.equal(out, same.repeat_interleave(2, 1))


@pytest.mark.parametrize("heads", [(1, 1), (12, 12), (4, 2)], ids=str)
def test_bits_do_not_depend_on_threads_nor_on_the_run(
    isa: str, threads: None, heads: tuple[int, int]
) -> None:
    leaves = inputs((1, *heads, 301, 301, 32, 24), torch.float32)
    found = []
    for count in (1, 2, 1, 3):
        torch.set_num_threads(count)
        given = [leaf.clone().requires_grad_() for leaf in leaves]
        out = attention(*given, causal(), backend="native")
        found.append([out, *torch.autograd.grad(out.sin().sum(), given)])
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert torch.equal(one, two)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_a_rows_bits_do_not_depend_on_what_shares_its_call(isa: str, dtype: torch.dtype) -> None:
    length, more = 150, 70
    query, key, value = inputs((7, 4, 2, length, length, 32, 32), dtype)
    alone = [
        attention(query[b : b + 1], key[b : b + 1], value[b : b + 1], causal(), backend="native")
        for b in range(7)
    ]
    together = attention(query, key, value, causal(), backend="native")
    assert torch.equal(together, torch.cat(alone)), "batch"

    junk = torch.full((7, 4, more, 32), 1e4, dtype=dtype)
    for pads in (1, 3, 8, 16, 33, more):
        left, right = junk[:, :, :pads], junk[:, :2, :pads]
        for side in ("left", "right"):
            order = (lambda a, b: (a, b)) if side == "left" else (lambda a, b: (b, a))
            rows = torch.cat(order(left, query), 2)
            keys, values = torch.cat(order(right, key), 2), torch.cat(order(right, value), 2)
            mask = padding(lengths=torch.full((7,), length), side=side) & causal()
            out = attention(rows, keys, values, mask, backend="native")
            real = slice(pads, None) if side == "left" else slice(0, length)
            assert torch.equal(out[:, :, real], together), f"{pads} pads on the {side}"

    for cut in (2, 5, 63, 64, 72, 100, 148):
        first = attention(
            query[:, :, :cut], key[:, :, :cut], value[:, :, :cut], causal(), backend="native"
        )
        second = attention(query[:, :, cut:], key, value, causal(), backend="native")
        assert torch.equal(torch.cat((first, second), 2), together), f"cut at {cut}"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_reaches_the_rows_that_see_it_and_no_other(isa: str, bad: float) -> None:
    shape = (2, 4, 2, 90, 90, 16, 24)
    clean = inputs(shape, torch.float32)
    for which, mask in ((1, causal()), (2, causal()), (2, window(7)), (0, causal())):
        leaves = [leaf.clone() for leaf in clean]
        leaves[which][1, 0, 40, 3] = bad
        given = [leaf.requires_grad_() for leaf in leaves]
        out = attention(*given, mask, backend="native")
        want = attention(*(leaf.detach() for leaf in leaves), mask, backend="reference")
        assert torch.equal(out.isfinite(), want.isfinite())
        close(out.nan_to_num(0, 0, 0), want.nan_to_num(0, 0, 0), torch.float32, f"input {which}")
        # Only rows before 40 are in the loss: nothing that is not finite is in their way.
        pulled = torch.zeros_like(out)
        pulled[:, :, :40] = 1
        assert bool(out[:, :, :40].isfinite().all())
        for grad in torch.autograd.grad(out, given, pulled):
            assert bool(grad.isfinite().all())


def test_scores_beyond_float_have_the_softmax_they_should(isa: str) -> None:
    query = torch.full((1, 1, 3, 4), 1e20)
    key = torch.stack([torch.full((4,), 1e19), torch.full((4,), -1e19)])[None, None]
    value = torch.tensor([[1.0], [2.0]])[None, None]
    out, lse = attention(query, key, value, scale=1e-39, return_lse=True, backend="native")
    want, want_lse = attention(
        query.double(), key.double(), value.double(), scale=1e-39,
        return_lse=True, backend="reference",
    )  # fmt: skip
    close(out, want, torch.float32, "output")
    close(lse, want_lse, torch.float32, "lse")


def test_rows_that_the_bias_hides_whole_are_empty_and_cost_nothing(isa: str) -> None:
    """A dense additive mask with padded rows; beside them, NaN at what is hidden."""
    query, key, value = inputs((4, 4, 4, 256, 512, 64, 64), torch.float32)
    bias = torch.zeros(4, 1, 256, 512)
    bias[:, :, 128:] = -math.inf
    key[:, :, -1] = math.nan
    bias[..., -1] = -math.inf
    out, lse = attention(query, key, value, bias=bias, return_lse=True, backend="native")
    assert bool((out[:, :, 128:] == 0).all()) and bool((lse[:, :, 128:] == -math.inf).all())
    assert bool(out[:, :, :128].isfinite().all()) and bool((out[:, :, :128] != 0).any())
    open_rows = query[:, :, :128], key[:, :, :-1], value[:, :, :-1]
    times = []
    for given in ((query, key, value, bias), (*open_rows, None)):
        start = time.perf_counter()
        for _ in range(3):
            attention(*given[:3], bias=given[3], backend="native")
        times.append(time.perf_counter() - start)
    assert times[0] < 20 * times[1], times


def test_strided_expanded_and_misaligned_inputs(isa: str) -> None:
    store = torch.randn(2 * 50 * 4 * 33 + 1)
    odd = store[1:].view(2, 50, 4, 33).transpose(1, 2)  # heads inside, rows 132 numbers apart
    query, key = odd[..., :17], odd[:, :2, :, 16:]
    value = torch.randn(1, 1, 50, 8).expand(2, 2, 50, 8)
    turned = torch.randn(2, 4, 17, 50).mT  # the last axis is not contiguous
    for q in (query, turned):
        out = attention(q, key, value, causal(), backend="native")
        plain = [t.contiguous() for t in (q, key, value)]
        assert torch.equal(out, attention(*plain, causal(), backend="native"))
        want = attention(*(t.double() for t in plain), causal(), backend="reference")
        close(out, want, torch.float32, "strided")
    one_key = torch.randn(2, 2, 1, 17).expand(2, 2, 50, 17)
    close(
        attention(query, one_key, value, backend="native"),
        value.mean(2, keepdim=True).repeat_interleave(2, 1).expand(2, 4, 50, 8),
        torch.float32,
        "one key, 50 times",
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("apart", [0, 16, 400], ids=["side by side", "apart", "far apart"])
def test_values_are_read_where_they_lie(isa: str, dtype: torch.dtype, apart: int) -> None:
    """Whole vectors in rows that are not too far apart are not copied; others are."""
    for queries, width in ((5, 64), (100, 16), (100, 128), (100, 80)):
        query, key, value = inputs((1, 3, 3, queries, 300, 16, width), dtype)
        room = torch.full((1, 3, 300, width + apart), math.nan, dtype=dtype)
        room[..., :width] = value
        out = attention(query, key, room[..., :width], window(150), backend="native")
        assert torch.equal(out, attention(query, key, value, window(150), backend="native"))
        exact = (t.double() for t in (query, key, value))
        want = attention(*exact, window(150), backend="reference")
        close(out, want, dtype, f"{queries} queries, {width} wide")


class TestDropout:
    def test_it_multiplies_by_its_draws_and_gradients_draw_the_same(self, isa: str) -> None:
        shape = (2, 4, 2, 61, 83, 16, 8)
        leaves = [t.requires_grad_() for t in inputs(shape, torch.float64)]
        call = AttentionCall(*leaves, causal(), dropout=0.3)
        factors = draws(call, 1234, slice(None), slice(None)).double()
        assert set(factors.unique().tolist()) <= {0.0, float(torch.tensor(1 / 0.7))}
        kept = float((factors > 0).double().mean())
        assert abs(kept - 0.7) < 4 * math.sqrt(0.21 / factors.numel())
        steps = attention(
            *leaves, causal(), backend="reference", return_lse=True
        )  # for its lse only
        scores = (leaves[0] @ leaves[1].repeat_interleave(2, 1).mT) / 4
        weights = torch.exp(scores - steps[1][..., None]) * call.visible.tile()
        want = (weights * factors) @ leaves[2].repeat_interleave(2, 1)
        out, lse = backends.get("native").forward(call.detach(), 1234, True)
        torch.testing.assert_close(out, want.detach(), rtol=1e-6, atol=1e-6)
        pull = torch.randn_like(want)
        wanted = torch.autograd.grad(want, leaves, pull)
        assert lse is not None
        grads = backends.get("native").backward(call.detach(), 1234, out, lse, pull, None, False)
        for name, grad in zip(("query", "key", "value"), wanted, strict=True):
            torch.testing.assert_close(grads[name], grad, rtol=1e-5, atol=1e-5, msg=name)

    def test_seeds_rows_heads_and_batches_differ_and_keys_are_even(self) -> None:
        query, key, value = inputs((2, 2, 2, 64, 4096, 4, 4), torch.float32)
        call = AttentionCall(query, key, value, dropout=0.5)
        one = draws(call, 1, slice(None), slice(None)) > 0
        two = draws(call, 2, slice(None), slice(None)) > 0
        assert 0.49 < float((one == two).double().mean()) < 0.51
        flat = one.flatten(0, 2).double() - 0.5
        alike = (flat @ flat.mT) / 4096 * 4
        off = alike - torch.eye(len(flat))
        # Correlations of independent rows: a standard deviation of 1/64.
        assert float(off.abs().max()) < 6 / 64
        assert 0.9 < float(off.std()) * 64 < 1.1
        by_key = one.double().mean((0, 1, 2))
        assert 0.9 < float((by_key - 0.5).std()) / math.sqrt(0.25 / 256) < 1.1
        part = draws(call, 1, slice(7, 9), slice(100, 300)) > 0
        assert torch.equal(part, one[:, :, 7:9, 100:300])


class TestSizes:
    def test_two_million_keys(self) -> None:
        keys = 2_000_003
        key = torch.zeros(1, 1, keys, 2)
        key[..., -1, :] = 30.0
        value = torch.arange(keys, dtype=torch.float32)[None, None, :, None]
        for queries in (1, 3):
            query = torch.ones(1, 1, queries, 2)
            out = attention(query, key, value, causal(), backend="native")
            weights = torch.softmax(((query[..., -1:, :] @ key.mT) / math.sqrt(2)).double(), -1)
            want = (weights @ value.double())[0, 0, 0, 0]
            assert float(out[0, 0, -1, 0]) == pytest.approx(float(want), rel=1e-5)

    @pytest.mark.parametrize("queries", [1, 200])
    def test_memory_that_cannot_be_had_is_a_memory_error_and_nothing_stays_locked(
        self, queries: int
    ) -> None:
        huge = torch.zeros(1, 1, 1, 1).expand(1, 1, 2**52, 1)
        query = torch.zeros(1, 1, queries, 1)
        with pytest.raises(MemoryError):
            attention(query, huge, huge, backend="native")
        small = torch.ones(1, 1, 3, 1)
        assert torch.equal(attention(small, small, small, backend="native"), small)

    def test_no_memory_grows_with_queries_times_keys(self) -> None:
        code = """
import resource, torch, headwise
x = torch.randn(1, 1, 16384, 16).requires_grad_()
def run(n):
    part = x[:, :, :n]
    headwise.attention(part, part, part, headwise.causal()).sum().backward()
run(256)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run(16384)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        # The scores alone would be 1 GiB.
        assert int(done.stdout) < 120_000, f"{done.stdout} KiB"


def test_several_python_threads_at_once(threads: None) -> None:
    torch.set_num_threads(2)
    given = [inputs((2, 4, 2, 90, 90, 16, 16), torch.float32, seed) for seed in range(4)]
    wanted = [attention(*leaves, causal(), backend="native") for leaves in given]
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(30):
            if not torch.equal(
                attention(*given[number], causal(), backend="native"), wanted[number]
            ):
                wrong.append(number)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_after_a_fork() -> None:
    """As in a data loader's worker: the parent's threads are gone; nothing may wait for them."""
    code = """
import os, torch, headwise
torch.set_num_threads(2)
x = torch.randn(1, 4, 200, 16)
want = headwise.attention(x, x, x, headwise.causal(), backend="native")
child = os.fork()
if child == 0:
    same = torch.equal(headwise.attention(x, x, x, headwise.causal(), backend="native"), want)
    os._exit(0 if same else 3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "0", done.stderr


def test_documents_cost_what_they_see(isa: str) -> None:
    """Rows of two runs, and tiles that nobody sees."""
    ids = torch.arange(600)[None] // 37
    query, key, value = inputs((1, 2, 1, 600, 600, 16, 16), torch.float32)
    for mask in (documents(ids) & causal(), window(9) | prefix(5)):
        out = attention(query, key, value, mask, backend="native")
        want = attention(query.double(), key.double(), value.double(), mask, backend="reference")
        close(out, want, torch.float32, "documents")
