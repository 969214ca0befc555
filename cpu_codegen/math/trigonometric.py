"""sin, cos, tan and atan2 of float32.

Arguments up to 2^17 are reduced by Cody and Waite's method (Software Manual for the Elementary Functions, 1980) with three parts of
pi / 2 and fused multiply-adds, of which the first is exact. Larger ones go to the C library, lane by lane, behind a branch.
"""

from __future__ import annotations

from collections.abc import Callable

from ..builder import Function, Val, const
from . import coefficients as c
from .parts import absolute, bits, copysign, from_bits, horner, k, nearest, or_lanewise

_TWO_BY_PI = 0.6366197723675814
_PI_HALF = (1.5707963705062866, -4.371138828673793e-08, -1.7151244994428829e-15)
_PI = (3.1415927410125732, -8.742277657347586e-08)
LARGEST = 131072.0


def _reduced(fn: Function, a: Val) -> tuple[Val, Val, Val]:
    """sin r, cos r and bits whose low two are n mod 4, where a = n pi / 2 + r, a >= 0 and |r| <= pi / 4."""
    n, quadrant = nearest(fn, a, _TWO_BY_PI)
    r = a
    for part in _PI_HALF:
        r = fn.fma(n, k(a, -part), r)
    z = fn.mul(r, r)
    sine = fn.fma(fn.mul(z, r), horner(fn, z, c.SIN), r)
    return sine, horner(fn, z, (1.0, -0.5, *c.COS)), quadrant


def _bit(fn: Function, word: Val, mask: int) -> Val:
    """Where a bit of an integer is set."""
    zero = const(word.ty, 0)
    return fn.icmp("ne", fn.and_(word, const(word.ty, mask)), zero)


def _with_sign(fn: Function, x: Val, sign: Val) -> Val:
    """x, negated where bit 31 of `sign` is set."""
    masked = fn.and_(sign, const(sign.ty, -0x80000000))
    return from_bits(fn, fn.xor(bits(fn, x), masked))


def _periodic(fn: Function, x: Val, symbol: str, body: Callable[[Val], Val]) -> Val:
    """body(|x|) where |x| is small enough for the reduction, the C function elsewhere."""
    a = absolute(fn, x)
    return or_lanewise(fn, fn.fcmp("ogt", a, k(x, LARGEST)), symbol, [x], body(a))


def sin(fn: Function, x: Val) -> Val:
    """Sine. 1.6 ulp; NaN for infinities, -0 for -0."""

    def body(a: Val) -> Val:
        sine, cosine, quadrant = _reduced(fn, a)
        sign = fn.xor(bits(fn, x), fn.shl(quadrant, const(quadrant.ty, 30)))
        return _with_sign(fn, fn.select(_bit(fn, quadrant, 1), cosine, sine), sign)

    return _periodic(fn, x, "sinf", body)


def cos(fn: Function, x: Val) -> Val:
    """Cosine. 1.6 ulp; NaN for infinities."""

    def body(a: Val) -> Val:
        sine, cosine, quadrant = _reduced(fn, a)
        sign = fn.shl(fn.add(quadrant, const(quadrant.ty, 1)), const(quadrant.ty, 30))
        return _with_sign(fn, fn.select(_bit(fn, quadrant, 1), sine, cosine), sign)

    return _periodic(fn, x, "cosf", body)


def tan(fn: Function, x: Val) -> Val:
    """Tangent. 3.6 ulp; NaN for infinities, -0 for -0. One division."""

    def body(a: Val) -> Val:
        sine, cosine, quadrant = _reduced(fn, a)
        odd = _bit(fn, quadrant, 1)
        ratio = fn.div(fn.select(odd, cosine, sine), fn.select(odd, sine, cosine))
        return _with_sign(fn, ratio, fn.xor(bits(fn, x), fn.shl(quadrant, const(quadrant.ty, 31))))

    return _periodic(fn, x, "tanf", body)


def atan2(fn: Function, y: Val, x: Val) -> Val:
    """The angle of the point (x, y), with the signs of zeros and the infinities of C's atan2. 2.0 ulp. One division.

    atan of smaller / larger coordinate, in [0, pi / 4], is put into its octant.
    """
    ax, ay = absolute(fn, x), absolute(fn, y)
    steep = fn.fcmp("ogt", ay, ax)
    high, low = fn.select(steep, ay, ax), fn.select(steep, ax, ay)
    one, zero, infinity = k(x, 1.0), k(x, 0.0), k(x, float("inf"))
    ratio = fn.div(low, fn.select(fn.fcmp("oeq", high, zero), one, high))
    both_infinite = fn.and_(fn.fcmp("oeq", low, infinity), fn.fcmp("oeq", high, infinity))
    ratio = fn.select(both_infinite, one, ratio)
    z = fn.mul(ratio, ratio)
    angle = fn.fma(fn.mul(z, ratio), horner(fn, z, c.ATAN), ratio)
    word = bits(fn, x)
    left = fn.icmp("slt", word, const(word.ty, 0))
    base = [fn.select(steep, k(x, half), fn.select(left, k(x, whole), zero)) for half, whole in zip(_PI_HALF, _PI)]
    turned = fn.select(fn.xor(steep, left), fn.neg(angle), angle)
    return copysign(fn, fn.add(base[0], fn.add(turned, base[1])), y)
