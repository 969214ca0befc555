"""A cheap test before matching: most attempts fail because of the names of the operations alone."""

from __future__ import annotations

from .pattern import COMMUTATIVE, Argument, Bound, Either, NumberLiteral, NumberVariable, Operation, Optional, Rest
from .query import NUMBER_OPS


def admits(node: Argument, op: str, operands: tuple[str, ...] | None = None) -> bool:
    """Whether a value of an operation may match, by the operation's name, and by those of its operands where they are given."""
    if isinstance(node, Operation):
        return op in node.ops and (operands is None or _admits_operands(node, op, operands))
    if isinstance(node, (Bound, Optional)):
        return admits(node.pattern, op, operands)
    if isinstance(node, Either):
        return any(admits(option, op, operands) for option in node.options)
    return op in NUMBER_OPS if isinstance(node, (NumberLiteral, NumberVariable)) else True


def _admits_operands(node: Operation, op: str, operands: tuple[str, ...]) -> bool:
    orders = (operands, operands[::-1]) if op in COMMUTATIVE else (operands,)
    return any(all(isinstance(a, Rest) or admits(a, name) for a, name in zip(node.args, order)) for order in orders)
