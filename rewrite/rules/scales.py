"""Quantization whose scale is in the constants before it, one multiplication less for each element.

    quantize(a * c + d) = quantize'(a * (c / s) + d / s)    c, d: constants; s: the scale of all elements; quantize': of steps
    quantize(a * c)     = quantize'(a * (c / s))
    quantize(relu x)    = quantize'(relu (x / s))           where x is one of these

That is what the scales and biases of a quantized layer are followed by where the next one takes integers, too. Numbers halfway between two
steps may become the other one, as the sum is rounded in steps.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ...graph import attrs as A
from ...graph.ir import Graph, Value, rebuild, with_inputs
from ...graph.ops import make
from ...graph.types import f32
from ..template import full


def scaled_before(graph: Graph, constants: Collection[Value]) -> Graph:
    """The graph with the scales of quantizations moved into the constants that come before them and serve nothing else. constants: the
    values that depend on no input."""
    fixed = frozenset(constants)

    def visit(value: Value, inputs: tuple[Value, ...]) -> Value:
        inverse = _inverse(value)
        if inverse is None or not _has_constants(graph, fixed, value.inputs[0]):
            return with_inputs(value, inputs)
        assert isinstance(value.attrs, A.QuantizeAttrs)
        attrs = replace(value.attrs, in_steps=True)
        return make("quantize", _scaled(value.inputs[0], inputs[0], fixed, inverse), attrs=attrs, origin=value.origin, name=value.name)

    return rebuild(graph, visit)


def _inverse(value: Value) -> float | None:
    """1 / scale of a quantization of f32 with one scale that is not 1."""
    if value.op != "quantize" or value.inputs[0].dtype != f32:
        return None
    assert isinstance(value.attrs, A.QuantizeAttrs)
    scale = value.attrs.qparams.scale
    return 1.0 / scale[0] if len(scale) == 1 and scale != (1.0,) and not value.attrs.in_steps else None


def _has_constants(graph: Graph, fixed: frozenset[Value], x: Value) -> bool:
    """Whether x is a product with constants, that and a sum with constants, or what is positive of these, which nothing else reads."""
    if x.op not in ("mul", "add", "relu") or x.dtype != f32 or len(graph.users[x]) != 1 or graph.is_output(x):
        return False
    if x.op == "relu":
        return _has_constants(graph, fixed, x.inputs[0])
    at = constant_operand(fixed, x)
    a = x.inputs[1 - at]
    return x.inputs[at] in fixed and a.shape == x.shape and (x.op == "mul" or (a.op == "mul" and _has_constants(graph, fixed, a)))


def constant_operand(fixed: Collection[Value], x: Value) -> int:
    """Which operand of x is constant, if any is."""
    return 1 if x.inputs[1] in fixed else 0


def _scaled(old: Value, x: Value, fixed: frozenset[Value], inverse: float) -> Value:
    """x * inverse by other constants. old: x in the old graph."""
    if x.op == "relu":
        return make("relu", _scaled(old.inputs[0], x.inputs[0], fixed, inverse), origin=x.origin, name=x.name)
    at = constant_operand(fixed, old)
    a = x.inputs[1 - at] if x.op == "mul" else _scaled(old.inputs[1 - at], x.inputs[1 - at], fixed, inverse)
    constant = make("mul", x.inputs[at], full(inverse, f32, (), x.origin), origin=x.origin)
    return make(x.op, a, constant, origin=x.origin, name=x.name)
