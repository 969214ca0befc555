"""Functions with a relative error below 2^-12 for results that are rounded to bfloat16 or 8 bits anyway: half the instructions."""

from __future__ import annotations

from ..builder import Function, Val
from . import coefficients as c
from .exponential import LOG2_E
from .parts import absolute, at_least, horner, k, nearest, power_of_two


def _power(fn: Function, q: Val) -> Val:
    """2^q for q up to 126; 0 for q below -126.5."""
    q = at_least(fn, q, -127.0)
    n, exponent = nearest(fn, q, 1.0, 127)
    return fn.mul(horner(fn, fn.sub(q, n), (1.0, *c.EXP2_SHORT)), power_of_two(fn, exponent))


def normal_cdf_short(fn: Function, x: Val) -> Val:
    """The normal distribution's cumulative function, erfc(-x / sqrt 2) / 2, where GELU(x) is x times it (Hendrycks and Gimpel, 2016).

    About 18 instructions. The polynomial is fitted for |x| <= 9.2; beyond, where the tail is under 2^-65, it still falls, to 0.
    """
    p = _power(fn, horner(fn, absolute(fn, x), c.NORMAL_SHORT))
    return fn.select(fn.fcmp("olt", x, k(x, 0.0)), p, fn.sub(k(x, 1.0), p))


def sigmoid_short(fn: Function, x: Val) -> Val:
    """1 / (1 + e^-x). About 14 instructions, one of them a division; 0 where it is below 2^-126.5."""
    e = _power(fn, fn.mul(absolute(fn, x), k(x, -LOG2_E)))
    return fn.div(fn.select(fn.fcmp("olt", x, k(x, 0.0)), e, k(x, 1.0)), fn.add(e, k(x, 1.0)))
