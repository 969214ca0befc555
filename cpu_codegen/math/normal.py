"""The normal distribution's cumulative function of float32, to the digits that 1 + erf has."""

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
    """erfc(-x / sqrt 2) / 2, where GELU(x) is x times it (Hendrycks and Gimpel, 2016). Within 1.1 * 2^-24 and never beyond 0 and 1.

    One half and an odd function, which between the middles of steps of NORMAL_STEP is a polynomial of degree 4, whose coefficients one
    instruction looks up each: 16 instructions, 6 of them multiplications. Without such an instruction, a power of two: 24.
    """
    if not looked_up(target):
        return _power(fn, x)
    a = at_most(fn, absolute(fn, x), (target.lookup_entries - 1) * c.NORMAL_STEP)
    n, step = nearest(fn, a, 1 / c.NORMAL_STEP)
    u = fn.fma(n, k(x, -c.NORMAL_STEP), a)
    coefficients = [_found(fn, target, numbers, from_bits(fn, step)) for numbers in c.NORMAL]
    total = coefficients.pop()
    while coefficients:
        total = fn.fma(total, u, coefficients.pop())
    return fn.add(copysign(fn, total, x), k(x, 0.5))


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
