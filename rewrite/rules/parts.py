"""Long reductions with few results in two steps, so that a GPU has enough to do at once: reduce(x) -> reduce(reduce(parts of x)).

A sum of partial sums also rounds less (Higham, The accuracy of floating point summation, 1993).
"""

from __future__ import annotations

from ...graph import attrs as A
from ...graph import build as b
from ...graph.dims import product
from ...graph.ir import Graph, Value, rebuild, with_inputs
from ...graph.types import bf16, f16, f32

# Threads that keep a large GPU busy, those that share a row at most, and elements that are worth a thread.
_BUSY, _SHARE, _WORTH = 1 << 17, 1024, 16
_KINDS = ("sum", "prod", "max", "min", "any", "all")


def in_parts(graph: Graph) -> Graph:
    """The graph with a second step where the first one would be too few threads'."""

    def visit(value: Value, inputs: tuple[Value, ...]) -> Value:
        value = with_inputs(value, inputs)
        parts = _parts(value)
        if not parts:
            return value
        assert isinstance(value.attrs, A.ReduceAttrs)
        a, x = value.attrs, value.inputs[0]
        axis = next(axis for axis in a.axes if _count(x, axis) % parts == 0 and _count(x, axis) > parts)
        axes = tuple(each + (each >= axis) for each in a.axes if each != axis)
        with b.at(value.origin):
            wide = b.cast(x, f32) if x.dtype in (f16, bf16) else x  # partial results are not rounded
            cut = b.reshape(wide, (*x.shape[:axis], parts, _count(x, axis) // parts, *x.shape[axis + 1 :]))
            first = b.reduce(cut, a.kind, (*axes, axis + 1))
            kept = [each for each in range(cut.tensor.rank) if each not in (*axes, axis + 1)]
            return b.cast(b.reshape(b.reduce(first, a.kind, kept.index(axis)), value.shape), value.dtype)

    return rebuild(graph, visit)


def _count(x: Value, axis: int) -> int:
    count = x.shape[axis]
    return count if isinstance(count, int) else 0


def _parts(value: Value) -> int:
    """In how many parts to reduce; 0: as it is."""
    if value.op != "reduce" or not isinstance(value.attrs, A.ReduceAttrs) or value.attrs.kind not in _KINDS:
        return 0
    x, axes = value.inputs[0], value.attrs.axes
    results, whole = product(value.shape), product([x.shape[axis] for axis in axes])
    if not isinstance(results, int) or not isinstance(whole, int) or not results or not whole:
        return 0
    last = x.tensor.rank - 1
    along = _count(x, last) if last in axes else 1
    threads = results * min(_SHARE, max(1, along // 4))
    if threads * 2 > _BUSY or whole < 4 * _WORTH * min(along, _SHARE):
        return 0
    most = min(-(-_BUSY // threads), whole // (_WORTH * min(along, _SHARE)))
    counts = [_count(x, axis) for axis in axes]
    return next((n for n in range(most, 1, -1) if any(count % n == 0 and count > n for count in counts)), 0)
