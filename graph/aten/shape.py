"""Views, concatenation, padding, conversion: operations that move elements without computing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...diagnostics.errors import Unsupported
from .. import build as b
from ..dims import Dim, bounds, maximum, minimum, mod, product
from ..ir import Value
from ..types import i64
from .call import Call, Result, Row, need_fitting

aten = torch.ops.aten


def as_shape(c: Call, x: Value, *_: Any) -> Value:
    """Any view that keeps the row-major order of elements: torch already knows the resulting shape."""
    return b.reshape(x, c.shape)


def same(c: Call, x: Value, *_: Any) -> Value:
    return x


def convert(c: Call, x: Value, *_: Any) -> Value:
    return b.cast(x, c.dtype)


def transpose(c: Call, x: Value, first: int, second: int) -> Value:
    order = list(range(x.tensor.rank))
    if order:
        i, j = b.axis_of(first, len(order)), b.axis_of(second, len(order))
        order[i], order[j] = order[j], order[i]
    return b.permute(x, order)


def movable(position: Dim, size: Dim) -> Dim:
    """A Python-style position as one in [0, size]."""
    high = bounds(position)[1]
    if _either(position):
        raise Unsupported(f"a position {position} of unknown sign")
    if high is not None and high < 0:
        position = maximum(position + size, 0)
    return minimum(position, size)


def _either(position: Dim) -> bool:
    """Whether a position may count from the beginning or from the end, by its bounds."""
    low, high = bounds(position)
    return (low is None or low < 0) and (high is None or high >= 0)


def cut(c: Call, x: Value, axis: int = 0, start: Dim | None = None, end: Dim | None = None, step: int = 1) -> Value:
    """slice: torch knows the length, so only the start is computed: of one that may count from either side, by that and the end."""
    axis = b.axis_of(axis, x.tensor.rank)
    size, length, first = x.shape[axis], c.shape[axis], 0 if start is None else start
    if step == 1 and _either(first):
        at = (size if end is None else movable(end, size)) - length
    else:
        at = movable(first, size)
    return b.slice_(x, axis, at, length, step)


def pick(c: Call, x: Value, axis: int, index: Dim) -> Value:
    axis = b.axis_of(axis, x.tensor.rank)
    return b.reshape(b.slice_(x, axis, movable(index, x.shape[axis]), 1), c.shape)


def parts(x: Value, axis: int, sizes: Sequence[Dim]) -> tuple[Value, ...]:
    start: Dim = 0
    found = []
    for size in sizes:
        found.append(b.slice_(x, axis, start, size))
        start = start + size
    return tuple(found)


def split(c: Call, x: Value, sizes: Any, axis: int = 0) -> Result:
    """split, split_with_sizes and chunk: torch already knows how long each part is."""
    axis = b.axis_of(axis, x.tensor.rank)
    return parts(x, axis, [c.element(i).shape[axis] for i in range(c.count)])


def unbind(c: Call, x: Value, axis: int = 0) -> Result:
    axis = b.axis_of(axis, x.tensor.rank)
    size = x.shape[axis]
    if not isinstance(size, int):
        raise Unsupported("unbind over an axis of unknown size")
    return tuple(b.reshape(p, x.shape[:axis] + x.shape[axis + 1:]) for p in parts(x, axis, [1] * size))


def concat(c: Call, items: Sequence[Value], axis: int = 0) -> Value:
    """cat, without the empty one-dimensional tensors that torch lets pass for history's sake."""
    full_rank = [b.cast(i, c.dtype) for i in items if not (i.shape == (0,) and len(c.shape) != 1)]
    return b.concat(full_rank, axis)


def stack(c: Call, items: Sequence[Value], axis: int = 0) -> Value:
    axis = b.axis_of(axis, len(c.shape))
    return b.concat([b.unsqueeze(b.cast(i, c.dtype), axis) for i in items], axis)


def flip(c: Call, x: Value, axes: Sequence[int]) -> Value:
    for axis in axes:
        if x.tensor.rank:
            at = b.axis_of(axis, x.tensor.rank)
            x = b.slice_(x, at, x.shape[at] - 1, x.shape[at], -1)
    return x


