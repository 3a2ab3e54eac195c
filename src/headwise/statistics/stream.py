"""The inner loop: every sum that the statistics need, from one batch element, tile by tile.

`stream(job)` leaves it to the native pass where that can run; these are torch's tiles for all else.
It never holds more than a few tiles: its memory is linear in the number of queries plus the number
of keys.

How it is arranged, and why:

- Half scores. Tiles hold s/2, so that one exponential gives u = e^{(s−m)/2} = √e, the Gram products
  of u give Σ√(p p') and u² gives e. Halving is exact in binary floating point.
- No tile is ever divided by its row sums. Row sums enter through small products instead: per-row
  Gram matrices are weighted afterwards, column sums and pooled cells are (1/l)ᵀ·e.
- Distances come from the sums along diagonals: a tile that is read with a row stride longer by one
  has its diagonals as columns. The mean distance, its histogram, previous and own token follow.
- A block of rows whose whole key range fits into the budget is one tile: one pass. Otherwise the
  block is streamed twice: first the running maximum, row sum and entropy accumulator (METRICS,
  "streaming entropy"), then, with these known, everything else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from headwise.statistics import native
from headwise.statistics.interface import Job, Sums, blank, first_keys, longest, wide_dtype
from headwise.statistics.rows import RowState

# A stand-in for −inf in half scores: e^LOW is 0 and 0·LOW is 0, where 0·(−inf) would be NaN.
LOW = -(2.0**100)
# Elements of one tile over all heads: three such buffers stay near the last-level cache.
TILE = 1 << 21
# A block this small in rows may be this much larger before it is streamed in two passes.
LARGE_TILE = 1 << 22
SMALL_ROWS = 16
# A known lse may replace the first pass only where its own rounding (half an ulp) is harmless.
KNOWN_LSE_ERROR = 4e-6


def stream(job: Job) -> Sums:
    """Every sum of `Sums`, exactly, in memory linear in L + S."""
    if native.refuse(job) is None:
        return native.run(job)
    return _Stream(job).run()


class _Tile:
    """One tile of half scores and what became of it: e and u hold e^{s−m} and e^{(s−m)/2}."""

    def __init__(self, rows: slice, keys: slice, columns: int) -> None:
        self.rows, self.keys = rows, keys
        self.height = rows.stop - rows.start
        self.width = keys.stop - keys.start
        # Zero columns after each row, so that a diagonal that leaves the tile reads zeros. The
        # row's length is a multiple of `columns` so that its maxima can be taken in strides.
        self.stride = -(-(self.width + self.height) // columns) * columns
        self.columns = columns
        self.hidden: list[tuple[slice, Tensor]] = []
        self.half: Tensor  # (H, rows, stride)
        self.root: Tensor
        self.weight: Tensor
        self.flat: Tensor  # the storage of `weight`, with `height` zeros before it


class _Stream:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.heads, self.queries, self.dim = job.query.shape
        self.kv_heads, self.keys = job.key.shape[:2]
        self.groups = self.heads // max(1, self.kv_heads)
        self.dtype, self.device = job.query.dtype, job.query.device
        self.wide = wide_dtype(self.device)
        self.top = min(job.top, self.keys)
        self.query = (job.query * (job.scale / 2)).view(self.kv_heads, self.groups, -1, self.dim)
        self.key = job.key.mT
        largest = longest(self.query) * longest(job.key)
        # Only then can a visible score be −inf (a bias of −inf hides its pair, see sight.py), and
        # only then is a pass over the whole tile spent on guarding 0·(−inf).
        self.guard = not math.isfinite(largest)
        self.first_keys = first_keys(job)
        self._buffers: dict[str, Tensor] = {}
        limit = torch.finfo(self.dtype).eps / 2
        self.known = (
            job.lse is not None
            and bool(job.sight.active.any())
            and float(torch.where(job.sight.active, job.lse.abs(), 0.0).max()) * limit
            < (KNOWN_LSE_ERROR if self.dtype == torch.float32 else 1e-12)
        )

    # --- the loop ---------------------------------------------------------------------------

    def run(self) -> Sums:
        self.sums = blank(self.job)
        for rows, tiles in self._blocks():
            self._block(rows, tiles)
        return self.sums

    def _blocks(self) -> Iterator[tuple[slice, list[slice]]]:
        """Row blocks that hold a counted row, each with the key ranges of its tiles."""
        begin, sight = 0, self.job.sight
        while begin < self.queries:
            if self.job.tile is not None:
                height, width = self.job.tile
            else:
                height, width = self._choose(begin)
            rows = slice(begin, min(begin + height, self.queries))
            span = sight.span(rows)
            if span.high > span.low:
                edges = range(span.low, span.high, width)
                yield rows, [slice(low, min(low + width, span.high)) for low in edges]
            begin = rows.stop

    def _choose(self, begin: int) -> tuple[int, int]:
        """Rows and keys of the next tile: the tallest block whose keys all fit, else a stream."""
        height = 256
        while True:
            span = self.job.sight.span(slice(begin, min(begin + height, self.queries)))
            size = self.heads * height * (span.high - span.low + height)
            if size <= (TILE if height > SMALL_ROWS else LARGE_TILE):
                return height, max(1, span.high - span.low)
            if height == SMALL_ROWS:
                return 64, max(256, TILE // (self.heads * 64))
            height //= 2

    def _block(self, rows: slice, tiles: list[slice]) -> None:
        job = self.job
        active = job.sight.active[:, rows].expand(self.heads, -1)
        state = RowState(active, self.top, self.dtype, self.wide, low=LOW)
        if job.sinks is not None:
            state.start_with_sink(job.sinks.to(self.wide))
        once = len(tiles) == 1
        if self.known and not once:
            assert job.lse is not None
            state.fix(job.lse[:, rows].to(self.wide))
            for keys in tiles:
                tile = self._scores(rows, keys)
                self._absorb(tile, state)
                self._add(tile, active.to(self.wide))
            state.finish()
        else:
            for keys in tiles:
                tile = self._scores(rows, keys)
                self._absorb(tile, state)
            inverse = state.finish()
            for keys in tiles:
                if not once:
                    tile = self._scores(rows, keys)
                    self._exponentials(tile, state.shift)
                self._add(tile, inverse)
        state.write(self.sums, rows)

    # --- one tile ---------------------------------------------------------------------------

    def _buffer(self, name: str, size: int) -> Tensor:
        held = self._buffers.get(name)
        if held is None or held.numel() < size:
            held = torch.zeros(size, dtype=self.dtype, device=self.device)
            self._buffers[name] = held
        return held

    def _scores(self, rows: slice, keys: slice) -> _Tile:
        """Half scores of a tile, LOW where hidden: scale → softcap → bias → mask."""
        job = self.job
        width = keys.stop - keys.start
        columns = 1
        if self.top and width > 16 * self.top:
            columns = 1 << round(math.log2(math.sqrt(width / self.top)))
        tile = _Tile(rows, keys, columns)
        height, stride = tile.height, tile.stride
        size = self.heads * height * stride
        tile.half = self._buffer("half", size)[:size].view(self.heads, height, stride)
        grouped = tile.half.view(self.kv_heads, self.groups * height, stride)
        query = self.query[:, :, rows].reshape(self.kv_heads, -1, self.dim)
        for head in range(self.kv_heads):
            torch.mm(query[head], self.key[head, :, keys], out=grouped[head, :, :width])
        half = tile.half[..., :width]
        tile.half[..., width:] = LOW
        if job.softcap is not None:
            half.mul_(2 / job.softcap).tanh_().mul_(job.softcap / 2)
        if job.bias is not None:
            half.add_(_part(job.bias, rows, keys), alpha=0.5)
        self._hide(tile)
        if self.guard:
            half.clamp_(min=LOW)
        return tile

    def _hide(self, tile: _Tile) -> None:
        """Set hidden scores to LOW, and keep where they were: only edges have any."""
        span = self.job.sight.span(tile.rows)
        low, high = tile.keys.start, tile.keys.stop
        first = min(max(span.solid_low, low), high)
        last = max(min(span.solid_high, high), first)
        for edge in (slice(low, first), slice(last, high)):
            if edge.stop > edge.start:
                hidden = ~self.job.sight.tile(tile.rows, edge)
                columns = slice(edge.start - low, edge.stop - low)
                tile.half[..., columns].masked_fill_(hidden, LOW)
                tile.hidden.append((columns, hidden))

    def _absorb(self, tile: _Tile, state: RowState) -> None:
        """Row quantities of a tile: maximum, row sum, entropy, score spread, strongest keys."""
        width, columns = tile.width, tile.columns
        strided = tile.half.view(self.heads, tile.height, columns, -1)
        peaks = strided.amax(-2) if columns > 1 else tile.half
        state.raise_to(peaks.amax(-1))
        self._exponentials(tile, state.shift)
        half = tile.half[..., :width]
        if self.top:
            state.offer(*self._strongest(tile, peaks))
        self._moments(tile, state)
        total = tile.weight[..., :width].sum(-1)
        state.add(total, half.mul_(tile.weight[..., :width]).sum(-1))

    def _moments(self, tile: _Tile, state: RowState) -> None:
        """Count, mean and centred norm of visible half scores. Centred before they are squared:
        where one key stands far above the rest, Σx² − (Σx)²/T would lose log₂ T bits."""
        width, half = tile.width, tile.half[..., : tile.width]
        visible = torch.full(half.shape[:2], width, dtype=self.wide, device=self.device)
        for where, hidden in tile.hidden:
            # In the entropy a hidden score meets a weight of 0, so 0 does for it from here on.
            tile.half[..., where].masked_fill_(hidden, 0.0)
            visible = visible - hidden.sum(-1)
        mean = (half.sum(-1) / visible.clamp(min=1)).to(self.dtype)
        spare = self._buffer("spare", tile.half.numel())[: half.numel()].view(half.shape)
        torch.sub(half, mean[..., None], out=spare)
        for where, hidden in tile.hidden:
            spare[..., where].masked_fill_(hidden, 0.0)
        state.moments(visible, mean, torch.linalg.vector_norm(spare, dim=-1))

    def _exponentials(self, tile: _Tile, shift: Tensor) -> None:
        """half ← half − shift; root = e^half; weight = root². Rows that do not count become 0."""
        size, lead = tile.half.numel(), tile.height
        tile.half.sub_(shift.to(self.dtype)[..., None])
        tile.root = self._buffer("root", size)[:size].view(tile.half.shape)
        torch.exp(tile.half, out=tile.root)
        if not self.job.sight.all_active(tile.rows):
            active = self.job.sight.active[:, tile.rows, None]
            tile.root.masked_fill_(~active, 0.0)
        flat = self._buffer("weight", size + lead)
        flat[:lead] = 0
        tile.flat = flat
        tile.weight = flat[lead : lead + size].view(tile.half.shape)
        torch.mul(tile.root, tile.root, out=tile.weight)

    def _strongest(self, tile: _Tile, peaks: Tensor) -> tuple[Tensor, Tensor]:
        """Half scores and keys of each row's strongest keys. The k largest of a row lie in the k
        strided classes with the largest maxima, so the whole row need not be sorted."""
        half, count = tile.half, min(self.top, tile.width)
        if tile.columns == 1:
            values, index = half[..., : tile.width].topk(count)
        else:
            classes = peaks.topk(count).indices
            steps = torch.arange(tile.columns, device=self.device) * peaks.shape[-1]
            among = (classes[..., None] + steps).flatten(-2)
            values, chosen = half.gather(-1, among).topk(count)
            index = among.gather(-1, chosen)
        return values, index + tile.keys.start

    # --- sums over rows -----------------------------------------------------------------------

    def _add(self, tile: _Tile, inverse: Tensor) -> None:
        """Add a tile's share of every sum over rows. inverse (H, rows): 1/l, 0 at idle rows."""
        sums, scale = self.sums, inverse.to(self.dtype)
        weight = tile.weight[..., : tile.width]
        self._add_grams(tile, inverse)
        self._add_columns(tile, scale)
        self._add_distances(tile, scale)
        self._add_sinks(tile, scale)
        matches = self.job.matches
        if matches is not None:
            sums.duplicate += matches.mass(weight, scale, tile.rows, tile.keys, 0)
            sums.induction += matches.mass(weight, scale, tile.rows, tile.keys, 1)
        declared = self.job.declared
        if declared is not None:
            outside = ~declared.tile(tile.rows, tile.keys)
            if bool(outside.any()):
                stray = torch.where(outside, weight, 0.0).sum(-1)
                sums.hidden += (stray * scale).sum(-1, dtype=self.wide)

    def _add_grams(self, tile: _Tile, inverse: Tensor) -> None:
        sums, width = self.sums, tile.width
        weight = tile.weight[..., :width]
        if sums.overlap is None:
            norm = torch.linalg.vector_norm(weight, dim=-1).to(self.wide) * inverse
            sums.gram += norm.square().sum(-1)
            return
        for matrix, factor, total in (
            (weight, inverse, sums.gram),
            (tile.root[..., :width], inverse.sqrt(), sums.overlap),
        ):
            by_row = matrix.transpose(0, 1)  # (rows, H, keys): one small Gram matrix a row
            grams = torch.bmm(by_row, by_row.mT).to(self.wide)
            total += torch.einsum("rhg,hr,gr->hg", grams, factor, factor)

    def _add_columns(self, tile: _Tile, scale: Tensor) -> None:
        """Column sums and pooled cells: rows are summed first, in a product with 1/l."""
        gq, gk = self.job.block
        first = tile.rows.start // gq
        last = (tile.rows.stop - 1) // gq
        row_cell = torch.arange(tile.rows.start, tile.rows.stop, device=self.device) // gq - first
        pool = torch.zeros(last - first + 1, tile.height, dtype=self.dtype, device=self.device)
        pool[row_cell, torch.arange(tile.height, device=self.device)] = 1
        pooled = torch.bmm(pool * scale[:, None], tile.weight[..., : tile.width]).to(self.wide)
        self.sums.received[:, tile.keys] += pooled.sum(1)
        low, high = tile.keys.start // gk, (tile.keys.stop - 1) // gk + 1
        margins = (tile.keys.start - low * gk, high * gk - tile.keys.stop)
        pooled = torch.nn.functional.pad(pooled, margins).unflatten(-1, (high - low, gk))
        self.sums.cells[:, first : last + 1, low:high] += pooled.sum(-1)

    def _add_distances(self, tile: _Tile, scale: Tensor) -> None:
        job, sums = self.job, self.sums
        if job.at is None:
            apart = job.query_at[tile.rows, None] - job.key_at[None, tile.keys] - sums.distance_low
            weight = (tile.weight[..., : tile.width] * scale[..., None]).to(self.wide)
            sums.distances.index_add_(1, apart.flatten(), weight.flatten(1))
            return
        # Element (r, c + r) of a row-major tile lies at r·(stride + 1) + c: a view with one more
        # element per row has diagonals as columns, from c = −(height − 1) on.
        height, width, stride = tile.height, tile.width, tile.stride
        reach = height - 1 + width
        view = tile.flat.as_strided(
            (self.heads, height, reach), (height * stride, stride + 1, 1), 1
        )
        along = torch.bmm(scale[:, None], view)[:, 0].to(self.wide).flip(-1)
        # The last column, c = width − 1, holds the smallest distance.
        smallest = tile.rows.start + job.at - (tile.keys.stop - 1)
        begin = smallest - sums.distance_low
        sums.distances[:, begin : begin + reach] += along

    def _add_sinks(self, tile: _Tile, scale: Tensor) -> None:
        for key, place in self.first_keys:
            if tile.keys.start <= key < tile.keys.stop:
                later = self.job.query_at[tile.rows] >= self.job.places[place]
                share = tile.weight[..., key - tile.keys.start] * scale
                self.sums.sink_sums[:, place] += torch.where(later, share, 0.0).sum(
                    -1, dtype=self.wide
                )


def _part(x: Tensor, rows: slice, keys: slice) -> Tensor:
    """A tile of a tensor whose last two axes are full or 1."""
    rows = rows if x.shape[-2] > 1 else slice(None)
    return x[..., rows, keys if x.shape[-1] > 1 else slice(None)]
