"""Contractions in a narrower type, everything else in f32.

    linear(x, w, b)      = linear(cast x, cast w, b)               the sum stays in f32, and so does the result
    x @ y                = cast x @ cast y                         likewise; so is routed_linear
    attention(q, k, v)   = cast f32 (attention(cast q, cast k, cast v))
    sum(windows(x) * w)  = sum(cast f32 (windows(cast x)) * w)     a depthwise convolution, where nothing else reads x

Each product has a relative error of up to three times the narrow type's rounding unit (both operands and, for attention, the result);
the sums add nothing. A depthwise convolution multiplies in f32 all the same: it waits for its image, of which there is half as much, and
what computes that may have few digits (`short.py`). Integer weights stay what they are. A mask stays as it is: the lowest f32 number
would become -inf in bf16. This changes numbers, so it is no rule that always applies but a pass that somebody asks for. What else reads a
value that is rounded for a product is told in `residuals.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from ...graph import attrs as A
from ...graph.ir import Graph, Value, rebuild, with_inputs
from ...graph.ops import OPS, make
from ...graph.types import DType, bf16, f16, f32

_WIDE = (f32, f16)
_VIEWS = ("reshape", "permute", "expand", "window", "pad")
# How many operands, counted from the first, are multiplied.
_FACTORS = {"linear": 2, "group_linear": 1, "routed_linear": 2, "matmul": 2, "attention": 3}


def lower_precision(graph: Graph, dtype: DType = bf16, select: Callable[[Value], bool] | None = None) -> Graph:
    """The graph with the factors of its contractions, of f32 or f16, cast to `dtype` (bf16 or f16).

    select: says which contractions of `graph` to change (a depthwise convolution by its sum); None means all. A value read by several
    contractions is cast once.
    """
    casts: dict[Value, Value] = {}

    def narrow(value: Value) -> Value:
        if value.dtype not in _WIDE or value.dtype == dtype:
            return value
        if value.op == "cast" and value.inputs[0].dtype == dtype:
            return value.inputs[0]
        if value not in casts:
            # Before the views of it, where it can be part of what computes the value.
            viewed = value.op in _VIEWS
            source, attrs = (narrow(value.inputs[0]), value.attrs) if viewed else (value, A.CastAttrs(dtype))
            casts[value] = make(value.op if viewed else "cast", source, attrs=attrs, origin=value.origin, name=value.name if viewed else "")
        return casts[value]

    def visit(old: Value, inputs: tuple[Value, ...]) -> Value:
        count = _FACTORS.get(old.op, 0)
        unchanged = with_inputs(old, inputs)
        if old.op == "mul" and (of := _windows_of(graph, old)) is not None and (select is None or select(graph.users[old][0])):
            image = make("cast", narrow(inputs[of]), attrs=A.CastAttrs(f32), origin=old.origin)
            return with_inputs(old, (*inputs[:of], image, *inputs[of + 1 :]))
        if count == 0 or any(v.dtype.is_float and v.dtype not in _WIDE for v in inputs[:count]) or (select is not None and not select(old)):
            return unchanged
        result = make(old.op, *map(narrow, inputs[:count]), *inputs[count:], attrs=old.attrs, origin=old.origin, name=old.name)
        return result if result.dtype == old.dtype else make("cast", result, attrs=A.CastAttrs(old.dtype), origin=old.origin)

    return rebuild(graph, visit)


def _windows_of(graph: Graph, product: Value) -> int | None:
    """Which factor of a depthwise convolution is the windows of an image that nothing else reads; None where it is no such product."""
    if product.dtype != f32 or [(user.op, getattr(user.attrs, "kind", "")) for user in graph.users[product]] != [("reduce", "sum")]:
        return None
    return next((n for n, factor in enumerate(product.inputs) if _is_windows(graph, factor)), None)


def _is_windows(graph: Graph, value: Value) -> bool:
    windows = False
    while value.op in _VIEWS and len(graph.users[value]) == 1:
        windows |= value.op == "window"
        value = value.inputs[0]
    return windows and len(graph.users[value]) == 1 and value.dtype == f32 and OPS[value.op].group in ("elementwise", "contraction")
