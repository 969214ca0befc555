"""Arithmetic that can be left out or done cheaper, without changing results.

    x + 0 = x - 0 = x          x * 1 = x / 1 = x         x * -1 = -x           integers: x * 0 = 0
    -(-x) = x                  x - (-y) = x + y          x + (-y) = x - y      |-x| = ||x|| = |x|
    x ^ 1 = x                  x ^ 2 = x * x             x ^ -1 = 1 / x
    1 / sqrt x = rsqrt x       1 / x = reciprocal x      x / c = x * (1/c) for powers of two only
    x * a * b = x * (a b), of which one is a power of two, where both make x larger or both smaller
    max(x, x) = min(x, x) = x  max(x, 0) = relu x        relu relu x = relu x
    where(true, x, y) = x      where(false, x, y) = y    where(c, x, x) = x    where(not c, x, y) = where(c, y, x)
    cast d (cast e x) = cast d x, when e holds every number of x's type
    a reduction over axes of size 1 is a reshape

Equality is that of numbers: NaN stays NaN, and a zero may change its sign (`-0.0 + 0` is `0.0`). The exceptions are powers and
roots, which may differ by two units in the last place (`ulp=2`). Never done, because they change results: x * 0 for floats, x - x, sums
and products in another order, x / c for other c, sqrt x for x ^ 0.5 (which is infinite for -inf). Where both
factors make x smaller, a result below the normal numbers may differ by one of the smallest of them.
"""

from __future__ import annotations

import random

from ...graph import attrs as A
from ...graph import build as b
from ...graph.ir import Value
from ...graph.types import f32, i32
from ..match import Mismatch
from ..query import holds, number, power_of_two
from ..rule import Match, RuleSet, equation, rule
from ..template import full


@rule("mul(x, 0) -> 0", example=lambda rng: b.mul(b.input_(0, i32, (rng.randint(1, 4), 3)), 0))
def times_zero(m: Match) -> Value | Mismatch:
    """Not for floats: infinity and NaN times zero are NaN."""
    return m.fail("x may be infinite or NaN", m["x"]) if m.root.dtype.is_float else m.right()


def _division(rng: random.Random) -> Value:
    return b.div(b.input_(0, f32, (rng.randint(1, 4), 5)), rng.choice((0.5, 8.0, -4.0)))


@rule("div(x, $c) -> mul(x, $c)", example=_division)
def divide_by_power_of_two(m: Match) -> Value | Mismatch:
    """The right side's number is 1/c, which is exact for these."""
    divisor = m.number("c")
    if not power_of_two(divisor) or m.root.dtype.bits < 32:
        return m.fail(f"1/{divisor} is not exact")
    return m.fitted(m.make("mul", m["x"], full(1.0 / divisor, m.root.dtype, (), m.root.origin)))


def _two_factors(rng: random.Random) -> Value:
    x = b.input_(0, f32, (rng.randint(1, 4), 5))
    return b.mul(b.mul(x, rng.choice((0.5, 8.0, -4.0))), rng.choice((0.25, 0.3, 3.0)))


@rule("mul(mul(x, $a), $b) -> mul(x, $a)", example=_two_factors)
def merge_factors(m: Match) -> Value | Mismatch:
    """The right side's number is a*b. With a power of two among them nothing is rounded in another place, as long as x*a is neither
    infinite nor below the normal numbers where x*a*b is not."""
    first, second = m.number("a"), m.number("b")
    if not m.root.dtype.is_float or m.root.dtype.bits < 32:
        return m.fail(f"products of {m.root.dtype} may wrap or overflow")
    grows = abs(first) >= 1 <= abs(second) and power_of_two(first)
    shrinks = abs(first) <= 1 >= abs(second) and (power_of_two(first) or power_of_two(second))
    if not (grows or shrinks) or not 2.0**-60 < abs(first * second) < 2.0**60:
        return m.fail(f"{first} * {second} rounds, or overflows, in another place")
    return m.fitted(m.make("mul", m["x"], full(first * second, m.root.dtype, (), m.root.origin)))


@rule("cast{d}(x) -> x")
def cast_to_same(m: Match) -> Value | Mismatch:
    """A cast of a quantized tensor is no identity: it forgets what the integers mean."""
    return m["x"] if m["x"].type == m.root.type else m.fail(f"{m['x'].dtype} is not {m.root.dtype}")


@rule("cast{d}(cast{e}(x)) -> cast{d}(x)")
def cast_of_cast(m: Match) -> Value | Mismatch:
    """The inner cast must lose nothing."""
    start, middle = m["x"].dtype, m.attrs("e", A.CastAttrs).dtype
    return m.right() if holds(middle, start) else m.fail(f"{middle} does not hold every {start}", m["x"])


