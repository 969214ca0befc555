"""What equations of sizes make of them: against the numbers that they hold for."""

from __future__ import annotations

import itertools

import pytest

from sashiko.graph.binding import solve
from sashiko.graph.dims import Dim, bounds, evaluate, floordiv, maximum, minimum, mod, product, substitute, symbol, symbols
from sashiko.graph.equalities import apart, fixed, joined, narrowed, parts, simplest, solved, told

S, T = symbol("s", 1), symbol("t", 1)


@pytest.mark.parametrize(
    ("zeros", "expected"),
    [
        ([mod(S, 4)], "4*s_by_4"),
        ([mod(S, 4), mod(S, 6)], "12*s_by_12"),
        ([S - 4 * floordiv(S, 4)], "4*s_by_4"),
        ([mod(S + 1, 4)], "4*s_by_4 + 3"),
        ([floordiv(S + 1, 2) - floordiv(S, 2)], "2*s_by_2"),
        ([2 * floordiv(S - 1, 4) - floordiv(S - 1, 2) + 1], "4*s_by_4 + s_rest + 3"),
        ([floordiv(S - 1, 8) - 2 * floordiv(S - 1, 16) - 1, floordiv(S - 1, 16) - 2 * floordiv(S - 1, 32) - 1], "32*s_by_32 + s_rest + 25"),
        ([mod(S, 4) * floordiv(S, 3)], None),
        ([mod(S, 3) - mod(S, 3)], None),
        ([floordiv(S, 4) - 3], None),
        ([mod(S * S, 4) - 1], None),
        ([mod(S, T)], None),
        ([mod(S, 4) - mod(T, 4)], None),
        ([mod(S, 4096)], None),
    ],
)
def test_parts_are_all_sizes_that_are_left(zeros: list[Dim], expected: str | None) -> None:
    found = parts(zeros)
    assert {name: str(dim) for name, dim in found.items()} == ({} if expected is None else {"s": expected})
    for size in range(4, 150) if expected else ():
        right = all(evaluate(zero, {"s": size}) == 0 for zero in zeros)
        try:
            env = solve([(found["s"], size, "a size")])
        except ValueError as error:
            assert not right, error
        else:
            assert right and evaluate(found["s"], env) == size


@pytest.mark.parametrize(
    ("zeros", "at_least", "expected"),
    [
        ([], [mod(S, 2) - 1], "2*s_by_2 + 1"),
        ([], [mod(S, 4) - 1], "4*s_by_4 + s_rest + 1"),
        ([mod(S, 4)], [1 - mod(floordiv(S, 4), 2)], "4*s_by_4"),  # of all
        ([mod(S, 4)], [mod(floordiv(S, 4), 4) - 3], "16*s_by_16 + 12"),
        ([mod(S, 4)], [mod(floordiv(S, 4), 2) * 2 - mod(floordiv(S, 4), 4)], "4*s_by_4"),  # some that are not one after the other
        ([], [floordiv(S, 4) - 3], None),
        ([], [S - 5], None),
    ],
)
def test_inequalities_of_remainders_leave_fewer(zeros: list[Dim], at_least: list[Dim], expected: str | None) -> None:
    found = parts(zeros, at_least)
    assert {name: str(dim) for name, dim in found.items()} == ({} if expected is None else {"s": expected})
    for size in range(17, 150) if expected else ():
        if all(evaluate(zero, {"s": size}) == 0 for zero in zeros) and all(evaluate(more, {"s": size}) >= 0 for more in at_least):
            assert evaluate(found["s"], solve([(found["s"], size, "a size")])) == size


@pytest.mark.parametrize(
    ("high", "expected"), [(8, (4, 8)), (9, (4, 8)), (3, None), (1 << 20, (4, 1 << 20))]
)
def test_parts_stay_in_range(high: int, expected: tuple[int, int] | None) -> None:
    found = parts([mod(symbol("s", 1, high), 4)])
    assert (bounds(found["s"]) if found else None) == expected


def test_parts_that_would_leave_the_range_are_none() -> None:
    zero = [2 * floordiv(S - 1, 4) - floordiv(S - 1, 2) + 1]
    for high, found in ((11, False), (12, True), (13, True), (14, True), (15, False)):
        assert bool(parts([substitute(zero[0], {"s": symbol("s", 1, high)})])) == found


