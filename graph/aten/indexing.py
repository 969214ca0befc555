"""Lookups by integer indices. `take` and `gather` need indices in [0, size), so negative ones are wrapped first where torch does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...diagnostics.errors import Unsupported
from .. import build as b
from ..attrs import IotaAttrs
from ..dims import Dim, bounds, broadcast, product
from ..ir import Value
from ..types import boolean, i64, u8
from .call import Call, Row, as_value, opmath

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
    """Bags of equal length, which the rows of a matrix of indices are: rows of the table summed, averaged (mode 1) or compared (2)."""
    c.need_only(0)
    while offsets.op in ("reshape", "cast"):
        offsets = offsets.inputs[0]
    a = offsets.attrs
    if not isinstance(a, IotaAttrs) or a.start != 0 or last or isinstance(a.step, float) or a.length * a.step != product(indices.shape):
        raise Unsupported("bags whose length depends on the data")
    skipped = -1 if padding is None else padding
    if (bounds(a.step)[0] or 0) < 1 or (skipped >= 0 and mode == 2):
        raise Unsupported("the largest of bags that may be empty")
    bags = b.reshape(indices, (a.length, a.step))
    work = opmath(table.dtype)
    rows = b.cast(b.take(table, bags, 0), work)
    count = as_value(a.step, work)
    if weights is not None:
        rows = b.mul(rows, b.unsqueeze(b.cast(b.reshape(weights, bags.shape), work), 2))
    if skipped >= 0:
        counts = b.ne(bags, skipped)
        rows = b.where(b.unsqueeze(counts, 2), rows, b.full(0.0, work))
        count = b.maximum(b.reduce(b.cast(counts, work), "sum", 1, True), 1.0)
    result = b.reduce(rows, "max" if mode == 2 else "sum", 1)
    return b.cast(b.div(result, count) if mode == 1 else result, table.dtype), None, None, None


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
