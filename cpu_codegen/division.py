"""Division with remainder: floordiv, truncdiv, remainder and fmod of integers and floats, as torch defines them.

No target has vector integer division, and floating remainder is a library function everywhere: both are made of float division,
which is exact enough where it is used. Nothing here traps, whatever unused lanes hold.
"""

from __future__ import annotations

import re

from ..graph.types import DType
from .builder import Function, Val, const, i64

_CONSTANT = re.compile(r"(?:splat \(i\d+ )?(-?\d+)\)?")


def divide(fn: Function, op: str, dtype: DType, a: Val, b: Val) -> Val:
    """op: floordiv, truncdiv, remainder (sign of the divisor) or fmod (sign of the dividend)."""
    return _divide_floats(fn, op, a, b) if dtype.is_float else _divide_integers(fn, op, dtype, a, b)


# -- integers -----------------------------------------------------------------------------------------------------


def _divide_integers(fn: Function, op: str, dtype: DType, a: Val, b: Val) -> Val:
    quotient = _quotient(fn, dtype, a, b)
    if op == "truncdiv":
        return quotient
    rest = fn.sub(a, fn.mul(quotient, b))
    if op == "fmod" or dtype.kind == "uint":
        return quotient if op == "floordiv" else rest
    zero = const(a.ty, 0)
    below = fn.and_(fn.icmp("ne", rest, zero), fn.icmp("slt", fn.xor(rest, b), zero))
    if op == "floordiv":
        return fn.select(below, fn.sub(quotient, const(a.ty, 1)), quotient)
    return fn.select(below, fn.add(rest, b), rest)


def _quotient(fn: Function, dtype: DType, a: Val, b: Val) -> Val:
    """Truncated quotient; some integer where b is 0."""
    if _harmless_constant(b):
        return fn.div(a, b) if dtype.kind == "int" else fn.udiv(a, b)
    if dtype.bits == 64:
        return _safe_quotient(fn, a, b)
    # The quotient of two n-bit integers is at least 1/2^n away from the next integer, relatively more than one rounding.
    wide = a.ty.of("float" if dtype.bits < 32 else "double")
    op = "uitofp" if dtype.kind == "uint" else "sitofp"
    whole = a.ty.of("i32")
    ratio = fn.div(fn.convert(op, a, wide), fn.convert(op, b, wide))
    result = fn.convert("fptosi", ratio, whole)
    frozen = fn.freeze(result)
    return frozen if whole == a.ty else fn.convert("trunc", frozen, a.ty)


def _harmless_constant(b: Val) -> bool:
    """A constant divisor becomes a multiplication; 0 and -1 could trap."""
    match = _CONSTANT.fullmatch(b.ref)
    return match is not None and int(match[1]) not in (0, -1)


def _safe_quotient(fn: Function, a: Val, b: Val) -> Val:
    """Dividing by 0, or the least integer by -1, would trap: divide by 1 instead, and negate for -1."""
    minus = fn.icmp("eq", b, const(b.ty, -1))
    harmless = fn.select(fn.or_(minus, fn.icmp("eq", b, const(b.ty, 0))), const(b.ty, 1), b)
    return fn.select(minus, fn.neg(a), fn.div(a, harmless))


# -- floats -------------------------------------------------------------------------------------------------------


def _divide_floats(fn: Function, op: str, a: Val, b: Val) -> Val:
    if op == "truncdiv":
        return fn.intrinsic("trunc", a.ty, [fn.div(a, b)])
    name = _fmod_function(fn, a)
    rest = fn.call(name, a.ty, [a, b])
    if op == "fmod":
        return rest
    zero = const(a.ty, 0.0)
    signs_differ = fn.xor(fn.fcmp("olt", b, zero), fn.fcmp("olt", rest, zero))
    below = fn.and_(fn.fcmp("une", rest, zero), signs_differ)
    if op == "remainder":
        return fn.select(below, fn.add(rest, b), rest)
    return _floor_quotient(fn, a, b, rest, below)


