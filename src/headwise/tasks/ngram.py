"""An n-gram model of text, the simplest that predicts: how often did this follow that?"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn


class NGram(nn.Module):
    """Interpolated Kneser–Ney (Chen & Goodman 1998, section 4.1.6) over token ids.

    Args:
        text: (N,) ids of the training text.
        order: the longest run of tokens that is counted: 2 looks at one token before.
        vocabulary: how many ids there are.

    The discount of each order is n1 / (n1 + 2 n2) (Ney et al. 1994), where n1 and n2 count the runs
    seen once and twice. Orders below the highest count in how many ways a run was come to.
    """

    def __init__(self, text: np.ndarray, order: int, vocabulary: int) -> None:
        super().__init__()
        if vocabulary**order >= 2**63:
            raise ValueError(f"NGram: order {order} over {vocabulary} ids overflows 64 bits")
        self.order, self.vocabulary = order, vocabulary
        runs = np.lib.stride_tricks.sliding_window_view(text.astype(np.int64), order)
        powers = vocabulary ** np.arange(order - 1, -1, -1, dtype=np.int64)
        codes, counts = np.unique(runs @ powers, return_counts=True)
        self.tables: dict[int, _Table] = {}
        for length in range(order, 0, -1):
            self.tables[length] = _Table(codes, counts, vocabulary)
            # Without the first token: each longer run is one way to come to the shorter.
            codes, counts = np.unique(codes % vocabulary ** (length - 1), return_counts=True)

    def forward(self, ids: Tensor) -> Tensor:
        """(B, L) ids → log-probabilities of each next id, (B, L, V)."""
        rows = ids.numpy()
        found = np.empty((*rows.shape, self.vocabulary), dtype=np.float32)
        known: dict[tuple[int, ...], np.ndarray] = {}
        for row, text in enumerate(rows):
            for place in range(len(text)):
                context = tuple(int(i) for i in text[max(0, place - self.order + 2) : place + 1])
                if context not in known:
                    known[context] = np.log(self._chances(context)).astype(np.float32)
                found[row, place] = known[context]
        return torch.from_numpy(found)

    def _chances(self, context: tuple[int, ...]) -> np.ndarray:
        """(V,) chances of what comes after the last order - 1 ids of a text."""
        chances = np.full(self.vocabulary, 1 / self.vocabulary)
        for length in range(1, min(self.order, len(context) + 1) + 1):
            code = 0
            for token in context[len(context) - length + 1 :]:
                code = code * self.vocabulary + token
            chances = self.tables[length].over(code, chances)
        return chances


class _Table:
    """The runs of one length: their counts, by what comes before the last token."""

    def __init__(self, codes: np.ndarray, counts: np.ndarray, vocabulary: int) -> None:
        once, twice = int((counts == 1).sum()), int((counts == 2).sum())
        self.discount = once / (once + 2 * twice) if once else 0.0
        self.tokens, self.counts = codes % vocabulary, counts
        # Codes are sorted, so runs of one context stand together.
        self.contexts, first = np.unique(codes // vocabulary, return_index=True)
        self.bounds = np.append(first, len(codes))

    def over(self, context: int, lower: np.ndarray) -> np.ndarray:
        """This length's chances (V,), with the discounted share spread as `lower` says."""
        place = int(np.searchsorted(self.contexts, context))
        if place == len(self.contexts) or self.contexts[place] != context:
            return lower
        part = slice(self.bounds[place], self.bounds[place + 1])
        counts = self.counts[part]
        total = counts.sum()
        chances = lower * (self.discount * len(counts) / total)
        chances[self.tokens[part]] += (counts - self.discount) / total
        return chances
