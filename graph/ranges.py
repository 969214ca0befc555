"""Ranges of numbers that are computed in each call, as far as their operations tell: places inside of a tensor need no check.

Interval arithmetic (Moore, Interval Analysis, 1966) over the few operations that positions are made of. A range also says that the number
is one: NaN is no place.
"""

from __future__ import annotations

import math

from . import attrs as A
from .ir import Value
from .types import f32, f64, i32, i64

Range = tuple[float, float]
_EXACT = 2.0**24  # whole numbers up to which f32 holds all of them
_DEEPEST = 40  # operations one above the other that are looked at
_VIEWS = ("reshape", "permute", "expand", "slice")


def lies_within(value: Value, low: int, high: int) -> bool:
    """Whether every element of a tensor of integers is known to be in [low, high], whatever the arguments of the call."""
    found = _Ranges().of(value) if value.dtype in (i32, i64) else None
    return found is not None and low <= found[0] and found[1] <= high


class _Ranges:
    """Bounds of all elements of values, none of which is NaN; None for floats of which they are not known, all numbers for integers. Each
    value is looked at once."""

    def __init__(self) -> None:
        self._known: dict[Value, Range | None] = {}
        self._depth = 0

    def of(self, value: Value) -> Range | None:
        if value not in self._known:
            found, whole = None, value.dtype in (i32, i64)
            self._depth += 1
            if self._depth <= _DEEPEST and (whole or value.dtype in (f32, f64)):
                found = self._found(value)
            self._depth -= 1
            self._known[value] = (-math.inf, math.inf) if found is None and whole else found
        return self._known[value]

    def _found(self, value: Value) -> Range | None:
        if value.op in _VIEWS:
            return self.of(value.inputs[0])
        if isinstance(value.attrs, A.FullAttrs):
            number = float(value.attrs.value)
            return (number, number) if abs(number) <= _EXACT else None  # NaN is not, either
        if value.op == "where":
            return self._chosen(*value.inputs)
        if value.op not in ("minimum", "maximum", "cast", "floor", "ceil", "trunc", "round", "add", "sub", "mul", "truncdiv"):
            return None
        bounds = [bound for bound in map(self.of, value.inputs) if bound is not None]
        if len(bounds) != len(value.inputs):
            return None
        if value.op in ("minimum", "maximum"):
            choose = min if value.op == "minimum" else max
            return choose(low for low, _ in bounds), choose(high for _, high in bounds)
        return _computed(value, bounds) if max(abs(end) for bound in bounds for end in bound) <= _EXACT else None

    def _chosen(self, condition: Value, x: Value, other: Value) -> Range | None:
        """Of `x if x > a else b`, which is b where x is NaN; of others where both sides are known."""
        own, rest = self.of(x), self.of(other)
        if own is None and condition.op in ("gt", "ge") and condition.inputs[0] is x:
            least = self.of(condition.inputs[1])
            own = None if least is None else (least[0], math.inf)
        return None if own is None or rest is None else (min(own[0], rest[0]), max(own[1], rest[1]))


def _computed(value: Value, bounds: list[Range]) -> Range | None:
    """Of operands that are no larger than 2^24. What is rounded, as sums of floats are, is not looked at."""
    (low, high), (least, most) = bounds[0], bounds[-1]
    whole = value.dtype in (i32, i64)
    if value.op in ("floor", "ceil", "trunc", "round"):
        return float(math.floor(low)), float(math.ceil(high))
    if value.op == "cast":
        if whole:
            return float(math.trunc(low)), float(math.trunc(high))
        return (low, high) if value.inputs[0].dtype in (i32, i64) else None
    ends = {
        "add": [low + least, high + most],
        "sub": [low - most, high - least],
        "mul": [a * b for a in (low, high) for b in (least, most)],
        "truncdiv": [math.trunc(a / b) if least > 0 else math.inf for a in (low, high) for b in (least, most)],
    }[value.op]
    return (min(ends), max(ends)) if whole and max(map(abs, ends)) <= _EXACT else None
