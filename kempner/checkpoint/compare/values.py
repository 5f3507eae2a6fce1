"""Compares two tensors of one shape, which may be of different dtypes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

_SLAB_ELEMENTS = 1 << 22
"""Elements that are compared at once: what that takes beside the tensors is some 200 MB at most."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Difference:
    """How far two tensors are apart.

    Of `elements`, `different` have other bits once both tensors are of the dtype `compared_in`, and
    the first of them in row-major order is at the index `first`. Rounding to that dtype changed
    `rounded` elements of the wider tensor. `max_abs` is the largest |a - b|, `max_rel` the largest
    |a - b| / max(|a|, |b|), both computed in float64 from the values in `compared_in`; the
    `not_finite` elements of which one is infinite or no number count in neither.
    """

    elements: int
    compared_in: str
    different: int = 0
    rounded: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    not_finite: int = 0
    first: tuple[int, ...] | None = None


def common_dtype(a: torch.dtype, b: torch.dtype) -> torch.dtype | None:
    """The dtype in which tensors of these two are compared: the narrower one.

    That is the one with fewer bits of mantissa, or with the smaller range where both have as many.
    None if the two are different and one of them is no floating-point type: then no element of one
    stands for an element of the other.
    """
    if a == b:
        return a
    if not (a.is_floating_point and b.is_floating_point):
        return None
    return max(a, b, key=lambda dtype: (torch.finfo(dtype).eps, -torch.finfo(dtype).max))


def difference(a: Tensor, b: Tensor) -> Difference:
    """Compare two tensors of one shape, with a `common_dtype`.

    Elements of one dtype are equal if their bits are: 0 and -0 differ, and a NaN equals the same
    NaN. Elements of two dtypes are equal if they are after rounding to the narrower one, where any
    NaN equals any other.
    """
    dtype = common_dtype(a.dtype, b.dtype)
    assert dtype is not None
    found = Difference(a.numel(), str(dtype).removeprefix("torch."))
    flat_a, flat_b = a.reshape(-1), b.reshape(-1)
    for start in range(0, a.numel(), _SLAB_ELEMENTS):
        piece = slice(start, start + _SLAB_ELEMENTS)
        found = _with_slab(found, flat_a[piece], flat_b[piece], dtype, start, a.shape)
    return found


def _with_slab(
    found: Difference, a: Tensor, b: Tensor, dtype: torch.dtype, start: int, shape: torch.Size
) -> Difference:
    one, other = a.to(dtype), b.to(dtype)
    differs = _differs(one, other)
    if a.dtype != b.dtype:
        differs &= ~(_is_nan(one) & _is_nan(other))
        found = replace(found, rounded=found.rounded + _changed(a, one) + _changed(b, other))
    count = int(differs.sum())
    if not count:
        return found
    first = found.first
    if first is None:
        position = start + int(differs.to(torch.uint8).argmax())
        first = tuple(int(index) for index in np.unravel_index(position, tuple(shape)))
    x, y = _numbers(one[differs]), _numbers(other[differs])
    finite = x.isfinite() & y.isfinite()
    x, y = x[finite], y[finite]
    apart = (x - y).abs()
    size = torch.maximum(x.abs(), y.abs()).clamp_min(torch.finfo(torch.float64).tiny)
    return replace(
        found,
        different=found.different + count,
        max_abs=max(found.max_abs, _largest(apart)),
        max_rel=max(found.max_rel, _largest(apart / size)),
        not_finite=found.not_finite + count - len(x),
        first=first,
    )


def _differs(a: Tensor, b: Tensor) -> Tensor:
    """Where two tensors of one dtype have other bits."""
    if a.dtype == torch.complex128:  # which no integer is as wide as
        return _differs(torch.view_as_real(a), torch.view_as_real(b)).any(-1)
    bits = _BITS[a.element_size()]
    return a.view(bits) != b.view(bits)


def _changed(before: Tensor, after: Tensor) -> int:
    """How many elements are not what they were before they were rounded."""
    if before.dtype == after.dtype:
        return 0
    return int(((after.to(before.dtype) != before) & ~_is_nan(before)).sum())


def _is_nan(tensor: Tensor) -> Tensor:
    return tensor.float().isnan() if tensor.element_size() == 1 else tensor.isnan()


def _numbers(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _largest(values: Tensor) -> float:
    return float(values.max()) if len(values) else 0.0
