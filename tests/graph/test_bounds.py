"""What quotients are between, against the numbers themselves."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from sashiko.graph.bounds import bounds, less, non_negative
from sashiko.graph.dims import Dim, ceildiv, evaluate, floordiv, maximum, minimum, mod, symbol

N, M, Q = symbol("n", 1), symbol("m", 1), floordiv
TERMS: list[tuple[Dim, tuple[int | None, int | None]]] = [
    (N - Q(N, 2), (1, None)),
    (Q(N, 2) - Q(N, 4) - 2 * Q(N, 8), (0, 2)),
    (Q(N, 4) - 2 * Q(N, 8), (0, 1)),
    (3 * Q(N, 2) - 6 * Q(N, 4), (0, 3)),
    (4 * ceildiv(N, 4) - N, (0, 3)),
    (8 * ceildiv(N, 8) - 4 * ceildiv(N, 4), (0, 4)),
    (N - 2 * Q(N, 2) + M - 3 * Q(M, 3), (0, 3)),
    (Q(N + 1, 2) + Q(N, 2) - N, (0, 0)),
    (Q(2 * Q(N, 3) + 1, 5) - N, (None, -1)),
    (N * M - 2 * Q(N, 2) * M, (0, None)),
    (Q(N - M, 2) + M, (1, None)),
    (Q(symbol("u", -5, 5), 2), (-3, 2)),
    (Q(N, 2) - Q(M, 2), (None, None)),
    (mod(N, 4) - Q(N, 8), (None, 3)),
]


@pytest.mark.parametrize(("value", "expected"), TERMS, ids=str)
def test_quotients_are_measured_by_what_they_are_of(value: Dim, expected: tuple[int | None, int | None]) -> None:
    low, high = bounds(value)
    assert (low, high) == expected
    numbers = [evaluate(value, {"n": n, "m": m, "u": u}) for n in range(1, 40) for m in range(1, 9) for u in (-5, 0, 5)]
    assert (low is None or low <= min(numbers)) and (high is None or high >= max(numbers))


def test_halves_fit() -> None:
    assert minimum(N, Q(N, 2)) == Q(N, 2) and maximum(0, 2 * Q(N, 2) - Q(N, 2)) == Q(N, 2)
    assert less(Q(N, 2), N) and not non_negative(Q(N, 2) - 1) and not less(Q(N, 2), Q(N + 1, 2))


@pytest.mark.parametrize("step", [lambda n: Q(n - 1, 2) + 1 + Q(n, 3), lambda n: n - 2 * Q(n - Q(n, 3), 5)], ids=["sum", "difference"])
def test_bounds_of_nested_quotients_are_found_in_no_time(step: Callable[[Dim], Dim]) -> None:
    size, began = symbol("n", 2, 300), time.perf_counter()
    for _ in range(5):
        size = step(size)
    low, high = bounds(size)
    numbers = [evaluate(size, {"n": n}) for n in range(2, 301)]
    assert low is not None and high is not None and low <= min(numbers) and max(numbers) <= high
    assert time.perf_counter() - began < 20
