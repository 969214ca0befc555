"""The one driver: applies rules to a graph until none fits any more.

A sweep visits the values of a graph, operands first, and tries the rules of each value's operation in the given order. The first
that applies settles the value; other matches that look at a settled value wait for the next sweep, so that every rule sees a
consistent graph with exact use counts. Sweeps repeat until nothing changes. The result depends on the graph and the rules alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from ..diagnostics.errors import InvalidGraph
from ..graph.ir import Graph, Value, with_inputs
from ..graph.types import TensorType
from .match import Matcher, Mismatch, Miss
from .query import NUMBER_OPS, number
from .rule import Applied, Rule, RuleSet
from .screen import Named, admits

# A rule set that shrinks or moves things needs a few sweeps; one that undoes itself needs infinitely many.
MAX_SWEEPS = 200


@dataclass(frozen=True)
class Step:
    """One replacement, in words."""

    rule: str
    origin: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.before} -> {self.after}" + (f"  ({self.origin})" if self.origin else "")


@dataclass(frozen=True)
class NearMiss:
    """The match of a rule that got furthest before it failed, and why it did."""

    rule: str
    reason: str
    origin: str
    value: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.reason}, at {self.value}" + (f"  ({self.origin})" if self.origin else "")


@dataclass
class Trace:
    """What runs of `apply` did, for explanations: replacements in order, and the graphs they left with the rules they tried there."""

    steps: list[Step] = field(default_factory=list)
    left: list[tuple[Graph, RuleSet]] = field(default_factory=list)

    @property
    def fired(self) -> Counter[str]:
        """How often each rule applied."""
        return Counter(step.rule for step in self.steps)

    def at_rest(self, graph: Graph) -> frozenset[int]:
        """Identities of rules that are known to apply nowhere in this graph: those that left it so."""
        return frozenset(id(rule) for left, rules in self.left if left is graph for rule in rules)

    def near_misses(self) -> tuple[NearMiss, ...]:
        """For each rule that never applied but comes near in what is left, why it does not; those that get furthest first."""
        fired = self.fired
        misses: dict[str, Miss] = {}
        for graph, rules in self.left:
            for rule in rules:
                if rule.name not in fired:
                    places(rule, graph, misses.setdefault(rule.name, Miss()))
        ranked = sorted(misses.items(), key=lambda item: -item[1].points)
        return tuple(near for name, miss in ranked if (near := near_miss(name, miss)) is not None)


def near_miss(rule: str, miss: Miss) -> NearMiss | None:
    """The recorded miss in words; None when not even the root of the pattern was found."""
    found: Mismatch | None = miss.mismatch
    if found is None:
        return None
    value = found.value
    return NearMiss(rule, found.reason, value.origin if value else "", repr(value) if value else "")


class Table:
    """Which rules to try at a value: those that the names of its operation and of its operands' do not rule out, nor what numbers these
    are. A model has few such combinations."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self._by_op: dict[str, list[Rule]] = {}
        for rule in rules:
            for op in rule.root_ops:
                self._by_op.setdefault(op, []).append(rule)
        self._known: dict[tuple[Named, ...], tuple[Rule, ...]] = {}
        self._named: dict[Value, Named] = {}

    def at(self, value: Value) -> tuple[Rule, ...]:
        """The rules, in order."""
        rules = self._by_op.get(value.op)
        if rules is None:
            return ()
        names = (value.op, *[self._name(v) if v.op in NUMBER_OPS else v.op for v in value.inputs])
        found = self._known.get(names)
        if found is None:
            found = self._known[names] = tuple([rule for rule in rules if admits(rule.equation.left, value.op, names[1:])])
        return found

    def _name(self, value: Value) -> Named:
        name = self._named.get(value)
        if name is None:
            found = number(value)
            name = self._named[value] = value.op if found is None else (value.op, found, value.dtype)
        return name


