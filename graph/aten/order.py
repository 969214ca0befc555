"""What is largest, what comes first, and how many lie in between."""

from __future__ import annotations

from functools import partial
from math import isinf
from typing import Any

import torch

from ...diagnostics.errors import Unsupported
from .. import build as b
from ..dims import Dim, bounds, product
from ..ir import Value
from ..types import boolean, f32, f64, i32, i64, identity, inverse
from .call import Call, Row, as_value, opmath

aten = torch.ops.aten
_FEW, _READ = 8, 2048  # topk: elements found one after the other, and how many are read for it
_SORTED, _ALONE = 16, 64  # sort: elements that are compared with one another, in each row or in all
_BINS, _LANES = 32, 16  # histc: bins that each element is compared with; of more, those that are counted in one vector
_COUNTED = 1 << 16  # histc: elements that one thread counts in so many bins
_ENDS = 256  # searchsorted: of more, halving is faster than comparing with all
_MOST = (1 << 46) - 1  # no tensor has more ends: those of 4 bytes in the 2^48 that a process addresses


def topk(c: Call, x: Value, k: Dim, axis: int = -1, largest: bool = True, in_order: bool = True) -> tuple[Value, Value]:
    """Few of short rows one after the other: the largest of what comes after those found so far. NaN is the largest, and of equal
    elements the first."""
    if not x.tensor.rank:
        return x, b.full(0, i64)
    axis = b.axis_of(axis, x.tensor.rank)
    most = bounds(x.shape[axis])[1]
    few = k == 1 or (most is not None and isinstance(k, int) and 1 < k <= _FEW and k * most <= _READ)
    if not largest or x.dtype == boolean or not isinstance(k, int) or not few:
        return _in_order(x, axis, largest, k)
    wide = b.cast(x, opmath(x.dtype))
    place = _places(x, axis)
    end = as_value(x.shape[axis], i32)
    least = _least(wide)
    value, at = b.reduce(wide, "max", axis, True), b.cast(b.reduce(wide, "argmax", axis, True), i32)
    found = [(value, at)]
    for _ in range(k - 1):
        left = b.or_(_below(wide, value), b.and_(_equal(wide, value), b.gt(place, at)))
        value = b.reduce(b.where(left, wide, least), "max", axis, True)
        at = b.reduce(b.where(b.and_(left, _equal(wide, value)), place, end), "min", axis, True)
        found.append((value, at))
    return b.cast(b.concat([v for v, _ in found], axis), x.dtype), b.cast(b.concat([p for _, p in found], axis), i64)


def sort(c: Call, x: Value, axis: int = -1, descending: bool = False) -> tuple[Value, Value]:
    """Of short rows: the rank of an element is the number of those before it. NaN is the largest; equal elements keep their order."""
    if not x.tensor.rank:
        return x, b.full(0, i64)
    axis = b.axis_of(axis, x.tensor.rank)
    row, all_of = bounds(x.shape[axis])[1], bounds(product(x.shape))[1]
    if (row is None or row > _SORTED) and (all_of is None or all_of > _ALONE):
        return _in_order(x, axis, descending, x.shape[axis])
    wide = b.cast(x, i32 if x.dtype == boolean else opmath(x.dtype))
    place = _places(x, axis)
    one, here = b.unsqueeze(wide, axis + 1), b.unsqueeze(place, axis + 1)
    other, there = b.unsqueeze(wide, axis), b.unsqueeze(place, axis)
    before = _below(one, other) if descending else _below(other, one)
    before = b.or_(before, b.and_(_equal(other, one), b.lt(there, here)))
    rank = b.reduce(b.cast(before, i32), "sum", axis + 1)
    chosen = b.eq(b.unsqueeze(rank, axis), here)  # [..., rank, element, ...]
    values = b.reduce(b.where(chosen, other, _least(wide)), "max", axis + 1)
    return b.cast(values, x.dtype), b.cast(b.reduce(b.where(chosen, there, 0), "sum", axis + 1), i64)


def _in_order(x: Value, axis: int, descending: bool, count: Dim) -> tuple[Value, Value]:
    """The elements that come first along an axis, and where they were."""
    order = (*(a for a in range(x.tensor.rank) if a != axis), axis)
    x = b.permute(x, order)
    places = b.argsort(x, descending=descending, count=count)
    return b.permute(b.gather(x, places, -1), inverse(order)), b.permute(places, inverse(order))


