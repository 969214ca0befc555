"""Logarithms of float32: x = 2^n (1 + f) with 1 + f in [sqrt(1/2), sqrt(2)), then a polynomial in f. No branches, no tables."""

from __future__ import annotations

from ..builder import Function, Val, const
from . import coefficients as c
from .exponential import LN2_HIGH, LN2_LOW
from .parts import absolute, bits, from_bits, horner, k

SQRT_HALF_BITS, MANTISSA = 0x3F3504F3, 0x007FFFFF
_SMALLEST_NORMAL = 2.0**-126
# Each constant as the sum of two floats.
_LOG10_2 = (0.3010300099849701, -1.432098883924482e-08)
_LOG2_E = (1.4426950216293335, 1.925963033500011e-08)
_LOG10_E = (0.4342944920063019, -1.0103049952192578e-08)


def _split(fn: Function, x: Val) -> tuple[Val, Val]:
    """n as a float and f, for positive finite x, denormal ones too; something harmless for other x."""
    tiny = fn.fcmp("olt", x, k(x, _SMALLEST_NORMAL))
    normal = fn.select(tiny, fn.mul(x, k(x, 2.0**24)), x)
    shifted = fn.sub(bits(fn, normal), const(x.ty.of("i32"), SQRT_HALF_BITS))
    n = fn.convert("sitofp", fn.ashr(shifted, const(shifted.ty, 23)), x.ty)
    n = fn.add(n, fn.select(tiny, k(x, -24.0), k(x, 0.0)))
    mantissa = fn.add(fn.and_(shifted, const(shifted.ty, MANTISSA)), const(shifted.ty, SQRT_HALF_BITS))
    return n, fn.sub(from_bits(fn, mantissa), k(x, 1.0))


def _with_special_cases(fn: Function, x: Val, result: Val) -> Val:
    """-inf for 0, NaN for negative numbers and NaN, inf for inf."""
    inside = fn.and_(fn.fcmp("ogt", x, k(x, 0.0)), fn.fcmp("olt", x, k(x, float("inf"))))
    special = fn.select(fn.fcmp("olt", x, k(x, 0.0)), k(x, float("nan")), x)
    special = fn.select(fn.fcmp("oeq", x, k(x, 0.0)), k(x, float("-inf")), special)
    return fn.select(inside, result, special)


def _natural(fn: Function, n: Val, f: Val) -> Val:
    """n ln 2 + ln(1 + f)."""
    y = fn.fma(fn.mul(f, f), horner(fn, f, c.LOG), f)
    return fn.fma(n, k(n, LN2_HIGH), fn.fma(n, k(n, LN2_LOW), y))


def _other_base(fn: Function, f: Val, polynomial: tuple[float, ...], factor: tuple[float, float]) -> Val:
    """log(1 + f) in a base; `factor` is the logarithm of e in it, in two parts."""
    y = fn.fma(f, k(f, factor[1]), fn.mul(fn.mul(f, f), horner(fn, f, polynomial)))
    return fn.fma(f, k(f, factor[0]), y)


def log(fn: Function, x: Val) -> Val:
    """Natural logarithm. 1.0 ulp."""
    return _with_special_cases(fn, x, _natural(fn, *_split(fn, x)))


def log2(fn: Function, x: Val) -> Val:
    """Logarithm to base 2, exact for powers of 2. 1.0 ulp."""
    n, f = _split(fn, x)
    return _with_special_cases(fn, x, fn.add(n, _other_base(fn, f, c.LOG2, _LOG2_E)))


def log10(fn: Function, x: Val) -> Val:
    """Logarithm to base 10. 1.0 ulp."""
    n, f = _split(fn, x)
    y = fn.fma(n, k(x, _LOG10_2[1]), _other_base(fn, f, c.LOG10, _LOG10_E))
    return _with_special_cases(fn, x, fn.fma(n, k(x, _LOG10_2[0]), y))


def log1p(fn: Function, x: Val) -> Val:
    """ln(1 + x); x itself where |x| < 2^-25. 1.5 ulp.

    n is that of the rounded 1 + x, but f = x 2^-n + (2^-n - 1) is made from x, so that no digit of it is lost.
    """
    shifted = fn.sub(bits(fn, fn.add(x, k(x, 1.0))), const(x.ty.of("i32"), SQRT_HALF_BITS))
    exponent = fn.and_(shifted, const(shifted.ty, -MANTISSA - 1))
    n = fn.convert("sitofp", fn.ashr(shifted, const(shifted.ty, 23)), x.ty)
    # 4 * 2^-n, since n can be 128 and 2^-128 is denormal.
    scale = from_bits(fn, fn.sub(const(shifted.ty, 129 << 23), exponent))
    f = fn.fma(fn.mul(x, scale), k(x, 0.25), fn.fma(scale, k(x, 0.25), k(x, -1.0)))
    y = _natural(fn, n, f)
    inside = fn.and_(fn.fcmp("ogt", x, k(x, -1.0)), fn.fcmp("olt", x, k(x, float("inf"))))
    special = fn.select(fn.fcmp("olt", x, k(x, -1.0)), k(x, float("nan")), x)
    special = fn.select(fn.fcmp("oeq", x, k(x, -1.0)), k(x, float("-inf")), special)
    small = fn.fcmp("olt", absolute(fn, x), k(x, 2.0**-25))
    return fn.select(small, x, fn.select(inside, y, special))
