"""Convolutions and pooling: contractions and reductions over windows.

The image is brought to channels-last order, [batch, spatial..., channels], where a window is a few long pieces of memory, and back. The
rules for views take the permutations between two such operations out again.

    convolution(x, w)  = linear over windows: sum over (k, c) of x[n, o * stride + k * dilation, c] * w[m, k, c]
    depthwise          = sum over k of x[n, o * stride + k * dilation, c] * w[k, c]
    pooling            = maximum or mean over k of x[n, o * stride + k * dilation, c]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from ...diagnostics.errors import Unsupported
from .. import build as b
from ..dims import Dim, Shape, floordiv, product
from ..ir import Value
from ..types import bf16, f16, f32
from .call import Call, Row, opmath

aten = torch.ops.aten
N = TypeVar("N", bound=Dim)


def channels_last(x: Value) -> Value:
    """[batch, channels, spatial...] as [batch, spatial..., channels]."""
    return b.permute(x, (0, *range(2, x.tensor.rank), 1))


def channels_first(x: Value) -> Value:
    """The inverse of `channels_last`."""
    return b.permute(x, (0, x.tensor.rank - 1, *range(1, x.tensor.rank - 1)))


def windows(x: Value, size: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Value:
    """[n, spatial..., c] as [n, windows..., window..., c], with as many window axes as there are numbers in `size`."""
    count = len(size)
    for axis, n, step, apart in zip(range(1, 2 * count, 2), size, stride, dilation, strict=True):
        if n == 1:
            x = b.unsqueeze(b.slice_(x, axis, 0, floordiv(x.shape[axis] - 1, step) + 1, step), axis + 1)
        else:
            x = b.window(x, axis, n, step, apart)
    return b.permute(x, (0, *range(1, 2 * count, 2), *range(2, 2 * count + 1, 2), 2 * count + 1))


def surrounded(x: Value, low: Sequence[Dim], high: Sequence[Dim], value: float = 0.0) -> Value:
    """x[n, spatial..., c] with so many elements before and after along each spatial axis."""
    amounts = (*zip(low, high, strict=True),)
    return x if not any(any(pair) for pair in amounts) else b.pad(x, ((0, 0), *amounts, (0, 0)), value)


def numbers(given: Sequence[N], count: int, default: Sequence[N] = ()) -> tuple[N, ...]:
    """An argument that may be one number for all axes, or empty for the default."""
    found = tuple(given) or tuple(default)
    return found * count if len(found) == 1 else found


def fixed(given: Sequence[Dim], count: int) -> tuple[int, ...]:
    """`numbers` that decide which loops there are. Raises Unsupported for those that come with the call."""
    found = tuple(n for n in given if isinstance(n, int))
    if len(found) != len(given):
        raise Unsupported("a convolution whose stride or dilation depends on sizes")
    return numbers(found, count)


def convolution(c: Call, x: Value, w: Value, bias: Value | None, stride: Sequence[Dim], padding: Sequence[Dim], dilation: Sequence[Dim],
                groups: Dim) -> Value:
    """x[N, C, spatial...], w[M, C / groups, window...], bias[M]."""
    size = window_of(x, w)
    rank = len(size)
    steps, edges, spread = fixed(stride, rank), numbers(padding, rank), fixed(dilation, rank)
    if groups == 1 and _by_channel(x, size, steps, edges, spread):
        out = b.linear(_patches_by_channel(x, size), b.reshape(w, (w.shape[0], product(w.shape[1:]))), bias)
        return channels_first(b.cast(out, c.dtype))
    if w.shape[1] == 1 != groups:
        out = _depthwise(windows(surrounded(channels_last(x), edges, edges), size, steps, spread), w, bias)
    else:
        out = dense(windows(surrounded(channels_last(x), edges, edges), size, steps, spread), w, bias, groups)
    return channels_first(b.cast(out, c.dtype))


def _by_channel(x: Value, size: Sequence[int], steps: Sequence[int], edges: Sequence[Dim], spread: Sequence[int]) -> bool:
    """Whether windows that touch, but do not overlap, are wider than the image is deep: each of them is read once, and its lines are the
    longest pieces of memory there are, such as those of the patches of a vision transformer."""
    together = all(n == step for n, step in zip(size, steps, strict=True)) and not any(edges) and all(apart == 1 for apart in spread)
    return together and isinstance(x.shape[1], int) and x.shape[1] < size[-1]


def _patches_by_channel(x: Value, size: Sequence[int]) -> Value:
    """[n, c, spatial...] as [n, windows..., c * window...]."""
    rank = len(size)
    for number, n in enumerate(size):
        x = b.window(x, 2 + 2 * number, n, n)
    places, inside = range(2, 2 + 2 * rank, 2), range(3, 3 + 2 * rank, 2)
    patches = b.permute(x, (0, *places, 1, *inside))
    return b.reshape(patches, (*patches.shape[: 1 + rank], product(patches.shape[1 + rank :])))


def window_of(x: Value, w: Value) -> tuple[int, ...]:
    """The sizes of a convolution's windows. Raises Unsupported for operands that no product takes."""
    if x.dtype not in (f32, bf16, f16) or w.dtype != x.dtype:
        raise Unsupported(f"a convolution of {x.dtype} and {w.dtype}")
    size = tuple(k for k in w.shape[2:] if isinstance(k, int))
    if len(size) != w.tensor.rank - 2 or 0 in (*x.shape, *w.shape):
        raise Unsupported("a convolution of tensors without elements, or with windows of unknown size")
    return size


