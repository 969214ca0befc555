"""The weights of a softmax in 16 bits, and those of sinks; others in f32 are `math.exponential.exp_weight`."""

from __future__ import annotations

from ..cpu_codegen import elementwise
from ..cpu_codegen.builder import I32, Function, Val, const
from ..cpu_codegen.math import call as math_call
from ..cpu_codegen.math.coefficients import EXP2_SHORT_WEIGHT, EXP2_SHORT_WEIGHT_UP
from ..cpu_codegen.math.exponential import LOG2_E
from ..cpu_codegen.math.parts import absolute, bits, k, power
from ..platforms.target import Target

# The largest score in powers of two: its product with the rate is off by up to 2^6 of them, which leaves all weights in range.
_TOP = 2.0**30


def larger(fn: Function, target: Target, x: Val, y: Val) -> Val:
    """Maximum in one instruction; a NaN may get lost, and is found again in the weights."""
    return elementwise.extreme(fn, target, "maximum", x, y, (False, True))


def finite(fn: Function, largest: Val) -> Val:
    """The largest score, or 0 where all are -inf, of which -inf - -inf would be NaN."""
    return fn.select(fn.fcmp("oeq", largest, const(largest.ty, float("-inf"))), const(largest.ty, 0.0), largest)


def inverse(fn: Function, total: Val) -> Val:
    """Of a sum of weights; a sum of 0 comes from scores that are all -inf, so that everything it would divide is 0."""
    one = const(total.ty, 1.0)
    return fn.div(one, fn.select(fn.fcmp("oeq", total, const(total.ty, 0.0)), one, total))


def octaves(fn: Function, largest: Val, factor: Val | None) -> Val:
    """How many powers of two a score of 1 is beside this largest one, for `short_weight`. factor: what scores are multiplied with, None for
    nothing.

    Fewer where the largest would be more than 2^30 powers, as where a mask of the lowest float hides all keys of a row: neighbours among
    floats of that size are then still 2^5 powers apart, so that all weights that are not the largest stay next to 0.
    """
    rate = k(largest, LOG2_E) if factor is None else fn.mul(factor, k(largest, LOG2_E))
    most = fn.div(k(largest, _TOP), absolute(fn, largest))
    return fn.select(fn.fcmp("olt", most, rate), most, rate)


def short_weight(fn: Function, target: Target, x: Val, rate: Val, top: Val) -> Val:
    """2^(x * rate - top) for f32 x <= largest, where `rate` is `octaves` and top = largest * rate, for weights that are rounded to 16 bits.
    0 for x = -inf, and below 2^-126 (without AVX-512, 2^-126.5); NaN stays NaN. 9 instructions, 7 with AVX-512.

    The relative error is at most 2^-13.6, besides one that all weights of this `largest` have in common: it is their scale.
    """
    return power(fn, target, fn.fma(x, rate, fn.neg(top)), EXP2_SHORT_WEIGHT, EXP2_SHORT_WEIGHT_UP)


def bounded_weight(fn: Function, target: Target, x: Val, factor: Val | None, octave: int) -> Val:
    """e^(x * factor) 2^octave for f32 x <= 0, the difference of a score and the largest; factor None: 1. Otherwise as `short_weight`.

    Never larger than for x = 0, however large the score, for which it takes that difference, one instruction more.
    """
    rate = k(x, LOG2_E) if factor is None else fn.mul(factor, k(x, LOG2_E))
    return short_weight(fn, target, x, rate, k(x, float(-octave)))


def sink_weight(fn: Function, target: Target, sink: Val, largest: Val) -> Val:
    """e^(sink - largest), for a sink that may be larger: infinite where other weights are next to nothing beside it, and NaN for one that
    is infinite itself."""
    weight = math_call(fn, target, "exp", [fn.sub(sink, largest)])
    return fn.select(fn.fcmp("oeq", sink, const(sink.ty, float("inf"))), const(weight.ty, float("nan")), weight)


def short_pair(fn: Function, even: Val, odd: Val) -> Val:
    """Vectors of weights in f32 as one of 32-bit units: each rounded to bf16, half away from 0, the even one in the low half.

    VCVTNE2PS2BF16 and VPERMW take longer on Intel's processors. LLVM makes VPERMT2W of the shift and the masks; without it attention takes
    as long. A NaN may become a number; their sum is NaN anyway.
    """
    half = const(I32.vec(even.ty.lanes), 0x8000)
    low, high = (fn.add(bits(fn, value), half) for value in (even, odd))
    return fn.or_(fn.lshr(low, const(low.ty, 16)), fn.and_(high, const(high.ty, -(1 << 16))))
