"""The normal distribution's cumulative function of float32 to the digits that 1 + erf has, and GELU."""

from __future__ import annotations

from ...platforms.target import Target
from .. import lookup
from ..builder import F32, Function, Val
from . import coefficients as c
from .parts import absolute, at_least, at_most, copysign, from_bits, horner, k, nearest, power_of_two


def looked_up(target: Target) -> bool:
    """Whether `normal_cdf` takes fewer instructions than `normal_cdf_short`: its pieces are as many as an instruction looks up."""
    return target.lookup_entries == len(c.NORMAL[0])


def normal_cdf(fn: Function, target: Target, x: Val) -> Val:
    """erfc(-x / sqrt 2) / 2. Within 1.3 * 2^-24 and never beyond 0 and 1. 15 instructions with lookups, elsewhere 24."""
    return fn.add(copysign(fn, _above_half(fn, target, absolute(fn, x)), x), k(x, 0.5)) if looked_up(target) else _power(fn, x)


def gelu(fn: Function, target: Target, x: Val) -> Val:
    """x normal_cdf(x) (Hendrycks and Gimpel, 2016), within 1.7 |x| 2^-24. 15 instructions where coefficients are looked up,
    elsewhere 25."""
    if not looked_up(target):
        return fn.mul(x, _power(fn, x))
    a = absolute(fn, x)
    return fn.fma(a, _above_half(fn, target, a), fn.mul(x, k(x, 0.5)))


def _above_half(fn: Function, target: Target, a: Val) -> Val:
    """normal_cdf(a) - 1/2 for a >= 0. Within 0.8 * 2^-24.

    Between the middles of steps of NORMAL_STEP it is a polynomial of degree 4, whose coefficients one instruction looks up each: 12
    instructions, 4 of them multiplications. All pieces are polynomials in a - NORMAL_CENTER, which takes one instruction where the distance
    from the middle of a piece takes two: no term is large that near to 1, and further away the function is flat.
    """
    a = at_most(fn, a, (target.lookup_entries - 1) * c.NORMAL_STEP)
    _, step = nearest(fn, a, 1 / c.NORMAL_STEP)
    t = fn.sub(a, k(a, c.NORMAL_CENTER))
    coefficients = [_found(fn, target, numbers, from_bits(fn, step)) for numbers in c.NORMAL]
    total = coefficients.pop()
    while coefficients:
        total = fn.fma(total, t, coefficients.pop())
    return total


def _power(fn: Function, x: Val) -> Val:
    """The tail beyond |x| is half of 2^(|x| Q(|x|)), and 0 from 2^-126 on: the polynomial keeps falling."""
    a = absolute(fn, x)
    q = at_least(fn, fn.mul(a, horner(fn, a, c.NORMAL_TAIL)), -126.0)
    n, exponent = nearest(fn, q, 1.0, 126)
    power, unit = horner(fn, fn.sub(q, n), (1.0, *c.EXP2)), power_of_two(fn, exponent)
    return fn.select(fn.fcmp("olt", x, k(x, 0.0)), fn.mul(power, unit), fn.fma(fn.neg(power), unit, k(x, 1.0)))


def _found(fn: Function, target: Target, numbers: tuple[float, ...], at: Val) -> Val:
    lanes = target.lanes(32)
    table = [fn.table(F32.vec(lanes), numbers[first : first + lanes]) for first in range(0, len(numbers), lanes)]
    return lookup.emit(fn, target, table, at)