def stable_sort(c: Call, x: Value, stable: bool | None = None, axis: int = -1, descending: bool = False) -> tuple[Value, Value]:
    return sort(c, x, axis, descending)


def kthvalue(c: Call, x: Value, k: Dim, axis: int = -1, keepdim: bool = False) -> tuple[Value, Value]:
    """The k-th in order from the smallest, and where it is."""
    if not x.tensor.rank:
        return x, b.full(0, i64)
    axis = b.axis_of(axis, x.tensor.rank)
    values, places = _in_order(x, axis, False, k)
    return _without(axis, keepdim, b.slice_(values, axis, k - 1, 1), b.slice_(places, axis, k - 1, 1))


def _without(axis: int, keepdim: bool, values: Value, places: Value) -> tuple[Value, Value]:
    """The same without an axis of one element, unless it is kept."""
    if keepdim:
        return values, places
    shape = (*values.shape[:axis], *values.shape[axis + 1 :])
    return b.reshape(values, shape), b.reshape(places, shape)


def median(c: Call, x: Value, axis: int, keepdim: bool = False, *, without_nan: bool = False) -> tuple[Value, Value]:
    """The element in the middle, the lower one of two. NaN, which is last in order, where there is one; or that of what is none."""
    if not x.tensor.rank:
        return x, b.full(0, i64)
    axis = b.axis_of(axis, x.tensor.rank)
    size = as_value(x.shape[axis], i64)
    found = b.reduce(b.cast(b.isnan(x), i64), "sum", axis, True) if x.dtype.is_float else b.full(0, i64)
    numbers = b.sub(size, found)
    middle = b.truncdiv(b.sub(numbers if without_nan else size, 1), 2)
    place = middle if without_nan else b.where(b.gt(found, 0), numbers, middle)
    _, places = _in_order(x, axis, False, x.shape[axis])
    kept = [1 if a == axis else d for a, d in enumerate(x.shape)]
    places = b.gather(places, b.expand(place, kept), axis)
    return _without(axis, keepdim, b.gather(x, places, axis), places)


def median_of_all(c: Call, x: Value, *, without_nan: bool = False) -> Value:
    return median(c, b.reshape(x, (product(x.shape),)), 0, without_nan=without_nan)[0]


def histogram(c: Call, x: Value, bins: int = 100, low: float = 0, high: float = 0) -> Value:
    """How many elements lie in each of `bins` parts of [low, high] of one size, the last one with both its ends."""
    x = b.reshape(x, (product(x.shape),))
    most = bounds(x.shape[0])[1]
    if x.dtype not in (f32, f64):
        raise Unsupported(f"a histogram of {x.dtype}, in which PyTorch counts, too")
    if low == high:
        raise Unsupported("bins between the smallest and the largest element")
    if not low < high or isinf(high - low):
        raise Unsupported(f"bins between {low} and {high}")
    if bins > _BINS and most is not None and most > _COUNTED:
        raise Unsupported(f"{most} elements in {bins} bins, more than {_COUNTED} in more than {_BINS}, which PyTorch counts in threads")
    least, end = b.full(float(low), x.dtype), b.full(float(high), x.dtype)
    number = b.cast(b.div(b.mul(b.sub(x, least), float(bins)), b.sub(end, least)), i32)
    number = b.where(b.and_(b.ge(x, least), b.le(x, end)), b.maximum(b.minimum(number, bins - 1), 0), -1)
    if bins > _BINS:
        return b.cast(_counted(number, bins), c.dtype)
    hits = b.eq(b.unsqueeze(number, 0), b.unsqueeze(b.iota(bins, i32), 1))
    return b.cast(b.reduce(b.cast(hits, i32), "sum", 1), c.dtype)


