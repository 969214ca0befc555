"""Physical layouts: a contraction whose result is only wanted permuted writes it that way, so the permutation costs nothing; rows that
would lie in the same few sets of a cache are moved apart."""

from __future__ import annotations

from ..graph import attrs as A
from ..graph.ir import ALIKE, Graph, Value, rebuild, reordered, with_inputs, with_room
from ..graph.ops import OPS
from .partition import Native, partition
from .roots import PIECEWISE

_BATCHED = ("attention", "matmul", "int_matmul")
_LINE = 64
_NATIVE = ("elementwise", "quant", "reduce", "contraction")


def choose_layouts(graph: Graph) -> Graph:
    """Give the results of attention and matmul, scaled or quantized as they may be, the order that their only user, a permute, asks for."""

    def visit(value: Value, inputs: tuple[Value, ...]) -> Value:
        users = graph.users[value]
        value_now = with_inputs(value, inputs)
        if len(users) == 1 and not graph.is_output(value):
            attrs = users[0].attrs
            if isinstance(attrs, A.PermuteAttrs) and _is_product(value, graph):
                return reordered(value_now, attrs.order)
        return value_now

    return rebuild(graph, visit)


def _is_product(value: Value, graph: Graph) -> bool:
    """Whether `value` is a batched contraction, or computed from one alone, element by element."""
    while OPS[value.op].group == "elementwise":
        inner = [v for v in value.inputs if v.shape == value.shape and OPS[v.op].group != "leaf"]
        if len(inner) != 1 or len(graph.users[inner[0]]) != 1:
            return False
        value = inner[0]
    return value.op in _BATCHED


def spread_rows(graph: Graph) -> Graph:
    """Give what products read row by row, and native code alone sees, a gap of one line between rows that lie a multiple of 1024 bytes
    apart."""
    wanted = {_rows_of(v.inputs[0]) for v in graph.order if v.op in PIECEWISE}
    wanted = {v for v in wanted if _lies_alike(v) and all(_keeps_rows(user, v) for user in graph.users[v])}
    if not wanted:
        return graph
    wanted -= _seen_outside(graph)

    def visit(value: Value, inputs: tuple[Value, ...]) -> Value:
        value_now = with_inputs(value, inputs)
        if value not in wanted:
            return value_now
        return with_room(value_now, (*[(0, 0)] * (value.tensor.rank - 1), (0, _LINE // value.dtype.bytes)))

    return rebuild(graph, visit)


def _rows_of(operand: Value) -> Value:
    """What holds the rows of a product's left operand."""
    while operand.op == "reshape" and operand.inputs[0].shape[-1:] == operand.shape[-1:]:
        operand = operand.inputs[0]
    return operand


def _lies_alike(value: Value) -> bool:
    if OPS[value.op].group not in _NATIVE or value.tensor.order is not None or value.tensor.rank < 2:
        return False
    return isinstance(value.shape[-1], int) and value.shape[-1] * value.dtype.bytes % ALIKE == 0


def _keeps_rows(user: Value, value: Value) -> bool:
    """Whether `user` reads the rows as they are; others might have to take the gaps into account at every element."""
    if user.op == "reshape":
        return user.shape[-1:] == value.shape[-1:]
    return OPS[user.op].group in _NATIVE


def _seen_outside(graph: Graph) -> set[Value]:
    """Values that are no affair of one native segment alone."""
    parts, constants = partition(graph)
    native = [part for part in parts if isinstance(part, Native)]
    return {*constants, *(v for part in native for v in (*part.inputs, *part.constants, *part.outputs))}
