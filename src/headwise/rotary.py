"""Rotary position embedding, and the four ways in use to stretch it over a longer context."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


def _wide(device: torch.device) -> torch.dtype:
    """The dtype of angles: float64, save on MPS, which has none.

    In float32 an angle at position p is off by about p * 6e-8, which at 32k tokens is 2e-3 radians:
    more than every other rounding in a float32 layer together. The table is small, so the cost is
    too.
    """
    return torch.float32 if device.type == "mps" else torch.float64


def check_positions(who: str, positions: Tensor) -> None:
    if positions.dtype.is_floating_point or positions.dtype == torch.bool or positions.is_complex():
        raise TypeError(
            f"{who}: positions must be integers, got {positions.dtype}; half types cannot even "
            "count past 256"
        )
    if positions.dim() not in (1, 2):
        raise ValueError(
            f"{who}: positions must be (length,) or (batch, length), got {tuple(positions.shape)}"
        )


class Scaling(Protocol):
    """A way to stretch rotary frequencies over a longer context."""

    #: True where the frequencies depend on the longest position of the call.
    @property
    def dynamic(self) -> bool: ...

    def stretch(
        self, exponents: Tensor, base: float, dim: int, longest: Tensor | None
    ) -> tuple[Tensor, float]:
        """Frequencies (dim / 2,) in radians per token, and the factor that multiplies cos and sin.

        `exponents` is 0/dim, 2/dim, 4/dim …; `longest` is the number of positions in play, (1,), or
        (B, 1) where rows differ: then frequencies are (B, dim / 2).
        """
        ...


def _check_factor(who: str, factor: float) -> None:
    if not (math.isfinite(factor) and factor >= 1):
        raise ValueError(f"{who}: factor={factor} must be a finite number of at least 1")


@dataclass(frozen=True)
class LinearScaling:
    """Positions divided by `factor` (Chen et al. 2023, arXiv 2306.15595, eq. 4)."""

    factor: float

    def __post_init__(self) -> None:
        _check_factor("LinearScaling", self.factor)

    @property
    def dynamic(self) -> bool:
        return False

    def stretch(
        self, exponents: Tensor, base: float, dim: int, longest: Tensor | None
    ) -> tuple[Tensor, float]:
        return base**-exponents / self.factor, 1.0


@dataclass(frozen=True)
class NTKScaling:
    """A larger base: low frequencies stretch by `factor`, high ones stay.

    Source: bloc97 2023; Peng et al. 2023, arXiv 2309.00071, definition 1.

    Without `original_length` the base is base * factor ** (dim / (dim - 2)). With it the stretch
    grows with the text ("dynamic NTK", as in transformers, but by each row's own length): nothing
    up to `original_length` tokens, then for n tokens
    base * (factor * n / original_length - (factor - 1)) ** (dim / (dim - 2)).

    A dynamic base and a cache of rotated keys contradict each other: the old keys were turned with
    the old base. `MultiHeadAttention` refuses the pair.
    """

    factor: float
    original_length: int | None = None

    def __post_init__(self) -> None:
        _check_factor("NTKScaling", self.factor)

    @property
    def dynamic(self) -> bool:
        return self.original_length is not None

    def stretch(
        self, exponents: Tensor, base: float, dim: int, longest: Tensor | None
    ) -> tuple[Tensor, float]:
        if dim <= 2:
            raise ValueError(f"NTKScaling: needs more than 2 rotated features a head, got {dim}")
        grow: Tensor | float = self.factor
        if self.original_length is not None and longest is not None:
            ratio = longest.to(exponents.dtype) / self.original_length
            grow = self.factor * ratio.clamp(min=1.0) - (self.factor - 1)
        elif self.original_length is not None:
            grow = 1.0
        power = dim / (dim - 2)
        # (base * grow^power) ** -e, written so that a tensor `grow` needs no tensor base.
        return base**-exponents * grow ** (-power * exponents), 1.0


@dataclass(frozen=True)
class YaRNScaling:
    """YaRN: high frequencies kept, low ones divided by `factor`, a ramp between (Peng et al. 2023,
    arXiv 2309.00071, section 3.2), and cos and sin times 0.1 ln(factor) + 1 (section 3.4).

    `beta_fast`, `beta_slow`: turns within `original_length` above which a frequency is kept, below
    which it is stretched. `truncate` rounds the ends of the ramp to whole features, as the authors'
    code does. `attention_factor` replaces 0.1 ln(factor) + 1.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        _check_factor("YaRNScaling", self.factor)

    @property
    def dynamic(self) -> bool:
        return False

    def stretch(
        self, exponents: Tensor, base: float, dim: int, longest: Tensor | None
    ) -> tuple[Tensor, float]:
        def feature(turns: float) -> float:
            return (
                dim * math.log(self.original_length / (turns * 2 * math.pi)) / (2 * math.log(base))
            )

        low, high = feature(self.beta_fast), feature(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        if low == high:
            high += 0.001
        index = exponents * dim / 2
        stretched = ((index - low) / (high - low)).clamp(0, 1)
        plain = base**-exponents
        frequencies = plain / self.factor * stretched + plain * (1 - stretched)
        magnitude = self.attention_factor
        if magnitude is None:
            magnitude = 0.1 * math.log(self.factor) + 1.0
        return frequencies, magnitude


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's piecewise stretch (Llama 3 model card; `rope_type: llama3` in transformers).

    Wavelengths over original_length / low_frequency are divided by `factor`, those under
    original_length / high_frequency stay, those between are blended.
    """

    factor: float
    original_length: int
    low_frequency: float = 1.0
    high_frequency: float = 4.0

    def __post_init__(self) -> None:
        _check_factor("Llama3Scaling", self.factor)
        if not self.high_frequency > self.low_frequency:
            raise ValueError(
                f"Llama3Scaling: high_frequency={self.high_frequency} must exceed "
                f"low_frequency={self.low_frequency}"
            )

    @property
    def dynamic(self) -> bool:
        return False

    def stretch(
        self, exponents: Tensor, base: float, dim: int, longest: Tensor | None
    ) -> tuple[Tensor, float]:
        plain = base**-exponents
        turns = self.original_length * plain / (2 * math.pi)
        kept = ((turns - self.low_frequency) / (self.high_frequency - self.low_frequency)).clamp(
            0, 1
        )
        return plain * kept + plain / self.factor * (1 - kept), 1.0


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding (Su et al. 2021, arXiv 2104.09864, eq. 34).

    Feature pair m of a head turns by position * base ** (-2m / dim).

    base            the slowest pair turns once in about 2 pi * base tokens
    dim, fraction   how many leading features of a head turn (partial rotary): a number, or a share
                    of the head; the rest pass unchanged. Both left alone: all of them
    interleaved     False: pair m is features (m, m + dim/2), as in Llama, GPT-NeoX and most
                    checkpoints on the hub; True: features (2m, 2m + 1), as in the paper, GPT-J and
                    Llama's own code
    scaling         LinearScaling, NTKScaling, YaRNScaling, Llama3Scaling or None

    It holds no tensors, so `model.to(torch.bfloat16)` cannot round its frequencies.
    """

    base: float = 10000.0
    dim: int | None = None
    fraction: float = 1.0
    interleaved: bool = False
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.base) and self.base > 1):
            raise ValueError(f"Rotary: base={self.base} must be a finite number above 1")
        if not 0 < self.fraction <= 1:
            raise ValueError(f"Rotary: fraction={self.fraction} must lie in (0, 1]")
        if self.dim is not None and self.fraction != 1.0:
            raise ValueError(
                f"Rotary: dim={self.dim} and fraction={self.fraction} both say how many features "
                "turn; pass one"
            )

    def rotated(self, head_dim: int) -> int:
        """How many features of a head turn. ValueError if that is odd or more than the head has."""
        dim = int(head_dim * self.fraction) if self.dim is None else self.dim
        if dim <= 0 or dim % 2 or dim > head_dim:
            raise ValueError(
                f"Rotary: {dim} features to turn must be even, above 0 and at most "
                f"head_dim={head_dim}"
            )
        return dim

    def frequencies(
        self,
        head_dim: int,
        *,
        longest: Tensor | int | None = None,
        device: torch.device | str = "cpu",
    ) -> tuple[Tensor, float]:
        """Radians per token, (rotated / 2,), and the factor on cos and sin.

        `longest` (number of positions in play, or a tensor (B, 1)) matters to dynamic scaling only.
        """
        dim = self.rotated(head_dim)
        device = torch.device(device)
        exponents = torch.arange(0, dim, 2, dtype=_wide(device), device=device) / dim
        if self.scaling is None:
            return self.base**-exponents, 1.0
        if isinstance(longest, int):
            longest = torch.tensor(longest, device=device)
        return self.scaling.stretch(exponents, self.base, dim, longest)

    def table(self, positions: Tensor, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin, each (1 or B, 1, L, rotated / 2), for (L,) or (B, L) integer positions.

        Angles are float64 (float32 on MPS); the table is float64 for float64 `dtype`, else float32.
        """
        check_positions("Rotary", positions)
        dynamic = self.scaling is not None and self.scaling.dynamic and positions.numel() > 0
        # Each row's own length: in a batch, a longer neighbour must not change a row.
        longest = positions.amax(-1, keepdim=True) + 1 if dynamic else None
        frequencies, magnitude = self.frequencies(
            head_dim, longest=longest, device=positions.device
        )
        if frequencies.dim() == 2:
            frequencies = frequencies[:, None]
        angles = positions.to(frequencies.dtype)[..., None] * frequencies
        angles = angles[None, None] if positions.dim() == 1 else angles[:, None]
        keep = torch.float64 if dtype == torch.float64 else torch.float32
        return (angles.cos() * magnitude).to(keep), (angles.sin() * magnitude).to(keep)

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x (B, H, L, D) turned by a `table`; computed in the table's dtype, returned in x's."""
        dim = 2 * cos.shape[-1]
        turning, rest = x[..., :dim].to(cos.dtype), x[..., dim:]
        if self.interleaved:
            a, b = turning[..., 0::2], turning[..., 1::2]
            turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
        else:
            a, b = turning[..., : dim // 2], turning[..., dim // 2 :]
            turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        turned = turned.to(x.dtype)
        return turned if rest.shape[-1] == 0 else torch.cat((turned, rest), -1)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """x (B, H, L, D) turned at (L,) or (B, L) integer positions."""
        return self.turn(x, *self.table(positions, x.shape[-1], x.dtype))
