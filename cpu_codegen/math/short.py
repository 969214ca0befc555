"""Functions with a relative error below 2^-12 for results that are rounded to bfloat16 or 8 bits anyway: half the instructions."""

from __future__ import annotations

from ...platforms.target import Target
from ..builder import Function, Val
from . import coefficients as c
from .exponential import LOG2_E
from .parts import absolute, horner, inverse_of_one_more, k, power


def _power(fn: Function, target: Target, q: Val) -> Val:
    """2^q for q up to 126, exact for integers."""
    return power(fn, target, q, (1.0, *c.EXP2_SHORT), (1.0, *c.EXP2_SHORT_UP))


def normal_cdf_short(fn: Function, target: Target, x: Val) -> Val:
    """The normal distribution's cumulative function, erfc(-x / sqrt 2) / 2, where GELU(x) is x times it (Hendrycks and Gimpel, 2016).

    About 18 instructions, 15 with AVX-512. The polynomial is fitted for |x| <= 9.2; beyond, where the tail is under 2^-65, it still falls,
    to 0.
    """
    p = _power(fn, target, horner(fn, absolute(fn, x), c.NORMAL_SHORT))
    return fn.select(fn.fcmp("olt", x, k(x, 0.0)), p, fn.sub(k(x, 1.0), p))


def sigmoid_short(fn: Function, target: Target, x: Val) -> Val:
    """1 / (1 + e^-x); 0 where it is far below 2^-126. About 14 instructions, one of them a division; with AVX-512 8."""
    up = (1.0, *c.EXP2_SHORT_UP)
    at_once = inverse_of_one_more(fn, target, fn.mul(x, k(x, -LOG2_E)), up)
    if at_once is not None:
        return at_once
    e = _power(fn, target, fn.mul(absolute(fn, x), k(x, -LOG2_E)))
    return fn.div(fn.select(fn.fcmp("olt", x, k(x, 0.0)), e, k(x, 1.0)), fn.add(e, k(x, 1.0)))
