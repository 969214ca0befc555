"""Tensors with some elements replaced. All become `put`; `graph/updates.py` says which of them write in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ...diagnostics.errors import Unsupported
from .. import build as b
from ..dims import Dim, bounds, product
from ..ir import Value
from ..shapes import broadcast
from ..types import boolean, i64, identity, inverse, u8
from .call import Call, Operand, Row, as_value, need_alike, opmath
from .indexing import wrapped
from .shape import movable

aten = torch.ops.aten


def along(position: Value, axis: int, rank: int) -> Value:
    """A list of positions as a tensor of `rank` axes that lies along one of them."""
    return b.reshape(position, (*[1] * axis, product(position.shape), *[1] * (rank - axis - 1)))


def index_put(c: Call, x: Value, indices: Sequence[Value | None], values: Value, accumulate: bool = False) -> Value:
    """x[i, :, j] = values: the shape that the indices have together is one axis of what is put."""
    found = [(axis, i) for axis, i in enumerate(indices) if i is not None]
    if any(i.dtype in (boolean, u8) for _, i in found):
        if accumulate:
            raise Unsupported("index_put that adds where a mask is true")
        return _masked(x, found, values)
    axes, rank = [axis for axis, _ in found], x.tensor.rank
    rest = [a for a in range(rank) if a not in axes]
    place = axes[0] if axes == list(range(axes[0], axes[0] + len(axes))) else 0
    order = [*rest[:place], *axes, *rest[place:]]
    moved, common = b.permute(x, order), broadcast(tuple(i.shape for _, i in found))
    before, after = moved.shape[:place], moved.shape[place + len(axes) :]
    part = b.reshape(b.expand(values, (*before, *common, *after)), (*before, product(common), *[1] * (len(axes) - 1), *after))
    positions = {place + n: along(b.expand(wrapped(i, x.shape[axis]), common), place, rank) for n, (axis, i) in enumerate(found)}
    made = _put_together(moved, part, positions, "sum") if accumulate else b.put(moved, part, positions)
    return b.permute(made, inverse(order))


def _masked(x: Value, found: Sequence[tuple[int, Value]], values: Value) -> Value:
    """x[mask] = one value for all, or the next one wherever the mask is true. Other numbers of these than of values raise IndexError."""
    (first, mask), *more = found
    behind = x.shape[first + mask.tensor.rank:]
    if more or values.tensor.rank > first + 1 + len(behind):
        raise Unsupported("a mask beside other indices")
    mask, given = b.cast(mask, boolean), (*[1] * (first + 1 + len(behind) - values.tensor.rank), *values.shape)
    true = b.reshape(mask, (*[1] * first, *mask.shape, *[1] * len(behind)))
    if given[first] == 1:
        return b.where(true, b.reshape(values, (*given[:first], *[1] * mask.tensor.rank, *given[first + 1:])), x)
    if first or (bounds(given[0])[0] or 0) < 1:
        raise Unsupported("as many values as a mask holds true, behind other axes or perhaps none")
    as_many = b.eq(b.reduce(b.cast(mask, i64), "sum"), as_value(given[0], i64))
    place = b.where(as_many, _next(b.reshape(mask, (product(mask.shape),))), -1)
    taken = b.take(b.expand(b.reshape(values, given), (given[0], *behind)), place, 0)
    return b.where(true, b.reshape(taken, x.shape), x)


def _next(true: Value) -> Value:
    """Where a mask of one axis is true, how often it was before."""
    return b.where(true, b.sub(b.scan(b.cast(true, i64), "sum", 0), 1), 0)


def masked_scatter(c: Call, x: Value, mask: Value, source: Value) -> Value:
    """The next element of the source wherever the mask is true, as vision-language models put what images give between words. A mask
    that is the same for all of a row takes rows of the source. Where the source is too short, reading it raises IndexError."""
    shape = broadcast((x.shape, mask.shape))
    while mask.op == "expand" and mask.inputs[0].tensor.rank == mask.tensor.rank:
        mask = mask.inputs[0]
    rank, given = len(shape), source.tensor.rank
    mask = b.reshape(mask, (*[1] * (rank - mask.tensor.rank), *mask.shape))
    row = next((n for n in range(min(rank, given)) if mask.shape[rank - 1 - n] != 1), min(rank, given))  # axes at the end that are one
    if product(shape[rank - row:]) != product(source.shape[given - row:]):
        row = 0
    rows, lines = shape[:rank - row], product(source.shape[:given - row])
    if (bounds(lines)[0] or 0) < 1:
        raise Unsupported("masked_scatter from what may be empty")
    true = b.reshape(b.expand(mask, (*rows, *mask.shape[rank - row:])), (product(rows),))
    taken = b.take(b.reshape(source, (lines, product(shape[rank - row:]))), _next(true), 0)
    return b.where(mask, b.reshape(taken, shape), b.expand(x, shape))


def index_copy(c: Call, x: Value, axis: int, index: Value, source: Value) -> Value:
    if not x.tensor.rank:
        raise Unsupported("index_copy into a scalar")
    axis = b.axis_of(axis, x.tensor.rank)
    part = b.reshape(source, (*x.shape[:axis], product(index.shape), *x.shape[axis + 1 :]))
    return b.put(x, part, {axis: along(b.cast(index, i64), axis, x.tensor.rank)})


def index_fill(c: Call, x: Value, axis: int, index: Value, value: Operand) -> Value:
    if not x.tensor.rank:
        return b.reshape(index_fill(c, b.reshape(x, (1,)), 0, index, value), ())
    axis = b.axis_of(axis, x.tensor.rank)
    part = b.expand(as_value(value, x.dtype), (*x.shape[:axis], product(index.shape), *x.shape[axis + 1 :]))
    return b.put(x, part, {axis: along(wrapped(index, x.shape[axis]), axis, x.tensor.rank)})


def index_add(c: Call, x: Value, axis: int, index: Value, source: Value, alpha: Operand = 1) -> Value:
    if not x.tensor.rank:
        raise Unsupported("index_add into a scalar")
    need_alike(x, source)
    axis = b.axis_of(axis, x.tensor.rank)
    part = b.reshape(source, (*x.shape[:axis], product(index.shape), *x.shape[axis + 1 :]))
    if alpha != 1:
        part = b.mul(part, as_value(alpha, x.dtype))
    return _put_together(x, part, {axis: along(b.cast(index, i64), axis, x.tensor.rank)}, "sum")


def _put_together(x: Value, part: Value, positions: Mapping[int, Value], kind: str) -> Value:
    """What has 16 bits is rounded once. PyTorch is faster at elements that go here and there one by one."""
    if part.dtype == boolean:
        raise Unsupported("booleans that are put together with what is there")
    rank, work = x.tensor.rank, opmath(x.dtype)
    full = {axis: b.reshape(p, (*[1] * (rank - p.tensor.rank), *p.shape)) for axis, p in positions.items()}
    alike = [axis for axis in range(rank) if part.shape[axis] != 1 and all(p.shape[axis] == 1 for p in full.values())]
    if not alike:
        raise Unsupported("elements one by one that are put together with what is there")
    order = [*(axis for axis in range(rank) if axis != alike[-1]), alike[-1]]
    positions = {order.index(axis): b.permute(p, order) for axis, p in full.items()}
    made = b.put(b.permute(b.cast(x, work), order), b.permute(b.cast(part, work), order), positions, kind)
    return b.cast(b.permute(made, inverse(order)), x.dtype)


def scatter_reduce(c: Call, x: Value, axis: int, index: Value, source: Value, reduce: str, include_self: bool = True) -> Value:
    if reduce == "mean" and not x.dtype.is_float:
        raise Unsupported("a scatter_reduce to means of integers")
    kind, work = {"amax": "max", "amin": "min", "mean": "sum"}.get(reduce, reduce), opmath(x.dtype)

    def together(x: Value, source: Operand) -> Value:
        return scatter(c, x if include_self else scatter(c, x, axis, index, identity(kind, work)), axis, index, source, kind)

    result = together(b.cast(x, work), b.cast(source, work))
    if reduce == "mean":
        result = b.div(result, together(b.full(1.0, work, x.shape), 1.0))
    return b.cast(result, x.dtype)


def scatter(c: Call, x: Value, axis: int, index: Value, source: Operand, kind: str = "") -> Value:
    """x[index[i, j], j] = source[i, j]: the other axes may be longer than those of the index."""
    rank = x.tensor.rank
    if not rank or index.tensor.rank != rank:
        raise Unsupported("scatter into a scalar")
    axis = b.axis_of(axis, rank)
    if isinstance(source, Value) and source.tensor.rank == rank:
        part = source
        for a, length in enumerate(index.shape):
            part = b.slice_(part, a, 0, length)
    else:
        part = b.expand(as_value(source, x.dtype), index.shape)
    positions = {a: along(b.iota(d, i64), a, rank) for a, d in enumerate(index.shape) if d != x.shape[a]}
    while index.op == "expand" and index.inputs[0].tensor.rank == rank:
        index = index.inputs[0]
    positions |= {axis: b.cast(index, i64)}
    return _put_together(x, part, positions, kind) if kind else b.put(x, part, positions)


def slice_scatter(c: Call, x: Value, part: Value, axis: int = 0, start: Dim | None = None, end: Dim | None = None, step: int = 1) -> Value:
    axis = b.axis_of(axis, x.tensor.rank)
    first = movable(0 if start is None else start, x.shape[axis])
    return _at(x, b.cast(part, x.dtype), axis, first, step)


def select_scatter(c: Call, x: Value, part: Value, axis: int, index: Dim) -> Value:
    axis = b.axis_of(axis, x.tensor.rank)
    return _at(x, b.unsqueeze(b.cast(part, x.dtype), axis), axis, movable(index, x.shape[axis]), 1)


def unpooled(c: Call, x: Value, places: Value, size: Sequence[Dim], *_: Any) -> Value:
    """max_unpool: elements at places that are counted in the plane of each alone. torch's decomposition counts through all planes, so that
    a place beyond the end of one is in the next."""
    if 0 in size:
        return b.full(0, x.dtype, c.shape)
    planes = c.shape[: -len(size)]
    part, at = (b.reshape(v, (*planes, product(x.shape[-len(size) :]))) for v in (x, places))
    return b.reshape(b.put(b.full(0, x.dtype, (*planes, product(size))), part, {len(planes): at}), c.shape)


def _at(x: Value, part: Value, axis: int, first: Dim, step: int) -> Value:
    return b.put(x, part, {axis: along(b.iota(part.shape[axis], i64, first, step), axis, x.tensor.rank)})


ROWS: dict[Any, Row] = {
    aten.index_put.default: index_put,
    aten._unsafe_index_put.default: index_put,
    aten.masked_scatter.default: masked_scatter,
    aten.index_copy.default: index_copy,
    aten.index_fill.int_Scalar: index_fill,
    aten.index_fill.int_Tensor: index_fill,
    aten.index_add.default: index_add,
    aten.scatter_add.default: partial(scatter, kind="sum"),
    aten.scatter_reduce.two: scatter_reduce,
    aten.scatter.src: scatter,
    aten.scatter.value: scatter,
    aten.max_unpool2d.default: unpooled,
    aten.max_unpool3d.default: unpooled,
    aten.slice_scatter.default: slice_scatter,
    aten.select_scatter.default: select_scatter,
}