@rule("cast{d}(n@full{f}()) -> full{f}()")
def cast_of_number(m: Match) -> Value | Mismatch:
    """The right side's number is the left one, converted; left alone where that is not defined for every machine."""
    found = number(m.root)
    if found is None:
        return m.fail(f"{m.attrs('f', A.FullAttrs).value} as {m.root.dtype} depends on the machine", m["n"])
    return full(found, m.root.dtype, m.root.shape, m.root.origin)


@rule("abs(neg(x)) -> abs(x)")
def absolute_of_negative(m: Match) -> Value | Mismatch:
    """Not where -1 is 255."""
    return m.fail(f"{m.root.dtype} has no negative numbers", m["x"]) if m.root.dtype.kind == "uint" else m.right()


def _over_unit_axis(rng: random.Random) -> Value:
    return b.reduce(b.input_(0, f32, (3, 1, rng.randint(1, 3))), rng.choice(("sum", "max")), 1, keepdim=rng.random() < 0.5)


@rule("reduce{r}(x) -> reshape{s}(x)", example=_over_unit_axis)
def reduce_nothing(m: Match) -> Value | Mismatch:
    """Each result depends on one element."""
    attrs = m.attrs("r", A.ReduceAttrs)
    if attrs.kind.startswith("arg") or m.root.dtype != m["x"].dtype or m["x"].tensor.qparams is not None:
        return m.fail(f"{attrs.kind} of {m['x'].type} is no element of it")
    long = [axis for axis in attrs.axes if m["x"].shape[axis] != 1]
    if long:
        return m.fail(f"axis {long[0]} has {m['x'].shape[long[0]]} elements", m["x"])
    if m.root.shape == m["x"].shape:
        return m["x"]
    return m.make("reshape", m["x"], attrs=A.ShapeAttrs(m.root.shape))


NEUTRAL: RuleSet = (
    equation("add(x, 0) -> x", name="add_zero"),
    equation("sub(x, 0) -> x", name="subtract_zero"),
    equation("mul(x, 1) -> x", name="times_one"),
    equation("mul(x, -1) -> neg(x)", name="times_minus_one"),
    equation("div(x, 1) -> x", name="divide_by_one"),
    times_zero,
    equation("and(x, true) -> x", name="and_true"),
    equation("and(x, false) -> false", name="and_false"),
    equation("or(x, false) -> x", name="or_false"),
    equation("or(x, true) -> true", name="or_true"),
    equation("maximum(x, x) | minimum(x, x) -> x", name="extreme_of_same"),
)

SIGNS: RuleSet = (
    equation("neg(neg(x)) -> x", name="double_negation"),
    equation("sub(x, neg(y)) -> add(x, y)", name="subtract_negative"),
    equation("add(x, neg(y)) -> sub(x, y)", name="add_negative"),
    absolute_of_negative,
    equation("abs(abs(x)) -> abs(x)", name="absolute_of_absolute"),
    equation("relu(relu(x)) -> relu(x)", name="relu_of_relu"),
)

POWERS: RuleSet = (
    equation("pow(x, 1) -> x", name="first_power"),
    equation("pow(x, 2) -> mul(x, x)", name="square", ulp=2),
    equation("pow(x, -1) -> reciprocal(x)", name="inverse_power", ulp=2),
    equation("div(1, x) -> reciprocal(x)", name="one_over", ulp=2),
    equation("reciprocal(sqrt(x)) -> rsqrt(x)", name="reciprocal_root", ulp=2),
    divide_by_power_of_two,
    merge_factors,
)

CHOICES: RuleSet = (
    equation("where(true, x, _) -> x", name="where_true"),
    equation("where(false, _, y) -> y", name="where_false"),
    equation("where(_, x, x) -> x", name="where_same"),
    equation("where(logical_not(c), x, y) -> where(c, y, x)", name="where_not"),
    equation("logical_not(logical_not(x)) -> x", name="double_not"),
)


@rule("maximum(x, 0) -> relu(x)")
def maximum_to_relu(m: Match) -> Value | Mismatch:
    """One spelling for the epilogues of contractions to recognise."""
    return m.right() if m.root.dtype.is_float else m.fail(f"relu of {m.root.dtype} is left alone")


RULES: RuleSet = (
    *NEUTRAL, *SIGNS, *POWERS, *CHOICES, maximum_to_relu, cast_to_same, cast_of_cast, cast_of_number, reduce_nothing,
)
