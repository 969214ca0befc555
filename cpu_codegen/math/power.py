"""pow of float32: 2^(y log2 |x|) computed in float64, where rounding, overflow and denormal results come out right by themselves."""

from __future__ import annotations

from ..builder import Function, Val, const
from . import coefficients as c
from .parts import absolute, bits, from_bits, horner, k

_SQRT_HALF_BITS, _MANTISSA = 0x3FE6A09E667F3BCD, (1 << 52) - 1
_TWO_52, _MAGIC = 2.0**52, 1.5 * 2.0**52
_BIAS = 1023


def _log2_wide(fn: Function, a: Val) -> Val:
    """log2 of float64 a >= 2^-149, to about 33 bits; -inf for 0, inf for inf, NaN for NaN."""
    shifted = fn.sub(bits(fn, a), const(a.ty.of("i64"), _SQRT_HALF_BITS))
    # No 64-bit arithmetic shift and no conversion from 64-bit integers on AVX2: bias the exponent, and make it a float by its bits.
    exponent = fn.lshr(fn.add(shifted, const(shifted.ty, _BIAS << 52)), const(shifted.ty, 52))
    n = fn.sub(from_bits(fn, fn.or_(exponent, const(shifted.ty, 0x4330000000000000))), k(a, _TWO_52 + _BIAS))
    mantissa = fn.add(fn.and_(shifted, const(shifted.ty, _MANTISSA)), const(shifted.ty, _SQRT_HALF_BITS))
    f = fn.sub(from_bits(fn, mantissa), k(a, 1.0))
    result = fn.fma(f, horner(fn, f, c.LOG2_WIDE), n)
    inside = fn.and_(fn.fcmp("ogt", a, k(a, 0.0)), fn.fcmp("olt", a, k(a, float("inf"))))
    return fn.select(inside, result, fn.select(fn.fcmp("oeq", a, k(a, 0.0)), k(a, float("-inf")), a))


def _exp2_wide(fn: Function, p: Val) -> Val:
    """2^p of float64 p as far as float32 results need it: to about 29 bits, and any number beyond 2^200 or below 2^-200 for such p."""
    for predicate, limit in (("ogt", 200.0), ("olt", -200.0)):
        p = fn.select(fn.fcmp(predicate, p, k(p, limit)), k(p, limit), p)
    shifted = fn.add(p, k(p, _MAGIC + _BIAS))
    f = fn.sub(p, fn.sub(shifted, k(p, _MAGIC + _BIAS)))
    word = bits(fn, shifted)
    return fn.mul(horner(fn, f, c.EXP2_WIDE), from_bits(fn, fn.shl(word, const(word.ty, 52))))


def pow(fn: Function, x: Val, y: Val) -> Val:
    """x^y with all special cases of C's pow. 0.7 ulp."""
    a = absolute(fn, x)
    wide = x.ty.of("double")
    exponent = fn.mul(fn.convert("fpext", y, wide), _log2_wide(fn, fn.convert("fpext", a, wide)))
    size = fn.convert("fptrunc", _exp2_wide(fn, exponent), x.ty)

    zero, one, infinity = k(x, 0.0), k(x, 1.0), k(x, float("inf"))
    half = fn.mul(y, k(y, 0.5))
    whole = fn.fcmp("oeq", fn.intrinsic("trunc", y.ty, [y]), y)
    odd = fn.and_(whole, fn.fcmp("une", fn.intrinsic("trunc", y.ty, [half]), half))
    sign = fn.select(odd, fn.and_(bits(fn, x), const(x.ty.of("i32"), -0x80000000)), const(x.ty.of("i32"), 0))
    result = from_bits(fn, fn.or_(bits(fn, size), sign))

    negative = fn.and_(fn.fcmp("olt", x, zero), fn.fcmp("olt", a, infinity))
    not_real = fn.and_(negative, fn.xor(whole, const(whole.ty, True)))
    result = fn.select(not_real, k(x, float("nan")), result)
    # 1 whatever the other argument is, NaN included; and (-1)^(+-inf).
    unit = fn.and_(fn.fcmp("oeq", a, one), fn.fcmp("oeq", absolute(fn, y), infinity))
    certain = fn.or_(fn.or_(fn.fcmp("oeq", y, zero), fn.fcmp("oeq", x, one)), unit)
    return fn.select(certain, one, result)