def _floor_quotient(fn: Function, a: Val, b: Val, rest: Val, below: Val) -> Val:
    """Python's floor division: (a - a % b) / b is within a rounding of an integer, to which it is snapped."""
    zero, one = const(a.ty, 0.0), const(a.ty, 1.0)
    exact = fn.div(fn.sub(a, rest), b)
    exact = fn.select(below, fn.sub(exact, one), exact)
    floor = fn.intrinsic("floor", a.ty, [exact])
    floor = fn.select(fn.fcmp("ogt", fn.sub(exact, floor), const(a.ty, 0.5)), fn.add(floor, one), floor)
    ratio = fn.div(a, b)
    signed_zero = fn.intrinsic("copysign", a.ty, [zero, ratio])
    floor = fn.select(fn.fcmp("oeq", exact, zero), signed_zero, floor)
    return fn.select(fn.fcmp("oeq", b, zero), ratio, floor)


def any_lane(fn: Function, mask: Val) -> Val:
    """One i1: whether any lane of a mask is set."""
    return fn.call(f"llvm.vector.reduce.or.{mask.ty.mangled}", mask.ty.vec(0), [mask]) if mask.ty.lanes else mask


def _fmod_function(fn: Function, like: Val) -> str:
    """An internal function fmod(a, b) of this type, exact: r -= trunc(r / b) * b with a fused multiply-add until |r| < |b|.

    In double, the quotient rounded to 53 bits times b is near r, and the difference is a multiple of b's last bit times the
    quotient's last bit, so that the fused result is exact and each turn takes 52 bits off the quotient.
    """
    name = f"fmod.{like.ty.mangled}"
    if name in fn.module.functions:
        return name
    inner = Function(fn.module, name, like.ty, [like.ty, like.ty], internal=True)
    wide = like.ty.of("double")
    a, b = (v if v.ty == wide else inner.convert("fpext", v, wide) for v in inner.args)
    size = inner.intrinsic("fabs", wide, [b])
    infinite, zero = const(wide, float("inf")), const(wide, 0.0)
    number = inner.fcmp("olt", inner.intrinsic("fabs", wide, [a]), infinite)
    usable = inner.and_(number, inner.and_(inner.fcmp("ogt", size, zero), inner.fcmp("olt", size, infinite)))
    start, divisor = inner.select(usable, a, zero), inner.select(usable, size, const(wide, 1.0))
    rest = _reduce(inner, start, divisor, like.ty != wide)
    # A quotient that was rounded up leaves the wrong sign and is one divisor short.
    wrong = inner.fcmp("olt", inner.mul(inner.intrinsic("copysign", wide, [const(wide, 1.0), start]), rest), zero)
    rest = inner.select(wrong, inner.add(rest, inner.intrinsic("copysign", wide, [divisor, start])), rest)
    rest = inner.intrinsic("copysign", wide, [rest, a])
    # A number modulo infinity is itself; everything else that is not usable is NaN.
    whole = inner.and_(number, inner.fcmp("oeq", size, infinite))
    result = inner.select(usable, rest, inner.select(whole, a, const(wide, float("nan"))))
    inner.ret(result if like.ty == wide else inner.convert("fptrunc", result, like.ty))
    inner.finish()
    return name


def _reduce(fn: Function, start: Val, divisor: Val, narrow: bool) -> Val:
    """The remainder of start by divisor, or up to one divisor off. One turn nearly always does; the loop is for wider quotients.

    narrow: both come from float32, so that their quotient is in the range of double.
    """
    ty = start.ty

    def turn(r: Val) -> Val:
        step = divisor
        # A quotient beyond the range of double: take off multiples of a larger divisor first, up to 2^1800 times as large.
        for _ in range(0 if narrow else 2):
            huge = fn.fcmp("ogt", fn.intrinsic("fabs", ty, [fn.div(r, step)]), const(ty, 2.0**1000))
            step = fn.select(huge, fn.mul(step, const(ty, 2.0**900)), step)
        quotient = fn.intrinsic("trunc", ty, [fn.div(r, step)])
        return fn.fma(fn.neg(quotient), step, r)

    first = turn(start)
    more = any_lane(fn, fn.fcmp("oge", fn.intrinsic("fabs", ty, [first]), divisor))
    # The widest quotients have 277 bits (float32) and 2098 bits; a turn takes off 52.
    stop = fn.select(more, i64(6 if narrow else 42), i64(0))
    return fn.loop(i64(0), stop, 1, [first], lambda _, carried: [turn(carried[0])])[0]
