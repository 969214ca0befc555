"""Images of other sizes: the nearest elements, interpolation between neighbours, means and maxima over regions of unequal sizes.

All read along one axis after the other, at positions that are known when the sizes are, and are computed in each call otherwise:

    nearest    out[i] = x[floor(i * n / m)], exact: x[floor((i + 1/2) * n / m)]
    linear     out[i] = (1 - f[i]) * x[low[i]] + f[i] * x[low[i] + 1], cubic: of four neighbours
    regions    out[i] = mean of x[floor(i * n / m)], .. x[ceil((i + 1) * n / m) - 1]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ...diagnostics.errors import Unsupported
from .. import build as b
from ..dims import Dim, Shape, divides, floordiv
from ..ir import Value
from ..types import DType, i64
from . import places, windows
from .call import Call, Row, opmath

aten = torch.ops.aten
_MANY_CHANNELS = 16  # from so many on vectors are of neighbouring channels, below of neighbouring columns


def _nearest_places(n: int, m: int, exact: bool, scale: float | None) -> torch.Tensor:
    """Where each result is read, in the arithmetic of ATen/native/UpSample.h."""
    step = torch.tensor(1.0 / scale if scale is not None and scale > 0 else n / m, dtype=torch.float32)
    at = torch.arange(m, dtype=torch.float32)
    return (step * (at + 0.5 if exact else at)).to(torch.int64).clamp(max=n - 1)


def _times(n: Dim, m: Dim, exact: bool, scale: float | None) -> int:
    """How many results in a row are one and the same of n elements, 0 where that differs or is not known."""
    if isinstance(n, int) and isinstance(m, int):
        times = m // n if n and m % n == 0 else 0
        return times if times and torch.equal(_nearest_places(n, m, exact, scale), torch.arange(m) // times) else 0
    times = int(scale) if scale is not None and scale >= 1 and math.frexp(scale)[0] == 0.5 else 0  # n / m is exact for powers of two
    return times if times and m == n * times else 0


def _one(n: Dim, m: Dim, exact: bool, scale: float | None) -> Value:
    """The element that each result is."""
    if isinstance(n, int) and isinstance(m, int):
        return _index(_nearest_places(n, m, exact, scale))
    return places.nearest(n, m, exact, scale)


def _nearest_of(c: Call, x: Value, scales: Sequence[float | None], rank: int, exact: bool) -> Value:
    """A view where every element is repeated as often: nothing of it is stored."""
    image = windows.channels_last(x)
    for axis, (m, scale) in enumerate(zip(c.shape[-rank:], scales, strict=True), 1):
        n = image.shape[axis]
        times = _times(n, m, exact, scale)
        if times > 1:
            before, after = image.shape[: axis + 1], image.shape[axis + 1 :]
            image = b.expand(b.reshape(image, (*before, 1, *after)), (*before, times, *after))
            image = b.reshape(image, (*before[:-1], m, *after))
        elif not times:
            image = b.take(image, _one(n, m, exact, scale), axis)
    return windows.channels_first(image)


def _nearest(rank: int, exact: bool) -> Row:
    """upsample_nearest and _upsample_nearest_exact with a size and perhaps scales."""
    return lambda c, x, size, *scales: _nearest_of(c, x, scales or (None,) * rank, rank, exact)


def _nearest_vec(rank: int, exact: bool) -> Row:
    """The same with a list of scales."""
    return lambda c, x, size, scales: _nearest_of(c, x, scales or (None,) * rank, rank, exact)


def _sizes_of(x: Value, out: Shape, rank: int) -> list[tuple[Dim, Dim]]:
    """(elements, results) of each spatial axis. Raises Unsupported where there are none."""
    pairs = list(zip(x.shape[-rank:], out[-rank:], strict=True))
    if any(0 in pair for pair in pairs):
        raise Unsupported(f"resizing from {x.shape[-rank:]} to {out[-rank:]}")
    return pairs


def _in_turn(x: Value, out: Shape, scales: Sequence[float | None]) -> list[tuple[int, Dim, Dim, float | None]]:
    """(axis of the channels-last image, elements, results, scale) in the order to go along them. Where vectors are of columns, rows
    are read as they lie, and columns are looked up one by one: of the image that has fewer rows, before or after."""
    found = [(axis, n, m, scale) for axis, ((n, m), scale) in enumerate(zip(_sizes_of(x, out, len(scales)), scales, strict=True), 1)]
    _, n, m, scale = found[0]
    grows = m > n if isinstance(n, int) and isinstance(m, int) else scale is None or scale > 1
    few = isinstance(x.shape[1], int) and x.shape[1] < _MANY_CHANNELS
    return found[::-1] if grows and few else found


def along(x: Value, axis: int, values: torch.Tensor | Value) -> Value:
    """Numbers for the positions (and what comes behind them) along one axis of x, ready to be broadcast."""
    made = b.constant(values) if isinstance(values, torch.Tensor) else values
    return b.reshape(made, (*made.shape, *(1 for _ in range(x.tensor.rank - axis - 1))))


def _index(at: torch.Tensor) -> Value:
    """Positions of results, counted where they go on by equal steps, or by one after so many results, between two ends; else a table."""
    m, least, most = len(at), int(at.min()), int(at.max())
    step = int(at[-1] - at[0]) // max(m - 1, 1)
    if torch.equal(at, at[0] + torch.arange(m) * step):
        return b.iota(m, i64, int(at[0]), step)
    turns = (at.diff() != 0).nonzero().flatten() + 1  # results before a new position
    times = int(turns[1] - turns[0]) if len(turns) > 1 else m
    start = -int(turns[0]) % times
    counted = (torch.arange(m) + start) // times
    counted += at[turns[0]] - counted[turns[0]]
    if not torch.equal(at, counted.clamp(least, most)):
        return b.constant(at)
    steps = b.add(b.floordiv(b.iota(m, i64, start), times), int(at[turns[0]]) - (int(turns[0]) + start) // times)
    return b.minimum(b.maximum(steps, least), most)


def _places(n: int, m: int, aligned: bool, scale: float | None, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(lower neighbour, fraction of the way to the next one) of each result."""
    place = _place(n, m, aligned, scale, dtype).clamp(min=0)
    low = place.to(torch.int64).clamp(max=n - 1)
    return low, (place - low).clamp(0, 1)


