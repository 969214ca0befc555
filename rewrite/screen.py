"""Cheap tests before matching: most attempts fail because of the names of the operations alone."""

from __future__ import annotations

from collections.abc import Callable

from ..graph.ir import Value
from .pattern import COMMUTATIVE, Argument, Bound, Either, NumberLiteral, NumberVariable, Operation, Optional, Rest
from .query import NUMBER_OPS

Screen = Callable[[Value], bool]


def screen(node: Argument) -> Screen | None:
    """A test that is false where the names of the operations rule a match out; None where they never do."""
    if isinstance(node, Operation):
        return _operation_screen(node)
    if isinstance(node, (Bound, Optional)):
        return screen(node.pattern)
    if isinstance(node, Either):
        options = [screen(option) for option in node.options]
        known = [test for test in options if test is not None]
        return (lambda value: any(test(value) for test in known)) if len(known) == len(options) else None
    return (lambda value: value.op in NUMBER_OPS) if isinstance(node, (NumberLiteral, NumberVariable)) else None


def _operation_screen(node: Operation) -> Screen:
    ops = node.ops
    tests = [(n, test) for n, arg in enumerate(node.args) if not isinstance(arg, Rest) and (test := screen(arg)) is not None]
    if not tests:
        return lambda value: value.op in ops
    if COMMUTATIVE.isdisjoint(ops):
        return lambda value: value.op in ops and all(n >= len(value.inputs) or test(value.inputs[n]) for n, test in tests)

    def either_order(value: Value) -> bool:
        if value.op not in ops:
            return False
        inputs = value.inputs
        if all(n >= len(inputs) or test(inputs[n]) for n, test in tests):
            return True
        return value.op in COMMUTATIVE and all(test(inputs[1 - n]) for n, test in tests)

    return either_order
