"""Masks of other libraries read back, and the words for them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwise import masks
from headwise.intervals import Mask
from headwise.watch.masks import describe, padding_of, read_grid, real_keys

LENGTHS = torch.tensor([7, 4])


def words(mask: Mask, queries: int = 7, keys: int = 7, heads: int = 3) -> str:
    compiled = mask.compile(batch=2, heads=heads, queries=queries, keys=keys)
    return describe(compiled).words()


LEFT = masks.padding(lengths=LENGTHS, side="left")
RIGHT = masks.padding(lengths=LENGTHS)


@pytest.mark.parametrize(
    ("mask", "sizes", "expected"),
    [
        (masks.everything(), (7, 7), "full"),
        (masks.causal(), (7, 7), "causal"),
        (masks.causal(), (3, 7), "causal"),
        (masks.causal(), (1, 7), "full"),
        (masks.causal(align="start"), (3, 7), "causal from the first key"),
        (masks.causal(align="start"), (7, 5), "causal from the first key"),
        (masks.causal(), (7, 5), "causal (4 rows see no key)"),
        (masks.window(3), (7, 7), "causal + window 3"),
        (masks.window(3), (4, 7), "causal + window 3"),
        (masks.window(left=2, right=1), (7, 7), "window 2 back, 1 ahead"),
        (RIGHT, (7, 7), "padding"),
        (RIGHT, (5, 7), "padding"),
        (LEFT, (7, 7), "padding"),
        (masks.causal() & RIGHT, (7, 7), "causal + padding"),
        (masks.causal() & LEFT, (7, 7), "causal + padding (3 rows see no key)"),
        (masks.window(3) & LEFT, (7, 7), "causal + window 3 + padding (3 rows see no key)"),
        (masks.causal() | masks.prefix(3), (7, 7), "irregular, 63% visible"),
        (masks.documents(torch.tensor([0, 0, 0, 1, 1, 1, 1])), (7, 7), "irregular, 51% visible"),
        (masks.keep(torch.eye(7).bool()), (7, 7), "causal + window 1"),
    ],
)
def test_words(mask: Mask, sizes: tuple[int, int], expected: str) -> None:
    assert words(mask, *sizes) == expected


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_bool_grids_survive_whatever_their_shape(data: st.DataObject) -> None:
    shape = [data.draw(st.sampled_from((1, full))) for full in (2, 3, 5)] + [7]
    seed = data.draw(st.integers(0, 2**20))
    grid = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.6
    read = read_grid(grid, 2, 3, 5, 7)
    assert read.bias is None
    mask = read.mask or masks.everything()
    assert torch.equal(mask.dense(5, 7, batch=2, heads=3), grid.expand(2, 3, 5, 7))
    described = describe(mask.compile(batch=2, heads=3, queries=5, keys=7))
    assert described.words()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_word_means_the_whole_mask(data: st.DataObject) -> None:
    """A mask that gets a band's name is that band on its real keys, entry for entry."""
    queries, keys = data.draw(st.sampled_from([(5, 5), (3, 5), (5, 3), (1, 5)]))
    seed = data.draw(st.integers(0, 2**20))
    made = torch.Generator().manual_seed(seed)
    start = torch.randint(0, keys, (1, 1, queries, 1), generator=made)
    end = start + torch.randint(0, keys, (1, 1, queries, 1), generator=made)
    place = torch.arange(keys)
    grid = (place >= start) & (place < end)
    compiled = masks.keep(grid).compile(batch=1, heads=1, queries=queries, keys=keys)
    shape = describe(compiled)
    if shape.other is not None:
        return
    align = "start" if shape.aligned_at_start else "end"
    band = masks.everything()
    if shape.causal:
        band = masks.window(shape.window or 10**6, align=align)
    elif shape.sides is not None:
        # Without "causal" the name does not say the alignment, so either may fit.
        pass
    real = grid.any(-2)[:, 0]
    wanted = (band & masks.padding(real)).dense(queries, keys)
    live = grid.any(-1, keepdim=True)
    if shape.sides is None and real.any():
        low, high = int(real[0].int().argmax()), keys - int(real[0].flip(0).int().argmax())
        if bool(real[0, low:high].all()):
            assert torch.equal(wanted & live, grid)
    assert shape.empty_rows == int((~live).sum())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_additive_grids_of_every_dtype(dtype: torch.dtype) -> None:
    visible = torch.ones(7, 7).tril().bool()
    for low in (-torch.inf, torch.finfo(dtype).min, -1e4):
        grid = torch.zeros(7, 7, dtype=dtype).masked_fill(~visible, low)
        read = read_grid(grid, 2, 3, 7, 7)
        assert read.bias is None and read.mask is not None
        assert torch.equal(read.mask.dense(7, 7)[0, 0], visible)
        # Causal is said as causal(), so that backends see it.
        compiled = read.mask.compile(batch=2, heads=3, queries=7, keys=7)
        assert compiled.is_causal


