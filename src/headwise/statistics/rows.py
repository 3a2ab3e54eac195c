"""The online softmax of a block of rows: maximum, sum, entropy, score spread, strongest keys."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.statistics.interface import Sums


class RowState:
    """Accumulators of one block of rows, (H, rows) each, in the wide dtype.

    Scores come halved (see stream.py): `shift` is m/2 with m the running maximum, `total` is
    l = Σ e^{s−m}, `weighted` is Σ e^{s−m}(s−m)/2.
    """

    def __init__(
        self, active: Tensor, top: int, dtype: torch.dtype, wide: torch.dtype, low: float
    ) -> None:
        shape, device = active.shape, active.device
        self.active, self.top, self.wide, self.low = active, top, wide, low

        def fill(value: float, *more: int, kind: torch.dtype = wide) -> Tensor:
            return torch.full((*shape, *more), value, dtype=kind, device=device)

        self.peak = fill(low)  # largest half score so far, the sink's not among them
        self.shift = fill(0.0)
        self.total, self.weighted = fill(0.0), fill(0.0)
        self.count, self.mean, self.squares = fill(0.0), fill(0.0), fill(0.0)
        self.values = fill(low, 0)
        self.keys = fill(-1, 0, kind=torch.int64)
        self.sink: Tensor | None = None
        self.fixed = False
        self.narrow = dtype

    def start_with_sink(self, logits: Tensor) -> None:
        """A learned sink's logit (H,) stands in every row's denominator."""
        self.sink = (logits / 2)[:, None].expand(self.active.shape)

    def fix(self, lse: Tensor) -> None:
        """Use a known logsumexp as the shift; row sums then come out as 1, up to its rounding."""
        self.shift, self.fixed = self._narrow(torch.where(self.active, lse / 2, 0.0)), True

    def _narrow(self, shift: Tensor) -> Tensor:
        # The shift is subtracted in the tile's dtype, so it must be a number of that dtype.
        return shift.to(self.narrow).to(self.wide)

    def raise_to(self, peak: Tensor) -> None:
        """Take a tile's largest half scores into the running maximum and rescale what was summed.

        On a new maximum m′: acc ← e^{m−m′}(acc + (m−m′)·l), l ← e^{m−m′}·l.
        """
        empty_so_far = self.peak <= self.low / 2
        self.peak = torch.maximum(self.peak, peak.to(self.wide))
        if self.fixed:
            return
        new = self.peak if self.sink is None else torch.maximum(self.peak, self.sink)
        new = self._narrow(torch.where(new <= self.low / 2, 0.0, new))
        fall = torch.where(empty_so_far, 0.0, self.shift - new)
        factor = torch.exp(2 * fall)
        self.weighted = factor * (self.weighted + fall * self.total)
        self.total = factor * self.total
        self.values = self.values + fall[..., None]
        self.shift = new

    def add(self, total: Tensor, weighted: Tensor) -> None:
        self.total = self.total + total
        self.weighted = self.weighted + weighted

    def offer(self, values: Tensor, keys: Tensor) -> None:
        """Keep the strongest of the keys held and those offered (half scores less the shift)."""
        values = torch.cat((self.values, values.to(self.wide)), -1)
        keys = torch.cat((self.keys, keys), -1)
        self.values, chosen = values.topk(min(self.top, values.shape[-1]))
        self.keys = keys.gather(-1, chosen)

    def moments(self, count: Tensor, mean: Tensor, norm: Tensor) -> None:
        """Merge a tile's count, mean and centred norm of visible half scores less the shift.

        Chan 1979 (Stanford STAN-CS-79-773, equations 2.1): squares and means merge exactly.
        """
        mean = mean.to(self.wide) + self.shift
        both = (self.count + count).clamp(min=1)
        gap = torch.where((self.count > 0) & (count > 0), mean - self.mean, 0.0)
        self.squares = self.squares + norm.to(self.wide).square()
        self.squares = self.squares + gap.square() * self.count * count / both
        self.mean = torch.where(self.count > 0, self.mean + gap * count / both, mean)
        self.count = self.count + count

    def finish(self) -> Tensor:
        """1/l of each row, the sink logit counted; 0 where a row does not count."""
        if self.sink is not None:
            self.from_sink = torch.exp(2 * (self.sink - self.shift))
        else:
            self.from_sink = torch.zeros_like(self.total)
        self.whole = self.total + self.from_sink
        # All scores −inf (an infinite product, say): no key is left to attend to.
        self.active = self.active & ~(self.peak <= self.low / 2)
        return torch.where(self.active, 1 / self.whole, 0.0)

    def write(self, sums: Sums, rows: slice) -> None:
        """Row results into the tensors of `sums`; rows that do not count stay NaN."""
        log = torch.log(self.whole)
        mass = self.total / self.whole
        keep = self.active
        sums.active[:, rows] = keep
        for name, value in (
            ("lse", 2 * self.shift + log),
            ("mass", mass),
            # H = −Σ p ln p with ln p = (s − m) − ln l. Rounding may leave −0 or a hair below 0.
            ("entropy", (mass * log - 2 * self.weighted / self.whole).clamp(min=0)),
            ("largest", torch.exp(2 * (self.peak - self.shift)) / self.whole),
            ("sink", self.from_sink / self.whole),
            ("spread", 2 * self.squares.sqrt()),
        ):
            into = getattr(sums, name)[:, rows]
            into.copy_(torch.where(keep, value, into))
        if self.top:
            # Not “above”, but “not below”: a NaN score gives a NaN weight.
            below = self.values <= self.low / 2 - self.shift[..., None].abs()
            found = keep[..., None] & ~below
            weights = torch.exp(2 * self.values) / self.whole[..., None]
            size = self.values.shape[-1]
            sums.top_keys[:, rows, :size] = torch.where(found, self.keys, -1)
            sums.top_weights[:, rows, :size] = torch.where(found, weights, 0.0).to(self.narrow)
