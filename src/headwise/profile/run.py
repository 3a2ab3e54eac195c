"""One model's profile: counted and measured side by side, its growth, how far a budget reaches."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from headwise.errors import BadInput
from headwise.profile import growth
from headwise.profile.analytic import Cost, cost, reach
from headwise.profile.machine import Machine
from headwise.profile.measured import Measured, OutOfMemory, measure
from headwise.profile.quality import Quality
from headwise.profile.shapes import Shape
from headwise.record import Record

Say = Callable[[int, int, str], None]


@dataclass
class Profile:
    """counted: one `Cost` a context. measured: those contexts that were run. stopped: where memory
    ended. beyond: contexts longer than the model was trained for. left_out: contexts asked for that
    are beyond it and were not run. quality: what its int8 cache costs."""

    shape: Shape
    counted: list[Cost]
    batch: int = 1
    dtype: str = "float32"
    cache: str = "plain"
    measured: list[Measured] = field(default_factory=list)
    stopped: int | None = None
    machine: Machine | None = None
    left_out: list[int] = field(default_factory=list)
    quality: Quality | None = None

    @property
    def name(self) -> str:
        return (
            self.shape.name if self.cache == "plain" else f"{self.shape.name}, {self.cache} cache"
        )

    @property
    def beyond(self) -> list[int]:
        limit = self.shape.positions
        return [c.context for c in self.counted if limit is not None and c.context > limit]

    def growths(self) -> dict[str, growth.Power | None]:
        """Fitted powers of the context: seconds of attention and of the rest, peak bytes beyond the
        weights."""
        at = [m.context for m in self.measured]
        weights = self.counted[0].weight_bytes
        return {
            "attention": growth.fit(at, [m.prefill * m.attention_share for m in self.measured]),
            "rest": growth.fit(at, [m.prefill * (1 - m.attention_share) for m in self.measured]),
            "prefill": growth.fit(at, [m.prefill for m in self.measured]),
            "memory": growth.fit(at, [float(m.peak - weights) for m in self.measured]),
        }

    def growth_lines(self) -> list[str]:
        """What the fits say, in sentences; none with fewer than two measured contexts."""
        found = self.growths()
        attention, rest, memory = found["attention"], found["rest"], found["memory"]
        lines = []
        if attention is not None and rest is not None:
            line = f"attention's time grows as {attention.words()}, the rest as {rest.words()}"
            where = growth.crossing(attention, rest)
            if where is not None and attention.exponent > rest.exponent:
                line += f"; they are equal at about {where:,.0f} tokens"
            lines.append(line)
        if memory is not None:
            lines.append(f"memory beyond the weights grows as {memory.words()}")
        return lines

    def notes(self) -> list[str]:
        """Where it ended, what was left out, what its int8 cache costs, in sentences."""
        lines = []
        if self.stopped is not None:
            lines.append(f"out of memory at {self.stopped:,} tokens")
        if self.left_out:
            lengths = ", ".join(f"{n:,}" for n in self.left_out)
            lines.append(
                f"left out: {lengths} tokens, beyond the {self.shape.positions:,} positions that "
                f"{self.shape.name} was made for (--beyond-trained runs them)"
            )
        if self.quality is not None and self.cache == "int8":
            lines.append(self.quality.line())
        return lines

    def memory_lines(self, memory: int) -> list[str]:
        """How far `memory` bytes reach, as it is and with fewer key/value heads.

        Raises:
            BadInput: not even one token fits.
        """

        def far(shape: Shape) -> int:
            return reach(shape, memory, batch=self.batch, dtype=self.dtype,
                         cache_dtype="int8" if self.cache == "int8" else None)  # fmt: skip

        longest = far(self.shape)
        if not longest:
            need = cost(self.shape, 1, batch=self.batch, dtype=self.dtype).fused_peak
            raise BadInput(
                f"profile: {self.name} needs {words(need)} before its first token, and --memory is "
                f"{words(memory)}"
            )
        line = f"{words(memory)}: {longest:,} tokens"
        for heads in sorted({layer.kv_heads for layer in self.shape.layers}):
            fewer = max((n for n in (1, 2, 4, 8) if n < heads and heads % n == 0), default=None)
            if fewer is not None:
                layers = tuple(
                    replace(one, kv_heads=min(one.kv_heads, fewer)) for one in self.shape.layers
                )
                other = far(replace(self.shape, layers=layers))
                line += f"; with {fewer} KV head{'s' * (fewer > 1)}, {other:,}"
                break
        return [line]

    def latency_line(self, seconds: float) -> str:
        """How far a prefill of so many seconds reaches, from the fitted power.

        Raises:
            BadInput: nothing was measured, or the shortest context takes longer.
        """
        power = self.growths()["prefill"]
        if power is None:
            raise BadInput("profile: --latency needs at least two measured contexts")
        first = min(self.measured, key=lambda m: m.context)
        if seconds < first.prefill:
            raise BadInput(
                f"profile: a prefill of {first.context:,} tokens takes {first.prefill:.3g} s "
                f"already, and --latency is {seconds:.3g} s"
            )
        found = growth.reach(power, seconds)
        far = "no context" if found is None else f"about {found:,.0f} tokens"
        longest = max(m.context for m in self.measured)
        beyond = " (beyond what was measured)" if found is not None and found > longest else ""
        return f"a prefill of {seconds:.3g} s: {far}{beyond}"

    def roofline(self, m: Measured) -> tuple[float, float | None] | None:
        """(the prefill's part of the matrix rate, the decode step's part of the read rate)."""
        if self.machine is None:
            return None
        c = next(c for c in self.counted if c.context == m.context)
        flops = (c.attention_flops + c.other_flops) / m.prefill / self.machine.flops
        read = None if m.decode is None else c.decode_bytes / m.decode / self.machine.read
        return flops, read

    def records(self) -> list[Record]:
        """A record of kind "cost" a context, and one of kind "growth"."""
        found = []
        by_context = {m.context: m for m in self.measured}
        for c in self.counted:
            values: dict[str, Any] = {
                **c.to_dict(), "batch": self.batch, "dtype": self.dtype, "cache": self.cache,
                "parameters": self.shape.parameters, "layers": len(self.shape.layers),
                "beyond_trained": c.context in self.beyond,
            }  # fmt: skip
            m = by_context.get(c.context)
            if m is not None:
                limit = self.roofline(m)
                values |= {
                    "prefill_seconds": m.prefill, "prefill_spread": m.spread,
                    "attention_share": m.attention_share, "decode_seconds": m.decode,
                    "measured_peak": m.peak, "measured_kv_bytes": m.kv_bytes,
                    "of_matrix_rate": None if limit is None else limit[0],
                    "of_read_rate": None if limit is None else limit[1],
                }  # fmt: skip
            if self.quality is not None:
                values |= {
                    "perplexity": getattr(self.quality, self.cache),
                    "perplexity_plain": self.quality.plain,
                    "perplexity_tokens": self.quality.tokens,
                }
            found.append(Record("cost", {"model": self.name, "context": c.context}, values))
        lines = [*self.growth_lines(), *self.notes()]
        if lines:
            found.append(Record("growth", {"model": self.name}, {"lines": lines}))
        return found


def share_out(
    shapes: Sequence[Shape], contexts: Sequence[int], beyond_trained: bool = False
) -> list[list[int]]:
    """The contexts of each shape, ascending: all, or those within its positions where only other
    shapes have more.

    Raises:
        BadInput: no context, one below 1, one that no shape has positions for, or a shape with
            positions for none, and not `beyond_trained`.
    """
    if not contexts or min(contexts) < 1:
        raise BadInput("profile: contexts must be at least 1")
    wanted = sorted(set(contexts))
    if beyond_trained:
        return [wanted for _ in shapes]
    fitting = [[n for n in wanted if s.positions is None or n <= s.positions] for s in shapes]
    for n in wanted:
        if not any(n in fit for fit in fitting):
            _refuse(max(shapes, key=lambda shape: shape.positions or 0), n)
    for shape, fit in zip(shapes, fitting, strict=True):
        if not fit:
            _refuse(shape, wanted[0])
    return fitting


def _refuse(shape: Shape, context: int) -> NoReturn:
    raise BadInput(
        f"profile: {shape.name} was made for {shape.positions:,} positions and the context is "
        f"{context:,}; --beyond-trained runs it all the same, and marks it"
    )


def profile(
    shape: Shape,
    contexts: Sequence[int],
    *,
    source: str | None = None,
    batch: int = 1,
    dtype: str = "float32",
    device: str = "cpu",
    attention: str = "headwise",
    cache: str = "plain",
    machine: Machine | None = None,
    beyond_trained: bool = False,
    say: Say = lambda done, total, line: None,
) -> Profile:
    """Count, and measure where `source` names a model that `headwise.models.load` loads.

    Raises:
        BadInput: no context, one below 1, or one beyond the model's positions without
            `beyond_trained`.
        HeadwiseError: a measuring process stopped with an error.
    """
    if batch < 1:
        raise BadInput(f"profile: batch must be at least 1, got {batch}")
    (lengths,) = share_out([shape], contexts, beyond_trained)
    cached = "int8" if cache == "int8" else None
    counted = [cost(shape, n, batch=batch, dtype=dtype, cache_dtype=cached) for n in lengths]
    found = Profile(shape, counted, batch, dtype, cache, machine=machine)
    if source is None:
        return found
    for one in measure(
        source, [c.context for c in counted], batch=batch, dtype=dtype, device=device,
        attention=attention, cache=cache, say=say,
    ):  # fmt: skip
        if isinstance(one, OutOfMemory):
            found.stopped = one.context
        else:
            found.measured.append(one)
    return found


def to_csv(profiles: Sequence[Profile]) -> str:
    """All numbers of the "cost" records, a line a model and context."""
    rows = [{**r.where, **r.values} for p in profiles for r in p.records() if r.kind == "cost"]
    names = list(dict.fromkeys(name for row in rows for name in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def words(size: float) -> str:
    """Bytes in the binary unit that suits them: "16 GiB", "1.5 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"
