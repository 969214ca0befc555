"""Matching a pattern against a value, with backtracking and with reasons for what did not match."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ..graph.attrs import Attrs
from ..graph.ir import Graph, Value
from ..graph.types import DType
from .pattern import (
    COMMUTATIVE,
    GROUPS,
    Argument,
    Bound,
    Either,
    Literal,
    Number,
    NumberLiteral,
    NumberVariable,
    Operation,
    Optional,
    Pattern,
    Rest,
    Variable,
)
from .query import number, rounded


@dataclass(frozen=True)
class Mismatch:
    """Why a rule does not apply; `value` is the place in the graph that is to blame."""

    reason: str
    value: Value | None = None


@dataclass(frozen=True)
class Bindings:
    """What a match bound so far. `covered`: the values of the pattern's operations, in the order they were met."""

    values: Mapping[str, Value] = field(default_factory=dict)
    rests: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    numbers: Mapping[str, Number] = field(default_factory=dict)
    attrs: Mapping[str, Attrs] = field(default_factory=dict)
    groups: Mapping[str, str] = field(default_factory=dict)
    covered: tuple[Value, ...] = ()

    def having(
        self, *, values: Mapping[str, Value] | None = None, rests: Mapping[str, tuple[Value, ...]] | None = None,
        numbers: Mapping[str, Number] | None = None, attrs: Mapping[str, Attrs] | None = None,
        groups: Mapping[str, str] | None = None, covered: tuple[Value, ...] | None = None,
    ) -> Bindings:
        """A copy with some fields exchanged; `dataclasses.replace` was a quarter of the time of rewriting a model."""
        return Bindings(
            self.values if values is None else values, self.rests if rests is None else rests,
            self.numbers if numbers is None else numbers, self.attrs if attrs is None else attrs,
            self.groups if groups is None else groups, self.covered if covered is None else covered,
        )


@dataclass
class Miss:
    """Remembers the nearest mismatch (the first of those): two points for each operation that matched, one for an operation of the
    right name whose attributes or use count are wrong, and a condition of the rule's function counts as an operation.
    """

    points: int = -1
    mismatch: Mismatch | None = None

    def note(self, points: int, mismatch: Mismatch) -> None:
        if points > self.points:
            self.points, self.mismatch = points, mismatch


