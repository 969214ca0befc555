"""Symbolic integers: canonical forms, and every simplification checked against plain integer arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sashiko.graph import dims
from sashiko.graph.dims import Dim, symbol
from sashiko.graph.poly import UNBOUNDED

RANGES = {"a": (0, 7), "b": (1, 5), "c": (2, 6), "i": (0, 1)}
SYMBOLS = {name: symbol(name, lo, hi) for name, (lo, hi) in RANGES.items()}
SYMBOLS["i"] = symbol("i", 0, None, extent=SYMBOLS["c"])


@dataclass(frozen=True)
class Both:
    """The same expression as a Dim and as a function of plain integers."""

    dim: Dim
    plain: Callable[[dict[str, int]], int]


def leaf(name: str) -> Both:
    return Both(SYMBOLS[name], lambda env: env[name])


def number(n: int) -> Both:
    return Both(n, lambda env: n)


def combine(kind: str, x: Both, y: Both) -> Both:
    divisor = Both(dims.maximum(y.dim, 1), lambda env: max(y.plain(env), 1))
    table: dict[str, Callable[[], Both]] = {
        "+": lambda: Both(x.dim + y.dim, lambda e: x.plain(e) + y.plain(e)),
        "-": lambda: Both(x.dim - y.dim, lambda e: x.plain(e) - y.plain(e)),
        "*": lambda: Both(x.dim * y.dim, lambda e: x.plain(e) * y.plain(e)),
        "//": lambda: Both(dims.floordiv(x.dim, divisor.dim), lambda e: x.plain(e) // divisor.plain(e)),
        "%": lambda: Both(dims.mod(x.dim, divisor.dim), lambda e: x.plain(e) % divisor.plain(e)),
        "ceil": lambda: Both(dims.ceildiv(x.dim, divisor.dim), lambda e: -(-x.plain(e) // divisor.plain(e))),
        "min": lambda: Both(dims.minimum(x.dim, y.dim), lambda e: min(x.plain(e), y.plain(e))),
        "max": lambda: Both(dims.maximum(x.dim, y.dim), lambda e: max(x.plain(e), y.plain(e))),
    }
    return table[kind]()


LEAVES = st.one_of(st.sampled_from(sorted(RANGES)).map(leaf), st.integers(0, 9).map(number))
KINDS = ("+", "-", "*", "//", "%", "ceil", "min", "max")
EXPRESSIONS = st.recursive(LEAVES, lambda inner: st.builds(combine, st.sampled_from(KINDS), inner, inner), max_leaves=6)
ENVS = st.fixed_dictionaries({name: st.integers(*bounds) for name, bounds in RANGES.items()})


@settings(max_examples=300, deadline=None)
@given(EXPRESSIONS, ENVS)
def test_simplification_keeps_the_value(expression: Both, env: dict[str, int]) -> None:
    assert dims.evaluate(expression.dim, env) == expression.plain(env)
    assert dims.evaluate(dims.rejoin(expression.dim), env) == expression.plain(env)


@settings(max_examples=300, deadline=None)
@given(EXPRESSIONS, ENVS)
def test_bounds_contain_every_value(expression: Both, env: dict[str, int]) -> None:
    low, high = dims.bounds(expression.dim)
    value = expression.plain(env)
    assert (low is None or low <= value) and (high is None or value <= high)


@settings(max_examples=300, deadline=None)
@given(EXPRESSIONS, EXPRESSIONS, ENVS)
def test_proofs_hold(x: Both, y: Both, env: dict[str, int]) -> None:
    a, b = x.plain(env), y.plain(env)
    if dims.less(x.dim, y.dim):
        assert a < b
    if dims.non_negative(x.dim):
        assert a >= 0
    if b != 0 and dims.divides(y.dim, x.dim):
        assert a % b == 0


@settings(max_examples=200, deadline=None)
@given(EXPRESSIONS, EXPRESSIONS, EXPRESSIONS)
def test_equal_polynomials_are_equal_objects(x: Both, y: Both, z: Both) -> None:
    assert x.dim * (y.dim + z.dim) == z.dim * x.dim + y.dim * x.dim
    assert hash(x.dim * y.dim) == hash(y.dim * x.dim)
    assert x.dim - x.dim == 0


@settings(max_examples=200, deadline=None)
@given(EXPRESSIONS, ENVS)
def test_linear_coefficient(expression: Both, env: dict[str, int]) -> None:
    parts = dims.coefficient(expression.dim, "a")
    if parts is not None:
        slope, rest = parts
        assert dims.evaluate(slope, env) * env["a"] + dims.evaluate(rest, env) == expression.plain(env)


A, B, C, N = SYMBOLS["a"], SYMBOLS["b"], SYMBOLS["c"], symbol("n", 1)


@pytest.mark.parametrize(("left", "right"), [
    (dims.product([A, B, 4]), 4 * B * A),
    (dims.floordiv(A * B, B), A),
    (dims.floordiv(A * 8 + 3, 8), A),
    (dims.mod(A * 8 + 3, 8), 3),
    (dims.mod(A * C, C), 0),
    (dims.floordiv(A * 4 + B * 12 + 7, 8), dims.floordiv(A + B * 3 + 1, 2)),  # a common factor of all terms and the divisor
    (dims.mod(A * 4 + 3, 8), dims.mod(A, 2) * 4 + 3),
    (dims.minimum(A, A + 1), A),
    (dims.maximum(B, 1), B),
    (symbol("one", 1, 1), 1),
    (dims.ceildiv(A * 16, 16), A),
    (dims.mod(dims.mod(A, 12) + B, 4), dims.mod(A + B, 4)),
    (A + dims.mod(-A, 8), dims.ceildiv(A, 8) * 8),  # a size with its padding
    (A + dims.mod(-dims.mod(A, 8), 8), dims.ceildiv(A, 8) * 8),
    (dims.floordiv(B + dims.mod(-B, 8), dims.ceildiv(B, 8)), 8),
    (dims.ceildiv(A * B, B), A),  # as many steps of a size as there are
    (dims.floordiv(A * C - B, 8 * C), dims.floordiv(A * C - B, 8 * C)),
    (dims.mod(A * B - 1, B), B - 1),
    (dims.rejoin(dims.floordiv(A + B, 4 * C) * 8 * C + dims.mod(A + B, 4 * C) * 2), 2 * A + 2 * B),
    (dims.floordiv(A + 9, 8), dims.floordiv(A + 1, 8) + 1),
    (dims.floordiv(A - 11, 4), dims.floordiv(A - 3, 4) - 2),
    (dims.mod(A + 9, 8) - dims.mod(symbol("n", 1) - 11, 4), dims.mod(A + 1, 8) - dims.mod(symbol("n", 1) - 3, 4)),
    (dims.floordiv(dims.floordiv(A + 1, 2) + B - 3, 4), dims.floordiv(A + 2 * B - 5, 8)),
    (dims.floordiv(N - 1, 2) + 1, dims.floordiv(N + 1, 2)),
    (dims.floordiv(N - 7 + 6, 4) + 1, dims.ceildiv(N, 4)),
    (-dims.floordiv(-N, 2), dims.ceildiv(N, 2)),
    (-dims.floordiv(-dims.ceildiv(N, 2), 2), dims.ceildiv(N, 4)),
    (-dims.floordiv(-N * B, 4), dims.ceildiv(N * B, 4)),
    (-dims.floordiv(N - A, 2), dims.floordiv(A - N + 1, 2)),
    (dims.mod(7 - N, 8), dims.mod(-N - 1, 8)),
    (dims.floordiv(A * B * (4 * N + C + 3) * (N - 1), (N - 1) * (4 * N + C + 3)), A * B),
    (dims.mod((4 * N + C + 3) * B, 4 * N + C + 3), 0),
    (dims.floordiv((4 * N + 3) * B + 1, 4 * N + 3) - dims.floordiv(4 * N * B + 3 * B + 1, 4 * N + 3), 0),
])
def test_canonical_forms(left: Dim, right: Dim) -> None:
    assert left == right


@pytest.mark.parametrize("count", range(1, 5))
def test_sizes_of_repeated_striding(count: int) -> None:
    """As many windows of 3, two apart, as elements from the third on."""
    windows = places = symbol("n", 64)
    for _ in range(count):
        windows, places = dims.floordiv(windows - 3, 2) + 1, dims.ceildiv(places - 2, 2)
    assert windows == places


SPANS = [(0, None), (1, None), (2, 40), (-9, 9), (-UNBOUNDED, None)]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(SPANS), st.sampled_from([-3, -2, -1, 1, 2, 4]), st.integers(0, 1 << 20)), min_size=1, max_size=3),
    st.integers(-30, 30), st.integers(2, 9), st.integers(-3, 3), st.integers(1, 3),
)
def test_quotients_have_one_form(parts: list[tuple[tuple[int, int | None], int, int]], first: int, by: int, turns: int, times: int) -> None:
    x, plain, env = first, first, {}
    for n, ((low, high), factor, number) in enumerate(parts):
        name, least = f"s{n}", max(low, -60)
        env[name] = least + number % ((60 if high is None else high) - least + 1)
        x, plain = x + factor * symbol(name, low, high), plain + factor * env[name]
    forms = [
        dims.floordiv(x, by), dims.floordiv(x - turns * by, by) + turns, dims.floordiv(times * x + times - 1, times * by),
        dims.ceildiv(x - by + 1, by), -dims.floordiv(by - 1 - x, by), -dims.ceildiv(-x, by),
    ]
    assert len(set(forms)) == 1 and dims.evaluate(forms[0], env) == plain // by
    rests = dims.mod(x, by), dims.mod(x + turns * by, by)
    assert rests[0] == rests[1] and dims.evaluate(rests[0], env) == plain % by


@settings(max_examples=300, deadline=None)
@given(*(st.integers(-30, 30) for _ in range(4)), *(st.integers(1, 9) for _ in range(2)))
def test_quotients_of_sums_of_quotients(x: int, y: int, before: int, after: int, p: int, q: int) -> None:
    env, (a, b) = {"x": x, "y": y}, (symbol(name, -30, 30) for name in "xy")
    inner, plain = dims.floordiv(a + before, p) + 2 * b + after, (x + before) // p + 2 * y + after
    assert (dims.evaluate(dims.floordiv(inner, q), env), dims.evaluate(dims.mod(inner, q), env)) == divmod(plain, q)


def test_quotients_of_parts_again_and_again() -> None:
    """Whose parts ask for bounds of each other: six times would not end, were these not kept."""
    size, plain = symbol("n", 2, 300), 100
    for _ in range(6):
        size, plain = dims.floordiv(size - 1, 2) + 1 + dims.floordiv(size, 3), (plain - 1) // 2 + 1 + plain // 3
    low, high = dims.bounds(size)
    assert dims.evaluate(size, {"n": 100}) == plain and low is not None and high is not None and low <= plain <= high


def test_quotients_by_negative_numbers() -> None:
    n, u = symbol("n", 0, 9), symbol("u", -5, 5)
    assert dims.evaluate(dims.floordiv(dims.floordiv(n, 2), u), {"n": 7, "u": -1}) == -3
    assert [dims.evaluate(dims.floordiv(dims.floordiv(n, 2), -2), {"n": at}) for at in range(10)] == [at // 2 // -2 for at in range(10)]


def test_an_axis_stays_below_its_extent() -> None:
    n = symbol("n", 1)
    i = symbol("i", 0, None, extent=n)
    assert dims.less(i, n) and dims.mod(n * 2 + i, n) == i
    assert not dims.less(n, i)
    j = symbol("j", 0, None, extent=8)
    assert dims.mod(8 * i + j, 8 * n) == 8 * i + j and not dims.less(9 * i + j, 8 * n)


def test_padding_is_less_than_what_it_fills() -> None:
    assert dims.bounds(dims.mod(-symbol("n", 1), 8)) == (0, 7) and dims.bounds(dims.mod(-B, 8)) == (3, 7)
    assert dims.bounds(dims.mod(-dims.floordiv(symbol("n", 1) + 1, 2), 8)) == (0, 7)  # of what is left after striding


def test_bounds_of_products_of_what_is_left() -> None:
    left, wide = (dims.floordiv(symbol(name, 20) - 8, 4) + 1 for name in "nw")
    assert dims.bounds(left * wide) == (16, None) and dims.bounds(left * symbol("b", 1, 9)) == (4, None)
    one, two = symbol("one", 1), symbol("two", 2)  # sizes from 1 on may be 0 in a call
    assert dims.bounds(left * two - left)[0] == 4 and dims.bounds(left * one - left)[0] is None


def test_a_missing_symbol_is_named() -> None:
    with pytest.raises(KeyError, match="b"):
        dims.evaluate(A + B, {"a": 1})


@pytest.mark.parametrize("first", [-40, -1, 0, 7, 8, 24, 25])
def test_quotients_that_are_the_same_for_all_of_a_range(first: int) -> None:
    rest = symbol("rest", 0, 7) + first
    whole, left = dims.floordiv(rest, 16), dims.mod(rest, 16)
    for n in range(8):
        assert (dims.evaluate(whole, {"rest": n}), dims.evaluate(left, {"rest": n})) == divmod(n + first, 16)
    assert isinstance(whole, int) == (first // 16 == (first + 7) // 16)


def test_a_size_of_nothing_has_no_blocks() -> None:
    assert dims.evaluate(dims.ceildiv(symbol("s", 1, 16), 16), {"s": 0}) == 0


def test_what_nothing_is_divided_by() -> None:
    assert dims.floordiv(symbol("rest", 0, 7), 0) is not None and dims.mod(symbol("rest", 0, 7), 0) is not None
