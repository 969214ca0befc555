"""Contractions: what their kernels read through pointers, and the loop bodies fused into them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..graph import attrs as A
from ..graph.dims import Shape, symbol
from ..graph.ir import Value
from ..graph.types import boolean, f32, i64
from .alike import Lowered, lowered
from .domain import Axis, finish_epilogue
from .elementwise import quantized
from .loops import COLUMN, Body, BodyBuilder, Node, hoist_numbers
from .lower import Lowering, NeedsBuffer
from .program import ContractionItem, Strided
from .roots import PIECEWISE
from .views import axes, broadcast_index, in_pieces, reshape_index, strided


def lower_epilogue(anchor: Value, roots: Sequence[Value], stored: set[Value]) -> Lowered:
    """Evaluate `roots` from the accumulators of `anchor`. Raises NeedsBuffer."""
    if anchor.op == "attention":
        return lowered([anchor], stored, "attention", lambda: _score(anchor, stored))
    return lowered(roots, stored, anchor.type, lambda: _epilogue(anchor, roots, stored), anchor)


def _epilogue(anchor: Value, roots: Sequence[Value], stored: set[Value]) -> Lowering:
    index, _ = axes(anchor.shape, "a")
    home = {root: reshape_index(index, anchor.shape, root.shape) for root in roots}
    lowering = Lowering(stored, home, {anchor: index}, anchor.dtype, loops=_around(anchor.shape))
    for root in roots:
        lowering.store(root, home[root])
    return lowering


def _around(shape: Shape) -> tuple[str, ...]:
    """The loops around an epilogue: some columns at a time, all rows, these columns."""
    *rows, columns = ([f"a{n}"] if extent != 1 else [] for n, extent in enumerate(shape))
    return tuple(name for part in (columns, *rows, columns) for name in part)


def item(anchor: Value, roots: Sequence[Value], stored: set[Value], readable: set[Value]) -> ContractionItem:
    """The contraction with `roots` as its results. `readable`: values with buffers, inputs and constants."""
    made = lower_epilogue(anchor, roots, stored)
    shape = anchor.shape if anchor.op != "attention" else anchor.shape[:3] + (anchor.inputs[1].shape[2],)
    named: list[Axis] = [(f"a{n}", extent) for n, extent in enumerate(shape)]
    body, params = finish_epilogue(made.body, tuple(named[:-1]), named[-1])
    pointers = []
    for operand in anchor.inputs[:3] if anchor.op == "attention" else anchor.inputs[:2]:
        found = strided(operand, readable)
        if found is None and operand is anchor.inputs[0] and anchor.op in PIECEWISE:
            found = in_pieces(operand, readable)
        if found is None:
            raise NeedsBuffer(operand, "it is no strided view of a buffer")
        pointers.append(Strided(*found))
    writes = (anchor,) if anchor.op == "attention" else tuple(roots)
    result, more = _result(anchor, len(params))
    return ContractionItem(anchor, tuple(pointers), body, params + more, made.operands, writes, tuple(made.inlined), result)


def _result(anchor: Value, first: int) -> tuple[Body | None, tuple[float, ...]]:
    """What becomes of attention's results where they are quantized, and its numbers, which come after `first` others."""
    attrs = anchor.attrs
    if not isinstance(attrs, A.AttentionAttrs) or attrs.dtype is None or attrs.qparams is None:
        return None, ()
    b = BodyBuilder()
    to = b.buffer(attrs.dtype)
    b.store(to, COLUMN, quantized(b, b.op("acc", f32), attrs.dtype, attrs.qparams))
    body, numbers = hoist_numbers(b.finish())
    nodes = tuple(replace(node, value=node.value + first) if node.op == "param" else node for node in body.nodes)
    return replace(body, nodes=nodes), numbers


def _score(anchor: Value, stored: set[Value]) -> Lowering:
    """Body of attention: scale, cap, mask and window of one score; its stores go nowhere and name the score and, if any, the sink."""
    assert isinstance(anchor.attrs, A.AttentionAttrs)
    q, k = anchor.inputs[:2]
    shape = q.shape[:3] + (k.shape[2],)
    index, _ = axes(shape, "a")
    low = Lowering(stored, loops=_around(shape))
    b = low.builder
    # Numbers are left to parameters, so that kernels which differ in them are one; that this one is positive is part of the form.
    scale = anchor.attrs.scale
    positive = 0 < scale < float("inf")
    score = b.op("mul", f32, b.op("acc", f32), b.const(scale if positive else -scale, f32))
    if not positive:
        score = b.op("neg", f32, score)
    if anchor.attrs.cap is not None:
        score = b.op("mul", f32, b.op("tanh", f32, score), b.const(anchor.attrs.cap, f32))
    floor = b.const(float("-inf"), f32)
    query, key = (symbol(f"a{n}", 0, None, shape[n]) if shape[n] != 1 else 0 for n in (2, 3))
    before, after = anchor.attrs.before, anchor.attrs.after
    ends = [] if before is None else [(query - before, key)]
    ends += [] if after is None else [(key, query + after)]
    for least, most in ends:
        seen = b.op("le", boolean, b.add(Node("index", i64, index=least)), b.add(Node("index", i64, index=most)))
        score = b.op("where", f32, seen, score, floor)
    mask, sink = anchor.attrs.besides(anchor.inputs)
    if mask is not None:
        node = low.value(mask, broadcast_index(index, mask.shape))
        if mask.dtype == boolean:
            score = b.op("where", f32, node, score, floor)
        else:
            score = b.op("add", f32, score, b.cast(node, f32))
    b.store(-1, 0, score)
    if sink is not None:
        b.store(-1, 0, b.cast(low.value(sink, broadcast_index(index, sink.shape)), f32))
    return low
