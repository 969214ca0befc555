"""Smaller images whose elements are weighted means of all that they cover, as `antialias=True` of F.interpolate asks for; of larger ones
the means are of neighbours, as in `resize.py`.

Along one axis result i is at (i + 1/2) * step among the elements, and the weights of those around it are a filter that is stretched by the
step where that is more than 1; they sum to 1. All in the arithmetic of ATen/native/cpu/UpSampleKernel.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch

from ...diagnostics.errors import Unsupported
from .. import build as b
from ..dims import Dim
from ..ir import Value
from . import windows
from .call import Call, Row, opmath
from .resize import along

aten = torch.ops.aten
_WRITTEN_OUT = 16  # elements to a result


@dataclass(frozen=True)
class Filter:
    """reach: how far it goes to each side, in elements."""

    reach: int
    weight: Callable[[torch.Tensor], torch.Tensor]


def _triangle(x: torch.Tensor) -> torch.Tensor:
    return (1 - x.abs()).clamp(min=0)


def _cubic(x: torch.Tensor) -> torch.Tensor:
    """Keys, 1981, with a = -1/2."""
    a, x = -0.5, x.abs()
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((x - 5) * x + 8) * x * a - 4 * a
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))


LINEAR, CUBIC = Filter(1, _triangle), Filter(2, _cubic)


def _weights(n: int, m: int, aligned: bool, scale: float | None, kind: Filter, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """[m, taps]: which elements each result is a mean of, and their weights; taps beyond the last element have none."""
    if aligned:
        step = (n - 1) / (m - 1) if m > 1 else 0.0
    else:
        step = 1.0 / scale if scale is not None and scale > 0 else n / m
    step = float(torch.tensor(step, dtype=dtype))
    wide = max(step, 1.0)
    support = kind.reach * wide
    center = step * (torch.arange(m, dtype=dtype) + 0.5)
    first = (center - support + 0.5).to(torch.int64).clamp(min=0)
    count = (center + support + 0.5).to(torch.int64).clamp(max=n) - first
    taps = torch.arange(min(int(count.max()), math.ceil(support) * 2 + 1))
    weight = kind.weight((taps + first[:, None] - center[:, None] + 0.5) / wide) * (taps < count[:, None])
    return (first[:, None] + taps).clamp(max=n - 1), weight / weight.sum(1, keepdim=True)


def _resized_along(image: Value, axis: int, m: Dim, aligned: bool, scale: float | None, kind: Filter) -> Value:
    n = image.shape[axis]
    if not (isinstance(n, int) and isinstance(m, int) and n and m):
        raise Unsupported(f"resizing with weights of unknown sizes, from {n} to {m}")
    at, weight = _weights(n, m, aligned, scale, kind, image.dtype.torch)

    def weighted(at: torch.Tensor, weight: torch.Tensor) -> Value:
        return b.mul(b.take(image, b.constant(at), axis), along(image, axis, weight))

    if at.shape[1] > _WRITTEN_OUT:
        return b.reduce(weighted(at, weight), "sum", axis + 1)
    return reduce(b.add, map(weighted, at.t(), weight.t()))


def _resized(c: Call, x: Value, aligned: bool, scales: Sequence[float | None], kind: Filter) -> Value:
    if not x.dtype.is_float:
        raise Unsupported(f"resizing of {x.type}")
    image = b.cast(windows.channels_last(x), opmath(x.dtype))
    for axis in (1, 2):  # rows first, which are read as they lie, so that fewer columns are looked up
        if image.shape[axis] != c.shape[axis + 1]:
            image = _resized_along(image, axis, c.shape[axis + 1], aligned, scales[axis - 1], kind)
    return windows.channels_first(b.cast(image, c.dtype))


def _row(kind: Filter) -> Row:
    return lambda c, x, size, aligned, *scales: _resized(c, x, aligned, scales, kind)


def _vec(kind: Filter) -> Row:
    """The same with a list of scales."""
    return lambda c, x, size, aligned, scales: _resized(c, x, aligned, scales or (None, None), kind)


ROWS: dict[Any, Row] = {
    aten._upsample_bilinear2d_aa.default: _row(LINEAR),
    aten._upsample_bilinear2d_aa.vec: _vec(LINEAR),
    aten._upsample_bicubic2d_aa.default: _row(CUBIC),
    aten._upsample_bicubic2d_aa.vec: _vec(CUBIC),
}
