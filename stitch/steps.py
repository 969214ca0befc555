"""Many pieces of one shape side by side, such as what the steps of a loop give: they are computed together."""

from __future__ import annotations

from itertools import groupby

from ..graph import attrs as A
from ..graph import build as b
from ..graph.ir import Graph, Value, rebuild, with_inputs

_FEW = 8  # more pieces would be as many conditions at every point of the whole, and what they share would be computed for each


def by_pieces(value: Value) -> bool:
    """Whether a value is computed at the points of one of its pieces: a concatenation of many of one shape, such as the steps of a loop.

    All pieces are computed together, and what they share once: of a loop, what each step hands to the next stays in registers.
    """
    return value.op == "concat" and len(value.inputs) > _FEW and all(v.shape == value.inputs[0].shape for v in value.inputs)


def together(graph: Graph) -> Graph:
    """Many pieces of one shape that follow each other among others, such as the steps of a loop behind what it begins with, as a
    concatenation of their own."""
    return rebuild(graph, lambda value, inputs: _together(with_inputs(value, inputs)))


def _together(value: Value) -> Value:
    if not isinstance(value.attrs, A.AxisAttrs) or value.op != "concat" or len(value.inputs) <= _FEW or by_pieces(value):
        return value
    axis, runs = value.attrs.axis, [list(run) for _, run in groupby(value.inputs, key=lambda piece: piece.shape)]
    if all(len(run) <= _FEW for run in runs):
        return value
    with b.at(value.origin):
        return b.concat([piece for run in runs for piece in (run if len(run) <= _FEW else [b.concat(run, axis)])], axis)