def _place(n: int, m: int, aligned: bool, scale: float | None, dtype: torch.dtype) -> torch.Tensor:
    """Where each result lies among the elements, in the arithmetic of ATen/native/UpSample.h."""
    at = torch.arange(m, dtype=dtype)
    if aligned:
        return at * (torch.tensor(n - 1, dtype=dtype) / (m - 1) if m > 1 else 0.0)
    step = torch.tensor(1.0 / scale if scale is not None and scale > 0 else n / m, dtype=dtype)
    return step * (at + 0.5) - 0.5


def _interpolated(c: Call, x: Value, aligned: bool, scales: Sequence[float | None], rank: int) -> Value:
    if not x.dtype.is_float:
        raise Unsupported(f"resizing of {x.type}")
    image = b.cast(windows.channels_last(x), opmath(x.dtype))
    for axis, n, m, scale in _in_turn(x, c.shape, scales):
        if n != m:
            image = _between(image, axis, m, aligned, scale)
    return windows.channels_first(b.cast(image, c.dtype))


def _between(image: Value, axis: int, m: Dim, aligned: bool, scale: float | None) -> Value:
    """Interpolated linearly along one axis."""
    n = image.shape[axis]
    if isinstance(n, int) and isinstance(m, int):
        low, part = _places(n, m, aligned, scale, image.dtype.torch)
        first, second = (b.take(image, _index(at), axis) for at in (low, (low + 1).clamp(max=n - 1)))
        return b.add(b.mul(first, along(image, axis, 1 - part)), b.mul(second, along(image, axis, part)))
    at, way = places.between(n, m, aligned, scale, image.dtype)
    first, second = b.take(image, at, axis), b.take(image, places.within(b.add(at, 1), n), axis)
    return b.add(b.mul(first, along(image, axis, b.sub(1.0, way))), b.mul(second, along(image, axis, way)))


