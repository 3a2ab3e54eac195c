"""Bounds on rounding, from the dtype, the length of the sums and the size of the numbers."""

import math

import torch
from torch import Tensor


def rounding(dtype: torch.dtype, *, terms: int, size: float) -> float:
    """What sums of `terms` numbers, of results up to `size`, may be off by in `dtype`.

    Errors of a sum grow as the square root of its terms; 8 is room for the few such steps that
    follow one another in a layer.
    """
    return 8 * torch.finfo(dtype).eps * math.sqrt(terms) * size


def assert_near(
    got: Tensor, wanted: Tensor, *, terms: int, dtype: torch.dtype | None = None
) -> None:
    """`got` equals `wanted` up to the rounding of the coarser of their dtypes (or of `dtype`)."""
    assert got.shape == wanted.shape
    got, wanted = got.detach(), wanted.detach()
    assert bool(got.isfinite().all()) and bool(wanted.isfinite().all())
    dtype = max(got.dtype, wanted.dtype, key=lambda kind: torch.finfo(kind).eps)
    size = max(1.0, float(wanted.abs().max())) if wanted.numel() else 1.0
    bound = rounding(dtype, terms=terms, size=size)
    gap = float((got.double() - wanted.double()).abs().max()) if got.numel() else 0.0
    assert gap <= bound, f"off by {gap:.3g}, bound {bound:.3g}"
