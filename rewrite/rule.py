"""Rules: an equation, and where the equation alone does not decide, a Python function.

    @rule("add(linear!(x, w), b) -> linear(x, w, b)")
    def bias(m: Match) -> Value | Mismatch:
        return m.right() if m["b"].tensor.rank == 1 else m.fail("the addend is no row", m["b"])

    double_negation = equation("neg(neg(x)) -> x")

Rules are plain immutable data; whoever rewrites a graph passes the rules it wants, in order of preference.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar, Union

from ..diagnostics.errors import InvalidGraph
from ..graph import attrs as A
from ..graph.ir import Graph, Value
from ..graph.ops import make
from ..graph.types import Type
from . import template
from .equation import parse_equation, unbound_attributes
from .match import Bindings, Matcher, Mismatch
from .pattern import Equation, Number, Pattern, root_ops

AttrsT = TypeVar("AttrsT", bound=A.Attrs)


@dataclass(frozen=True)
class Match:
    """The left side of an equation found in a graph: `root` is the value to be replaced."""

    root: Value
    graph: Graph
    bindings: Bindings
    equation: Equation

    def __getitem__(self, name: str) -> Value:
        """The value bound to `name`. Raises KeyError for an optional operand that is absent; see `get`."""
        return self.bindings.values[name]

    def get(self, name: str) -> Value | None:
        """The value bound to `name`, or None where the operand is absent or another alternative matched."""
        return self.bindings.values.get(name)

    def rest(self, name: str) -> tuple[Value, ...]:
        """The operands bound to `name...`."""
        return self.bindings.rests[name]

    def number(self, name: str) -> Number:
        """The number bound to `$name`."""
        return self.bindings.numbers[name]

    def attrs(self, name: str, kind: type[AttrsT]) -> AttrsT:
        """The attributes bound to `{name}`, which are of class `kind`."""
        found = self.bindings.attrs[name]
        if not isinstance(found, kind):
            raise InvalidGraph(f"{self.equation}: the attributes {name} are {type(found).__name__}, not {kind.__name__}")
        return found

    def fail(self, reason: str, value: Value | None = None) -> Mismatch:
        """The rule does not apply; `value` (default: the root) is what stands in the way."""
        return Mismatch(reason, self.root if value is None else value)

    def make(self, op: str, *inputs: Value, attrs: A.Attrs | None = None, type: Type | None = None) -> Value:
        """A new value that carries the origin of the root."""
        return make(op, *inputs, attrs=A.NoAttrs() if attrs is None else attrs, type=type, origin=self.root.origin)

    def call(self, kernel: str, *inputs: Value, options: tuple[tuple[str, float | int | str], ...] = ()) -> Value:
        """A custom kernel that computes the root from `inputs`."""
        return self.make("call", *inputs, attrs=A.CallAttrs(kernel, options), type=self.root.type)

    def right(self) -> Value | Mismatch:
        """The right side of the equation, stretched to the root's shape if need be; a mismatch when it has no type or another one."""
        try:
            value = template.build(self.equation.right, self.bindings, self.root)
        except InvalidGraph as error:
            return self.fail(f"the right side has no type: {error.what}")
        return self.fitted(value)

    def fitted(self, value: Value) -> Value | Mismatch:
        """`value`, stretched to the root's shape if need be; a mismatch when the types differ in another way."""
        if value.type == self.root.type:
            return value
        fitting = template.fit(value, self.root.tensor, self.root.origin)
        return fitting if fitting is not None else self.fail(f"the right side is {value.type}, the left side {self.root.type}")

    def find(self, pattern: Pattern, value: Value) -> Match | None:
        """The first match of another pattern at `value`, for rules that look further than their equation."""
        for found in Matcher(self.graph).matches(pattern, value):
            return Match(value, self.graph, found, self.equation)
        return None


Function = Callable[[Match], Union[Value, Mismatch]]
# Builds the root of a graph in which the rule applies, from inputs, constants and the given source of randomness.
Example = Callable[[random.Random], Value]


@dataclass(frozen=True)
class Rule:
    """One rewrite.

    function: decides and builds; None means that the equation's right side is the replacement, whenever it has the root's type.
    ulp: how far both sides may differ in floating point, in units of the last place of the largest element of the result; 0 means
    that they are equal (where both are NaN or either zero, too).
    example: for rules whose left side is seldom met by chance.
    """

    name: str
    equation: Equation
    function: Function | None = None
    ulp: float = 0
    example: Example | None = None

    @cached_property
    def root_ops(self) -> tuple[str, ...]:
        return root_ops(self.equation.left)

    def try_at(self, root: Value, graph: Graph, matcher: Matcher) -> Applied | None:
        """The replacement of `root`, or None. Mismatches are told to the matcher's `miss`."""
        for found in matcher.matches(self.equation.left, root):
            match = Match(root, graph, found, self.equation)
            result = match.right() if self.function is None else self.function(match)
            if isinstance(result, Value):
                return Applied(self, root, result, found.covered)
            if matcher.miss is not None:
                matcher.miss.note(2 * len(found.covered) + 2, result)
        return None

    def __str__(self) -> str:
        return f"{self.name}: {self.equation}"


@dataclass(frozen=True)
class Applied:
    """One application: `root` becomes `replacement`; `covered` are the values that the left side looked at."""

    rule: Rule
    root: Value
    replacement: Value
    covered: tuple[Value, ...]


RuleSet = tuple[Rule, ...]


def equation(text: str, *, name: str = "", ulp: float = 0, example: Example | None = None) -> Rule:
    """A rule that is nothing but its equation. Raises InvalidGraph when the right side needs attributes that the left does not bind."""
    parsed = parse_equation(text)
    if unbound_attributes(parsed):
        raise InvalidGraph(f"{text!r}: nothing says what {', '.join(sorted(unbound_attributes(parsed)))} is; write a rule with a function")
    return Rule(name or text, parsed, None, ulp, example)


def rule(text: str, *, name: str = "", ulp: float = 0, example: Example | None = None) -> Callable[[Function], Rule]:
    """A rule whose function accepts or refuses each match and builds the replacement; the function's name is the rule's
    unless `name` is given."""
    parsed = parse_equation(text)

    def define(function: Function) -> Rule:
        return Rule(name or getattr(function, "__name__", text), parsed, function, ulp, example)

    return define
