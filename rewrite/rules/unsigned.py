"""Rows of unsigned integers for processors whose products read nothing else where it lies. With u = q + 128, which is exact:

    int_linear(q, w) = int_linear(u, w) - 128 sum of w over k        q = quantize(x) in i8, u = quantize(x) in u8

VPDPBUSD takes an unsigned lhs: a signed one is copied and shifted before every product that reads it.
"""

from __future__ import annotations

from dataclasses import replace

from ...graph import attrs as A
from ...graph import build as b
from ...graph.ir import Graph, Value, rebuild, with_inputs
from ...graph.ops import make
from ...graph.types import i8, i32, u8

SHIFT = 128
# Sums of so many products of u8 and i8 are integers of 32 bits.
MOST = 1 << 16


def unsigned_rows(graph: Graph, unit: int) -> Graph:
    """The graph with u8 wherever nothing but products reads what is quantized to i8. unit: of how many k such products read whole rows."""
    shifted = {v for v in graph.order if v.op == "quantize" and v.dtype == i8 and _is_lhs_alone(v, graph, unit)}
    if not shifted:
        return graph

    def visit(value: Value, inputs: tuple[Value, ...]) -> Value:
        if value in shifted:
            assert isinstance(value.attrs, A.QuantizeAttrs)
            q = value.attrs.qparams
            q = replace(q, zero_point=q.zero_point + SHIFT, qmin=q.qmin + SHIFT, qmax=q.qmax + SHIFT)
            return make("quantize", *inputs, attrs=replace(value.attrs, dtype=u8, qparams=q), origin=value.origin)
        if value.op not in ("reshape", "int_linear") or inputs[0].dtype == value.inputs[0].dtype:
            return with_inputs(value, inputs)
        again = make(value.op, *inputs, attrs=value.attrs, origin=value.origin)
        if value.op == "reshape":
            return again
        with b.at(value.origin):
            return b.sub(again, b.mul(b.reduce(b.cast(inputs[1], i32), "sum", 1), SHIFT))

    return rebuild(graph, visit)


def _is_lhs_alone(value: Value, graph: Graph, unit: int) -> bool:
    """Whether all that reads a value are products that take it for the rows of their lhs, be it in another shape."""
    users = graph.users[value]
    return bool(users) and not graph.is_output(value) and all(_reads_rows(user, value, graph, unit) for user in users)


def _reads_rows(user: Value, value: Value, graph: Graph, unit: int) -> bool:
    if user.op == "reshape":
        return _is_lhs_alone(user, graph, unit)
    if user.op != "int_linear" or user.inputs[1] is value or user.inputs[1].dtype != i8:
        return False
    k = value.shape[-1]
    return isinstance(k, int) and k <= MOST and k % unit == 0
