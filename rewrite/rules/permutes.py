"""Permutations move towards the outputs, until they meet and cancel.

    f(permute x) = permute (f x)                          elementwise functions, also of several operands permuted alike
    g(permute x, y) = permute (g(x, y'))                  y permuted back for free: a number, a weight, axes of size 1 that move
    reduce (permute x) = permute (reduce x)               likewise pad, slice, expand, take, and concat of operands permuted alike
    reshape (permute x) = permute (reshape x)             where what it merges or splits lies together in x, as in a group norm
    permute p (permute q x) = permute (q o p) x
    linear(permute x, w) = permute (sum over k of x_k w_k)   where w mixes a few features that lie apart in x, as in talking heads
    reduce x = reduce (reduce x)                          over neighbours and over what lies around what is kept, in an order that is fast

So the channels-last images of two convolutions meet through everything between them. Sums may be taken in another order; the rest is
exact. It is one walk, operands first, and no set of rules: a permutation would need a sweep of the graph for every operation it passes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ...graph import attrs as A
from ...graph import build as b
from ...graph.dims import product
from ...graph.ir import Graph, Value, rebuild, with_inputs
from ...graph.ops import OPS, make
from ...graph.shapes import reshape_groups
from ...graph.types import Order, f32, f64, inverse
from ..query import is_weight

_FEW = 64  # neighbours whose sums are no rows worth a loop
_MIXED = 8  # features, at most, that are mixed element by element: what reads each element so often is better off as a product


def sink_permutes(graph: Graph) -> Graph:
    """The graph with every permutation as late as it can be had for free."""

    def visit(old: Value, inputs: tuple[Value, ...]) -> Value:
        value = with_inputs(old, inputs)
        rule = _elementwise if OPS[value.op].group == "elementwise" else _ROWS.get(value.op)
        order = next((found for v in value.inputs if (found := order_of(v)) is not None), None) if rule is not None else None
        if rule is None or (order is None and rule is not _reduce):
            return value
        with b.at(value.origin):
            sunk = rule(value, order) if order is not None else _in_two(value)
        return value if sunk is None or sunk.type != value.type else sunk

    return rebuild(graph, visit)


def order_of(value: Value) -> Order | None:
    """The order of a permutation."""
    return value.attrs.order if isinstance(value.attrs, A.PermuteAttrs) else None


def _elementwise(value: Value, order: Order) -> Value | None:
    if len(order) != value.tensor.rank:
        return None
    operands = [before(v, order) for v in value.inputs]
    if any(v is None for v in operands):
        return None
    attrs = value.attrs
    if isinstance(attrs, A.QuantizeAttrs) and attrs.qparams.axis is not None:
        attrs = replace(attrs, qparams=replace(attrs.qparams, axis=order[attrs.qparams.axis]))
    return b.permute(_like(value, *operands, attrs=attrs), order)


def before(value: Value, order: Order) -> Value | None:
    """y with permute(y, order) == value, up to broadcasting, where that costs nothing; None: it would move elements."""
    if order_of(value) == order:
        return value.inputs[0]
    if value.tensor.rank == 0:
        return value
    if value.tensor.rank > len(order) or value.tensor.qparams is not None:
        return None
    wide = b.reshape(value, (*(1,) * (len(order) - value.tensor.rank), *value.shape))
    back = inverse(order)
    moving = [axis for axis in back if wide.shape[axis] != 1]
    if moving == sorted(moving):
        return b.reshape(wide, tuple(wide.shape[axis] for axis in back))
    return b.permute(wide, back) if is_weight(value) else None


def _like(value: Value, *operands: Value | None, attrs: A.Attrs) -> Value:
    """The operation of `value` on other operands."""
    return make(value.op, *(v for v in operands if v is not None), attrs=attrs, origin=value.origin, name=value.name)


def _permute(value: Value, order: Order) -> Value:
    outer = order_of(value)
    assert outer is not None
    return b.permute(value.inputs[0].inputs[0], tuple(order[axis] for axis in outer))


def _reduce(value: Value, order: Order) -> Value:
    attrs = value.attrs
    assert isinstance(attrs, A.ReduceAttrs)
    axes = tuple(sorted(order[axis] for axis in attrs.axes))
    inner = _in_two(_like(value, value.inputs[0].inputs[0], attrs=replace(attrs, axes=axes)))
    if attrs.keepdim:
        return b.permute(inner, order)
    left = [order[axis] for axis in range(len(order)) if axis not in attrs.axes]
    return b.permute(inner, tuple(sorted(left).index(axis) for axis in left))


def _in_two(value: Value) -> Value:
    """A reduction over neighbours and over axes before those that it keeps. Of few neighbours, as in a group norm of a channels-last image:
    over the others first, all neighbours side by side, and then over what is left of these. Of many, as over all but the channels of
    images: over the neighbours first, which are a row."""
    x, attrs = value.inputs[0], value.attrs
    assert isinstance(attrs, A.ReduceAttrs)
    solid = [axis for axis, extent in enumerate(x.shape) if extent != 1]
    behind = max((axis for axis in solid if axis not in attrs.axes), default=0)
    near, far = (tuple(axis for axis in attrs.axes if (axis > behind) == side and axis in solid) for side in (True, False))
    if not (near and far) or attrs.kind in ("argmax", "argmin"):
        return value
    few = product(x.shape[axis] for axis in near)
    wide = b.cast(x, f32) if x.dtype.is_float and x.dtype.bits < 32 else x  # no sum is rounded twice
    first, then = (far, near) if isinstance(few, int) and few < _FEW else (near, far)
    made = b.reduce(b.reduce(wide, attrs.kind, first, True), attrs.kind, then, True)
    return b.cast(b.reshape(made, value.shape), value.dtype)


def _reshape(value: Value, order: Order) -> Value | None:
    source, placed = value.inputs[0].inputs[0], list[tuple[int, range]]()
    for axes, merged in reshape_groups(value.shape, value.inputs[0].shape):
        run = [order[axis] for axis in merged if value.inputs[0].shape[axis] != 1]
        between = range(run[0], run[-1] + 1) if run else range(0)
        if run != sorted(run) or any(source.shape[axis] != 1 for axis in between if axis not in run):
            return None
        placed.append((run[0] if run else placed[-1][0] if placed else 0, axes))
    moved = [axis for _, axes in sorted(placed, key=lambda each: each[0]) for axis in axes]
    inner = b.reshape(source, tuple(value.shape[axis] for axis in moved))
    return b.permute(inner, inverse(moved))


def _pad(value: Value, order: Order) -> Value:
    assert isinstance(value.attrs, A.PadAttrs)
    amounts = tuple(value.attrs.amounts[order.index(axis)] for axis in range(len(order)))
    return b.permute(_like(value, value.inputs[0].inputs[0], attrs=replace(value.attrs, amounts=amounts)), order)


def _slice(value: Value, order: Order) -> Value:
    assert isinstance(value.attrs, A.SliceAttrs)
    return b.permute(_like(value, value.inputs[0].inputs[0], attrs=replace(value.attrs, axis=order[value.attrs.axis])), order)


def _expand(value: Value, order: Order) -> Value | None:
    if value.tensor.rank != len(order):
        return None
    return b.permute(b.expand(value.inputs[0].inputs[0], tuple(value.shape[order.index(axis)] for axis in range(len(order)))), order)


def _concat(value: Value, order: Order) -> Value | None:
    assert isinstance(value.attrs, A.AxisAttrs)
    if any(order_of(v) != order for v in value.inputs):
        return None
    return b.permute(_like(value, *(v.inputs[0] for v in value.inputs), attrs=A.AxisAttrs(order[value.attrs.axis])), order)


def _take(value: Value, order: Order) -> Value | None:
    assert isinstance(value.attrs, A.AxisAttrs)
    table, index = value.inputs
    if index.tensor.rank != 1 or order_of(table) != order:
        return None
    return b.permute(_like(value, table.inputs[0], index, attrs=A.AxisAttrs(order[value.attrs.axis])), order)


def _linear(value: Value, order: Order) -> Value | None:
    x, w = value.inputs[:2]
    if order_of(x) != order:  # it is the weight that is permuted
        return None
    source = x.inputs[0]
    axis = order[-1]
    between, within = source.shape[:axis], source.shape[axis + 1 :]
    n, k = w.shape
    side_by_side = product(within)
    few = isinstance(n, int) and isinstance(k, int) and n <= _MIXED and k <= _MIXED and source.shape[axis] == k
    if not few or not is_weight(w) or (isinstance(side_by_side, int) and side_by_side < 2 * _MIXED):
        return None
    wide = f64 if value.dtype == f64 else f32
    parts = b.reshape(b.cast(source, wide), (*between, 1, k, *within))
    total = b.reduce(b.mul(parts, b.reshape(b.cast(w, wide), (n, k, *(1 for _ in within)))), "sum", axis + 1)
    for bias in value.inputs[2:]:
        total = b.add(total, b.reshape(b.cast(bias, wide), (n, *(1 for _ in within))))
    return b.permute(b.cast(total, value.dtype), order)


_ROWS: dict[str, Callable[[Value, Order], Value | None]] = {
    "permute": _permute, "reshape": _reshape, "reduce": _reduce, "pad": _pad, "slice": _slice, "expand": _expand, "concat": _concat,
    "take": _take, "linear": _linear,
}