def dense(patches: Value, w: Value, bias: Value | None, groups: Dim) -> Value:
    """patches[n, places..., window..., C], w[M, C / groups, window...] as [n, places..., M]: a linear whose columns are in groups."""
    if not isinstance(groups, int):
        raise Unsupported("a convolution whose number of groups depends on sizes, and that is not depthwise")
    rank = w.tensor.rank - 1
    places, size, width = patches.shape[:rank], patches.shape[rank:-1], w.shape[1]
    if groups > 1:
        split = b.reshape(patches, (*places, *size, groups, width))
        patches = b.permute(split, (*range(rank), rank + len(size), *range(rank, rank + len(size)), rank + len(size) + 1))
    rows = b.reshape(patches, (*places, product((*size, groups, width))))
    return b.linear(rows, b.reshape(channels_last(w), (w.shape[0], product((*size, width)))), bias)


def _depthwise(patches: Value, w: Value, bias: Value | None) -> Value:
    """patches[n, places..., window..., C], w[C * T, 1, window...] as [n, places..., C * T]: each channel gives T of the result."""
    work, rank = opmath(w.dtype), w.tensor.rank - 1
    places, size, width = patches.shape[:rank], patches.shape[rank:-1], patches.shape[-1]
    times = floordiv(w.shape[0], width)
    taps = b.permute(b.reshape(w, (w.shape[0], *size)), (*range(1, rank), 0))
    if times != 1:
        repeated = b.expand(b.unsqueeze(patches, patches.tensor.rank), (*patches.shape, times))
        patches = b.reshape(repeated, (*places, *size, w.shape[0]))
    out = b.reduce(b.mul(b.cast(patches, work), b.cast(taps, work)), "sum", tuple(range(rank, rank + len(size))))
    return out if bias is None else b.add(out, b.cast(bias, work))


