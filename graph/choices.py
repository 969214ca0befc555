"""Choices between numbers, of which models make masks: `tril` of ones chooses between 1 and 0, and what is compared, cast or multiplied
after that is the same choice between other numbers, or the condition itself. All of it is exact, as in `simplify.py`."""

from __future__ import annotations

import torch

from . import attrs as A
from . import build as b
from .interpret import evaluate_one
from .ir import Value
from .ops import OPS
from .types import boolean

_OPPOSITE = {"le": "gt", "lt": "ge", "ge": "lt", "gt": "le", "eq": "ne", "ne": "eq"}


def number_of(value: Value) -> float | int | None:
    """The number that a `full` repeats."""
    return value.attrs.value if isinstance(value.attrs, A.FullAttrs) else None


def chosen_numbers(value: Value) -> Value | None:
    """f(where(c, 1, 0), 2) = where(c, f(1, 2), f(0, 2)) for elementwise f."""
    choices = [x for x in value.inputs if x.op != "full"]
    known = OPS[value.op].group == "elementwise" and value.op not in ("where", "quantize", "dequantize") and value.tensor.qparams is None
    if not known or len(choices) != 1 or choices[0].op != "where" or None in map(number_of, choices[0].inputs[1:]):
        return None
    condition, *branches = choices[0].inputs
    found = []
    for branch in branches:
        operands = [torch.tensor(number_of(branch if x is choices[0] else x), dtype=x.dtype.torch) for x in value.inputs]
        found.append(evaluate_one(value, operands, {}, {}).item())
    with b.at(value.origin):
        if repr(found[0]) == repr(found[1]):
            return b.full(found[0], value.dtype, value.shape)
        return b.expand(b.where(condition, *(b.full(each, value.dtype) for each in found)), value.shape)


def chosen_truth(value: Value) -> Value | None:
    """where(c, True, False) = c, where(c, x, False) = c and x, where(c, True, x) = c or x, and these of what is not c."""
    if value.dtype != boolean:
        return None
    condition, yes, no = value.inputs
    with b.at(value.origin):
        for kept, other, c in ((yes, no, condition), (no, yes, negated(condition))):
            if number_of(other) == 0:
                return b.expand(c if number_of(kept) == 1 else b.and_(c, kept), value.shape)
            if number_of(kept) == 1:
                return b.expand(b.or_(c, other), value.shape)
    return None


def opposite(value: Value) -> Value | None:
    """not (x <= y) = x > y where nothing is NaN; not (x or y) = not x and not y; not (not x) = x."""
    x = value.inputs[0]
    with b.at(value.origin):
        if x.op in _OPPOSITE and (x.op in ("eq", "ne") or not x.inputs[0].dtype.is_float):
            return getattr(b, _OPPOSITE[x.op])(*x.inputs)  # type: ignore[no-any-return]
        if x.op == "or":
            return b.and_(*map(negated, x.inputs))
        return x.inputs[0] if x.op == "logical_not" and x.inputs[0].dtype == boolean else None


def negated(x: Value) -> Value:
    """not x, in the form of `opposite`."""
    value = b.logical_not(x)
    return opposite(value) or value
