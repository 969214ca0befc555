"""exp and its family for float32. No branches, no tables. The ulp bounds are those the tests assert; one ulp is the
spacing of float32 at the result, denormals included."""

from __future__ import annotations

from ...platforms.target import Target
from ..builder import Function, Val
from . import coefficients as c
from .parts import absolute, at_least, at_most, copysign, horner, k, nearest, power, power_of_two, scaled

LOG2_E = 1.4426950408889634
# ln 2 in two parts; n * LN2_HIGH is subtracted exactly by a fused multiply-add.
LN2_HIGH, LN2_LOW = 0.693147182464599609375, -1.904654290582768e-09
# exp(x) is infinite above 88.73 and less than half of the smallest denormal below -103.98.
EXP_HIGH, EXP_LOW = 89.0, -104.0
_ONE_FROM = 32.0  # where sigmoid is 1 for long


def _reduced(fn: Function, x: Val, offset: int) -> tuple[Val, Val, Val]:
    """r, n and the exponent bits of n, where x = n ln 2 + r and |r| <= ln(2) / 2."""
    n, exponent = nearest(fn, x, LOG2_E, offset)
    r = fn.fma(n, k(x, -LN2_HIGH), x)
    return fn.fma(n, k(x, -LN2_LOW), r), n, exponent


def exp(fn: Function, target: Target, x: Val) -> Val:
    """e^x. 1.0 ulp, denormal results included; 0 for -inf, inf where it overflows. About 18 instructions, 13 with AVX-512."""
    r, n, exponent = _reduced(fn, at_most(fn, at_least(fn, x, EXP_LOW), EXP_HIGH), 254)
    return scaled(fn, target, horner(fn, r, (1.0, 1.0, *c.EXP)), n, exponent)


def exp_weight(fn: Function, target: Target, x: Val) -> Val:
    """e^x for x <= 0, for the weights of a softmax: 1 for 0, 0 for -inf. 11 instructions, 9 with AVX-512.

    The relative error is at most 2^-22.4 + |x| 2^-23.6: it grows as the weight shrinks, so that no sum of weights notices, about as much as
    that of a difference x that was rounded. Below 2^-126 it is 0, without AVX-512 from 2^-126.5 on.
    """
    return power(fn, target, x, (1.0, *c.EXP2_WEIGHT), (1.0, *c.EXP2_WEIGHT_UP), LOG2_E)


def exp2(fn: Function, target: Target, x: Val) -> Val:
    """2^x. 1.0 ulp, exact for integers, denormal results included."""
    x = at_most(fn, at_least(fn, x, -151.0), 129.0)
    n, exponent = nearest(fn, x, 1.0, 254)
    return scaled(fn, target, horner(fn, fn.sub(x, n), (1.0, *c.EXP2)), n, exponent)


def _expm1_reduced(fn: Function, r: Val) -> Val:
    """e^r - 1 for |r| <= ln(2) / 2, with a small relative error."""
    return fn.fma(fn.mul(r, r), horner(fn, r, c.EXP), r)


def expm1(fn: Function, x: Val) -> Val:
    """e^x - 1. 1.6 ulp; -1 below -17.4, x itself where |x| < 2^-25."""
    y = at_most(fn, at_least(fn, x, -18.0), EXP_HIGH)
    r, _, exponent = _reduced(fn, y, 126)
    half = power_of_two(fn, exponent)  # 2^(n - 1): for n = 128, 2^n would not be a float
    result = fn.fma(half, _expm1_reduced(fn, r), fn.sub(half, k(x, 0.5)))
    small = fn.fcmp("olt", absolute(fn, x), k(x, 2.0**-25))
    return fn.select(small, x, fn.add(result, result))


def tanh(fn: Function, x: Val) -> Val:
    """Hyperbolic tangent. 2.0 ulp, odd, never beyond 1. About 30 instructions, one of them a division.

    Near 0: x + x^3 P(x^2). Beyond: 1 - 2 / (1 + e^2|x|), where the exponential is needed to fewer digits.
    """
    a = absolute(fn, x)
    z = fn.mul(x, x)
    near = fn.fma(fn.mul(z, a), horner(fn, z, c.TANH), a)
    doubled = at_most(fn, fn.add(a, a), 20.0)
    n, exponent = nearest(fn, doubled, LOG2_E, 127)
    r = fn.fma(n, k(x, -LN2_HIGH), doubled)
    below = fn.fma(horner(fn, r, (1.0, 1.0, *c.EXP_SHORT)), power_of_two(fn, exponent), k(x, 1.0))
    far = fn.sub(k(x, 1.0), fn.div(k(x, 2.0), below))
    return copysign(fn, fn.select(fn.fcmp("olt", a, k(x, c.TANH_SPLIT)), near, far), x)


def sigmoid(fn: Function, target: Target, x: Val) -> Val:
    """e^x / (1 + e^x), of x that is cut before anything overflows. 2.5 ulp, denormal results included.

    About 21 instructions, 16 with AVX-512, one of them a division.
    """
    r, n, exponent = _reduced(fn, at_most(fn, at_least(fn, x, EXP_LOW), _ONE_FROM), 254)
    e = scaled(fn, target, horner(fn, r, (1.0, 1.0, *c.EXP)), n, exponent)
    return fn.div(e, fn.add(e, k(x, 1.0)))


def erf(fn: Function, x: Val) -> Val:
    """Error function. 1.4 ulp, odd, never beyond 1. About 36 instructions, no division.

    Near 0: x + x P(x^2). Beyond: 1 - 2^Q(|x|), where the exponential is needed to few digits only.
    """
    a = absolute(fn, x)
    near = fn.fma(horner(fn, fn.mul(x, x), c.ERF_NEAR), a, a)
    q = horner(fn, at_most(fn, a, c.ERF_LAST), c.ERF_FAR)
    n, exponent = nearest(fn, q, 1.0, 127)
    power = horner(fn, fn.sub(q, n), (1.0, *c.EXP2))
    far = fn.fma(fn.neg(power), power_of_two(fn, exponent), k(x, 1.0))
    return copysign(fn, fn.select(fn.fcmp("olt", a, k(x, c.ERF_SPLIT)), near, far), x)