def apply(graph: Graph, rules: RuleSet, trace: Trace | None = None) -> Graph:
    """The graph after the rules applied wherever they fit, to the fixpoint.

    Raises InvalidGraph when a replacement has another type than what it replaces, and when the rules never come to rest.
    """
    at_rest = trace.at_rest(graph) if trace is not None else frozenset()
    table = Table(rules)
    fresh = Table(rule for rule in rules if id(rule) not in at_rest) if at_rest else table
    for again in range(MAX_SWEEPS):
        applied = _sweep(graph, table if again else fresh, trace)
        if not applied:
            if trace is not None:
                trace.left.append((graph, rules))
            return graph
        graph = _replace(graph, {a.root: a.replacement for a in applied})
    names = ", ".join(sorted({a.rule.name for a in applied}))
    raise InvalidGraph(f"rules undo one another without end: {names}", where=applied[0].root.origin, hint="remove one of them")


def _sweep(graph: Graph, table: Table, trace: Trace | None) -> list[Applied]:
    settled: set[Value] = set()
    result: list[Applied] = []
    matcher = Matcher(graph)
    for value in graph.order:
        # A physical layout is chosen after rewriting; a value that has one stays as it is, and so do the graph's inputs.
        if value.op == "input" or (isinstance(value.type, TensorType) and value.type.order is not None):
            continue
        for rule in table.at(value):
            applied = rule.try_at(value, graph, matcher)
            if applied is None:
                continue
            if not settled.isdisjoint(applied.covered):
                break
            check(applied)
            settled.add(value)
            result.append(_named(applied, graph))
            if trace is not None:
                trace.steps.append(Step(rule.name, value.origin, repr(value), repr(applied.replacement)))
            break
    return result


def check(applied: Applied) -> None:
    """Raises InvalidGraph when the replacement's type is not the root's."""
    root, new = applied.root, applied.replacement
    if root.type == new.type:
        return
    raise InvalidGraph(
        f"rule {applied.rule.name} replaces {root.op} of type {root.type} by {new.op} of type {new.type}", where=root.origin,
        hint="a replacement must have the type of what it replaces; m.fitted() stretches it or says why it cannot",
    )


def _replace(graph: Graph, replacements: Mapping[Value, Value]) -> Graph:
    """The graph with each key of `replacements` computed as its value instead; the values may read any value of the graph."""
    new: dict[Value, Value] = {v: v for v in graph.inputs}
    for output in graph.outputs:
        stack = [(output, False)]
        opened: set[Value] = set()
        while stack:
            value, ready = stack.pop()
            if value in new:
                continue
            target = replacements.get(value)
            needs = value.inputs if target is None else (target,)
            if ready:
                new[value] = with_inputs(value, [new[v] for v in needs]) if target is None else new[target]
                continue
            if value in opened:
                raise InvalidGraph(f"a rule replaced {value.op} by something that reads it", where=value.origin)
            opened.add(value)
            stack.append((value, True))
            stack.extend((v, False) for v in reversed(needs) if v not in new)
    return Graph(graph.inputs, tuple(new[v] for v in graph.outputs), graph.name)


def _named(applied: Applied, graph: Graph) -> Applied:
    """A replacement that is new takes over the readable name of what it replaces."""
    new, name = applied.replacement, applied.root.name
    if new.name or not name or new in graph.users:
        return applied
    return replace(applied, replacement=replace(new, name=name))


def places(rule: Rule, graph: Graph, miss: Miss) -> list[Applied]:
    """Where the rule applies in the graph; what came nearest elsewhere is noted in `miss`."""
    matcher = Matcher(graph, miss)
    return [a for v in graph.order if v.op in rule.root_ops and (a := rule.try_at(v, graph, matcher)) is not None]


def explain(rule: Rule, graph: Graph) -> str:
    """Where the rule applies in the graph, or else the match that came nearest and why it failed."""
    miss = Miss()
    found = places(rule, graph, miss)
    if found:
        return "\n".join(f"{rule.name} applies to {a.root!r}" + (f"  ({a.root.origin})" if a.root.origin else "") for a in found)
    near = near_miss(rule.name, miss)
    return str(near) if near is not None else f"{rule.name}: the graph has no {' or '.join(rule.root_ops)}"
