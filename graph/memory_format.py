"""Tensors of a call that do not lie row by row, such as images with their channels last.

The graph takes and gives them as they lie: as row-major tensors with permuted axes. So a model in channels-last format, whose convolutions
are computed in this order anyway, moves nothing.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from . import build as b
from .attrs import PermuteAttrs
from .captured import Captured, GraphOutput, TensorInput
from .dims import product
from .ir import Graph, Value, rebuild, with_inputs
from .ops import OPS, make
from .types import Order, inverse


def order_of(tensor: torch.Tensor) -> Order | None:
    """How a tensor, maybe a fake one, lies in memory; None: row by row, or not densely, or nobody knows."""
    sizes, strides = [known(s) for s in tensor.shape], [known(s) for s in tensor.stride()]
    if None in (*sizes, *strides) or 0 in sizes:
        return None
    rows = tuple(range(len(sizes)))
    order = tuple(sorted(rows, key=lambda axis: -(strides[axis] or 0)))
    return order if _dense(sizes, strides, order) and not _dense(sizes, strides, rows) else None


def lies_row_by_row(tensor: torch.Tensor) -> bool:
    """Whether a tensor, maybe a fake one, is known to lie row by row, as far as the example tells."""
    sizes, strides = [known(s) for s in tensor.shape], [known(s) for s in tensor.stride()]
    return None not in (*sizes, *strides) and (0 in sizes or _dense(sizes, strides, tuple(range(len(sizes)))))


def known(size: int | torch.SymInt) -> int | None:
    """A size as far as it is known of the example: to ask for it would make it part of the program."""
    return size if isinstance(size, int) else size.node.hint


def _dense(sizes: list[int | None], strides: list[int | None], order: Order) -> bool:
    step = 1
    for axis in reversed(order):
        size = sizes[axis] or 0
        if size != 1 and strides[axis] != step:
            return False
        step *= size
    return True


def as_they_lie(captured: Captured) -> Captured:
    """The same with a graph of row-major inputs and outputs alone, but for inputs that are written into and what PyTorch computes or reads
    itself. `order` of inputs and outputs is None where the graph has the axes of the call."""
    graph, written = captured.graph, {m.input for m in captured.mutations}
    inputs = tuple([
        replace(i, order=None) if isinstance(i, TensorInput) and (i.index in written or _by_torch(graph, graph.inputs[i.index])) else i
        for i in captured.inputs
    ])
    outputs = tuple([
        replace(o, order=None) if isinstance(o, GraphOutput) and graph.outputs[o.index].op in ("aten", "get") else o
        for o in captured.outputs
    ])
    taken = {i.index: i.order for i in inputs if isinstance(i, TensorInput) and i.order is not None}
    given = {o.index: o.order for o in outputs if isinstance(o, GraphOutput) and o.order is not None}
    if taken or given:
        graph = _given(_taken(graph, taken), given)
    return replace(captured, graph=graph, inputs=inputs, outputs=outputs)


def _by_torch(graph: Graph, value: Value) -> bool:
    return any(user.op == "aten" for user in graph.users[value])


def _taken(graph: Graph, orders: dict[int, Order]) -> Graph:
    new = list(graph.inputs)
    seen: dict[Value, Value] = {}
    for number, order in orders.items():
        old = graph.inputs[number]
        new[number] = b.input_(number, old.dtype, tuple(old.shape[axis] for axis in order), old.name)
        seen[old] = b.permute(new[number], inverse(order))
    made = rebuild(
        Graph(tuple(v for v in graph.inputs if v not in seen), graph.outputs, graph.name),
        lambda value, inputs: seen.get(value) or with_inputs(value, inputs),
    )
    return Graph(tuple(new), made.outputs, graph.name)


def _given(graph: Graph, orders: dict[int, Order]) -> Graph:
    return replace(graph, outputs=tuple([b.permute(_own(v), orders[n]) if n in orders else v for n, v in enumerate(graph.outputs)]))


def _own(value: Value) -> Value:
    """A value that is no view of an argument or constant, which it would be once its axes have been put back."""
    if value.op == "permute":
        return with_inputs(value, (_own(value.inputs[0]),))
    return make("copy", value) if value.op in ("input", "constant") else value


def row_by_row_where_made_so(graph: Graph, captured: Captured) -> tuple[Graph, Captured]:
    """The graph of `as_they_lie`, rewritten, with those products in the order of the call's axes that are computed so and would have to be
    put into another; everything else is computed in any order."""
    plain = {
        o.index: value.inputs[0]
        for o in captured.outputs
        if isinstance(o, GraphOutput) and (value := graph.outputs[o.index]).op == "permute" and value.attrs == PermuteAttrs(o.order or ())
        and _is_product(value.inputs[0])
    }
    if not plain:
        return graph, captured
    outputs = tuple([replace(o, order=None) if isinstance(o, GraphOutput) and o.index in plain else o for o in captured.outputs])
    return replace(graph, outputs=tuple([plain.get(n, v) for n, v in enumerate(graph.outputs)])), replace(captured, outputs=outputs)


def _is_product(value: Value) -> bool:
    """Whether a value is a contraction, or computed from one alone element by element."""
    while OPS[value.op].group in ("elementwise", "view"):
        rows = [v for v in value.inputs if product(v.shape) == product(value.shape)]
        if len(rows) != 1:
            return False
        value = rows[0]
    return OPS[value.op].group == "contraction"