def _clipped(size: int, results: Dim, length: Dim, padding: int, dilation: int) -> int:
    """The size of the windows along one axis of so many elements. A single window may be much larger than all of them; what is beyond
    the padding belongs to no mean and to no maximum."""
    if results != 1 or not isinstance(length, int):
        return size
    return min(size, (length + 2 * padding - 1) // dilation + 1)


@dataclass(frozen=True)
class _Pool:
    """Windows over the last axes of a tensor, as many as `out` says, and what is to be added at the end so that there are as many."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    extra: tuple[int, ...]
    out: Shape

    @classmethod
    def of(cls, c: Shape, x: Value, size: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], ceil: bool,
           rank: int) -> _Pool:
        size = numbers(size, rank)
        stride, padding, dilation = numbers(stride, rank, size), numbers(padding, rank), numbers(dilation, rank)
        extra = [0] * rank
        size = tuple(_clipped(*axis) for axis in zip(size, c[-rank:], x.shape[-rank:], padding, dilation, strict=True))
        for axis in range(rank if ceil else 0):
            reach = (c[axis - rank] - 1) * stride[axis] + dilation[axis] * (size[axis] - 1) + 1
            beyond = reach - x.shape[axis - rank] - 2 * padding[axis]
            extra[axis] = max(0, beyond) if isinstance(beyond, int) else stride[axis] - 1  # which is as far as a window may reach
        return cls(size, stride, padding, dilation, tuple(extra), c[-rank:])

    def reduced(self, image: Value, kind: str, value: float) -> Value:
        """image[n, spatial..., c], surrounded by `value`, reduced over each window."""
        rank = len(self.size)
        high = tuple(p + e for p, e in zip(self.padding, self.extra, strict=True))
        places = windows(surrounded(image, self.padding, high, value), self.size, self.stride, self.dilation)
        for axis, count in enumerate(self.out, 1):  # one that would begin behind the image is none
            places = b.slice_(places, axis, 0, count)
        return b.reduce(places, kind, tuple(range(1 + rank, 1 + 2 * rank)))


def image_of(x: Value, rank: int) -> Value:
    """x[n, c, spatial...], or without n, in channels-last order and in the type that torch computes in."""
    if not x.dtype.is_float or 0 in x.shape:
        raise Unsupported(f"pooling of {x.type}")
    return channels_last(x if x.tensor.rank == rank + 2 else b.unsqueeze(x, 0))


def largest(rank: int) -> Row:
    def row(c: Call, x: Value, size: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] = (0,),
            dilation: Sequence[int] = (1,), ceil_mode: bool = False) -> tuple[Value | None, ...]:
        c.need_only(0)
        shape = c.element(0).shape
        pool = _Pool.of(shape, x, size, stride, padding, dilation, ceil_mode, rank)
        return b.reshape(channels_first(pool.reduced(image_of(x, rank), "max", -math.inf)), shape), None

    return row


def average(rank: int) -> Row:
    def row(c: Call, x: Value, size: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] = (0,), ceil_mode: bool = False,
            count_include_pad: bool = True, divisor: int | None = None) -> Value:
        pool = _Pool.of(c.shape, x, size, stride, padding, (1,), ceil_mode, rank)
        image = image_of(x, rank)
        total = pool.reduced(b.cast(image, opmath(x.dtype)), "sum", 0.0)
        whole = not any(pool.extra) and (count_include_pad or not any(pool.padding))
        if divisor is not None or whole:
            mean = b.div(total, float(divisor or math.prod(pool.size)))
        else:
            ones = b.full(1.0, total.dtype, (1, *image.shape[1:-1], 1))
            if count_include_pad:  # what the last window has beyond that does not count
                ones = b.full(1.0, total.dtype, tuple(d + 2 * p for d, p in zip(ones.shape, (0, *pool.padding, 0), strict=True)))
                pool = replace(pool, padding=(0,) * rank)
            mean = b.div(total, pool.reduced(ones, "sum", 0.0))
        return b.cast(b.reshape(channels_first(mean), c.shape), c.dtype)

    return row


ROWS: dict[Any, Row] = {
    aten.max_pool2d_with_indices.default: largest(2),
    aten.max_pool3d_with_indices.default: largest(3),
    aten.avg_pool1d.default: average(1),
    aten.avg_pool2d.default: average(2),
    aten.avg_pool3d.default: average(3),
}
