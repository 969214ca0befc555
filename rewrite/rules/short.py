"""Functions of few digits where the result is rounded to few digits anyway, the normal distribution's in place of erf, and the weights of
a softmax.

    1 + erf(x sqrt(1/2))  = 2 normal_cdf(x)
    x normal_cdf(x)       = gelu(x)
    1 + erf(x sqrt(1/2))  = 2 normal_cdf_short(x)
    1 + tanh(x)           = 2 sigmoid_short(2 x)
    sigmoid(x)            = sigmoid_short(x)
    (x / 2) (2 y)         = x y
    exp(x - max(x))       = exp_weight(x - max(x))

normal_cdf has the digits of 1 + erf. The short functions have a relative error below 2^-12. They stand where all that becomes of the value
is rounded to few digits (`digits.py`). exp_weight has all digits near the largest x, and further down as many as the difference has.
"""

from __future__ import annotations

from math import sqrt

from ...graph import attrs as A
from ...graph import build as b
from ...graph.ir import Graph, Value, rebuild, with_inputs
from ...graph.ops import MADE, make
from ...graph.types import f32
from .digits import Demands, constant

_FUNCTIONS = ("erf", "tanh", "sigmoid", "exp")


def shorten(graph: Graph, normal_is_fast: bool = False) -> Graph:
    """The graph with short functions wherever the digits they lack are rounded off.

    normal_is_fast: whether normal_cdf takes no longer than its short form, which then stands only before results in bf16, where its
    accuracy far from 0 may show.
    """
    if not any(v.op in _FUNCTIONS for v in graph.order):
        return graph
    demands, integers = Demands(graph), Demands(graph, floats=False)

    def shorter(old: Value, new: Value) -> Value:
        if old.op == "mul":
            return _gelu(_without_halves(new))
        if old.op == "exp":
            return _weight(new)
        if old.op not in ("add", "sigmoid") or old.dtype != f32:
            return new
        normal = _normal(new, "normal_cdf")
        if normal is not None and normal_is_fast and integers.few_digits(old):
            return normal
        return (_short(new) if demands.few_digits(old) else normal) or new

    def visit(old: Value, inputs: tuple[Value, ...]) -> Value:
        new = with_inputs(old, inputs)
        found = shorter(old, new)
        if found is new:
            return new
        with b.at(old.origin):  # the numbers that are left out may have had more axes
            return b.expand(found, new.shape)

    return rebuild(graph, visit)


def _weight(value: Value) -> Value:
    """exp_weight for an exponential of how far numbers are below the largest of them."""
    [x] = value.inputs
    if x.op != "sub" or x.dtype != f32:
        return value
    numbers, top = x.inputs
    attrs = top.attrs
    largest = isinstance(attrs, A.ReduceAttrs) and attrs.kind == "max" and attrs.keepdim and top.inputs[0] is numbers
    return make("exp_weight", x, origin=value.origin) if largest else value


def _short(value: Value) -> Value | None:
    if value.op == "sigmoid":
        return make("sigmoid_short", *value.inputs)
    for function, one in (value.inputs, value.inputs[::-1]):
        if constant(one) == 1.0 and function.op == "tanh":
            return _twice(make("sigmoid_short", _twice(function.inputs[0]), origin=value.origin))
    return _normal(value, "normal_cdf_short")


def _normal(value: Value, name: str) -> Value | None:
    """Twice the function `name` for one plus an error function."""
    for function, one in (value.inputs, value.inputs[::-1]) if value.op == "add" else ():
        if constant(one) == 1.0 and function.op == "erf" and (x := _times(function.inputs[0], sqrt(0.5))) is not None:
            return _twice(make(name, x, origin=value.origin))
    return None


def _twice(value: Value) -> Value:
    return make("mul", value, make("full", attrs=A.FullAttrs(2.0, f32, ()), origin=value.origin))


def _times(value: Value, factor: float) -> Value | None:
    """What is multiplied by the constant `factor`, as exactly as f32 holds it."""
    if value.op != "mul":
        return None
    pairs = (value.inputs, value.inputs[::-1])
    return next((x for x, c in pairs if abs(constant(c) - factor) <= factor * 2**-24), None)


def _gelu(product: Value) -> Value:
    """gelu(x) for x normal_cdf(x)."""
    for x, function in (product.inputs, product.inputs[::-1]):
        if function.op == "normal_cdf" and function.inputs[0] is x:
            return make("gelu", x, origin=product.origin)
    return product


def _without_halves(product: Value) -> Value:
    """x y for (x / 2) (2 y), which is exact."""
    for x, y in (product.inputs, product.inputs[::-1]):
        half, twice = _times(x, 0.5), _times(y, 2.0)
        if half is not None and twice is not None and twice.op in MADE:
            return make("mul", half, twice, origin=product.origin)
    return product