def test_real_values_stay_a_bias() -> None:
    grid = torch.randn(1, 3, 5, 7, generator=torch.Generator().manual_seed(0))
    grid[0, 0, 0, 0] = -9999.0  # a large but real value beside others is no mask
    read = read_grid(grid, 2, 3, 5, 7)
    assert read.mask is None and read.bias is not None and torch.equal(read.bias, grid)
    grid[0, 1, 2, 3] = -torch.inf
    read = read_grid(grid, 2, 3, 5, 7)
    assert read.mask is not None and read.bias is not None
    assert int((~read.mask.dense(5, 7, heads=3)).sum()) == 1
    assert read.bias.isfinite().all()


def test_nothing_hidden_is_no_mask() -> None:
    assert read_grid(None, 2, 3, 5, 7) == (None, None)
    assert read_grid(torch.ones(5, 7).bool(), 2, 3, 5, 7) == (None, None)
    assert read_grid(torch.zeros(5, 7), 2, 3, 5, 7) == (None, None)
    assert padding_of(torch.ones(2, 7)) is None


def test_integer_grids_are_refused() -> None:
    with pytest.raises(TypeError, match=r"dtype torch\.int64 is neither bool nor float"):
        read_grid(torch.ones(5, 7).long(), 2, 3, 5, 7)


def test_copies_a_head_become_one() -> None:
    real = torch.rand(2, 1, 5, 7, generator=torch.Generator().manual_seed(0)) < 0.6
    read = read_grid(real.expand(2, 3, 5, 7).contiguous(), 2, 3, 5, 7)
    assert read.mask is not None
    compiled = read.mask.compile(batch=2, heads=3, queries=5, keys=7)
    held = compiled.intervals if compiled.intervals is not None else compiled.bits
    assert held is not None and held.shape[1] == 1


def test_a_shared_mask_is_read_once_and_a_changed_one_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from headwise.watch import masks as own

    times: list[int] = []
    monkeypatch.setattr(own, "read_grid", lambda *args: times.append(1) or read_grid(*args))
    reader, grid = own.Reader(), torch.ones(5, 7).tril().bool()
    first = reader(grid, 2, 3, 5, 7)
    assert reader(grid, 2, 3, 5, 7) is first and len(times) == 1
    grid[0, 3] = True
    again = reader(grid, 2, 3, 5, 7)
    assert len(times) == 2 and again.mask is not None
    assert torch.equal(again.mask.dense(5, 7)[0, 0], grid)
    reader.forget()
    reader(grid, 2, 3, 5, 7)
    with torch.inference_mode():
        untold = torch.ones(5, 7).tril().bool()
        reader(untold, 2, 3, 5, 7)
        reader(untold, 2, 3, 5, 7)
        assert len(times) == 4
        untold[0, 3] = True
        again = reader(untold, 2, 3, 5, 7)
    assert len(times) == 5 and again.mask is not None
    assert torch.equal(again.mask.dense(5, 7)[0, 0], grid)


def test_longer_grids_are_cut() -> None:
    grid = torch.ones(1, 1, 5, 9).tril(2).bool()
    read = read_grid(grid, 2, 3, 5, 7)
    assert read.mask is not None
    assert torch.equal(read.mask.dense(5, 7)[0, 0], grid[0, 0, :, :7])


@pytest.mark.parametrize(
    "mask",
    [masks.causal(), RIGHT, LEFT & masks.causal(), masks.window(2) & RIGHT, ~RIGHT,
     masks.keep(torch.arange(49).reshape(7, 7) % 3 == 0), masks.everything()],
)  # fmt: skip
def test_real_keys(mask: Mask) -> None:
    compiled = mask.compile(batch=2, heads=3, queries=7, keys=7)
    grid = mask.dense(7, 7, batch=2, heads=3)
    assert torch.equal(real_keys(compiled), grid.any(2).any(1))
