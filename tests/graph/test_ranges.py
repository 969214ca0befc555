"""Ranges of computed integers: what is known, what is not, and that it holds for any argument, NaN and infinities too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sashiko.graph import build as b
from sashiko.graph.interpret import run
from sashiko.graph.ir import Graph, Value
from sashiko.graph.ranges import lies_within
from sashiko.graph.types import f32, i64

X = b.input_(0, f32, (64,))
N = b.input_(1, i64, (64,))
ODD = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1e30, -1e30, 7.5, 7.4999995, 2.0**24, 1e-40])


def clipped(x: Value, size: int) -> Value:
    return b.minimum(b.where(b.gt(x, 0.0), x, 0.0), float(size - 1))


KNOWN: dict[str, tuple[Value, int, int]] = {
    "clipped": (b.cast(clipped(b.floor(X), 8), i64), 0, 7),
    "rows and columns": (b.add(b.mul(b.cast(clipped(X, 8), i64), 9), b.cast(clipped(b.round_(b.mul(X, 3.0)), 9), i64)), 0, 71),
    "of integers": (b.maximum(b.minimum(N, 5), -2), -2, 5),
    "seen otherwise": (b.reshape(b.slice_(b.maximum(b.minimum(N, 5), 0), 0, 0, 32), (4, 8)), 0, 5),
    "differences": (b.sub(b.maximum(b.minimum(N, 5), 0), b.maximum(b.minimum(N, 3), 1)), -3, 4),
    "divided": (b.truncdiv(b.maximum(b.minimum(N, 50), -1), 16), 0, 3),
    "chosen": (b.where(b.lt(X, 1.0), b.full(3, i64), b.full(-4, i64)), -4, 3),
}


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_known_holds(name: str) -> None:
    value, low, high = KNOWN[name]
    assert lies_within(value, low, high) and not lies_within(value, low + 1, high) and not lies_within(value, low, high - 1)
    x, i = torch.randn(64) * 20, torch.randint(-(2**40), 2**40, (64,))
    x[: len(ODD)] = ODD
    (got,) = run(Graph((X, N), (value,)), [x, i])
    assert int(got.min()) >= low and int(got.max()) <= high


@pytest.mark.parametrize("value", [
    N,
    b.minimum(N, 5),
    b.cast(b.minimum(b.maximum(X, 0.0), 7.0), i64),  # NaN stays one, and is no place
    b.cast(b.minimum(b.where(b.lt(X, 0.0), b.full(0.0, f32), X), 7.0), i64),  # likewise
    b.cast(b.minimum(b.where(b.gt(b.mul(X, 2.0), 0.0), X, 0.0), 7.0), i64),  # it is another number that is compared
    b.cast(b.floor(b.sub(b.cast(b.maximum(b.minimum(N, 5), 0), f32), 0.5)), i64),  # sums of floats are rounded
    b.mul(b.maximum(b.minimum(N, 2**23), 0), 4),  # beyond what is looked at
    b.truncdiv(b.maximum(b.minimum(N, 5), 0), b.maximum(b.minimum(N, 5), 0)),  # perhaps by 0
    b.cast(X, i64),
])
def test_what_is_not_known(value: Value) -> None:
    assert not lies_within(value, -(2**62), 2**62)


@pytest.mark.parametrize("step", [lambda v: b.add(v, b.minimum(v, 1)), lambda v: b.minimum(v, b.add(v, 0))])
def test_what_meets_itself_is_looked_at_once(step: Callable[[Value], Value]) -> None:
    value = b.maximum(b.minimum(N, 1), 0)
    for _ in range(2000):
        value = step(value)
    lies_within(value, 0, 1)
