"""What the functions are made of. Everything works for any number of lanes and uses only portable LLVM IR."""

from __future__ import annotations

from collections.abc import Sequence

from ...platforms.target import Target
from ...stitch.elementwise import MAGIC
from ..builder import I32, Function, Ty, Val, const, i64
from ..division import any_lane

_ALL_LANES = Val(Ty("i16"), "-1")
_AS_SET = 4  # rounding as the control register says
_DOWN = 9  # to integers, downwards, without a word of what is lost


def k(like: Val, value: float) -> Val:
    """A constant of the type of `like`."""
    return const(like.ty, value)


def horner(fn: Function, x: Val, coefficients: Sequence[float]) -> Val:
    """The polynomial with these coefficients, lowest power first. One fused multiply-add each: least work, not least latency."""
    total = k(x, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        total = fn.fma(total, x, k(x, c))
    return total


def bits(fn: Function, x: Val) -> Val:
    """The bits of a float as an integer of the same width."""
    return fn.convert("bitcast", x, x.ty.of("i64" if x.ty.scalar == "double" else "i32"))


def from_bits(fn: Function, x: Val) -> Val:
    return fn.convert("bitcast", x, x.ty.of("double" if x.ty.scalar == "i64" else "float"))


def absolute(fn: Function, x: Val) -> Val:
    return fn.intrinsic("fabs", x.ty, [x])


def copysign(fn: Function, magnitude: Val, sign: Val) -> Val:
    return fn.intrinsic("copysign", magnitude.ty, [magnitude, sign])


def at_most(fn: Function, x: Val, limit: float) -> Val:
    """min(x, limit); NaN stays NaN. Operand order as in x86's MINPS, so that it is one instruction there."""
    bound = k(x, limit)
    return fn.select(fn.fcmp("olt", bound, x), bound, x)


def at_least(fn: Function, x: Val, limit: float) -> Val:
    """max(x, limit); NaN stays NaN."""
    bound = k(x, limit)
    return fn.select(fn.fcmp("ogt", bound, x), bound, x)


def nearest(fn: Function, x: Val, factor: float, offset: int = 0) -> tuple[Val, Val]:
    """n = round(x * factor) as a float, and the bits of n + offset + MAGIC, whose low 22 bits are those of n + offset.

    |x * factor| + offset < 2^22; beyond it n is meaningless but nothing traps.
    """
    magic = k(x, MAGIC + offset)
    shifted = fn.add(x, magic) if factor == 1.0 else fn.fma(x, k(x, factor), magic)
    return fn.sub(shifted, magic), bits(fn, shifted)


def power_of_two(fn: Function, exponent_bits: Val) -> Val:
    """2^n for n in [-126, 127] from the second result of `nearest(..., offset=127)`: the shift leaves just the exponent field."""
    return from_bits(fn, fn.shl(exponent_bits, const(exponent_bits.ty, 23)))


def scaled(fn: Function, target: Target, x: Val, n: Val, exponent_bits: Val) -> Val:
    """x * 2^n for n in [-252, 254], both results of `nearest(..., offset=254)`, rounded once even where it is denormal.

    2^n is not a float for all these n, hence two factors 2^(n // 2) and 2^(n - n // 2); only the second product can round. AVX-512 has
    an instruction for all that, which also leaves the units of multiplication free.
    """
    if _has_exponents(target) and x.ty.lanes * x.ty.bits == 512:
        return _scalef(fn, x, n)
    half = fn.lshr(exponent_bits, const(exponent_bits.ty, 1))
    rest = fn.sub(exponent_bits, half)
    return fn.mul(fn.mul(x, power_of_two(fn, half)), power_of_two(fn, rest))


def power(fn: Function, target: Target, x: Val, middle: Sequence[float], up: Sequence[float], factor: float = 1.0) -> Val:
    """2^y for y = x * factor up to 126, by polynomials for 2^f: `middle` for |f| <= 1/2, `up` for 0 <= f < 1. 0 for -inf.

    AVX-512 has instructions for the fraction, which is that above the next integer below, and for the product with a power of two. What
    is below 2^-126 comes out 0, elsewhere from 2^-126.5 on: every operation that gives or takes a denormal number interrupts a processor
    of Intel's for 150 cycles, and scores under a mask of -100 would be such.
    """
    if _has_exponents(target):
        y = _sixteen(fn, x if factor == 1.0 else fn.mul(x, k(x, factor)))
        normal = fn.fcmp("uge", y, k(y, -126.0))
        return _some(fn, _scalef(fn, horner(fn, _fraction(fn, y), up), y, normal), x.ty.lanes)
    x = at_least(fn, x, -127.0 / factor)
    n, exponent = nearest(fn, x, factor, 127)
    rest = fn.sub(x, n) if factor == 1.0 else fn.fma(x, k(x, factor), fn.neg(n))
    return fn.mul(horner(fn, rest, middle), power_of_two(fn, exponent))


def _has_exponents(target: Target) -> bool:
    return target.has("avx512bw", "avx512dq", "avx512vl")


def inverse_of_one_more(fn: Function, target: Target, q: Val, up: Sequence[float]) -> Val | None:
    """1 / (1 + 2^q) for any q, by what AVX-512 has instructions for: powers that may be infinite, and reciprocals that are good to 2^-14.
    None elsewhere.

    up: as for `power`. Exact where 2^q is 1, 0 or infinite; what is below 2^-126 may be 0.
    """
    if not _has_exponents(target):
        return None
    whole = _sixteen(fn, q)
    more = fn.add(_scalef(fn, horner(fn, _fraction(fn, whole), up), whole), k(whole, 1.0))
    types = (more.ty, more.ty, "i16")
    return _some(fn, fn.call("llvm.x86.avx512.rcp14.ps.512", more.ty, [more, more, _ALL_LANES], params=types), q.ty.lanes)


def _sixteen(fn: Function, x: Val) -> Val:
    """A number or up to 16 of them as a vector of 16, the last one repeated."""
    if not x.ty.lanes:
        return fn.splat(x, 16)
    assert x.ty.lanes <= 16, f"{x.ty} is more than a register"
    return x if x.ty.lanes == 16 else fn.shuffle(x, x, [min(lane, x.ty.lanes - 1) for lane in range(16)])


def _some(fn: Function, x: Val, lanes: int) -> Val:
    """The first of the lanes; 0: a number."""
    if not lanes:
        return fn.extract(x, 0)
    return x if lanes == x.ty.lanes else fn.shuffle(x, x, range(lanes))


def _fraction(fn: Function, x: Val) -> Val:
    """x - floor(x), 0 for infinities."""
    types = (x.ty, "i32 immarg", x.ty, "i16", "i32 immarg")
    return fn.call("llvm.x86.avx512.mask.reduce.ps.512", x.ty, [x, const(I32, _DOWN), x, _ALL_LANES, const(I32, _AS_SET)], params=types)


def _scalef(fn: Function, x: Val, n: Val, mask: Val | None = None) -> Val:
    """x * 2^floor(n), rounded once. mask: lanes outside are 0, and cost nothing."""
    types = (x.ty, x.ty, x.ty, "i16", "i32 immarg")
    other, lanes = (x, _ALL_LANES) if mask is None else (k(x, 0.0), fn.convert("bitcast", mask, _ALL_LANES.ty))
    return fn.call("llvm.x86.avx512.mask.scalef.ps.512", x.ty, [x, n, other, lanes, const(I32, _AS_SET)], params=types)


def lanewise(fn: Function, symbol: str, args: Sequence[Val]) -> Val:
    """Calls the C function `symbol` for every lane, through a helper function of the module. Slow: for rare cases and for float64."""
    ty = args[0].ty
    scalar = Ty(ty.scalar)
    if not ty.lanes:
        return fn.call(symbol, scalar, args)
    name = f"sashiko.{symbol}.{ty.mangled}"
    if name not in fn.module.functions:
        helper = Function(fn.module, name, ty, [ty] * len(args), internal=True)
        size = ty.lanes * ty.bits // 8
        places = [helper.alloca(size) for _ in args]
        for place, arg in zip(places, helper.args):
            helper.store(arg, place)

        def lane(i: Val, _: list[Val]) -> list[Val]:
            values = [helper.load(scalar, helper.gep(place, i, scalar)) for place in places]
            helper.store(helper.call(symbol, scalar, values), helper.gep(places[0], i, scalar))
            return []

        helper.loop(i64(0), i64(ty.lanes), 1, [], lane)
        helper.ret(helper.load(ty, places[0]))
        helper.finish()
    text = f"call {ty} @{name}({', '.join(f'{a.ty} {a.ref}' for a in args)})"
    return fn.emit(ty, text)


def or_lanewise(fn: Function, rare: Val, symbol: str, args: Sequence[Val], usual: Val) -> Val:
    """`usual`, but the C function `symbol` in the lanes where `rare` holds, which costs a branch when there is none."""
    wide = fn.branch(any_lane(fn, rare), lambda: [lanewise(fn, symbol, args)], lambda: [usual])[0]
    return fn.select(rare, wide, usual)