def _counted(number: Value, bins: int) -> Value:
    """How often each of 0, 1, ... occurs, and -1 nowhere: each number is a row of 1 and 0 that is added to the row of counts it lies in."""
    rows, number = -(-bins // _LANES), b.unsqueeze(number, 1)
    row = b.truncdiv(number, _LANES)
    one = b.cast(b.eq(b.sub(number, b.mul(row, _LANES)), b.iota(_LANES, i32)), i32)
    counts = b.put(b.full(0, i32, (rows, _LANES)), one, {0: b.cast(row, i64)}, "sum")
    return b.slice_(b.reshape(counts, (rows * _LANES,)), 0, 0, bins)


def searchsorted(c: Call, ends: Value, x: Value, short: bool, right: bool, side: str | None = None, sorter: Value | None = None) -> Value:
    """How many of the ends, which are in order, lie before an element, in each row of both or of one row of ends. NaN lies behind all."""
    most = bounds(ends.shape[-1])[1] if ends.tensor.rank else None
    if most is None or sorter is not None or ends.dtype != x.dtype or x.dtype == boolean:
        raise Unsupported("as many numbers as it happens, in an order of their own, or of another type")
    rows, right = ends.shape[:-1], right or side == "right"
    if most > _ENDS:
        if rows:
            raise Unsupported("rows of many numbers")
        return b.reshape(b.cast(ends_before(ends, x, right), c.dtype), c.shape)
    elements = b.reshape(b.cast(x, opmath(x.dtype)), (*rows, 1, x.shape[-1] if rows else product(x.shape)))
    before = (b.le if right else b.lt)(b.unsqueeze(b.cast(ends, elements.dtype), ends.tensor.rank), elements)
    before = b.or_(before, b.ne(elements, elements)) if x.dtype.is_float else before
    return b.reshape(b.cast(b.reduce(b.cast(before, i32), "sum", -2), c.dtype), c.shape)


def ends_before(ends: Value, x: Value, right: bool) -> Value:
    """How many of a row of ends lie before each element, by halves: the number grows by a power of two where all these lie before."""
    count, most = ends.shape[0], bounds(ends.shape[0])[1]
    most = _MOST if most is None else min(most, _MOST)
    whole, step = i64 if x.dtype.bits == 64 or most >= 1 << 31 else i32, 1 << most.bit_length()
    found = b.expand(b.full(0, whole), x.shape)
    while step := step // 2:
        further = b.add(found, step)
        there = b.le(further, as_value(count, whole))
        end = b.take(ends, b.where(there, b.sub(further, 1), 0), 0)
        found = b.where(b.and_(there, b.logical_not((b.gt if right else b.ge)(end, x))), further, found)
    return found


def bucketize(c: Call, x: Value, ends: Value, short: bool = False, right: bool = False) -> Value:
    return searchsorted(c, ends, x, short, right)


def _places(x: Value, axis: int) -> Value:
    """i32: 0, 1, ... along an axis of x, in one of its rows."""
    return b.reshape(b.iota(x.shape[axis], i32), [d if a == axis else 1 for a, d in enumerate(x.shape)])


def _least(x: Value) -> Value:
    return b.full(identity("max", x.dtype), x.dtype)


def _below(x: Value, y: Value) -> Value:
    """x < y, where NaN is greater than everything."""
    return b.or_(b.lt(x, y), b.and_(b.isnan(y), b.logical_not(b.isnan(x)))) if x.dtype.is_float else b.lt(x, y)


def _equal(x: Value, y: Value) -> Value:
    """x == y, where NaN equals itself."""
    return b.or_(b.eq(x, y), b.and_(b.isnan(x), b.isnan(y))) if x.dtype.is_float else b.eq(x, y)


ROWS: dict[Any, Row] = {
    aten.topk.default: topk,
    aten.sort.default: sort,
    aten.sort.stable: stable_sort,
    aten.argsort.default: lambda c, x, axis=-1, descending=False: sort(c, x, axis, descending)[1],
    aten.argsort.stable: lambda c, x, stable=False, axis=-1, descending=False: sort(c, x, axis, descending)[1],
    aten.kthvalue.default: kthvalue,
    aten.median.dim: median,
    aten.median.default: median_of_all,
    aten.nanmedian.dim: partial(median, without_nan=True),
    aten.nanmedian.default: partial(median_of_all, without_nan=True),
    aten.histc.default: histogram,
    aten.bucketize.Tensor: bucketize,
    aten.searchsorted.Tensor: searchsorted,
}
