"""Images read at positions that are computed: grid_sample, as the sampled points of deformable attention and warped images need it.

    out[n, p, c] = sum over corners k of weight[n, p, k] * x[n, corner[n, p, k], c]

In channels-last order each corner is one row of a table, read where it lies, and weights are numbers of the row. What lies outside counts
as zero, or is read from the edge, or from the reflected image, in the arithmetic of ATen/native/GridSampler.h.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import product as combinations
from typing import Any

import torch

from ...diagnostics.errors import Unsupported
from .. import build as b
from ..dims import Dim, product
from ..ir import Value
from ..types import f32, f64, i64
from . import places, windows
from .call import Call, Row

aten = torch.ops.aten

_LINEAR, _NEAREST, _CUBIC = range(3)
_ZEROS, _BORDER, _REFLECTION = range(3)
# (position along one axis, a whole number as a float; weight, None for 1; whether it may be the one behind the last element, whose weight
# is 0: an infinity read there in its place would be NaN)
_Tap = tuple[Value, Value | None, bool]


def _unnormalized(at: Value, size: Dim, aligned: bool) -> Value:
    """[-1, 1] as positions: from the middle of the first element to that of the last one, or from edge to edge."""
    if aligned:
        return b.mul(b.add(at, 1.0), b.mul(b.scalar(size - 1, at.dtype), 0.5))
    return b.sub(b.mul(b.add(at, 1.0), b.mul(b.scalar(size, at.dtype), 0.5)), 0.5)


def _clipped(at: Value, size: Dim) -> Value:
    """NaN becomes 0, so that every number is a position."""
    return b.minimum(b.where(b.gt(at, 0.0), at, 0.0), b.scalar(size - 1, at.dtype))


def _reflected(at: Value, size: Dim, aligned: bool) -> Value:
    """Back and forth between the middles of the first and the last element, or between their outer edges. Between those of one element:
    NaN, for 0."""
    low, span = (0.0, size - 1) if aligned else (-0.5, size)
    away, twice = b.abs_(b.sub(at, low)), b.scalar(2 * span, at.dtype)
    rest = b.sub(away, b.mul(b.trunc(b.div(away, twice)), twice))
    return b.add(b.minimum(rest, b.sub(twice, rest)), low)


def _bounded(at: Value, size: Dim, padding: int, aligned: bool) -> Value:
    if padding == _ZEROS:
        return at
    return _clipped(_reflected(at, size, aligned) if padding == _REFLECTION else at, size)


def _taps(at: Value, size: Dim, mode: int, padding: int, aligned: bool) -> list[_Tap]:
    """Which positions along one axis count for a point, and how much."""
    at = _unnormalized(at, size, aligned)
    if mode == _CUBIC:
        first = b.floor(at)
        weights = places.cubic(b.sub(at, first))
        return [(_bounded(b.add(first, float(n - 1)), size, padding, aligned), weight, False) for n, weight in enumerate(weights)]
    at = _bounded(at, size, padding, aligned)
    if mode == _NEAREST:
        return [(b.round_(at), None, False)]
    first = b.floor(at)
    part = b.sub(at, first)
    return [(first, b.sub(1.0, part), False), (b.add(first, 1.0), part, True)]


def _read(table: Value, sizes: Sequence[Dim], corner: Sequence[_Tap], zeros: bool) -> Value:
    """The rows at one corner of every point, of table[n, position, c]; zeros where it lies outside, if they are asked for."""
    row: Value | None = None
    for (at, *_), size in zip(corner, sizes, strict=True):
        here = b.cast(_clipped(at, size), i64)
        row = here if row is None else b.add(b.mul(row, b.scalar(size, i64)), here)
    assert row is not None
    count, width, points = table.shape[0], table.shape[2], product(row.shape[1:])
    index = b.expand(b.reshape(row, (count, points, 1)), (count, points, width))
    taken = b.reshape(b.gather(table, index, 1), (*row.shape, width))
    sides = [b.ge(at, 0.0) for at, *_ in corner if zeros]
    sides += [b.le(at, b.scalar(size - 1, at.dtype)) for (at, _, behind), size in zip(corner, sizes, strict=True) if zeros or behind]
    if not sides:
        return taken
    inside = reduce(b.and_, sides)
    return b.where(b.unsqueeze(inside, inside.tensor.rank), taken, 0.0)


def _sampler(rank: int) -> Row:
    def row(c: Call, x: Value, grid: Value, mode: int, padding: int, aligned: bool) -> Value:
        sizes = x.shape[2:]
        if x.dtype not in (f32, f64) or 0 in (*c.shape, *sizes):
            raise Unsupported(f"sampling of {x.type}: an image in f32 or f64 is needed")
        table = b.reshape(windows.channels_last(x), (x.shape[0], product(sizes), x.shape[1]))
        points = [b.reshape(b.slice_(grid, rank + 1, rank - 1 - axis, 1), grid.shape[:-1]) for axis in range(rank)]
        taps = [_taps(at, size, mode, padding, aligned) for at, size in zip(points, sizes, strict=True)]
        out: Value | None = None
        for corner in combinations(*taps):
            taken = _read(table, sizes, corner, padding == _ZEROS)
            weights = [w for _, w, _ in reversed(corner) if w is not None]
            if weights:
                weight = reduce(b.mul, weights)
                taken = b.mul(taken, b.unsqueeze(weight, weight.tensor.rank))
            out = taken if out is None else b.add(out, taken)
        assert out is not None
        return windows.channels_first(out)

    return row


ROWS: dict[Any, Row] = {aten.grid_sampler_2d.default: _sampler(2), aten.grid_sampler_3d.default: _sampler(3)}
