"""The normal distribution's cumulative function of float32 to the digits that 1 + erf has, and GELU."""

from __future__ import annotations

from ...platforms.target import Target
from .. import lookup
from ..builder import F32, Function, Val
from . import coefficients as c
from .parts import absolute, at_least, at_most, from_bits, horner, k, nearest, power_of_two

_LARGE = 2.0**64  # whose tail is 0


def looked_up(target: Target) -> bool:
    """Whether `normal_cdf` takes fewer instructions than `normal_cdf_short`: its pieces are as many as an instruction looks up."""
    return target.lookup_entries == len(c.NORMAL[0])


def normal_cdf(fn: Function, target: Target, x: Val) -> Val:
    """erfc(-x / sqrt 2) / 2. Within 1.1 * 2^-24 and never beyond 0 and 1. 16 instructions with lookups, elsewhere 24."""
    if not looked_up(target):
        power, unit = _tail(fn, x)
        return fn.select(fn.fcmp("olt", x, k(x, 0.0)), fn.mul(power, unit), fn.fma(fn.neg(power), unit, k(x, 1.0)))
    far = _pieces(fn, target, absolute(fn, x), 0.5)
    return fn.select(fn.fcmp("olt", x, k(x, 0.0)), fn.sub(k(x, 1.0), far), far)


def gelu(fn: Function, target: Target, x: Val) -> Val:
    """x normal_cdf(x) (Hendrycks and Gimpel, 2016), within 1.5 |x| 2^-24. 15 instructions where coefficients are looked up,
    elsewhere 26: x less its product with the tail, for x that is not infinite in it, as infinity times 0 is no number."""
    if not looked_up(target):
        power, unit = _tail(fn, x)
        tail = fn.mul(power, unit)
        above = fn.fma(fn.neg(at_most(fn, x, _LARGE)), tail, x)
        return fn.select(fn.fcmp("olt", x, k(x, 0.0)), fn.mul(x, tail), above)
    a = absolute(fn, x)
    return fn.fma(a, _pieces(fn, target, a, 0.0), fn.mul(x, k(x, 0.5)))


def _pieces(fn: Function, target: Target, a: Val, least: float) -> Val:
    """normal_cdf(a) - 1/2 + least for a >= 0, least 0 or 1/2, which is added exactly to a first coefficient.

    Between the middles of steps of NORMAL_STEP it is a polynomial of degree 4, whose coefficients one instruction looks up each: 12
    instructions, 4 of them multiplications. All pieces are polynomials in a - NORMAL_CENTER, which takes one instruction where the distance
    from the middle of a piece takes two: no term is large that near to 1, and further away the function is flat.
    """
    a = at_most(fn, a, (target.lookup_entries - 1) * c.NORMAL_STEP)
    _, step = nearest(fn, a, 1 / c.NORMAL_STEP)
    t = fn.sub(a, k(a, c.NORMAL_CENTER))
    coefficients = [_found(fn, target, numbers, from_bits(fn, step)) for numbers in c.NORMAL]
    total = coefficients.pop()
    while len(coefficients) > 1:
        total = fn.fma(total, t, coefficients.pop())
    first = coefficients.pop()
    return fn.fma(total, t, fn.add(first, k(a, least)) if least else first)


def _tail(fn: Function, x: Val) -> tuple[Val, Val]:
    """Two factors of normal_cdf(-|x|): half of 2^(|x| Q(|x|)), and 0 from 2^-126 on: the polynomial keeps falling."""
    a = absolute(fn, x)
    q = at_least(fn, fn.mul(a, horner(fn, a, c.NORMAL_TAIL)), -126.0)
    n, exponent = nearest(fn, q, 1.0, 126)
    return horner(fn, fn.sub(q, n), (1.0, *c.EXP2)), power_of_two(fn, exponent)


def _found(fn: Function, target: Target, numbers: tuple[float, ...], at: Val) -> Val:
    lanes = target.lanes(32)
    table = [fn.table(F32.vec(lanes), numbers[first : first + lanes]) for first in range(0, len(numbers), lanes)]
    return lookup.emit(fn, target, table, at)
