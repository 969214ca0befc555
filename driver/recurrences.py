"""Recurrent layers: the graph of one step, which goes through the same passes and kernels as any other, and is repeated by the plan."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import replace

from ..graph import attrs as A
from ..graph import build as b
from ..graph.aten.quantized import rounded_rows
from ..graph.dims import Dim
from ..graph.ir import Graph, Value
from ..graph.recurrence import CELLS
from ..graph.types import bf16, f32
from ..stitch.partition import Native, partition
from ..stitch.program import RecurrenceItem
from ..stitch.stitcher import stitch

Passes = Callable[[Graph], Graph]


def recurrence_item(value: Value, constants: Set[Value], passes: Passes) -> RecurrenceItem:
    """The item that computes a recurrence. constants: the values that are known before the call; passes: what makes a graph ready to be
    stitched."""
    graph = passes(step_graph(value, constants))
    (part,), _ = partition(graph)
    assert isinstance(part, Native), "every operation of a cell has a native form"
    # The state is no output, which might be stored around the caches: the next step reads it.
    step = replace(stitch(graph.outputs, graph.inputs, part.constants), outputs=())
    return RecurrenceItem(value, step, graph.outputs[0])


def step_graph(value: Value, constants: Set[Value]) -> Graph:
    """One step: from its part of `x`, the state, and `w` and `b` where these are no constants, to the next state."""
    assert isinstance(value.attrs, A.RecurrenceAttrs)
    inputs: list[Value] = []

    def operand(number: int) -> Value:
        outer = value.inputs[number]
        if number > 1 and outer in constants:
            return outer
        inputs.append(b.input_(len(inputs), f32, outer.shape[1:] if number == 0 else outer.shape, outer.name))
        return inputs[-1]

    with b.at(value.origin):
        x, state, w, *others = [operand(number) for number in range(len(value.inputs))]
        projections, bias = (others[:1], others[1:]) if CELLS[value.attrs.cell].projected else ([], others)
        hidden = b.reshape(b.slice_(b.slice_(state, 0, 0, 1), 2, 0, w.shape[1]), (state.shape[1], w.shape[1]))
        rounded = _ROUNDINGS[value.attrs.rounding](hidden)
        product = b.linear(rounded, b.cast(w, rounded.dtype), *bias)
        states = _CELLS[value.attrs.cell](x, product, state, *projections)
        after = b.concat([b.unsqueeze(s, 0) for s in states], 0) if len(states) > 1 else states[0]  # of one state, the axis says nothing
        return Graph(tuple(inputs), (after,), "step")


def _gates(x: Value, size: Dim, count: int) -> list[Value]:
    return [b.slice_(x, 1, n * size, size) for n in range(count)]


def _remembering(gates: Value, memory: Value) -> list[Value]:
    i, f, g, o = _gates(gates, memory.shape[1], 4)
    memory = b.add(b.mul(b.sigmoid(f), memory), b.mul(b.sigmoid(i), b.tanh(g)))
    return [b.mul(b.sigmoid(o), b.tanh(memory)), memory]


def _lstm(x: Value, product: Value, state: Value) -> list[Value]:
    return _remembering(b.add(x, product), b.reshape(b.slice_(state, 0, 1, 1), state.shape[1:]))


def _lstm_projected(x: Value, product: Value, state: Value, projection: Value) -> list[Value]:
    columns, size = projection.shape
    memory = b.slice_(b.reshape(state, state.shape[1:]), 1, columns, size)
    hidden, memory = _remembering(b.add(x, product), memory)
    return [b.concat([b.linear(hidden, projection), memory], 1)]


def _gru(x: Value, product: Value, state: Value) -> list[Value]:
    (r, z, n), (hr, hz, hn) = _gates(x, state.shape[2], 3), _gates(product, state.shape[2], 3)
    update, hidden = b.sigmoid(b.add(z, hz)), b.reshape(state, state.shape[1:])
    fresh = b.tanh(b.add(n, b.mul(b.sigmoid(b.add(r, hr)), hn)))
    return [b.add(b.mul(b.sub(1.0, update), fresh), b.mul(update, hidden))]


_CELLS: dict[str, Callable[..., list[Value]]] = {
    "lstm": _lstm,
    "lstm_projected": _lstm_projected,
    "gru": _gru,
    "rnn_tanh": lambda x, product, state: [b.tanh(b.add(x, product))],
    "rnn_relu": lambda x, product, state: [b.relu(b.add(x, product))],
}
_ROUNDINGS: dict[str, Callable[[Value], Value]] = {
    "none": lambda x: x,
    "rows": lambda x: rounded_rows(x, affine=False),
    "affine_rows": lambda x: rounded_rows(x, affine=True),
    "bf16": lambda x: b.cast(x, bf16),
}