@pytest.mark.parametrize(("low", "first"), [(1, 3), (3, 3), (4, None), (5, 7), (8, None), (9, 11)])
def test_parts_begin_where_the_range_does(low: int, first: int | None) -> None:
    found = parts([substitute(2 * floordiv(S - 1, 4) - floordiv(S - 1, 2) + 1, {"s": symbol("s", low)})])
    assert (bounds(found["s"])[0] if found else None) == first


def test_numbers_and_sizes_that_all_terms_have_are_left_out() -> None:
    zero = 8 * product([S, T]) - 32 * product([S, floordiv(T, 4)])
    assert simplest(zero) == T - 4 * floordiv(T, 4)
    assert simplest(S * T) == 1 and simplest(5) == 5
    perhaps = symbol("n", 0)
    assert simplest(perhaps * T - perhaps) == perhaps * T - perhaps


PRODUCTS: list[tuple[list[Dim], list[Dim], list[Dim]]] = [
    ([3, S, T], [12, floordiv(T, 2), floordiv(S, 2)], [S - 2 * floordiv(S, 2), T - 2 * floordiv(T, 2)]),
    ([144, floordiv(S, 4), floordiv(T, 6)], [6, S, T], [S - 4 * floordiv(S, 4), T - 6 * floordiv(T, 6)]),
    ([S, S], [9, floordiv(S, 3), floordiv(S, 3)], [S - 3 * floordiv(S, 3)] * 2),
    ([floordiv(S, 4), T + 3], [14, floordiv(S, 8), floordiv(T + 3, 7)],
     [floordiv(S, 4) - 2 * floordiv(S, 8), T + 3 - 7 * floordiv(T + 3, 7)]),
    ([S + 2, T + 2], [4, floordiv(S, 2) + 1, floordiv(T, 2) + 1], [S - 2 * floordiv(S, 2), T - 2 * floordiv(T, 2)]),
    ([S, T], [8, floordiv(S, 2), floordiv(T, 2)], [S * T - 8 * product([floordiv(S, 2), floordiv(T, 2)])]),
    ([2, S, T], [3, floordiv(S, 2), floordiv(T, 2)], [2 * S * T - 3 * product([floordiv(S, 2), floordiv(T, 2)])]),
    ([S, T], [4, floordiv(S * T, 4)], [S * T - 4 * floordiv(S * T, 4)]),
    ([8, S, T], [32, S, floordiv(T, 4)], [T - 4 * floordiv(T, 4)]),
    ([-1, S, T], [4, floordiv(S, 2), floordiv(T, 2)], [-S * T - 4 * product([floordiv(S, 2), floordiv(T, 2)])]),
    ([S - T], [0], [S - T]),
]


@pytest.mark.parametrize(("left", "right", "expected"), PRODUCTS)
def test_sizes_of_one_product_are_cut_one_by_one(left: list[Dim], right: list[Dim], expected: list[Dim]) -> None:
    found = apart(left, right)
    assert found == expected
    for values in itertools.product(range(1, 30), repeat=2):
        env = dict(zip("st", values))
        equal = evaluate(product(left), env) == evaluate(product(right), env)
        assert all(evaluate(zero, env) == 0 for zero in found) is equal or min(evaluate(size, env) for size in left) == 0


@pytest.mark.parametrize(
    ("zeros", "span"),
    [
        ([minimum(64, S) - S], (1, 64)),
        ([maximum(0, 64 - S) + S - 64], (1, 64)),
        ([maximum(8, S) - S], (8, None)),
        ([S - maximum(8, S), minimum(64, S) - S], (8, 64)),
        ([maximum(9, 2 * S) - 2 * S], (5, None)),
        ([minimum(9, 2 * S) - 2 * S], (1, 4)),
    ],
)
def test_narrowed(zeros: list[Dim], span: tuple[int, int | None]) -> None:
    (found,) = narrowed(zeros).values()
    assert bounds(found) == span
    holds = [n for n in range(1, 200) if all(evaluate(zero, {"s": n}) == 0 for zero in zeros)]
    assert (min(holds), max(holds)) == (span[0], span[1] or 199)


def test_what_says_nothing_of_one_symbol_narrows_none() -> None:
    assert not narrowed([minimum(S, T) - T, floordiv(S, 2) - T, minimum(S, T) - 5])