@dataclass(frozen=True)
class Matcher:
    """Matches patterns in one graph. With `miss`, failures are recorded there; without it they cost nothing."""

    graph: Graph
    miss: Miss | None = None

    def matches(self, pattern: Pattern, value: Value) -> Iterator[Bindings]:
        """All ways to match, the preferred one first."""
        return self._node(pattern, value, Bindings())

    def _fail(self, state: Bindings, value: Value, expected: str, found: str, named: bool = False) -> None:
        points = 2 * len(state.covered) + named
        if self.miss is not None and points > self.miss.points:
            self.miss.note(points, Mismatch(f"expected {expected}, found {found}", value))

    def _node(self, node: Argument, value: Value, state: Bindings) -> Iterator[Bindings]:
        if isinstance(node, Variable):
            yield from self._bind_value(node.name, value, state)
        elif isinstance(node, Operation):
            yield from self._operation(node, value, state)
        elif isinstance(node, Bound):
            for inside in self._bind_value(node.name, value, state):
                yield from self._node(node.pattern, value, inside)
        elif isinstance(node, Either):
            for option in node.options:
                yield from self._node(option, value, state)
        elif isinstance(node, NumberLiteral):
            found = number(value)
            if found is not None and found == as_element(node.value, value.dtype):
                yield state
            else:
                self._fail(state, value, f"the number {node}", value.op if found is None else str(found))
        elif isinstance(node, NumberVariable):
            yield from self._number_variable(node, value, state)
        elif isinstance(node, Optional):
            yield from self._node(node.pattern, value, state)

    def _bind_value(self, name: str, value: Value, state: Bindings) -> Iterator[Bindings]:
        if name == "_":
            yield state
        elif name not in state.values:
            yield state.having(values={**state.values, name: value})
        elif same_value(state.values[name], value):
            yield state
        else:
            self._fail(state, value, f"the same value as the other {name}", f"another {value.op}")

    def _number_variable(self, node: NumberVariable, value: Value, state: Bindings) -> Iterator[Bindings]:
        found = number(value)
        if found is None:
            self._fail(state, value, "a known number", value.op)
        elif state.numbers.get(node.name, found) != found:
            self._fail(state, value, f"the number {state.numbers[node.name]} again", str(found))
        else:
            yield state.having(numbers={**state.numbers, node.name: found})

    def _operation(self, node: Operation, value: Value, state: Bindings) -> Iterator[Bindings]:
        problem = self._operation_problem(node, value, state)
        if problem is not None:
            self._fail(state, value, *problem, named=value.op in node.ops)
            return
        attrs = {**state.attrs, node.attrs: value.attrs} if node.attrs else state.attrs
        groups = {**state.groups, node.op: value.op} if node.op in GROUPS else state.groups
        inside = state.having(attrs=attrs, groups=groups, covered=(*state.covered, value))
        orders = [value.inputs]
        if value.op in COMMUTATIVE and value.inputs[0] is not value.inputs[1]:
            orders.append(value.inputs[::-1])
        for inputs in orders:
            yield from self._args(node.args, value, inputs, inside)

    def _operation_problem(self, node: Operation, value: Value, state: Bindings) -> tuple[str, str] | None:
        """(expected, found) when the value itself, operands aside, is not what the node asks for."""
        if value.op not in node.ops:
            return node.op, value.op
        if node.op in GROUPS and state.groups.get(node.op, value.op) != value.op:
            return state.groups[node.op], value.op
        if node.attrs is not None and state.attrs.get(node.attrs, value.attrs) != value.attrs:
            return f"the same attributes as the other {node.attrs}", str(value.attrs)
        for key, wanted in node.fields:
            found = getattr(value.attrs, key)
            if not same_literal(found, wanted):
                return f"{value.op} with {key}={wanted}", f"{key}={found}"
        if node.single_use:
            users = len(self.graph.users.get(value, ()))
            if users > 1 or self.graph.is_output(value):
                return f"{value.op} with one user", f"{users} users" if users > 1 else "an output of the graph"
        return None

    def _args(self, nodes: tuple[Argument, ...], value: Value, inputs: tuple[Value, ...], state: Bindings) -> Iterator[Bindings]:
        if not nodes:
            if inputs:
                self._fail(state, value, f"{value.op} without more operands", f"{len(inputs)} more")
            else:
                yield state
            return
        node = nodes[0]
        if isinstance(node, Rest):
            if state.rests.get(node.name, inputs) == inputs:
                yield state.having(rests={**state.rests, node.name: inputs})
        elif not inputs:
            if isinstance(node, Optional):
                yield from self._args(nodes[1:], value, inputs, state)
            else:
                self._fail(state, value, f"{value.op} with operand {node}", "none")
        else:
            for found in self._node(node, inputs[0], state):
                yield from self._args(nodes[1:], value, inputs[1:], found)


def same_value(a: Value, b: Value) -> bool:
    """True for one value, and for two that spell the same number in the same type."""
    if a is b:
        return True
    return a.op == b.op == "full" and a.attrs == b.attrs


def as_element(literal: Number, dtype: DType) -> Number | None:
    """A literal as an element of this type; None where the type has no such number."""
    if isinstance(literal, bool) or dtype.kind == "bool":
        return literal if isinstance(literal, bool) and dtype.kind == "bool" else None
    if dtype.is_float:
        return rounded(literal, dtype)
    return literal if isinstance(literal, int) else None


def same_literal(found: object, wanted: Literal) -> bool:
    """An attribute against its spelling in a pattern: element types by name, everything else as it is."""
    if isinstance(found, DType):
        return found.name == wanted
    return type(found) is type(wanted) and found == wanted if isinstance(wanted, (bool, str)) else found == wanted