def _cubic(x: torch.Tensor) -> torch.Tensor:
    """Weights of the four neighbours, [m, 4], for the fractions of the way from the second to the third (Keys, 1981, with a = -3/4)."""
    a = -0.75

    def near(x: torch.Tensor) -> torch.Tensor:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: torch.Tensor) -> torch.Tensor:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    return torch.stack((far(x + 1), near(x), near(1 - x), far(2 - x)), -1)


def _four(n: Dim, m: Dim, aligned: bool, scale: float | None, dtype: DType) -> list[tuple[Value, torch.Tensor | Value]]:
    """The four neighbours of each result, and their weights."""
    if isinstance(n, int) and isinstance(m, int):
        place = _place(n, m, aligned, scale, dtype.torch)
        weights, low = _cubic(place - place.floor()), place.floor().to(torch.int64)
        return [(_index((low + t).clamp(0, n - 1)), weights[:, t + 1]) for t in range(-1, 3)]
    at = places.place(n, m, aligned, scale, dtype)
    first = b.cast(b.floor(at), i64)
    return [(places.within(b.add(first, t), n), weight) for t, weight in enumerate(places.cubic(b.sub(at, b.floor(at))), -1)]


def _cubically(c: Call, x: Value, aligned: bool, scales: Sequence[float | None]) -> Value:
    if not x.dtype.is_float:
        raise Unsupported(f"resizing of {x.type}")
    image = b.cast(windows.channels_last(x), opmath(x.dtype))
    for axis, n, m, scale in _in_turn(x, c.shape, scales):
        near = _four(n, m, aligned, scale, image.dtype)
        taps = [b.mul(b.take(image, at, axis), along(image, axis, weight)) for at, weight in near]
        image = b.add(b.add(b.add(taps[0], taps[1]), taps[2]), taps[3])
    return windows.channels_first(b.cast(image, c.dtype))


def _linear(rank: int) -> Row:
    """upsample_linear1d, _bilinear2d, _trilinear3d with a size and perhaps scales."""
    return lambda c, x, size, aligned, *scales: _interpolated(c, x, aligned, scales, rank)


def _linear_vec(rank: int) -> Row:
    """The same with a list of scales."""
    return lambda c, x, size, aligned, scales: _interpolated(c, x, aligned, scales or (None,) * rank, rank)


def _parts(image: Value, axis: int, m: Dim) -> tuple[Value, Value, Value]:
    """The m regions along one axis as an axis of regions and one of their elements, of which some are beyond the end of a region and repeat
    its last one; then which elements are within, and how many those are, ready to be broadcast."""
    n = image.shape[axis]
    if isinstance(n, int) and isinstance(m, int):
        first, count, offset = _region(n, m)
        taken = b.take(image, b.constant(first[:, None] + torch.minimum(offset, count[:, None] - 1)), axis)
        return taken, along(taken, axis + 1, offset < count[:, None]), along(taken, axis + 1, count[:, None])
    start, number, beyond = places.regions(n, m)
    number = b.unsqueeze(number, 1)
    taken = b.take(image, b.add(b.unsqueeze(start, 1), b.minimum(beyond, b.sub(number, 1))), axis)
    return taken, along(taken, axis + 1, b.lt(beyond, number)), along(taken, axis + 1, number)


def _windows(pairs: Sequence[tuple[Dim, Dim]]) -> list[int] | None:
    """How many elements each result is of, where that is a number and the same for all."""
    sizes = [floordiv(n, m) if divides(m, n) else 0 for n, m in pairs]
    known = [size for size in sizes if isinstance(size, int) and size]
    return known if len(known) == len(pairs) else None


