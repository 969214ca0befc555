"""The exponential of a softmax, whose arguments are never positive."""

from __future__ import annotations

from ..cpu_codegen.builder import Function, Val
from ..cpu_codegen.math import coefficients
from ..cpu_codegen.math.exponential import LN2_HIGH, LN2_LOW, LOG2_E
from ..cpu_codegen.math.parts import at_least, horner, k, nearest, power_of_two

# Rounds to -127 powers of two, whose exponent field is that of 0: from here on down the weight is 0, as it is for -inf.
_LOWEST = -88.0


def weight(fn: Function, x: Val) -> Val:
    """e^x for f32 x <= 0 (vectors or scalars); 1 ulp above 2^-126, 0 below; exp(-inf) = 0; NaN stays NaN. 14 instructions."""
    x = at_least(fn, x, _LOWEST)
    n, exponent = nearest(fn, x, LOG2_E, 127)
    r = fn.fma(n, k(x, -LN2_HIGH), x)
    r = fn.fma(n, k(x, -LN2_LOW), r)
    return fn.mul(horner(fn, r, (1.0, 1.0, *coefficients.EXP)), power_of_two(fn, exponent))
