"""Integers as expressions of positions."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sashiko.graph import build as b
from sashiko.graph.dims import evaluate, symbol
from sashiko.graph.interpret import run
from sashiko.graph.ir import Graph, Value
from sashiko.graph.types import f32, i32, i64
from sashiko.stitch.counted import counted

AT = b.iota(12, i64, 3, 2)
COUNTED: dict[str, Callable[[], Value]] = {
    "plain": lambda: AT,
    "reflected": lambda: b.sub(9, b.abs_(b.sub(b.abs_(b.sub(AT, 9)), 9))),
    "clamped": lambda: b.minimum(b.maximum(b.sub(AT, 6), 0), 9),
    "divided": lambda: b.add(b.floordiv(AT, 4), b.remainder(AT, 5)),
    "backwards": lambda: b.mul(b.neg(b.slice_(AT, 0, 11, 12, -1)), 3),
    "of a view": lambda: b.add(b.reshape(b.reshape(AT, (3, 4)), (12,)), b.cast(b.expand(b.iota(1, i32, 4), (12,)), i64)),
}


@pytest.mark.parametrize("name", COUNTED)
def test_every_element(name: str) -> None:
    value = COUNTED[name]()
    found = counted(value, (symbol("c", 0, None, 12),))
    assert found is not None
    assert [evaluate(found, {"c": n}) for n in range(12)] == run(Graph((), (value,)), [])[0].tolist()


@pytest.mark.parametrize("make", [
    lambda: b.input_(0, i64, (12,)),
    lambda: b.add(AT, b.input_(0, i64, (12,))),
    lambda: b.mul(AT, AT),
    lambda: b.floordiv(b.sub(AT, 9), 4),  # which rounds down, and code would have to ask for the sign
    lambda: b.cast(b.iota(12, f32), i64),
    lambda: b.iota(12, i64, 0.5, 1),
])
def test_what_is_not_counted(make: Callable[[], Value]) -> None:
    assert counted(make(), (symbol("c", 0, None, 12),)) is None


def test_long_chains_are_left_alone() -> None:
    value = AT
    for _ in range(60):
        value = b.add(b.mul(value, 2), value)
    assert counted(value, (symbol("c", 0, None, 12),)) is None
