"""Which values are rounded to few digits whatever becomes of them: to bf16, which rounds by 2^-8, or to 8-bit integers.

These are quantized as they are or with the scale of their own row, or clamped and converted. From the value to there only operations may
lie that pass a relative error on as it is, so that nothing that cancels can make it grow.
"""

from __future__ import annotations

from ...graph import attrs as A
from ...graph.ir import Graph, Value
from ...graph.types import bf16

# Operations whose result has the relative error of their operands, one operand or all of them.
_RELATIVE = ("mul", "div", "neg", "reciprocal", "relu", "reshape", "expand", "permute", "slice", "window")
_TO_INTEGERS = ("maximum", "minimum", "round", "floor", "ceil", "trunc")
_LARGEST = 256.0


class Demands:
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
            if not any(abs(constant(bound)) <= _LARGEST for bound in user.inputs if bound is not value):
                return False
            bounds |= {user.op}
        users = self.graph.users[user]
        return bool(users) and all(self._saturates(each, user, bounds) for each in users)

    def _is_row_quantized(self, total: Value, value: Value) -> bool:
        """quantize(value + zero), with a zero point of 8 bits: the value itself is then no larger than twice the range."""
        zero = total.inputs[1] if total.inputs[0] is value else total.inputs[0]
        bounded = zero.op == "round" and any(abs(constant(bound)) < _LARGEST for bound in _clamps(zero.inputs[0]))
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


def constant(value: Value) -> float:
    """The number that a value is everywhere; NaN when there is none."""
    return float(value.attrs.value) if isinstance(value.attrs, A.FullAttrs) else float("nan")
