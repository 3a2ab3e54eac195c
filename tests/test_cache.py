"""KV caches by themselves: what is held, for how long, and what is refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headwise.cache import KVCache, RollingKVCache

B, H, D, DV = 2, 3, 4, 5


def tokens(length: int, start: int = 0, batch: int = B) -> tuple[Tensor, Tensor]:
    """Keys and values that carry their own index, so that order and identity can be read off."""
    index = torch.arange(start, start + length, dtype=torch.float32)
    row = 1000.0 * torch.arange(batch)[:, None, None, None]
    key = (row + index[None, None, :, None]).expand(batch, H, length, D)
    value = -(row + index[None, None, :, None]).expand(batch, H, length, DV)
    return key, value


def indices(keys: Tensor) -> list[int]:
    return keys[0, 0, :, 0].int().tolist()


@given(chunks=st.lists(st.integers(0, 5), min_size=1, max_size=8))
@settings(max_examples=40, deadline=None)
def test_everything_comes_back_in_order(chunks):
    cache, seen = KVCache(B, H, 40, D, DV), 0
    for length in chunks:
        assert cache.visible_after(length) == seen + length
        held = cache.append(*tokens(length, seen))
        seen += length
        assert cache.length == cache.seen == seen
        assert torch.equal(held.keys, tokens(seen)[0])
        assert torch.equal(held.values, tokens(seen)[1])
        assert torch.equal(held.positions, torch.arange(seen)[None])
        assert held.real is None
        assert cache.next_position.tolist() == [seen] * B


@given(window=st.integers(1, 7), chunks=st.lists(st.integers(1, 20), min_size=1, max_size=12))
@settings(max_examples=80, deadline=None)
def test_a_rolling_cache_shows_each_new_key_its_whole_window(window, chunks):
    cache, seen, views = RollingKVCache(B, H, window, D, DV), 0, []
    size = cache.nbytes
    for length in chunks:
        expected = cache.visible_after(length)
        held = cache.append(*tokens(length, seen))
        start = max(0, seen - (window - 1))
        seen += length
        assert indices(held.keys) == list(range(start, seen))
        assert held.keys.shape[2] == expected == seen - start
        assert torch.equal(held.values, -held.keys[..., :1].expand_as(held.values))
        assert held.positions[0].tolist() == list(range(start, seen))
        assert cache.seen == seen and cache.length == min(seen, window)
        assert cache.nbytes == size, "memory does not grow with the text"
        views.append((held.keys, held.keys.clone()))
    for view, was in views:
        assert torch.equal(view, was), "what a call was given stays as it was"


def test_positions_go_on_per_row_after_left_and_right_padding():
    cache = KVCache(3, H, 10, D, DV)
    real = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0], [0, 0, 0, 0, 0]]).bool()
    held = cache.append(*tokens(5, batch=3), real=real)
    assert held.positions.tolist() == [[-1, -1, 0, 1, 2], [0, 1, 2, 3, 3], [-1] * 5]
    assert cache.next_position.tolist() == [3, 4, 0], "3, not 5: pads are not tokens"
    held = cache.append(*tokens(1, 5, batch=3))
    assert held.positions[:, -1].tolist() == [3, 4, 0]
    assert held.real is not None
    assert torch.equal(held.real, torch.cat((real, torch.ones(3, 1, dtype=torch.bool)), 1))


def test_pads_that_come_late_leave_earlier_tokens_real():
    cache = KVCache(B, H, 10, D, DV)
    cache.append(*tokens(2))
    held = cache.append(*tokens(2, 2), real=torch.tensor([[True, False], [True, True]]))
    assert held.real is not None and held.real.tolist() == [[True] * 3 + [False], [True] * 4]
    assert cache.next_position.tolist() == [3, 4]


def test_given_positions_are_kept_and_counting_goes_on_from_them():
    cache = KVCache(B, H, 10, D, DV)
    held = cache.append(*tokens(2), positions=torch.tensor([[7, 8], [3, 20]]))
    assert held.positions.tolist() == [[7, 8], [3, 20]]
    assert cache.append(*tokens(1, 2)).positions.tolist() == [[7, 8, 9], [3, 20, 21]]


def test_counting_goes_on_from_the_last_real_token_where_pads_have_positions_too():
    cache = KVCache(B, H, 10, D, DV)
    real = torch.tensor([[True, True, False], [True, True, True]])
    cache.append(*tokens(3), positions=torch.tensor([[4, 5, 1], [4, 5, 6]]), real=real)
    assert cache.next_position.tolist() == [6, 7]


def test_rows_go_on_apart_where_positions_are_shared_and_pads_are_not():
    cache = KVCache(B, H, 10, D, DV)
    real = torch.tensor([[True, True, False], [True, True, True]])
    cache.append(*tokens(3), positions=torch.arange(3), real=real)
    assert cache.next_positions(2).tolist() == [[2, 3], [3, 4]]
    held = cache.append(*tokens(2, 3))
    assert held.positions.tolist() == [[0, 1, 2, 2, 3], [0, 1, 2, 3, 4]]


def test_crop_forgets_the_newest_and_counts_again():
    cache = KVCache(B, H, 10, D, DV)
    real = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]]).bool()
    cache.append(*tokens(5), real=real)
    cache.crop(3)
    assert cache.length == cache.seen == 3
    assert cache.next_position.tolist() == [2, 3]
    held = cache.append(*tokens(1, 30))
    assert indices(held.keys) == [0, 1, 2, 30]
    assert held.positions.tolist() == [[-1, 0, 1, 2], [0, 1, 2, 3]]
    cache.crop(1)
    assert cache.next_position.tolist() == [0, 1], "row 0 holds only a pad"
    cache.crop(0)
    assert cache.next_position.tolist() == [0, 0]


def test_crop_of_a_rolling_cache_stops_where_its_window_would_be_short():
    cache = RollingKVCache(B, H, 4, D, DV)
    cache.append(*tokens(3))
    cache.crop(1)
    assert indices(cache.append(*tokens(1, 1)).keys) == [0, 1]
    cache.append(*tokens(8, 2))
    cache.crop(9)
    assert indices(cache.append(*tokens(1, 9)).keys) == [6, 7, 8, 9]
    cache.crop(9)
    with pytest.raises(ValueError, match="9 tokens were seen and the last 3 are held; going back"):
        cache.crop(8)


@pytest.mark.parametrize("length", [-1, 4])
def test_crop_beyond_what_was_seen_is_an_error(length):
    cache = KVCache(B, H, 10, D, DV)
    cache.append(*tokens(3))
    with pytest.raises(ValueError, match=rf"crop: length={length} must lie in 0\.\.3"):
        cache.crop(length)


@pytest.mark.parametrize("order", [[1, 0], [1, 1], [0, 0, 1, 1], [1]])
@pytest.mark.parametrize("kind", [KVCache, RollingKVCache])
def test_reorder_moves_keys_positions_and_pads_together(kind, order):
    cache = kind(B, H, 6, D, DV)
    real = torch.tensor([[False, True, True], [True, True, True]])
    before = cache.append(*tokens(3), real=real)
    keys, positions = before.keys.clone(), before.positions.clone()
    cache.reorder(torch.tensor(order))
    assert cache.batch == len(order)
    held = cache.append(*tokens(1, 3, batch=len(order)))
    assert torch.equal(held.keys[:, :, :3], keys[order])
    assert torch.equal(held.positions[:, :3], positions[order])
    assert held.positions[:, 3].tolist() == [[2, 3][row] for row in order]
    assert held.real is not None and torch.equal(held.real[:, :3], real[order])


@pytest.mark.parametrize("kind", [KVCache, RollingKVCache])
def test_reset_starts_over_in_the_same_memory(kind):
    cache = kind(B, H, 6, D, DV)
    cache.append(*tokens(3), real=torch.tensor([[False, True, True], [True, True, True]]))
    where = cache._keys.data_ptr()
    cache.reset()
    held = cache.append(*tokens(2, 50))
    assert indices(held.keys) == [50, 51]
    assert held.positions.tolist() == [[0, 1]] and held.real is None
    assert cache.seen == 2
    assert held.keys.data_ptr() == where == cache._keys.data_ptr()


def test_append_writes_in_place_and_returns_views():
    cache = KVCache(B, H, 6, D, DV)
    first = cache.append(*tokens(2))
    second = cache.append(*tokens(2, 2))
    assert first.keys.data_ptr() == second.keys.data_ptr()
    assert cache.nbytes == B * H * 6 * (D + DV) * 4


def test_a_full_cache_says_how_large_it_must_be_and_keeps_its_state():
    cache = KVCache(B, H, 4, D, DV)
    cache.append(*tokens(3))
    with pytest.raises(
        ValueError, match="capacity=4 holds 3 tokens and 2 more came; make it at least 5"
    ):
        cache.append(*tokens(2, 3))
    assert cache.seen == 3 and cache.next_position.tolist() == [3, 3]
    assert indices(cache.append(*tokens(1, 3)).keys) == [0, 1, 2, 3]


def test_wrong_input_is_named():
    cache = KVCache(B, H, 4, D, DV)
    key, value = tokens(1)
    with pytest.raises(ValueError, match=r"key must be .* = \(2, 3, 1, 4\), got \(3, 3, 1, 4\)"):
        cache.append(*tokens(1, batch=3))
    with pytest.raises(ValueError, match=r"value must be .* = \(2, 3, 1, 5\), got \(2, 3, 1, 4\)"):
        cache.append(key, key)
    with pytest.raises(ValueError, match=r"cache is torch\.float32 but key is torch\.float64"):
        cache.append(key.double(), value.double())
    with pytest.raises(ValueError, match=r"real must be .* = \(2, 1\), got \(2, 2\)"):
        cache.append(key, value, real=torch.ones(2, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="new keys require grad"):
        cache.append(key.clone().requires_grad_(), value)
    with pytest.raises(ValueError, match=r"reorder: indices must be integers .* torch\.float32"):
        cache.reorder(torch.ones(2))
    assert cache.seen == 0
    with pytest.raises(ValueError, match="capacity=0 must be at least 1"):
        KVCache(B, H, 0, D)
    with pytest.raises(ValueError, match="window=0 must be at least 1"):
        RollingKVCache(B, H, 0, D)


def test_printed_caches_say_what_they_hold():
    full, rolling = KVCache(B, H, 8, D, DV), RollingKVCache(B, H, 2, D, DV)
    for cache in (full, rolling):
        cache.append(*tokens(3))
    assert "KVCache(3 of 8 tokens, batch 2, kv heads 3, head dim 4, torch.float32" in repr(full)
    assert "RollingKVCache(last 2 of 3 tokens, window 2" in repr(rolling)