def _region(n: int, m: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(first element, how many, offsets up to the largest number) of the m regions that n elements are in."""
    first = torch.arange(m) * n // m
    count = -(-(torch.arange(m) + 1) * n // m) - first
    return first, count, torch.arange(int(count.max()))


def _regions(rank: int) -> Row:
    """Adaptive average pooling: windows where all are of one size, else the positions of each region, with some that do not count."""

    def row(c: Call, x: Value, out: Sequence[Dim]) -> Value:
        pairs = _sizes_of(x, c.shape, rank)
        if (sizes := _windows(pairs)) is not None:
            return windows.average(rank)(c, x, sizes)  # type: ignore[return-value]
        image = b.cast(windows.image_of(x, rank), opmath(x.dtype))
        for axis, (_, m) in enumerate(pairs, 1):
            taken, inside, count = _parts(image, axis, m)
            summed = b.reduce(b.where(inside, taken, 0.0), "sum", axis + 1, keepdim=True)
            mean = b.div(summed, b.cast(count, image.dtype))
            image = b.reshape(mean, (*mean.shape[: axis + 1], *mean.shape[axis + 2 :]))
        return b.cast(b.reshape(windows.channels_first(image), c.shape), c.dtype)

    return row


def _largest(rank: int) -> Row:
    """Adaptive maximum pooling: smaller regions have their last element several times."""

    def row(c: Call, x: Value, out: Sequence[Dim]) -> tuple[Value | None, ...]:
        c.need_only(0)
        pairs = _sizes_of(x, c.element(0).shape, rank)
        if (sizes := _windows(pairs)) is not None:
            return windows.largest(rank)(c, x, sizes)  # type: ignore[return-value]
        image = windows.image_of(x, rank)
        for axis, (_, m) in enumerate(pairs, 1):
            image = b.reduce(_parts(image, axis, m)[0], "max", axis + 1)
        return b.reshape(windows.channels_first(image), c.element(0).shape), None

    return row


ROWS: dict[Any, Row] = {
    aten.upsample_nearest1d.default: _nearest(1, False),
    aten.upsample_nearest2d.default: _nearest(2, False),
    aten.upsample_nearest3d.default: _nearest(3, False),
    aten.upsample_nearest1d.vec: _nearest_vec(1, False),
    aten.upsample_nearest2d.vec: _nearest_vec(2, False),
    aten.upsample_nearest3d.vec: _nearest_vec(3, False),
    aten._upsample_nearest_exact1d.default: _nearest(1, True),
    aten._upsample_nearest_exact2d.default: _nearest(2, True),
    aten._upsample_nearest_exact3d.default: _nearest(3, True),
    aten._upsample_nearest_exact1d.vec: _nearest_vec(1, True),
    aten._upsample_nearest_exact2d.vec: _nearest_vec(2, True),
    aten._upsample_nearest_exact3d.vec: _nearest_vec(3, True),
    aten.upsample_linear1d.default: _linear(1),
    aten.upsample_bilinear2d.default: _linear(2),
    aten.upsample_trilinear3d.default: _linear(3),
    aten.upsample_linear1d.vec: _linear_vec(1),
    aten.upsample_bilinear2d.vec: _linear_vec(2),
    aten.upsample_trilinear3d.vec: _linear_vec(3),
    aten.upsample_bicubic2d.default: lambda c, x, size, aligned, *scales: _cubically(c, x, aligned, scales),
    aten.upsample_bicubic2d.vec: lambda c, x, size, aligned, scales: _cubically(c, x, aligned, scales or (None, None)),
    aten._adaptive_avg_pool2d.default: _regions(2),
    aten._adaptive_avg_pool3d.default: _regions(3),
    aten.adaptive_max_pool2d.default: _largest(2),
    aten.adaptive_max_pool3d.default: _largest(3),
}
