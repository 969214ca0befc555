"""Physical layouts: a contraction whose result is only wanted permuted writes it that way, so the permutation costs nothing."""

from __future__ import annotations

from ..graph import attrs as A
from ..graph.ir import Graph, Value, rebuild, with_inputs
from ..graph.ops import reordered


def choose_layouts(graph: Graph) -> Graph:
    """Give attention and matmul results the order that their only user, a permute, asks for."""

    def visit(value: Value, inputs: tuple[Value, ...]) -> Value:
        users = graph.users[value]
        value_now = with_inputs(value, inputs)
        if value.op in ("attention", "matmul") and len(users) == 1 and not graph.is_output(value):
            attrs = users[0].attrs
            if isinstance(attrs, A.PermuteAttrs):
                return reordered(value_now, attrs.order)
        return value_now

    return rebuild(graph, visit)
