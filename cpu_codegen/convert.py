"""Element types in registers and in memory, and conversions between them.

In registers bool is i1, float16 and bfloat16 are their 16 raw bits (no target computes in them here), everything else is itself.
In memory bool is one byte, 0 or 1. Nothing in this file becomes a library call, but for float16 on x86 without F16C: there LLVM calls
`__extendhfsf2` and `__truncsfhf2` for each element.
"""

from __future__ import annotations

from ..graph.types import DType, bf16, boolean, f16, f32, i32
from ..platforms.target import Target
from .builder import BF16, F16, I1, I8, I16, Function, Ty, Val, const

HALVES = (f16, bf16)


def register_type(dtype: DType, lanes: int = 0) -> Ty:
    """The LLVM type of a value in registers; lanes 0 is a scalar."""
    if dtype == boolean:
        return I1.vec(lanes)
    if dtype in HALVES:
        return I16.vec(lanes)
    if dtype.is_float:
        return Ty("float" if dtype == f32 else "double", lanes)
    return Ty(f"i{dtype.bits}", lanes)


def memory_type(dtype: DType, lanes: int = 0) -> Ty:
    """The LLVM type of a value in memory."""
    return I8.vec(lanes) if dtype == boolean else register_type(dtype, lanes)


def from_memory(fn: Function, value: Val, dtype: DType) -> Val:
    return fn.icmp("ne", value, const(value.ty, 0)) if dtype == boolean else value


def to_memory(fn: Function, value: Val, dtype: DType) -> Val:
    return fn.convert("zext", value, value.ty.of("i8")) if dtype == boolean else value


def constant(dtype: DType, value: float | int | bool, lanes: int) -> Val:
    """A constant of any element type, in register form."""
    if dtype not in HALVES:
        if dtype.kind == "uint" or (dtype.kind == "int" and isinstance(value, int)):
            value = _wrapped(int(value), dtype)
        return const(register_type(dtype, lanes), value)
    literal = const(F16 if dtype == f16 else BF16, float(value)).ref
    return const(I16.vec(lanes), int(literal[3:], 16))


def _wrapped(value: int, dtype: DType) -> int:
    half = 1 << (dtype.bits - 1)
    return (value + half) % (2 * half) - half


def widen(fn: Function, a: Val, src: DType) -> Val:
    """float16 or bfloat16 bits to f32, exactly."""
    if src == bf16:
        bits = fn.convert("zext", a, a.ty.of("i32"))
        return fn.convert("bitcast", fn.shl(bits, const(bits.ty, 16)), a.ty.of("float"))
    return fn.convert("fpext", fn.convert("bitcast", a, a.ty.of("half")), a.ty.of("float"))


def narrow(fn: Function, target: Target, a: Val, dst: DType, exact: bool = False) -> Val:
    """f32 to float16 or bfloat16 bits, to nearest even; NaN stays NaN. exact: `a` is known to be such a number, or NaN with such bits.

    The bf16 instructions of x86 take numbers below 2^-126 for zero, in conversions as in products.
    """
    raw = a.ty.of("i16")
    if dst == bf16 and exact:
        bits = fn.convert("bitcast", a, a.ty.of("i32"))
        return fn.convert("trunc", fn.lshr(bits, const(bits.ty, 16)), raw)
    if dst == f16:
        return fn.convert("bitcast", fn.convert("fptrunc", a, a.ty.of("half")), raw)
    if target.has("avx512_bf16") or target.has("bf16"):
        return fn.convert("bitcast", fn.convert("fptrunc", a, a.ty.of("bfloat")), raw)
    bits = fn.convert("bitcast", a, a.ty.of("i32"))
    # Adding 0x7FFF plus the lowest kept bit carries exactly when the discarded half is above the middle, or at it and odd.
    odd = fn.and_(fn.lshr(bits, const(bits.ty, 16)), const(bits.ty, 1))
    rounded = fn.lshr(fn.add(fn.add(bits, const(bits.ty, 0x7FFF)), odd), const(bits.ty, 16))
    safe = fn.select(fn.fcmp("uno", a, a), const(bits.ty, 0x7FC0), rounded)
    return fn.convert("trunc", safe, raw)


def cast(fn: Function, target: Target, a: Val, src: DType, dst: DType) -> Val:
    """As torch's `.to(dst)`. Float to int truncates; where torch leaves the result undefined it is some integer, never poison."""
    if src == dst:
        return a
    if src in HALVES:
        return cast(fn, target, widen(fn, a, src), f32, dst)
    if dst in HALVES:
        return narrow(fn, target, cast(fn, target, a, src, f32), dst)
    if dst == boolean:
        zero = const(a.ty, 0)
        return fn.fcmp("une", a, zero) if src.is_float else fn.icmp("ne", a, zero)
    to = register_type(dst, a.ty.lanes)
    if src == boolean:
        return fn.select(a, const(to, 1), const(to, 0)) if dst.is_float else fn.convert("zext", a, to)
    if src.is_float and dst.is_float:
        return fn.convert("fpext" if dst.bits > src.bits else "fptrunc", a, to)
    if src.is_float:
        return _float_to_int(fn, a, dst, to)
    if dst.is_float:
        wide = cast(fn, target, a, src, i32) if src.bits < 32 else a
        return fn.convert("sitofp", wide, to)
    if dst.bits == src.bits:
        return a
    return fn.convert("trunc" if dst.bits < src.bits else "zext" if src.kind == "uint" else "sext", a, to)


def _float_to_int(fn: Function, a: Val, dst: DType, to: Ty) -> Val:
    """Through i32 for the narrow ones, so that -1.0 becomes 255 in uint8 as in C."""
    wide = to if dst.bits >= 32 else to.of("i32")
    whole = fn.convert("fptosi", a, wide)
    # fptosi of NaN and of what does not fit is poison; freezing makes it the machine's own answer (INT_MIN on x86).
    frozen = fn.freeze(whole)
    return frozen if wide == to else fn.convert("trunc", frozen, to)


def round_to_int(fn: Function, a: Val, bits: int) -> Val:
    """Half-to-even rounding and conversion in one: f32 or f64 to i32 or i64. Out of range gives some integer."""
    to = a.ty.of(f"i{bits}")
    return fn.call(f"llvm.lrint.{to.mangled}.{a.ty.mangled}", to, [a])


def bitcast(fn: Function, a: Val, dst: DType) -> Val:
    """The same bits as another type of equal width; bool does not take part."""
    return fn.convert("bitcast", a, register_type(dst, a.ty.lanes))

