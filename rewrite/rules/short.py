"""Functions of few digits where the result is rounded to few digits anyway, and the normal distribution's in place of erf.

    1 + erf(x sqrt(1/2))  = 2 normal_cdf(x)
    1 + erf(x sqrt(1/2))  = 2 normal_cdf_short(x)
    1 + tanh(x)           = 2 sigmoid_short(2 x)
    sigmoid(x)            = sigmoid_short(x)
    (x / 2) (2 y)         = x y

normal_cdf has the digits of 1 + erf. The short functions have a relative error below 2^-12. They stand where all that becomes of the value
is a number of bf16 (which rounds by 2^-8), or an 8-bit integer: quantized as it is or with the scale of its own row, or clamped and
converted. From the function to there only operations may lie that pass a relative error on as it is, so that nothing that cancels can
make it grow.
"""

from __future__ import annotations

from math import sqrt

from ...graph import attrs as A
from ...graph.ir import Graph, Value, rebuild, with_inputs
from ...graph.ops import MADE, make
from ...graph.types import bf16, f32

# Operations whose result has the relative error of their operands, one operand or all of them.
_RELATIVE = ("mul", "div", "neg", "reciprocal", "relu", "reshape", "expand", "permute", "slice", "window")
_TO_INTEGERS = ("maximum", "minimum", "round", "floor", "ceil", "trunc")
_FUNCTIONS = ("erf", "tanh", "sigmoid")
_LARGEST = 256.0


def shorten(graph: Graph, normal_is_fast: bool = False) -> Graph:
    """The graph with short functions wherever the digits they lack are rounded off.

    normal_is_fast: whether normal_cdf takes no longer than its short form, which then stands only before results in bf16, where its
    accuracy far from 0 may show.
    """
    if not any(v.op in _FUNCTIONS for v in graph.order):
        return graph
    demands, integers = _Demands(graph), _Demands(graph, floats=False)

    def visit(old: Value, inputs: tuple[Value, ...]) -> Value:
        new = with_inputs(old, inputs)
        if old.op == "mul":
            return _without_halves(new)
        if old.op not in ("add", "sigmoid") or old.dtype != f32:
            return new
        normal = _normal(new, "normal_cdf")
        if normal is not None and normal_is_fast and integers.few_digits(old):
            return normal
        return (_short(new) if demands.few_digits(old) else normal) or new

    return rebuild(graph, visit)


def _short(value: Value) -> Value | None:
    if value.op == "sigmoid":
        return make("sigmoid_short", *value.inputs)
    for function, one in (value.inputs, value.inputs[::-1]):
        if _constant(one) == 1.0 and function.op == "tanh":
            return _twice(make("sigmoid_short", _twice(function.inputs[0]), origin=value.origin))
    return _normal(value, "normal_cdf_short")


def _normal(value: Value, name: str) -> Value | None:
    """Twice the function `name` for one plus an error function."""
    for function, one in (value.inputs, value.inputs[::-1]) if value.op == "add" else ():
        if _constant(one) == 1.0 and function.op == "erf" and (x := _times(function.inputs[0], sqrt(0.5))) is not None:
            return _twice(make(name, x, origin=value.origin))
    return None


def _twice(value: Value) -> Value:
    return make("mul", value, make("full", attrs=A.FullAttrs(2.0, f32, ()), origin=value.origin))


def _times(value: Value, factor: float) -> Value | None:
    """What is multiplied by the constant `factor`, as exactly as f32 holds it."""
    if value.op != "mul":
        return None
    pairs = (value.inputs, value.inputs[::-1])
    return next((x for x, c in pairs if abs(_constant(c) - factor) <= factor * 2**-24), None)


def _without_halves(product: Value) -> Value:
    """x y for (x / 2) (2 y), which is exact."""
    for x, y in (product.inputs, product.inputs[::-1]):
        half, twice = _times(x, 0.5), _times(y, 2.0)
        if half is not None and twice is not None and twice.op in MADE:
            return make("mul", half, twice, origin=product.origin)
    return product


