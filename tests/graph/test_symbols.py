"""What PyTorch decides by, asked of the sizes of a call."""

from __future__ import annotations

import pytest
import sympy

from sashiko.graph.dims import symbol
from sashiko.graph.symbols import Assumption, Symbols

A, B = sympy.symbols("a b", integer=True, positive=True)


@pytest.mark.parametrize(
    "decided",
    [
        sympy.Or(sympy.Eq(A, 3), sympy.Eq(sympy.Mod(A, 4), 0)),
        sympy.Or(A > 3, sympy.And(sympy.Ne(A, B), B <= 2)),
        sympy.And(sympy.Or(A >= B, sympy.Ne(B, 4)), sympy.Or(sympy.Eq(A, 2), B > 1, A < B)),
    ],
    ids=str,
)
def test_one_of_several_relations(decided: sympy.Basic) -> None:
    """An assumption for it holds for the very sizes that it is true of."""
    assumed = list(Symbols(None)._assumed(decided))
    held = {(a, b): all(each.holds({"a": a, "b": b}) for each in assumed) for a in range(1, 9) for b in range(1, 7)}
    assert held == {(a, b): bool(decided.subs({A: a, B: b})) for a, b in held}
    assert {True, False} == set(held.values())


@pytest.mark.parametrize("relation", ["==", "!=", ">="])
@pytest.mark.parametrize("constant", range(-8, 3))
def test_what_goes_without_saying_holds_for_all_sizes(relation: str, constant: int) -> None:
    a, b = symbol("a", 2, 4), symbol("b", 1, 3)
    for dim in (a + b + constant, a - b + constant, a * b + constant, a - a + constant):
        assumption = Assumption(dim, relation)
        held = [assumption.holds({"a": x, "b": y}) for x in (2, 3, 4) for y in (1, 2, 3)]
        assert assumption.evident == all(held) or relation == "!="  # what is between two bounds may be left out
        assert all(held) or not assumption.evident
