"""Which word of one side comes from which of the other: IBM Model 1 (Brown et al. 1993)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def chances(
    sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], rounds: int = 5
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Source ids, target ids and t(target | source) (section 4.2, equation 17), one entry for each
    two that ever meet in a pair of lines, after `rounds` of expectation and maximisation."""
    left, right, places = [], [], []
    count = 0
    for ours, theirs in zip(sources, targets, strict=True):
        left.append(np.tile(np.asarray(ours, dtype=np.int64), len(theirs)))
        right.append(np.repeat(np.asarray(theirs, dtype=np.int64), len(ours)))
        places.append(count + np.repeat(np.arange(len(theirs)), len(ours)))
        count += len(theirs)
    source, target, place = map(np.concatenate, (left, right, places))
    width = int(target.max(initial=0)) + 1
    code, entry = np.unique(source * width + target, return_inverse=True)
    ours = code // width
    chance = np.ones(len(code))
    for _ in range(rounds):
        # A target word's unit of count is shared out among the source words of its line.
        share = chance[entry]
        share = share / np.bincount(place, share, count)[place]
        counted = np.bincount(entry, share, len(code))
        chance = counted / np.bincount(ours, counted)[ours]
    return ours, code % width, chance
