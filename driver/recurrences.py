"""Recurrent layers: the graph of one step, which goes through the same passes and kernels as any other, and is repeated by the plan."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import replace

from ..graph import attrs as A
from ..graph import build as b
from ..graph.aten.quantized import rounded_rows
from ..graph.ir import Graph, Value
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
        x, state, *weights = [operand(number) for number in range(len(value.inputs))]
        rounded = _ROUNDINGS[value.attrs.rounding](b.reshape(b.slice_(state, 0, 0, 1), state.shape[1:]))
        product = b.linear(rounded, b.cast(weights[0], rounded.dtype), *weights[1:])
        states = _CELLS[value.attrs.cell](x, product, state)
        after = b.concat([b.unsqueeze(s, 0) for s in states], 0) if len(states) > 1 else states[0]  # of one state, the axis says nothing
        return Graph(tuple(inputs), (after,), "step")


def _gates(x: Value, state: Value, count: int) -> list[Value]:
    size = state.shape[2]
    return [b.slice_(x, 1, n * size, size) for n in range(count)]


def _lstm(x: Value, product: Value, state: Value) -> list[Value]:
    i, f, g, o = _gates(b.add(x, product), state, 4)
    memory = b.reshape(b.slice_(state, 0, 1, 1), state.shape[1:])
    memory = b.add(b.mul(b.sigmoid(f), memory), b.mul(b.sigmoid(i), b.tanh(g)))
    return [b.mul(b.sigmoid(o), b.tanh(memory)), memory]


def _gru(x: Value, product: Value, state: Value) -> list[Value]:
    (r, z, n), (hr, hz, hn) = _gates(x, state, 3), _gates(product, state, 3)
    update, hidden = b.sigmoid(b.add(z, hz)), b.reshape(state, state.shape[1:])
    fresh = b.tanh(b.add(n, b.mul(b.sigmoid(b.add(r, hr)), hn)))
    return [b.add(b.mul(b.sub(1.0, update), fresh), b.mul(update, hidden))]


_CELLS: dict[str, Callable[[Value, Value, Value], list[Value]]] = {
    "lstm": _lstm,
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