class _Demands:
    """Answers whether all that becomes of a value is rounded to few digits. floats: whether those of bf16 are few."""

    def __init__(self, graph: Graph, floats: bool = True) -> None:
        self.graph, self.floats = graph, floats
        self._known: dict[Value, bool] = {}

    def few_digits(self, value: Value) -> bool:
        """Whether a relative error of 2^-12 of `value` is small beside the rounding of everything computed from it."""
        known = self._known.get(value)
        if known is None:
            users = self.graph.users[value]
            known = bool(users) and not self.graph.is_output(value) and all(self._rounds(user, value) for user in users)
            self._known[value] = known
        return known

    def _rounds(self, user: Value, value: Value) -> bool:
        if user.op == "cast":
            return self.floats and user.dtype == bf16
        if user.op == "quantize":
            return user.dtype.bits == 8
        if user.op == "where":
            return user.inputs[0] is not value and self.few_digits(user)
        if user.op == "add":
            return self._is_row_quantized(user, value)
        if user.op == "reduce":
            return self._is_range(user, value)
        if user.op in _TO_INTEGERS:
            return self._saturates(user, value, frozenset())
        return user.op in _RELATIVE and self.few_digits(user)

    def _saturates(self, user: Value, value: Value, bounds: frozenset[str]) -> bool:
        """Whether `value` becomes an 8-bit integer by `user` and what follows: rounded, with a least and a largest value of 8 bits."""
        if user.op == "cast":
            return user.dtype.bits == 8 and user.dtype.kind in ("int", "uint") and len(bounds) == 2
        if user.op not in _TO_INTEGERS or self.graph.is_output(user):
            return False
        if user.op in ("maximum", "minimum"):
            if not any(abs(_constant(bound)) <= _LARGEST for bound in user.inputs if bound is not value):
                return False
            bounds |= {user.op}
        users = self.graph.users[user]
        return bool(users) and all(self._saturates(each, user, bounds) for each in users)

    def _is_row_quantized(self, total: Value, value: Value) -> bool:
        """quantize(value + zero), with a zero point of 8 bits: the value itself is then no larger than twice the range."""
        zero = total.inputs[1] if total.inputs[0] is value else total.inputs[0]
        bounded = zero.op == "round" and any(abs(_constant(bound)) < _LARGEST for bound in _clamps(zero.inputs[0]))
        users = self.graph.users[total]
        return bounded and all(user.op == "quantize" and user.dtype.bits == 8 for user in users) and not self.graph.is_output(total)

    def _is_range(self, extreme: Value, value: Value) -> bool:
        """Whether a maximum or minimum of the value makes the scale that the value itself is quantized with."""
        assert isinstance(extreme.attrs, A.ReduceAttrs)
        if extreme.attrs.kind not in ("max", "min") or self.graph.is_output(extreme):
            return False
        scales = [operand for user in self.graph.users[value] if user.op == "mul" for operand in user.inputs if operand is not value]
        return any(_reads(scale, extreme, value) for scale in scales)


def _clamps(value: Value) -> list[Value]:
    """The constants that a value is a minimum or maximum with; as many as two."""
    found: list[Value] = []
    while value.op in ("maximum", "minimum") and len(found) < 2:
        bound = next((operand for operand in value.inputs if operand.op == "full"), None)
        if bound is None:
            break
        found.append(bound)
        value = next(operand for operand in value.inputs if operand is not bound)
    return found


def _reads(root: Value, wanted: Value, end: Value) -> bool:
    """Whether `root` is computed from `wanted`, looking no further than `end`."""
    pending, seen = [root], {end}
    while pending:
        value = pending.pop()
        if value is wanted:
            return True
        if value not in seen:
            seen.add(value)
            pending += value.inputs
    return False


def _constant(value: Value) -> float:
    """The number that a value is everywhere; NaN when there is none."""
    return float(value.attrs.value) if isinstance(value.attrs, A.FullAttrs) else float("nan")