def roll(c: Call, x: Value, shifts: Sequence[Dim], axes: Sequence[int] = ()) -> Value:
    flat = x if axes else b.reshape(x, (product(x.shape),))
    for shift, rolled in zip(shifts, axes or (0,), strict=True):
        axis = b.axis_of(rolled, flat.tensor.rank)
        size = flat.shape[axis]
        if size == 0:
            return x
        moved = mod(shift, size)
        if isinstance(size, int) and isinstance(moved, int):
            flat = b.take(flat, b.remainder(b.iota(size, i64, size - moved), size), axis)
        else:
            first, second = parts(flat, axis, (size - moved, moved))
            flat = b.concat((second, first), axis)
    return b.reshape(flat, x.shape)


def repeat(c: Call, x: Value, times: Sequence[Dim]) -> Value:
    """Each axis becomes a pair (times, size), the first of which is broadcast."""
    sizes = (1,) * (len(times) - x.tensor.rank) + x.shape
    pairs = b.reshape(x, tuple(d for size in sizes for d in (1, size)))
    return b.reshape(b.expand(pairs, tuple(d for pair in zip(times, sizes, strict=True) for d in pair)), c.shape)


def pad(c: Call, x: Value, amounts: Sequence[Dim], value: float = 0) -> Value:
    """constant_pad_nd: torch lists (low, high) from the last axis backwards."""
    need_fitting(c.dtype, value)
    pairs: list[tuple[Dim, Dim]] = [(amounts[i], amounts[i + 1]) for i in range(0, len(amounts), 2)]
    full: list[tuple[Dim, Dim]] = [(0, 0)] * (x.tensor.rank - len(pairs))
    return b.pad(x, (*full, *reversed(pairs)), value)


def stretch(c: Call, x: Value, shape: Any, *_: Any) -> Value:
    return b.expand(x, c.shape)


def unfold(c: Call, x: Value, axis: int, size: int, step: int) -> Value:
    """All windows of `size` elements along an axis; what is inside a window is the last axis."""
    if not x.tensor.rank or not size:
        raise Unsupported("windows of a scalar, or of no elements")
    axis = b.axis_of(axis, x.tensor.rank)
    windows = b.window(x, axis, size, step)
    return b.permute(windows, [*(a for a in range(windows.tensor.rank) if a != axis + 1), axis + 1])


def diagonal(c: Call, x: Value, offset: int = 0, first: int = 0, second: int = 1) -> Value:
    """Element i of the last axis is the one at (i, i + offset) of two axes, or at (i - offset, i)."""
    i, j = b.axis_of(first, x.tensor.rank), b.axis_of(second, x.tensor.rank)
    length = c.shape[-1]
    if length == 0:  # the offset may lie beyond the tensor
        return b.full(0, c.dtype, c.shape)
    matrices = b.permute(x, [*(a for a in range(x.tensor.rank) if a not in (i, j)), i, j])
    rows = b.slice_(matrices, -2, max(-offset, 0), length)
    columns = b.reshape(b.iota(length, i64, max(offset, 0)), (length, 1))
    return b.reshape(b.gather(rows, b.expand(columns, (*c.shape, 1)), -1), c.shape)


ROWS: dict[Any, Row] = {
    aten.view.default: as_shape,
    aten._unsafe_view.default: as_shape,
    aten.reshape.default: as_shape,
    aten.unsqueeze.default: as_shape,
    aten.squeeze.default: as_shape,
    aten.squeeze.dim: as_shape,
    aten.squeeze.dims: as_shape,
    aten.flatten.using_ints: as_shape,
    aten.unflatten.int: as_shape,
    aten.view_as.default: as_shape,
    aten.reshape_as.default: as_shape,
    aten.view_copy.default: as_shape,
    aten.expand.default: stretch,
    aten.permute.default: lambda c, x, order: b.permute(x, order),
    aten.t.default: lambda c, x: b.permute(x, tuple(reversed(range(x.tensor.rank)))),
    aten.transpose.int: transpose,
    aten.alias.default: same,
    aten.detach.default: same,
    aten.clone.default: same,
    aten.contiguous.default: same,
    aten.lift_fresh_copy.default: same,
    aten._to_copy.default: convert,
    torch.ops.prims.convert_element_type.default: convert,
    aten.slice.Tensor: cut,
    aten.select.int: pick,
    aten.split.Tensor: split,
    aten.split_with_sizes.default: split,
    aten.chunk.default: split,
    aten.unbind.int: unbind,
    aten.cat.default: concat,
    aten.stack.default: stack,
    aten.unfold.default: unfold,
    aten.diagonal.default: diagonal,
    aten.flip.default: flip,
    aten.roll.default: roll,
    aten.repeat.default: repeat,
    aten.constant_pad_nd.default: pad,
}
