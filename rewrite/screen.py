"""A cheap test before matching: most attempts fail because of the names of the operations alone."""

from __future__ import annotations

from .pattern import COMMUTATIVE, Argument, Bound, Either, NumberLiteral, NumberVariable, Operation, Optional, Rest

# The name of an operation, and whether its result is one known number.
Named = tuple[str, bool]


def admits(node: Argument, value: Named, operands: tuple[Named, ...] | None = None) -> bool:
    """Whether a value may match: by the name of its operation, and by those of its operands where they are given."""
    if isinstance(node, Operation):
        return value[0] in node.ops and (operands is None or _admits_operands(node, value[0], operands))
    if isinstance(node, (Bound, Optional)):
        return admits(node.pattern, value, operands)
    if isinstance(node, Either):
        return any(admits(option, value, operands) for option in node.options)
    return value[1] or not isinstance(node, (NumberLiteral, NumberVariable))


def _admits_operands(node: Operation, op: str, operands: tuple[Named, ...]) -> bool:
    orders = (operands, operands[::-1]) if op in COMMUTATIVE else (operands,)
    return any(all(isinstance(a, Rest) or admits(a, operand) for a, operand in zip(node.args, order)) for order in orders)
