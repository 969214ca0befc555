"""Every rule of the project, both sides, on random graphs made from its own pattern."""

from __future__ import annotations

import random

import pytest
import torch

from sashiko.diagnostics.errors import InvalidGraph
from sashiko.graph.dims import evaluate
from sashiko.graph.interpret import run
from sashiko.graph.ir import Graph, Value
from sashiko.rewrite import Match, Mismatch, Rule, Trace, apply, equation, rule
from sashiko.rewrite.fuzz import difference, fuzz
from sashiko.rewrite.generate import SYMBOLS, generate, random_tensor
from sashiko.rewrite.rules import ALL, CANONICAL, INTEGER, SIMPLIFY

SAMPLES = 30


@pytest.mark.parametrize("tested", ALL, ids=lambda r: r.name)
def test_both_sides_agree(tested: Rule) -> None:
    """Fails, too, when the rule never applied: then nothing would have been tested."""
    result = fuzz(tested, SAMPLES)
    assert result.fired >= SAMPLES // 10, f"{tested} applied to {result.fired} of {result.tried} graphs"


@pytest.mark.parametrize("tested", ALL, ids=lambda r: r.name)
def test_all_rules_together_come_to_rest_and_agree(tested: Rule) -> None:
    """Graphs made for one rule are rewritten by all: the same numbers, and nothing left to do afterwards."""
    rng = random.Random(tested.name)
    for sample in range(8):
        root = tested.example(rng) if tested.example is not None and sample % 2 == 0 else generate(tested.equation.left, rng)
        if root is None:
            continue
        inputs = sorted((v for v in Graph((), (root,)).order if v.op == "input"), key=lambda v: getattr(v.attrs, "index", 0))
        graph = Graph(tuple(inputs), (root,))
        once = apply(graph, ALL)
        trace = Trace()
        assert apply(once, ALL, trace) is once and not trace.steps
        data = [random_tensor(rng, v.dtype, tuple(evaluate(d, SYMBOLS) for d in v.shape), specials=False) for v in inputs]
        left, right = (run(g, data, SYMBOLS)[0] for g in (graph, once))
        assert difference(left, right) <= max(r.ulp for r in ALL)


def test_names_are_unique() -> None:
    names = [r.name for r in ALL]
    assert len(set(names)) == len(names)


def test_sets_contain_one_another() -> None:
    assert set(SIMPLIFY) < set(CANONICAL) < set(ALL) and set(INTEGER) < set(ALL)


@pytest.mark.parametrize("text", [
    "sub(x, neg(y)) -> sub(x, y)",
    "mul(x, 0) -> 0",
    "sub(x, x) -> 0",
    "pow(x, 3) -> mul(x, x)",
    "where(logical_not(c), x, y) -> where(c, x, y)",
    "exp(x) -> exp2(x)",
    "reshape{s}(permute(x)) -> reshape{s}(x)",
    "floor(x) -> trunc(x)",
    "logical_not(lt(x, y)) -> ge(x, y)",
    "abs(neg(x)) -> abs(x)",
    "mul(mul(x, 4), 0.25) -> x",
])
def test_wrong_equations_are_caught(text: str) -> None:
    """The fuzzer itself: false identities, some of them false for infinities, NaN, zeros, large numbers or unsigned integers only."""
    with pytest.raises(InvalidGraph, match="differ"):
        fuzz(equation(text, ulp=0), 400)


def test_wrong_functions_are_caught() -> None:
    @rule("permute{p}(permute{q}(x)) -> permute{p}(x)")
    def forgets_one(m: Match) -> Value | Mismatch:
        return m.right()

    with pytest.raises(InvalidGraph, match="differ"):
        fuzz(forgets_one, 200)


def test_rules_that_never_apply_are_seen() -> None:
    @rule("neg(x) -> x")
    def never(m: Match) -> Value | Mismatch:
        return m.fail("no")

    assert fuzz(never, 10).fired == 0


def test_difference_counts_units_in_the_last_place() -> None:
    one = torch.ones(3)
    assert difference(one, one + torch.finfo(torch.float32).eps) == pytest.approx(1)
    assert difference(one, one.double()) == float("inf")
    assert difference(torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")])) == 0
    assert difference(torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 2.0])) == float("inf")
    assert difference(torch.tensor([1, 2]), torch.tensor([1, 3])) == float("inf")
