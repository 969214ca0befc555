"""The exponential of a softmax, whose arguments are never positive and whose small results count for little."""

from __future__ import annotations

from ..cpu_codegen.builder import I32, Function, Val, const
from ..cpu_codegen.math.coefficients import EXP2, EXP2_WEIGHT, EXP2_WEIGHT_UP
from ..cpu_codegen.math.exponential import LOG2_E
from ..cpu_codegen.math.parts import at_least, bits, horner, k, nearest, power, power_of_two
from ..platforms.target import Target

# Rounds to -127 powers of two, whose exponent field is that of 0: from here on down the weight is 0, as it is for -inf.
_LOWEST = -88.0


def weight(fn: Function, x: Val) -> Val:
    """e^x for f32 x <= 0 (vectors or scalars). exp(-inf) = 0, and so is everything below 2^-126; NaN stays NaN. 12 instructions.

    The relative error is at most 2^-23 + |x| 2^-24: it grows as the weight shrinks, so that no sum of weights notices.
    """
    x = at_least(fn, x, _LOWEST)
    n, exponent = nearest(fn, x, LOG2_E, 127)
    rest = fn.fma(x, k(x, LOG2_E), fn.neg(n))
    return fn.mul(horner(fn, rest, (1.0, *EXP2)), power_of_two(fn, exponent))


def octaves(fn: Function, like: Val, factor: Val | None) -> Val:
    """How many powers of two a score of 1 is, for `short_weight`. factor: what scores are multiplied with, None for nothing."""
    return k(like, LOG2_E) if factor is None else fn.mul(factor, k(like, LOG2_E))


def short_weight(fn: Function, target: Target, x: Val, rate: Val, top: Val) -> Val:
    """2^(x * rate - top) for f32 x <= largest, where `rate` is `octaves` and top = largest * rate, for weights that are rounded to 16 bits.
    0 for x = -inf, and all but 0 below 2^-126; NaN stays NaN. 9 instructions, 6 with AVX-512.

    The relative error is at most 2^-13.6, besides one that all weights of this `largest` have in common: it is their scale.
    """
    return power(fn, target, fn.fma(x, rate, fn.neg(top)), EXP2_WEIGHT, EXP2_WEIGHT_UP)


def short_pair(fn: Function, even: Val, odd: Val) -> Val:
    """Vectors of weights in f32 as one of 32-bit units: each rounded to bf16, half away from 0, the even one in the low half.

    4 instructions that Intel's processors take two of at a time, where VCVTNE2PS2BF16 and VPERMW take twice as long. A NaN may become a
    number; their sum is NaN anyway.
    """
    half = const(I32.vec(even.ty.lanes), 0x8000)
    low, high = (fn.add(bits(fn, value), half) for value in (even, odd))
    return fn.or_(fn.lshr(low, const(low.ty, 16)), fn.and_(high, const(high.ty, -(1 << 16))))
