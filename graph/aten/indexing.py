"""Lookups by integer indices. `take` and `gather` need indices in [0, size), so negative ones are wrapped first where torch does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...diagnostics.errors import Unsupported
from .. import build as b
from ..attrs import IotaAttrs
from ..dims import Dim, bounds, product
from ..ir import Value
from ..shapes import broadcast
from ..types import boolean, i64, identity, u8
from .call import Call, Row, as_value, opmath
from .order import ends_before

aten = torch.ops.aten


def wrapped(index: Value, size: Dim) -> Value:
    """Negative indices count from the end."""
    index = b.cast(index, i64)
    if never_negative(index):
        return index
    return b.where(b.lt(index, 0), b.add(index, as_value(size, i64)), index)


def never_negative(index: Value) -> bool:
    """True for positions that were counted upwards from 0 or more."""
    while index.op in ("reshape", "expand", "cast"):
        index = index.inputs[0]
    a = index.attrs
    return isinstance(a, IotaAttrs) and isinstance(a.start, int) and isinstance(a.step, int) and a.start >= 0 and a.step >= 0


def counting_axis(index: Value, size: Dim) -> int | None:
    """The axis along which `index` runs 0, 1, .. size - 1, constant along all others; None for any other index."""
    value = index
    while value.op in ("reshape", "cast"):
        value = value.inputs[0]
    a = value.attrs
    if not isinstance(a, IotaAttrs) or a.start != 0 or a.step != 1 or a.length != size:
        return None
    axes = [axis for axis, d in enumerate(index.shape) if d != 1]
    return axes[0] if len(axes) == 1 and index.shape[axes[0]] == size else None


def index(c: Call, x: Value, indices: Sequence[Value | None]) -> Value:
    """x[i, :, j]: the indexed axes are flattened into one, and one `take` reads it."""
    found = [(axis, i) for axis, i in enumerate(indices) if i is not None]
    if any(i.dtype in (boolean, u8) for _, i in found):
        raise Unsupported("indexing with a mask gives a size that depends on the data")
    axes = [axis for axis, _ in found]
    adjacent = axes == list(range(axes[0], axes[0] + len(axes)))
    rest = [a for a in range(x.tensor.rank) if a not in axes]
    place = axes[0] if adjacent else 0
    order = [*rest[:place], *axes, *rest[place:]]
    moved = b.permute(x, order)
    sizes = [x.shape[a] for a in axes]
    common = broadcast(tuple(i.shape for _, i in found))
    runs = [counting_axis(i, s) for (_, i), s in zip(found, sizes, strict=True)]
    if None not in runs and runs == sorted({r for r in runs if r is not None}) and len(runs) == sum(d != 1 for d in common):
        return b.reshape(moved, c.shape)
    flat: Value | None = None
    for (_, i), size in zip(found, sizes, strict=True):
        step = wrapped(i, size)
        flat = step if flat is None else b.add(b.mul(flat, as_value(size, i64)), step)
    assert flat is not None
    table = b.reshape(moved, (*moved.shape[:place], product(sizes), *moved.shape[place + len(axes):]))
    return b.take(table, b.expand(flat, common), place)


def index_select(c: Call, x: Value, axis: int, positions: Value) -> Value:
    if not x.tensor.rank:
        raise Unsupported("index_select of a scalar")
    return b.reshape(b.take(x, b.reshape(positions, (product(positions.shape),)), axis), c.shape)


def gather(c: Call, x: Value, axis: int, positions: Value, sparse_grad: bool = False) -> Value:
    if not x.tensor.rank or not positions.tensor.rank:
        raise Unsupported("gather of a scalar")
    if positions.tensor.rank != x.tensor.rank:  # which torch allows for positions without elements
        return b.full(0, x.dtype, c.shape)
    return b.gather(x, positions, axis)


def embedding_bag(c: Call, table: Value, indices: Value, offsets: Value, scale_grad: bool, mode: int, sparse: bool,
                  weights: Value | None, last: bool, padding: int | None = None) -> tuple[Value | None, ...]:
    """Rows of the table summed, averaged (mode 1) or compared (2): those of a row of a matrix, or from one offset to the next."""
    c.need_only(0)
    work, kind, skipped = opmath(table.dtype), "max" if mode == 2 else "sum", -1 if padding is None else padding
    rows = b.cast(b.take(table, indices, 0), work)
    if weights is not None:
        rows = b.mul(rows, b.unsqueeze(b.cast(weights, work), 1))
    kept = b.ne(indices, skipped)
    if skipped >= 0:
        rows = b.where(b.unsqueeze(kept, 1), rows, b.full(identity(kind, work), work))
    bags = _equal_bags(offsets, indices, last)
    if bags is None and ((skipped < 0 and mode != 2) or table.shape[1] == 1):
        raise Unsupported("bags whose length depends on the data, for which PyTorch has a kernel of its own")
    reduced, counts = bags or _bags_from(offsets, indices, last)
    if skipped >= 0 and mode:
        counts = reduced(b.expand(b.unsqueeze(b.cast(kept, work), 1), rows.shape), "sum")
    result, counts = reduced(rows, kind), b.cast(counts, work)
    if mode == 1:
        result = b.div(result, b.maximum(counts, 1.0))
    elif mode == 2:
        result = b.where(b.gt(counts, 0.0), result, b.full(0.0, work))
    return b.cast(result, table.dtype), None, None, None


_Bags = tuple[Callable[[Value, str], Value], Value]  # the reduction of all rows of a bag to one, and how many there are


def _equal_bags(offsets: Value, indices: Value, last: bool) -> _Bags | None:
    """Bags of one length, as the rows of a matrix are."""
    while offsets.op in ("reshape", "cast"):
        offsets = offsets.inputs[0]
    a = offsets.attrs
    if not isinstance(a, IotaAttrs) or a.start != 0 or last or isinstance(a.step, float) or a.length * a.step != product(indices.shape):
        return None
    if (bounds(a.step)[0] or 0) < 1:
        raise Unsupported("bags that may be empty")
    step = a.step
    return lambda rows, kind: b.reduce(b.reshape(rows, (a.length, step, *rows.shape[1:])), kind, 1), as_value(step, i64)


def _bags_from(offsets: Value, indices: Value, last: bool) -> _Bags:
    """Bags from one offset to the next: a row belongs to the last offset that is not after it. last: the last offset begins no bag."""
    number, place = indices.shape[0], b.iota(indices.shape[0], offsets.dtype)
    ends = offsets if last else b.concat([offsets, b.reshape(as_value(number, offsets.dtype), (1,))], 0)
    count = ends.shape[0] - 1
    starts, ends = b.slice_(ends, 0, 0, count), b.slice_(ends, 0, 1, count)
    bag = b.unsqueeze(b.cast(b.sub(ends_before(starts, place, True), 1), i64), 1)
    there = b.unsqueeze(b.lt(place, b.slice_(ends, 0, count - 1, 1)), 1)

    def reduced(rows: Value, kind: str) -> Value:
        none = b.full(identity(kind, rows.dtype), rows.dtype)
        rows = b.where(there, rows, none) if last else rows
        return b.put(b.expand(none, (count, *rows.shape[1:])), rows, {0: bag}, kind)

    return reduced, b.unsqueeze(b.sub(ends, starts), 1)


ROWS: dict[Any, Row] = {
    aten.embedding.default: lambda c, table, positions, *_: b.take(table, positions, 0),
    aten.index.Tensor: index,
    aten._unsafe_index.Tensor: index,
    aten.index_select.default: index_select,
    aten.gather.default: gather,
    aten.embedding_bag.padding_idx: embedding_bag,
    aten._embedding_bag.default: embedding_bag,
    aten._embedding_bag_forward_only.default: embedding_bag,
}
