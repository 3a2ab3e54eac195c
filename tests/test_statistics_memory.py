"""Memory of the streamed statistics is linear in the context length."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headwise import masks
from headwise.statistics import head_statistics
from headwise.statistics.stream import LARGE_TILE
from materialised import make


class LargestTensor(TorchDispatchMode):
    """Records the largest tensor that any operation returns, by the storage behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.bytes = max(self.bytes, leaf.untyped_storage().nbytes())
        return out


def largest(length: int, **options: Any) -> int:
    call = make(1, 1, 1, length, length, 2, dtype=torch.float32, mask=masks.causal())
    with LargestTensor() as seen:
        head_statistics(call, top=2, map_cells=32, **options)
    return seen.bytes


def test_memory_grows_with_the_length_not_with_its_square() -> None:
    """Four times the length: at most four times the largest tensor, which L×S would not fit."""
    small, large = largest(1024, tile=(128, 256)), largest(4096, tile=(128, 256))
    assert large <= 4 * small * 1.01
    assert large < 4096 * 4096 * 4 / 200
    # Left to choose its own tiles it stays inside its budget, far below the map.
    assert largest(8192) <= LARGE_TILE * 4 * 1.1 < 8192 * 8192 * 4 / 10


def test_a_large_peak_would_be_noticed() -> None:
    """The measuring device itself: a materialised map of the same length is seen."""
    with LargestTensor() as seen:
        torch.zeros(2048, 1) @ torch.zeros(1, 2048)
    assert seen.bytes == 2048 * 2048 * 4
