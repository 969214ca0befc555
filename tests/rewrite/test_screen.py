"""The test before matching: it must never hide a rule that applies, and it has to rule out what it is there for."""

from __future__ import annotations

import random

import pytest

from sashiko.graph import build as b
from sashiko.graph.ir import Graph, Value
from sashiko.graph.types import boolean, f32, i32
from sashiko.rewrite import Rule
from sashiko.rewrite.driver import Table
from sashiko.rewrite.generate import generate
from sashiko.rewrite.match import Matcher
from sashiko.rewrite.rules import ALL

X, Y = b.input_(0, f32, (2, 3)), b.input_(1, f32, (2, 3))


@pytest.mark.parametrize("tested", ALL, ids=lambda r: r.name)
def test_rules_that_apply_are_tried(tested: Rule) -> None:
    rng, table = random.Random(tested.name), Table(ALL)
    for sample in range(12):
        root = tested.example(rng) if tested.example is not None and sample % 2 == 0 else generate(tested.equation.left, rng)
        if root is None:
            continue
        graph = Graph(tuple(v for v in Graph((), (root,)).order if v.op == "input"), (root,))
        for value in graph.order:
            if value.op in tested.root_ops and tested.try_at(value, graph, Matcher(graph)) is not None:
                assert tested in table.at(value)


@pytest.mark.parametrize(("value", "hidden", "shown"), [
    (b.add(X, 0.5), {"add_zero"}, set[str]()),
    (b.add(X, -0.0), set[str](), {"add_zero"}),
    (b.mul(X, b.full(1.0, f32, (2, 3))), {"times_zero", "times_minus_one"}, {"times_one"}),
    (b.mul(b.input_(0, i32, (2,)), 1), {"times_zero"}, {"times_one"}),
    (b.or_(b.input_(0, boolean, (2,)), b.full(True, boolean)), {"or_false"}, {"or_true"}),
    (b.maximum(b.exp(X), X), {"extreme_of_same"}, set[str]()),
    (b.maximum(b.exp(X), b.exp(X)), set[str](), {"extreme_of_same"}),
], ids=["another number", "minus zero", "one", "integer", "bool", "operands of two kinds", "operands of one kind"])
def test_what_is_tried(value: Value, hidden: set[str], shown: set[str]) -> None:
    """By numbers as well as names; operands that may be one value are called the same."""
    names = {rule.name for rule in Table(ALL).at(value)}
    assert hidden.isdisjoint(names) and shown <= names
