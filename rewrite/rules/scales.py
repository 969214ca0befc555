"""Scales of quantizations, and of tables, in the constants before them: some operations less for each element.

    quantize(a * c + d) = quantize'(a * (c / s) + (d / s + z))     c, d: constants; s, z: the scale of all elements and their zero point
    quantize(a * c)     = quantize'(a * (c / s))                   quantize': of steps, from the zero point on where that is added before
    quantize(relu x)    = quantize'(relu (x / s))                  where x is one of these, and z is added after
    piecewise(a * c + d) = piecewise'(a * (c n) + d n)             n: pieces for each unit; piecewise': with pieces of length 1
                                                                   a: integers, where infinity has a result of its own

However many products and sums with constants there are, one of each is left: the scales and biases of a quantized layer where the next one
takes integers, too, and the weights of a norm, perhaps divided by what smooths activations. Numbers halfway between two steps may become
the other one, as sums are rounded in steps.

Nothing else may read what the constants are applied to, since it would be computed twice; but where a is a product with a number for each
row, as in a norm, computing both from it takes no more than one from the other.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

from ...graph import attrs as A
from ...graph import build as b
from ...graph.ir import Graph, Value, rebuild, with_inputs
from ...graph.ops import make
from ...graph.types import f32
from ..template import full
from .pieces import of_units


def scaled_before(graph: Graph, constants: Collection[Value]) -> Graph:
    """The graph with the scales of quantizations and tables moved into the constants that come before them. constants: the values that
    depend on no input."""
    fixed = frozenset((*constants, *(value for value in graph.order if value.op == "full")))

    def visit(value: Value, inputs: tuple[Value, ...]) -> Value:
        rate = _rate(value)
        chain = [] if rate is None else _chain(graph, fixed, value.inputs[0])
        if rate is None or not chain or (_tells_infinity(value.attrs) and not _of_integers(chain[-1])):
            return with_inputs(value, inputs)
        attrs, positive = value.attrs, value.inputs[0].op == "relu"
        with b.at(value.inputs[0].origin):
            a, factor, term = _affine(chain, inputs[0].inputs[0] if positive else inputs[0], fixed, rate)
            scaled = b.mul(a, factor)
            if isinstance(attrs, A.QuantizeAttrs):
                from_zero = term is not None and not positive
                term = b.add(term, float(attrs.qparams.zero_point)) if term is not None and from_zero else term
                attrs = replace(attrs, in_steps=True, from_zero=from_zero)
            else:
                assert isinstance(attrs, A.PiecewiseAttrs)
                attrs = of_units(attrs)
            scaled = scaled if term is None else b.add(scaled, term)
            scaled = b.relu(scaled) if positive else scaled
        return make(value.op, scaled, *inputs[1:], attrs=attrs, origin=value.origin, name=value.name)

    return rebuild(graph, visit)


def _rate(value: Value) -> float | None:
    """What an operation on f32 multiplies its operand by before all else, if that is one number and not 1."""
    if value.op == "piecewise":
        assert isinstance(value.attrs, A.PiecewiseAttrs)
        rate = value.attrs.density
    elif value.op == "quantize" and value.inputs[0].dtype == f32:
        assert isinstance(value.attrs, A.QuantizeAttrs)
        scale = value.attrs.left.scale
        rate = 1.0 / scale[0] if len(scale) == 1 else 1.0
    else:
        return None
    return None if rate == 1 else rate


def _tells_infinity(attrs: A.Attrs) -> bool:
    """Whether the result for infinity is another one than for the largest numbers, which would be infinite as more than they are."""
    return isinstance(attrs, A.PiecewiseAttrs) and (attrs.dtype.is_float or attrs.low == -math.inf or attrs.high == math.inf)


def _of_integers(a: Value) -> bool:
    """Whether a comes nowhere near the largest numbers, as the sum of a quantized product."""
    return a.op == "cast" and not a.inputs[0].dtype.is_float


def _chain(graph: Graph, fixed: frozenset[Value], x: Value) -> list[Value]:
    """x, or what it is the positive part of, and the values from which products and sums with constants make it, as far as their scale may
    be another one. The last is `a`, the others read only by the next one where that matters."""
    if x.op == "relu":
        return _chain(graph, fixed, x.inputs[0]) if x.inputs[0].op != "relu" and _is_alone(graph, x) else []
    chain = [x]
    while (a := _operand(fixed, chain[-1])) is not None:
        chain.append(a)
    return chain if len(chain) > 1 and (_is_normalized(chain[-1]) or all(_is_alone(graph, v) for v in chain[:-1])) else []


def _operand(fixed: frozenset[Value], x: Value) -> Value | None:
    """What x is the product or sum of with a constant, if it is one."""
    if x.op not in ("mul", "add") or x.dtype != f32:
        return None
    at = constant_operand(fixed, x)
    a = x.inputs[1 - at]
    return a if x.inputs[at] in fixed and a not in fixed and a.shape == x.shape else None


def constant_operand(fixed: Collection[Value], x: Value) -> int:
    """Which operand of x is constant, if any is."""
    return 1 if x.inputs[1] in fixed else 0


def _is_alone(graph: Graph, x: Value) -> bool:
    """Whether one operation reads x, and no one else does."""
    return len(graph.users[x]) == 1 and not graph.is_output(x)


def _is_normalized(a: Value) -> bool:
    """Whether a is a product with a number for each row."""
    return a.op == "mul" and any(v.shape[-1:] == (1,) != a.shape[-1:] and v.tensor.rank == a.tensor.rank for v in a.inputs)


def _affine(chain: list[Value], x: Value, fixed: frozenset[Value], scale: float) -> tuple[Value, Value, Value | None]:
    """(a, factor, term) so that x * scale = a * factor + term. chain: of x in the old graph, as `_chain` gives it."""
    factor, term = full(scale, f32), None
    for old in chain[:-1]:
        at = constant_operand(fixed, old)
        constant, x = x.inputs[at], x.inputs[1 - at]
        if old.op == "mul":
            factor = b.mul(factor, constant)
        else:
            more = b.mul(constant, factor)
            term = more if term is None else b.add(term, more)
    return x, factor, term
