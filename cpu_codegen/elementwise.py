"""The elementwise operations of `graph.ops` on scalars and vectors, with torch's answers for NaN, infinities and overflow.

Integer arithmetic wraps, maximum and minimum propagate NaN, shifts by more than the width give what torch gives. Functions
that no instruction computes come from `math`; none of these operations becomes a library call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..graph.types import DType, boolean, f32
from ..platforms.target import Target
from . import convert, division, dots
from .builder import Function, Val, const
from .math import call as math_call

Emit = Callable[[Function, DType, Sequence[Val]], Val]
_ROUNDINGS = {"floor": "floor", "ceil": "ceil", "trunc": "trunc", "round": "roundeven"}
_FLOAT_PREDICATES = {"eq": "oeq", "ne": "une", "lt": "olt", "le": "ole", "gt": "ogt", "ge": "oge"}
_INT_PREDICATES = {"eq": "eq", "ne": "ne", "lt": "lt", "le": "le", "gt": "gt", "ge": "ge"}
_DIVISIONS = ("floordiv", "truncdiv", "remainder", "fmod")
# Bool arithmetic is torch's: a sum is true when either is, a product when both are.
_BOOL_OPS = {"add": "or", "maximum": "or", "or": "or", "mul": "and", "minimum": "and", "and": "and", "sub": "xor", "xor": "xor"}
# What these make of float16 and bfloat16 numbers are such numbers.
_EXACT = ("neg", "abs", "sign", "relu", "maximum", "minimum", *_ROUNDINGS)
PREDICATES = ("logical_not", "isnan", "isinf", *_FLOAT_PREDICATES)


def apply(fn: Function, target: Target, op: str, dtype: DType, args: Sequence[Val], never_nan: Sequence[bool] = ()) -> Val:
    """`op` of arguments that all have element type `dtype`. `never_nan`: which operands are known to be numbers, for cheaper code."""
    if op == "pack_bytes":
        return dots.pack(fn, args)
    if op == "dot_bytes":
        return dots.dot(fn, target, *args)
    if dtype in convert.HALVES and op != "where":
        wide = apply(fn, target, op, f32, [convert.widen(fn, a, dtype) for a in args], never_nan)
        return wide if op in PREDICATES else convert.narrow(fn, target, wide, dtype, op in _EXACT)
    if op in ("maximum", "minimum") and dtype.is_float:
        return extreme(fn, target, op, args[0], args[1], tuple(never_nan) or (False, False))
    if op in _DIVISIONS:
        return division.divide(fn, op, dtype, args[0], args[1])
    if op in _FLOAT_PREDICATES:
        return compare(fn, op, dtype, args[0], args[1])
    if dtype == boolean and op in _BOOL_OPS:
        return {"or": fn.or_, "and": fn.and_, "xor": fn.xor}[_BOOL_OPS[op]](args[0], args[1])
    table = _FLOAT if dtype.is_float else _INTEGER
    emit = table.get(op)
    return emit(fn, dtype, args) if emit is not None else math_call(fn, target, op, list(args))


def compare(fn: Function, op: str, dtype: DType, a: Val, b: Val) -> Val:
    if dtype.is_float:
        return fn.fcmp(_FLOAT_PREDICATES[op], a, b)
    sign = "" if op in ("eq", "ne") else "s" if dtype.kind == "int" else "u"
    return fn.icmp(sign + _INT_PREDICATES[op], a, b)


def extreme(fn: Function, target: Target, op: str, a: Val, b: Val, never_nan: tuple[bool, ...]) -> Val:
    """Maximum or minimum that gives NaN when either operand is NaN.

    `number > x ? number : x` is exactly the x86 instruction, which gives x when x is NaN: one instruction where one operand is a number.
    """
    if target.has("neon"):
        return fn.intrinsic(op, a.ty, [a, b])
    predicate = "ogt" if op == "maximum" else "olt"
    if never_nan[1] and not never_nan[0]:
        a, b = b, a
    chosen = fn.select(fn.fcmp(predicate, a, b), a, b)
    return chosen if any(never_nan) else fn.select(fn.fcmp("uno", a, a), a, chosen)


def _abs_float(fn: Function, dtype: DType, args: Sequence[Val]) -> Val:
    return fn.intrinsic("fabs", args[0].ty, [args[0]])


def _sign_float(fn: Function, dtype: DType, args: Sequence[Val]) -> Val:
    a = args[0]
    zero, one = const(a.ty, 0.0), const(a.ty, 1.0)
    below = fn.select(fn.fcmp("olt", a, zero), const(a.ty, -1.0), zero)
    return fn.select(fn.fcmp("ogt", a, zero), one, below)


def _relu_float(fn: Function, dtype: DType, args: Sequence[Val]) -> Val:
    zero = const(args[0].ty, 0.0)
    return fn.select(fn.fcmp("ogt", zero, args[0]), zero, args[0])


def _isinf(fn: Function, dtype: DType, args: Sequence[Val]) -> Val:
    return fn.fcmp("oeq", _abs_float(fn, dtype, args), const(args[0].ty, float("inf")))


def _reciprocal(fn: Function, dtype: DType, args: Sequence[Val]) -> Val:
    return fn.div(const(args[0].ty, 1.0), args[0])


def _rsqrt(fn: Function, dtype: DType, args: Sequence[Val]) -> Val:
    return fn.div(const(args[0].ty, 1.0), fn.intrinsic("sqrt", args[0].ty, [args[0]]))


def _rounding(name: str) -> Emit:
    return lambda fn, dtype, args: fn.intrinsic(name, args[0].ty, [args[0]])


def _same(fn: Function, dtype: DType, args: Sequence[Val]) -> Val:
    return args[0]


def _where(fn: Function, dtype: DType, args: Sequence[Val]) -> Val:
    return fn.select(args[0], args[1], args[2])


def _not_zero(fn: Function, dtype: DType, args: Sequence[Val]) -> Val:
    zero = const(args[0].ty, 0)
    return fn.fcmp("oeq", args[0], zero) if dtype.is_float else fn.icmp("eq", args[0], zero)


def _never(fn: Function, dtype: DType, args: Sequence[Val]) -> Val:
    return const(args[0].ty.of("i1"), False)


def _abs_int(fn: Function, dtype: DType, args: Sequence[Val]) -> Val:
    a = args[0]
    return a if dtype.kind != "int" else fn.select(fn.icmp("slt", a, const(a.ty, 0)), fn.neg(a), a)


def _sign_int(fn: Function, dtype: DType, args: Sequence[Val]) -> Val:
    a = args[0]
    if dtype == boolean:
        return a
    zero, one = const(a.ty, 0), const(a.ty, 1)
    positive = fn.select(fn.icmp("ne", a, zero), one, zero)
    return positive if dtype.kind == "uint" else fn.select(fn.icmp("slt", a, zero), const(a.ty, -1), positive)


def _relu_int(fn: Function, dtype: DType, args: Sequence[Val]) -> Val:
    return args[0] if dtype.kind != "int" else fn.smax(args[0], const(args[0].ty, 0))


def _extreme_int(kind: str) -> Emit:
    return lambda fn, dtype, args: fn.intrinsic(("s" if dtype.kind == "int" else "u") + kind, args[0].ty, list(args))


def _not(fn: Function, dtype: DType, args: Sequence[Val]) -> Val:
    return fn.xor(args[0], const(args[0].ty, True if dtype == boolean else -1))


def _shl(fn: Function, dtype: DType, args: Sequence[Val]) -> Val:
    """0 for shifts by less than 0 or by the width and more."""
    a, by = args
    inside = fn.icmp("ult", by, const(by.ty, dtype.bits))
    return fn.select(inside, fn.shl(a, fn.select(inside, by, const(by.ty, 0))), const(a.ty, 0))


def _shr(fn: Function, dtype: DType, args: Sequence[Val]) -> Val:
    """Arithmetic for signed types; shifts by less than 0 or by the width and more leave the sign (0 for unsigned)."""
    a, by = args
    if dtype.kind == "uint":
        inside = fn.icmp("ult", by, const(by.ty, dtype.bits))
        return fn.select(inside, fn.lshr(a, fn.select(inside, by, const(by.ty, 0))), const(a.ty, 0))
    return fn.ashr(a, fn.intrinsic("umin", by.ty, [by, const(by.ty, dtype.bits - 1)]))


_COMMON: dict[str, Emit] = {
    "add": lambda fn, dtype, args: fn.add(*args),
    "sub": lambda fn, dtype, args: fn.sub(*args),
    "mul": lambda fn, dtype, args: fn.mul(*args),
    "neg": lambda fn, dtype, args: fn.neg(args[0]),
    "where": _where,
    "logical_not": _not_zero,
}
_FLOAT: dict[str, Emit] = {
    **_COMMON,
    **{name: _rounding(intrinsic) for name, intrinsic in _ROUNDINGS.items()},
    "div": lambda fn, dtype, args: fn.div(*args),
    "sqrt": lambda fn, dtype, args: fn.intrinsic("sqrt", args[0].ty, [args[0]]),
    "rsqrt": _rsqrt,
    "reciprocal": _reciprocal,
    "abs": _abs_float,
    "sign": _sign_float,
    "relu": _relu_float,
    "isnan": lambda fn, dtype, args: fn.fcmp("uno", args[0], args[0]),
    "isinf": _isinf,
}
_INTEGER: dict[str, Emit] = {
    **_COMMON,
    **dict.fromkeys(_ROUNDINGS, _same),
    "abs": _abs_int,
    "sign": _sign_int,
    "relu": _relu_int,
    "isnan": _never,
    "isinf": _never,
    "maximum": _extreme_int("max"),
    "minimum": _extreme_int("min"),
    "and": lambda fn, dtype, args: fn.and_(*args),
    "or": lambda fn, dtype, args: fn.or_(*args),
    "xor": lambda fn, dtype, args: fn.xor(*args),
    "bitwise_not": _not,
    "shl": _shl,
    "shr": _shr,
}
