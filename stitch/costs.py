"""What is not computed twice."""

from __future__ import annotations

from ..graph import attrs as A
from ..graph.ir import Value
from ..graph.ops import OPS, TRANSCENDENTAL
from .views import VIEWS

# Operations that are not repeated where their result could be stored and loaded.
EXPENSIVE = {*TRANSCENDENTAL, "piecewise", "reduce", "scan", "take", "gather", "remainder", "fmod"}
CHEAP_OPS = 6  # elementwise operations that are repeated rather than stored and loaded
PASS = 8  # a pass of its own over what is stored, in elementwise operations


def is_expensive(value: Value, stored: set[Value]) -> bool:
    """Whether evaluating `value` twice costs more than storing and loading it."""
    count, stack = 0, [value]
    while stack:
        v = stack.pop()
        if (v in stored and v is not value) or OPS[v.op].group == "leaf":
            continue
        if v.op in EXPENSIVE:
            return True
        count += v.op not in VIEWS
        if count > CHEAP_OPS:
            return True
        stack.extend(v.inputs)
    return False


def reads(value: Value, stored: set[Value]) -> bool:
    """Whether anything but numbers and ranges is below `value`."""
    stack = [value]
    while stack:
        v = stack.pop()
        if v in stored or v.op in ("input", "constant"):
            return True
        stack.extend(v.inputs)
    return False


def below_windows(view: Value, stored: set[Value]) -> Value | None:
    """What is below windows that overlap, and would be computed for each of them although that takes longer than a pass of its own;
    None: nothing."""
    factor, source = 1.0, view
    while source not in stored and (source.op in VIEWS or source.op == "pad"):
        if isinstance(source.attrs, A.WindowAttrs):
            factor *= max(1.0, source.attrs.size / source.attrs.step)
        source = source.inputs[0]
    if factor == 1.0:
        return None
    work, stack = -1, [source]
    while stack:
        value = stack.pop()
        work += value.op not in VIEWS
        if value in stored:
            continue
        if value.op in EXPENSIVE:
            return value
        stack.extend(value.inputs)
    return source if work > 1 and (factor - 1) * work > PASS else None  # one operation is done while its operand is loaded