@pytest.mark.parametrize(
    ("zero", "expected"),
    [
        (floordiv(S + 1, 2) - T, {"t": floordiv(S + 1, 2)}),
        (T - maximum(S - 4, 1), {"t": maximum(S - 4, 1)}),
        (S - T, {}),
        (2 * T - floordiv(S, 2), {}),
        (floordiv(T + S, 2) - T, {}),
        (floordiv(S, 2) - symbol("u", 1, 9), {}),
        (floordiv(S, 2) - symbol("u", 5), {}),
    ],
)
def test_a_symbol_is_told_by_the_functions_that_it_equals(zero: Dim, expected: dict[str, Dim]) -> None:
    assert told(zero) == expected
    for values in itertools.product(range(1, 20), repeat=2):
        env = {**dict(zip("st", values)), "u": 7}
        if expected and evaluate(zero, env) == 0:
            assert evaluate(expected["t"], env) == env["t"]


@pytest.mark.parametrize("high", [None, 12, 64])
def test_which_symbol_is_which_does_not_depend_on_their_ranges(high: int | None) -> None:
    dim = parts([substitute(2 * floordiv(S - 1, 4) - floordiv(S - 1, 2) + 1, {"s": symbol("s", 1, high)})])["s"]
    for size in (3, 4, 7, 8, 11, 12):
        assert solve([(dim, size, "a size")]) == {"s_by_4": (size - 3) // 4, "s_rest": (size - 3) % 4}


def test_a_multiple_is_not_zero_where_it_is_traced_for_more() -> None:
    assert solve([(S, 0, "a size")]) == {"s": 0}
    with pytest.raises(ValueError, match="size 0, expected a multiple of 4 from 4 on"):
        solve([(parts([mod(S, 4)])["s"], 0, "a size")])


def test_all_symbols_of_parts_are_found_in_a_call() -> None:
    dim = parts([2 * floordiv(S - 1, 4) - floordiv(S - 1, 2) + 1])["s"]
    assert solve([(dim, 36, "a size")]) == {"s_by_4": 8, "s_rest": 1} and len(symbols(dim)) == 2
    with pytest.raises(ValueError, match="a size has size 34, expected 3 to 4 more than a multiple of 4, from 3 on"):
        solve([(dim, 34, "a size")])


HALF = floordiv(S + T + 1, 2)
SOLVED: list[tuple[list[Dim], list[Dim]]] = [
    ([2 * HALF - S - T, 16 * HALF - 16 * S], [S - T, 0]),
    ([HALF - S, HALF - T, minimum(S, T) - HALF], [T - S, 0, minimum(S, T) - T]),
    ([product([HALF, T]) - 2 * T, product([HALF, S]) - T], [0, 2 * S - T]),
    ([HALF - floordiv(S, 2), 2 * HALF - S - T], [HALF - floordiv(S, 2), 2 * HALF - S - T]),
]


@pytest.mark.parametrize(("zeros", "expected"), SOLVED)
def test_equations_are_solved_for_their_functions(zeros: list[Dim], expected: list[Dim]) -> None:
    found = solved([*map(simplest, zeros)])
    assert found == expected
    for values in itertools.product(range(1, 20), repeat=2):
        env = dict(zip("st", values))
        if all(evaluate(zero, env) == 0 for zero in zeros):
            assert all(evaluate(zero, env) == 0 for zero in found)


FIXED: list[tuple[Dim, dict[str, Dim]]] = [
    (2 * S - 6, {"s": 3}), (4 - S, {"s": 4}), (2 * S - 3, {}), (S, {}), (S - T, {}), (S * S - 4, {}), (floordiv(S, 4) - S, {}),
]


@pytest.mark.parametrize(("zero", "expected"), FIXED)
def test_a_symbol_is_fixed_by_an_equation_of_it_alone(zero: Dim, expected: dict[str, Dim]) -> None:
    assert fixed(zero) == expected


def test_symbols_whose_difference_is_nothing_are_one() -> None:
    part, one = symbol("s_by_4", 2), symbol("t", 1, 9)
    assert joined(part - one, {"s", "t"}) == joined(one - part, {"t"}) == dict.fromkeys(("s_by_4", "t"), symbol("t", 2, 9))
    for zero in (part - 2 * one, part - one - 1, part + one, part * one - part, part - one - symbol("u", 1), part - symbol("u", 0, 1)):
        assert not joined(zero, {"t"})
