"""Masks: meaning, direction, broadcasting, compilation to runs, and messages."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwise.masks import (
    Mask,
    causal,
    documents,
    everything,
    from_dense,
    hide,
    keep,
    padding,
    prefix,
    window,
)


def grid(mask: Mask, queries: int, keys: int, **sizes: int) -> list:
    return mask.dense(queries, keys, **sizes)[0, 0].int().tolist()


def test_causal_lets_the_last_query_see_the_last_key():
    assert grid(causal(), 2, 5) == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert grid(causal(), 5, 2) == [[0, 0], [0, 0], [0, 0], [1, 0], [1, 1]]
    assert grid(causal(), 1, 4) == [[1, 1, 1, 1]]


def test_causal_from_the_start_and_by_offset():
    assert grid(causal(align="start"), 2, 5) == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0]]
    assert grid(causal(align="start"), 1, 3) == [[1, 0, 0]], "not all, as aligned at the end"
    assert grid(causal(offset=1), 2, 5) == [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0]]
    by_row = causal(offset=torch.tensor([0, 3])).dense(1, 5, batch=2)
    assert by_row[:, 0, 0].int().tolist() == [[1, 0, 0, 0, 0], [1, 1, 1, 1, 0]]


def test_window_counts_the_query_itself_in_size_and_not_in_left():
    two = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    assert grid(window(2), 4, 4) == two
    assert grid(window(left=1, right=0), 4, 4) == two
    assert grid(window(left=0, right=1), 3, 3) == [[1, 1, 0], [0, 1, 1], [0, 0, 1]]
    assert grid(window(left=1), 3, 3) == [[1, 1, 1], [1, 1, 1], [0, 1, 1]]
    # one new query against a cache of five
    assert grid(window(2), 1, 5) == [[0, 0, 0, 1, 1]]


def test_padding_by_flags_and_by_lengths_on_both_sides():
    real = torch.tensor([[1, 1, 0], [0, 1, 1]])
    flags = padding(real).dense(1, 3, batch=2)[:, 0, 0].int().tolist()
    assert flags == real.tolist()
    lengths = torch.tensor([0, 2])
    assert padding(lengths=lengths).dense(1, 3, batch=2)[:, 0, 0].int().tolist() == [
        [0, 0, 0],
        [1, 1, 0],
    ]
    left = padding(lengths=lengths, side="left").dense(1, 3, batch=2)[:, 0, 0].int().tolist()
    assert left == [[0, 0, 0], [0, 1, 1]]


def test_lists_are_taken_where_tensors_are():
    assert grid(padding([[1, 0, 1]]), 1, 3) == [[1, 0, 1]]
    assert grid(padding(lengths=[2]), 1, 3) == [[1, 1, 0]]
    assert grid(causal(offset=[1]), 1, 3) == [[1, 1, 0]]
    assert grid(documents([0, 1, 1]), 1, 3) == [[0, 1, 1]]


def test_documents_keep_to_themselves_also_when_they_come_back():
    assert grid(documents(torch.tensor([0, 0, 1])), 3, 3) == [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    back = [[1, 0, 1, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 1]]
    assert grid(documents(torch.tensor([7, 3, 7, 5])), 4, 4) == back
    assert grid(documents(torch.tensor([0, 0, 1])), 1, 3) == [[0, 0, 1]]
    crossed = documents(torch.tensor([0, 0, 1]), query_ids=torch.tensor([1, 0]))
    assert grid(crossed, 2, 3) == [[0, 0, 1], [1, 1, 0]]


def test_prefix_language_model_and_sinks_beside_a_window():
    assert grid(causal() | prefix(2), 3, 3) == [[1, 1, 0], [1, 1, 0], [1, 1, 1]]
    sinks = causal() & (window(2) | prefix(1))
    assert grid(sinks, 4, 4) == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 1, 1]]
    by_row = prefix(torch.tensor([0, 2])).dense(1, 3, batch=2)[:, 0, 0].int().tolist()
    assert by_row == [[0, 0, 0], [1, 1, 0]]


def test_keep_and_hide_are_opposites():
    marks = torch.tensor([[True, False], [False, False]])
    assert grid(keep(marks), 2, 2) == [[1, 0], [0, 0]]
    assert grid(hide(marks), 2, 2) == [[0, 1], [1, 1]]


def test_draw_is_the_grid_that_people_read():
    assert causal().draw(2, 3) == "    key 0 1 2\nquery 0 x x .\nquery 1 x x x"
    wide = causal().draw(11, 11).splitlines()
    assert wide[0] == "     key  0  1  2  3  4  5  6  7  8  9 10"
    assert wide[10] == "query  9  x  x  x  x  x  x  x  x  x  x  ."


@pytest.mark.parametrize(
    "mask",
    [
        everything(),
        causal(),
        window(5),
        window(left=2, right=3),
        padding(lengths=torch.tensor([0, 3, 11])),
        padding(torch.tensor([[1] * 4 + [0] * 7, [0] * 11, [0] * 5 + [1] * 6])),
        causal() & padding(lengths=torch.tensor([0, 3, 11]), side="left"),
        documents(torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3])) & causal(),
        causal() & (window(2) | prefix(3)),
        causal() | prefix(torch.tensor([1, 4, 9])),
        ~window(3),
        keep(causal().dense(11, 11) & window(left=4, right=0).dense(11, 11)),
    ],
    ids=lambda mask: type(mask).__name__,
)
def test_masks_that_are_runs_compile_to_runs(mask):
    compiled = mask.compile(batch=3, heads=2, queries=11, keys=11)
    assert compiled.bits is None
    if not compiled.is_full:
        assert compiled.intervals.dtype == torch.int32
        assert compiled.intervals.shape[-2] <= 2
        assert compiled.intervals.shape[1] == 1, "no mask here differs between heads"


def test_compiled_size_does_not_grow_with_length_squared():
    compiled = (causal() & padding(lengths=torch.tensor([5, 9]))).compile(
        batch=2, heads=12, queries=100_000, keys=100_000
    )
    assert compiled.intervals.numel() == 2 * 100_000 * 2


def test_repeated_axes_are_not_copied():
    flags = torch.rand(2, 1, 1, 64) > 0.5
    compiled = keep(flags.expand(2, 12, 64, 64)).compile(batch=2, heads=12, queries=64, keys=64)
    assert compiled.bits.shape == (2, 1, 1, 8)


def test_a_run_that_swallows_several_others_is_counted_once():
    ring = ~window(left=1, right=1) & window(left=3, right=3)
    wide = window(left=5, right=5)
    for mask in (wide | ring, ring | wide, (ring | window(left=0, right=0)) | wide):
        compiled = mask.compile(batch=1, heads=1, queries=13, keys=13)
        wanted = wide.dense(13, 13)
        assert torch.equal(compiled.tile(), wanted)
        assert torch.equal(compiled.counts(), wanted.sum(-1))


def test_an_empty_run_left_over_by_and_does_not_mislead_not():
    one = keep(torch.tensor([[0, 0, 0, 1, 1, 0, 1, 1]]).bool())
    two = keep(torch.tensor([[1, 1, 0, 0, 0, 0, 1, 1]]).bool())
    assert grid(one & two, 1, 8) == [[0, 0, 0, 0, 0, 0, 1, 1]]
    assert grid(~(one & two), 1, 8) == [[1, 1, 1, 1, 1, 1, 0, 0]]


def test_packed_masks_join_bit_by_bit():
    one = torch.tensor([[1, 0, 1, 0, 1, 0, 1, 0, 1, 1, 0]]).bool()
    two = torch.tensor([[1, 0, 0, 1, 1, 0, 0, 1, 1, 0, 1]]).bool()
    both = (keep(one) & keep(two)).compile(batch=1, heads=1, queries=1, keys=11)
    assert both.bits is not None
    assert torch.equal(both.tile()[0, 0], one & two)
    assert torch.equal((keep(one) | keep(two)).dense(1, 11)[0, 0], one | two)
    assert torch.equal((~keep(one)).dense(1, 11)[0, 0], ~one)


@pytest.mark.parametrize("start", [0, 1, 8, 11])
def test_a_part_is_a_mask_of_its_own(start):
    holes = keep(torch.rand(6, 21, generator=torch.Generator().manual_seed(3)) > 0.5)
    for mask in (causal(), holes, holes & window(9), window(3) | prefix(2)):
        compiled = mask.compile(batch=1, heads=1, queries=6, keys=21)
        part = compiled.part(slice(2, 5), slice(start, 19))
        assert part.sizes[2:4] == (3, 19 - start)
        wanted = mask.dense(6, 21)[:, :, 2:5, start:19]
        assert torch.equal(part.tile().expand(wanted.shape), wanted)
        assert torch.equal(part.counts().expand(wanted.shape[:3]), wanted.sum(-1))


def test_the_hull_is_the_smallest_span_of_what_is_seen():
    late = hide(torch.arange(9)[None] < torch.tensor([[9], [4], [6], [5]]))
    compiled = (late & window(left=8, right=2)).compile(batch=1, heads=1, queries=4, keys=9)
    assert compiled.hull() == (4, 9)
    assert compiled.hull(slice(0, 1)) == (0, 0), "nothing is seen"
    assert compiled.hull(slice(0, 2)) == (4, 9), "a row that sees nothing does not count"
    assert compiled.hull(slice(2, 4)) == (5, 9)


SIZES = st.tuples(*[st.sampled_from([1, 2, 3]), st.sampled_from([1, 2]), *[st.integers(1, 19)] * 2])


@st.composite
def masks(draw: st.DrawFn, sizes: tuple[int, int, int, int], depth: int = 2) -> tuple:
    """A mask and, drawn beside it in the plainest way, its grid."""
    batch, heads, queries, keys = sizes
    row = torch.arange(queries)[:, None] + keys - queries
    key = torch.arange(keys)[None]
    kinds = ["everything", "causal", "window", "padding", "keep", "prefix", "documents"]
    kind = draw(st.sampled_from([*kinds, "and", "or", "not"] if depth else kinds))
    if kind in ("and", "or"):
        one, a = draw(masks(sizes, depth - 1))
        two, b = draw(masks(sizes, depth - 1))
        return (one & two, a & b) if kind == "and" else (one | two, a | b)
    if kind == "not":
        one, a = draw(masks(sizes, depth - 1))
        return ~one, ~a
    full = torch.ones(batch, heads, queries, keys, dtype=torch.bool)
    if kind == "everything":
        return everything(), full
    if kind == "causal":
        return causal(), full & (key <= row)
    if kind == "window":
        size = draw(st.integers(1, 20))
        return window(size), full & (key <= row) & (key > row - size)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 20)))
    if kind == "padding":
        real = torch.rand(batch, keys, generator=generator) > 0.4
        return padding(real), full & real[:, None, None]
    if kind == "keep":
        marks = torch.rand(batch, heads, queries, keys, generator=generator) > 0.4
        return keep(marks), marks
    if kind == "prefix":
        length = draw(st.integers(0, 20))
        return prefix(length), full & (key < length)
    ids = torch.randint(0, 3, (batch, max(keys, queries)), generator=generator)
    key_ids, query_ids = ids[:, :keys], ids[:, :queries]
    mask = documents(key_ids, query_ids=query_ids)
    return mask, full & (query_ids[:, None, :, None] == key_ids[:, None, None, :])


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_expression_equals_its_plain_grid(data: st.DataObject):
    sizes = data.draw(SIZES)
    mask, wanted = data.draw(masks(sizes))
    batch, heads, queries, keys = sizes
    compiled = mask.compile(batch=batch, heads=heads, queries=queries, keys=keys)
    got = compiled.tile().expand(wanted.shape)
    assert torch.equal(got, wanted)
    assert torch.equal(compiled.counts().expand(wanted.shape[:3]), wanted.sum(-1))
    begin = data.draw(st.integers(0, keys - 1))
    rows, some = slice(queries // 2, queries), slice(begin, data.draw(st.integers(begin + 1, keys)))
    part = compiled.tile(rows, some)
    assert torch.equal(part.expand(wanted[:, :, rows, some].shape), wanted[:, :, rows, some])
    low, high = compiled.hull(rows)
    seen = wanted[:, :, rows].flatten(0, 2).any(0).nonzero().flatten()
    if len(seen):
        assert low <= int(seen[0]) and int(seen[-1]) < high
    if compiled.intervals is not None:
        runs = compiled.intervals
        assert (runs[..., 0] <= runs[..., 1]).all()
        assert (runs[..., 1:, 0] >= runs[..., :-1, 1]).all() or (
            runs[..., 0] == runs[..., 1]
        ).any(), "runs stand in order"
    kept = from_dense(wanted).dense(queries, keys, batch=batch, heads=heads)
    assert torch.equal(kept, wanted)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: causal() & torch.ones(2, 2), TypeError, "keep"),
        (lambda: causal() | None, TypeError, "NoneType"),
        (lambda: keep(torch.ones(2, 2)), TypeError, r"float32.*keep\(mask > 0\)"),
        (lambda: hide(torch.ones(2, 2, dtype=torch.int64)), TypeError, r"int64.*hide\(mask != 0\)"),
        (lambda: keep([[True]]), TypeError, "list"),
        (lambda: window(0), ValueError, "at least 1; got 0"),
        (lambda: window(2.5), TypeError, r"size counts keys.*got 2\.5"),
        (lambda: window(left=1.0), TypeError, "left counts keys"),
        (lambda: causal(offset=1.5), TypeError, "offset: wanted whole numbers, got torch.float32"),
        (lambda: causal(offset="1"), TypeError, "offset: wanted whole numbers, got '1'"),
        (lambda: padding(lengths=[2.5, 3.0]), TypeError, "lengths: wanted whole numbers"),
        (lambda: window(), ValueError, "give size"),
        (lambda: window(2, left=1), ValueError, "not both"),
        (lambda: window(left=-1), ValueError, "got -1"),
        (lambda: causal(align="middle"), ValueError, "'middle'"),
        (lambda: causal(align="start", offset=3), ValueError, "leave align out"),
        (lambda: padding(), ValueError, "lengths"),
        (lambda: padding(torch.ones(2, 3)), TypeError, "float32"),
        (lambda: padding(torch.tensor([[0, 2]])), ValueError, "got 2"),
        (lambda: padding(lengths=torch.tensor([1]), side="top"), ValueError, "'top'"),
        (lambda: prefix(-1), ValueError, "got -1"),
        (
            lambda: padding(torch.ones(2, 3).bool()).dense(4, 5),
            ValueError,
            r"\(1, 5\), got \(2, 3\)",
        ),
        (lambda: padding(lengths=torch.tensor([6])).dense(4, 5), ValueError, r"0\.\.5.*got \[6\]"),
        (lambda: keep(torch.ones(3, 4, 5).bool()).dense(4, 5), ValueError, "rank 3"),
        (lambda: keep(torch.ones(2, 5).bool()).dense(4, 5, batch=2), ValueError, r"padding\("),
        (lambda: keep(torch.ones(5).bool()).dense(4, 5), ValueError, "rank 1"),
        (lambda: causal(offset=torch.tensor([1, 2])).dense(4, 5, batch=3), ValueError, r"\(3,\)"),
        (lambda: documents(torch.tensor([1])).dense(4, 1), ValueError, "query_ids="),
        (lambda: documents(torch.tensor([1, 2])).dense(2, 3), ValueError, r"got \(1, 2\)"),
        (
            lambda: causal().compile(batch=1, heads=1, queries=2, keys=3).dense(2, 4),
            ValueError,
            r"\(1, 1, 2, 3\)",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(make, error, message):
    with pytest.raises(error, match=message):
        make()
