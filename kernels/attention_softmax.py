"""The exponential of a softmax, whose arguments are never positive and whose small results count for little."""

from __future__ import annotations

from ..cpu_codegen.builder import Function, Val
from ..cpu_codegen.math.coefficients import EXP2
from ..cpu_codegen.math.exponential import LOG2_E
from ..cpu_codegen.math.parts import at_least, horner, k, nearest, power_of_two

# Rounds to -127 powers of two, whose exponent field is that of 0: from here on down the weight is 0, as it is for -inf.
_LOWEST = -88.0
# 2^f for |f| <= 1/2, lowest power first, by minimax of the relative error, which is 2^-13.7.
_EXP2_SHORT = (0.99992807, 0.69326099, 0.24261112, 0.05517167)


def weight(fn: Function, x: Val, short: bool = False) -> Val:
    """e^x for f32 x <= 0 (vectors or scalars). exp(-inf) = 0, and so is everything below 2^-126; NaN stays NaN. 12 instructions.

    The relative error is at most 2^-23 + |x| 2^-24: it grows as the weight shrinks, so that no sum of weights notices. short: 2^-13.6, for
    weights that are rounded to 16 bits; 9 instructions.
    """
    x = at_least(fn, x, _LOWEST)
    n, exponent = nearest(fn, x, LOG2_E, 127)
    rest = fn.fma(x, k(x, LOG2_E), fn.neg(n))
    return fn.mul(horner(fn, rest, _EXP2_SHORT if short else (1.0, *EXP2)), power_of_two(fn, exponent))
