"""A cheap test before matching: most attempts fail because of the names of the operations alone, or of a number that is another."""

from __future__ import annotations

from collections.abc import Sequence

from ..graph.types import DType
from .match import as_element
from .pattern import COMMUTATIVE, Argument, Bound, Either, Number, NumberLiteral, NumberVariable, Operation, Optional, Rest, Variable

# The name of an operation, or that of one whose result is a known number with the number and its type.
Named = str | tuple[str, Number, DType]


def admits(node: Argument, value: Named, operands: Sequence[Named] | None = None) -> bool:
    """Whether a value may match: by what it is called, and by what its operands are where they are given."""
    if isinstance(node, Operation):
        op = value if isinstance(value, str) else value[0]
        return op in node.ops and (operands is None or _admits_operands(node, op, operands))
    if isinstance(node, (Bound, Optional)):
        return admits(node.pattern, value, operands)
    if isinstance(node, Either):
        return any(admits(option, value, operands) for option in node.options)
    if isinstance(node, NumberLiteral):
        return not isinstance(value, str) and value[1] == as_element(node.value, value[2])
    return not (isinstance(node, NumberVariable) and isinstance(value, str))


def _admits_operands(node: Operation, op: str, operands: Sequence[Named]) -> bool:
    orders = (operands, operands[::-1]) if op in COMMUTATIVE else (operands,)
    return any(_admits_all(node.args, order) for order in orders)


def _admits_all(nodes: Sequence[Argument], operands: Sequence[Named]) -> bool:
    bound: dict[str, Named] = {}  # two operands that are one value are called the same
    for node, operand in zip(nodes, operands):
        if isinstance(node, Variable):
            if node.name != "_" and bound.setdefault(node.name, operand) != operand:
                return False
        elif not isinstance(node, Rest) and not admits(node, operand):
            return False
    return True
