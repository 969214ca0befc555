"""Patterns as data: what a subgraph must look like. `equation.py` reads them from text; anything else may build them too.

A pattern is a tree of nodes. Matching it against a value binds names to values, to numbers and to attributes of operations;
the same name always means the same thing, so a pattern that names a value twice matches graphs in which it is used twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Union

from ..graph.ops import BINARY, COMPARE, UNARY

Number = Union[int, float, bool]
Literal = Union[int, float, bool, str, tuple[int, ...]]

COMMUTATIVE = frozenset({"add", "mul", "maximum", "minimum", "and", "or", "xor", "eq", "ne"})

# Names that stand for any operation of a kind; on a right side they mean the operation that matched on the left.
GROUPS: dict[str, tuple[str, ...]] = {
    "unary": UNARY,
    "binary": BINARY + COMPARE,
    "view": ("reshape", "expand", "permute", "slice", "window"),
}


@dataclass(frozen=True)
class Variable:
    """Any value. `_` binds nothing, every other name binds the value."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class NumberLiteral:
    """A value whose every element is this number, after rounding the number to the value's element type."""

    value: Number

    def __str__(self) -> str:
        return str(self.value).lower()


@dataclass(frozen=True)
class NumberVariable:
    """A value whose every element is one known number; the number is bound to `name`."""

    name: str

    def __str__(self) -> str:
        return f"${self.name}"


@dataclass(frozen=True)
class Operation:
    """The result of one operation.

    op: its name, or a key of GROUPS. args: patterns of the operands; commutative operations also match with them exchanged.
    attrs: the name that the attributes are bound to. fields: attributes that must have these values.
    single_use: no other operation reads the value and it is no output of the graph.
    """

    op: str
    args: tuple[Argument, ...]
    attrs: str | None = None
    fields: tuple[tuple[str, Literal], ...] = ()
    single_use: bool = False

    @cached_property
    def ops(self) -> tuple[str, ...]:
        """The names of operations that this node accepts."""
        return GROUPS.get(self.op, (self.op,))

    def __str__(self) -> str:
        items = ([self.attrs] if self.attrs else []) + [f"{key}={_literal_text(value)}" for key, value in self.fields]
        attrs = f"{{{', '.join(items)}}}" if items else ""
        return f"{self.op}{'!' if self.single_use else ''}{attrs}({', '.join(map(str, self.args))})"


@dataclass(frozen=True)
class Bound:
    """A value that matches `pattern`, bound to `name`."""

    name: str
    pattern: Pattern

    def __str__(self) -> str:
        return f"{self.name}@{self.pattern}"


@dataclass(frozen=True)
class Either:
    """The first of several patterns that leads to a match of the whole."""

    options: tuple[Pattern, ...]

    def __str__(self) -> str:
        return f"({' | '.join(map(str, self.options))})"


@dataclass(frozen=True)
class Optional:
    """An operand that may be absent; only after all operands that may not."""

    pattern: Pattern

    def __str__(self) -> str:
        return f"{self.pattern}?"


@dataclass(frozen=True)
class Rest:
    """All remaining operands, none included."""

    name: str

    def __str__(self) -> str:
        return f"{self.name}..."


Pattern = Union[Variable, NumberLiteral, NumberVariable, Operation, Bound, Either]
Argument = Union[Pattern, Optional, Rest]


@dataclass(frozen=True)
class Equation:
    """left -> right. `right` is a pattern too, read as a template."""

    left: Pattern
    right: Pattern

    def __str__(self) -> str:
        return f"{self.left} -> {self.right}"


def _literal_text(value: Literal) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def walk(node: Argument) -> Iterator[Argument]:
    """The node and everything below it, parents first."""
    yield node
    children: tuple[Argument, ...] = ()
    if isinstance(node, Operation):
        children = node.args
    elif isinstance(node, Either):
        children = node.options
    elif isinstance(node, (Bound, Optional)):
        children = (node.pattern,)
    for child in children:
        yield from walk(child)


def value_names(node: Argument) -> set[str]:
    """Names that a match binds to values."""
    return {n.name for n in walk(node) if isinstance(n, (Variable, Rest, Bound))} - {"_"}


def number_names(node: Argument) -> set[str]:
    """Names that a match binds to numbers."""
    return {n.name for n in walk(node) if isinstance(n, NumberVariable)}


def attribute_names(node: Argument) -> set[str]:
    """Names that a match binds to attributes."""
    return {n.attrs for n in walk(node) if isinstance(n, Operation) and n.attrs is not None}


def root_ops(node: Pattern) -> tuple[str, ...]:
    """Names of the operations that the root of a match can be; empty when the pattern accepts any value."""
    if isinstance(node, Operation):
        return node.ops
    if isinstance(node, Bound):
        return root_ops(node.pattern)
    if isinstance(node, Either):
        found = [root_ops(option) for option in node.options]
        return tuple(dict.fromkeys(op for ops in found for op in ops)) if all(found) else ()
    return ()
