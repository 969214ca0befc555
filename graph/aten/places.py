"""Where the results of a resizing are read, for sizes that each call gives: `resize.py` has the same for sizes that are known.

All in the arithmetic of ATen/native/UpSample.h, so that results are read where PyTorch reads them.
"""

from __future__ import annotations

from .. import build as b
from ..dims import Dim, ceildiv
from ..ir import Value
from ..types import DType, f32, f64, i64


def _step(n: Dim, m: Dim, scale: float | None, dtype: DType) -> Value:
    """Elements from one result to the next."""
    if scale is not None and scale > 0:
        return b.full(1.0 / scale, dtype)
    return b.cast(b.div(b.scalar(n, f64), b.scalar(m, f64)), dtype)


def _counted(m: Dim, dtype: DType) -> Value:
    return b.cast(b.iota(m, i64), dtype)


def _last(n: Dim) -> Value:
    return b.scalar(n - 1, i64)


def within(at: Value, n: Dim) -> Value:
    """Positions among n elements, the nearest ones of those outside."""
    return b.maximum(b.minimum(at, _last(n)), 0)


def nearest(n: Dim, m: Dim, exact: bool, scale: float | None) -> Value:
    """The element of each result."""
    at = _counted(m, f32)
    return within(b.cast(b.mul(_step(n, m, scale, f32), b.add(at, 0.5) if exact else at), i64), n)


def place(n: Dim, m: Dim, aligned: bool, scale: float | None, dtype: DType) -> Value:
    """Where each result lies among the elements."""
    at = _counted(m, dtype)
    if aligned:
        between = b.maximum(b.scalar(m - 1, i64), 1)  # one result is the first element
        return b.mul(at, b.div(b.scalar(n - 1, dtype), b.cast(between, dtype)))
    return b.sub(b.mul(_step(n, m, scale, dtype), b.add(at, 0.5)), 0.5)


def between(n: Dim, m: Dim, aligned: bool, scale: float | None, dtype: DType) -> tuple[Value, Value]:
    """(lower neighbour, fraction of the way to the next one) of each result."""
    at = b.maximum(place(n, m, aligned, scale, dtype), 0.0)
    low = within(b.cast(at, i64), n)
    return low, b.minimum(b.maximum(b.sub(at, b.cast(low, dtype)), 0.0), 1.0)


def regions(n: Dim, m: Dim) -> tuple[Value, Value, Value]:
    """(first element, how many, offsets from the first, of as many as there may be) of the m regions that n elements are in."""
    at, size, parts = b.iota(m, i64), b.scalar(n, i64), b.scalar(m, i64)
    first = b.floordiv(b.mul(at, size), parts)
    end = b.floordiv(b.add(b.mul(b.add(at, 1), size), b.sub(parts, 1)), parts)
    return first, b.sub(end, first), b.iota(ceildiv(n, m) + 1, i64)


def cubic(way: Value) -> tuple[Value, Value, Value, Value]:
    """Weights of the four neighbours for the way from the second to the third (Keys, 1981, with a = -3/4)."""
    other = b.sub(1.0, way)
    return _far(b.add(way, 1.0)), _near(way), _near(other), _far(b.add(other, 1.0))


def _near(distance: Value) -> Value:
    """Keys' kernel for distances in [0, 1]."""
    a = -0.75
    return b.add(b.mul(b.mul(b.sub(b.mul(distance, a + 2), a + 3), distance), distance), 1.0)


def _far(distance: Value) -> Value:
    """Keys' kernel for distances in [1, 2]."""
    a = -0.75
    return b.sub(b.mul(b.add(b.mul(b.sub(b.mul(distance, a), 5 * a), distance), 8 * a), distance), 4 * a)
