"""Physical layouts: a contraction whose result is only wanted permuted writes it that way, so the permutation costs nothing."""

from __future__ import annotations

from ..graph import attrs as A
from ..graph.ir import Graph, Value, rebuild, with_inputs
from ..graph.ops import OPS, reordered

_BATCHED = ("attention", "matmul", "int_matmul")


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
