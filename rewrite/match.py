"""Matching a pattern against a value, with backtracking and with reasons for what did not match."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

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


class Bindings(NamedTuple):
    """What a match bound so far. `covered`: the values of the pattern's operations, in the order they were met.

    A tuple, made by position: a match makes many of them, and `_replace` was half of its time.
    """

    values: Mapping[str, Value] = {}
    rests: Mapping[str, tuple[Value, ...]] = {}
    numbers: Mapping[str, Number] = {}
    attrs: Mapping[str, Attrs] = {}
    groups: Mapping[str, str] = {}
    covered: tuple[Value, ...] = ()


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
        if isinstance(node, Operation):
            yield from self._operation(node, value, state)
        elif isinstance(node, Bound):
            inside = self._bind_value(node.name, value, state)
            if inside is not None:
                yield from self._node(node.pattern, value, inside)
        elif isinstance(node, Either):
            for option in node.options:
                yield from self._node(option, value, state)
        elif isinstance(node, Optional):
            yield from self._node(node.pattern, value, state)
        else:
            found = self._leaf(node, value, state)
            if found is not None:
                yield found

    def _leaf(self, node: Variable | NumberVariable | NumberLiteral | Rest, value: Value, state: Bindings) -> Bindings | None:
        """The match of a node that matches in one way at most."""
        if isinstance(node, Variable):
            return self._bind_value(node.name, value, state)
        if isinstance(node, NumberVariable):
            return self._number_variable(node, value, state)
        assert isinstance(node, NumberLiteral), "the rest of the operands is matched with them"
        found = number(value)
        if found is not None and found == as_element(node.value, value.dtype):
            return state
        if self.miss is not None:
            self._fail(state, value, f"the number {node}", value.op if found is None else str(found))
        return None

    def _bind_value(self, name: str, value: Value, state: Bindings) -> Bindings | None:
        if name == "_":
            return state
        known = state.values.get(name)
        if known is None:
            return Bindings({**state.values, name: value}, *state[1:])
        if same_value(known, value):
            return state
        if self.miss is not None:
            self._fail(state, value, f"the same value as the other {name}", f"another {value.op}")
        return None

    def _number_variable(self, node: NumberVariable, value: Value, state: Bindings) -> Bindings | None:
        found = number(value)
        if found is None or found != found:  # NaN is no number that an equation could be about
            self._fail(state, value, "a known number", value.op if found is None else str(found))
        elif state.numbers.get(node.name, found) != found:
            self._fail(state, value, f"the number {state.numbers[node.name]} again", str(found))
        else:
            return state._replace(numbers={**state.numbers, node.name: found})
        return None

    def _operation(self, node: Operation, value: Value, state: Bindings) -> Iterator[Bindings]:
        problem = self._operation_problem(node, value, state)
        if problem is not None:
            self._fail(state, value, *problem, named=value.op in node.ops)
            return
        inside = Bindings(*state[:-1], (*state.covered, value))
        if node.attrs:
            inside = inside._replace(attrs={**state.attrs, node.attrs: value.attrs})
        if node.op in GROUPS:
            inside = inside._replace(groups={**state.groups, node.op: value.op})
        inputs = value.inputs
        yield from self._args(node.args, value, inputs, inside)
        if value.op in COMMUTATIVE and inputs[0] is not inputs[1]:
            yield from self._args(node.args, value, inputs[::-1], inside)

    def _operation_problem(self, node: Operation, value: Value, state: Bindings) -> tuple[str, str] | None:
        """(expected, found) when the value itself, operands aside, is not what the node asks for."""
        if value.op not in node.ops:
            return node.op, value.op
        if node.op in GROUPS and state.groups.get(node.op, value.op) != value.op:
            return state.groups[node.op], value.op
        if node.attrs is not None and not same_attrs(state.attrs.get(node.attrs, value.attrs), value.attrs):
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
        at = 0
        for n, node in enumerate(nodes):
            if isinstance(node, Rest):
                if state.rests.get(node.name, inputs[at:]) == inputs[at:]:
                    yield state._replace(rests={**state.rests, node.name: inputs[at:]})
                return
            if at == len(inputs):
                if isinstance(node, Optional):
                    continue
                self._fail(state, value, f"{value.op} with operand {node}", "none")
                return
            if isinstance(node, (Operation, Bound, Either, Optional)):
                for found in self._node(node, inputs[at], state):
                    yield from self._args(nodes[n + 1 :], value, inputs[at + 1 :], found)
                return
            bound = self._leaf(node, inputs[at], state)
            if bound is None:
                return
            at, state = at + 1, bound
        if at < len(inputs):
            self._fail(state, value, f"{value.op} without more operands", f"{len(inputs) - at} more")
        else:
            yield state


def same_value(a: Value, b: Value) -> bool:
    """True for one value, and for two that spell the same number in the same type: 0.0 and -0.0 are two."""
    return a is b or (a.op == b.op == "full" and same_attrs(a.attrs, b.attrs))


def same_attrs(a: Attrs, b: Attrs) -> bool:
    """True for attributes that mean the same, bit for bit."""
    return a is b or (a == b and a.exact == b.exact)


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
