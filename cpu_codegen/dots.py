"""Four bytes in one element of 32 bits, and dot products of these: VPDPBUSD and USDOT add up four products in each lane."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from ..platforms.target import Target
from .builder import Function, Val, const
from .values import I8, I32

_WIDTHS = {"avx_vnni": (128, 256), "avx512_vnni": (128, 256, 512)}  # bits of the vectors of each


def pack(fn: Function, parts: Sequence[Val]) -> Val:
    """The bytes in each lane beside one another, the first the lowest, zeros behind them."""
    lanes = parts[0].ty.lanes
    if not lanes or len(parts) == 1:
        wide = [fn.convert("zext", part, part.ty.of("i32")) for part in parts]
        return reduce(fn.or_, [fn.shl(part, const(part.ty, 8 * n)) if n else part for n, part in enumerate(wide)])
    beside = fn.concatenate([*parts, *[const(I8.vec(lanes), 0)] * (4 - len(parts))])
    in_lanes = fn.shuffle(beside, beside, [part * lanes + lane for lane in range(lanes) for part in range(4)])
    return fn.convert("bitcast", in_lanes, I32.vec(lanes))


def vpdpbusd(fn: Function, total: Val, a: Val, b: Val) -> Val:
    """The instruction, which needs a processor that has it: `dot` of vectors of 32 bits."""
    return fn.call(f"llvm.x86.avx512.vpdpbusd.{32 * total.ty.lanes}", total.ty, [total, a, b])


def dot(fn: Function, target: Target, a: Val, b: Val, total: Val | None = None) -> Val:
    """`total` and the products of the unsigned bytes of a with the signed bytes of b."""
    total = const(a.ty, 0) if total is None else total
    bits = 32 * a.ty.lanes
    if target.has("i8mm") and bits == 128:
        return fn.call("llvm.aarch64.neon.usdot.v4i32.v16i8", total.ty, [total, *(fn.convert("bitcast", v, I8.vec(16)) for v in (a, b))])
    if any(target.has(name) and bits in widths for name, widths in _WIDTHS.items()):
        return vpdpbusd(fn, total, a, b)
    for shift in range(0, 32, 8):
        unsigned = fn.and_(fn.lshr(a, const(a.ty, shift)), const(a.ty, 255))
        signed = fn.ashr(fn.shl(b, const(b.ty, 24 - shift)), const(b.ty, 24))
        total = fn.add(total, fn.mul(unsigned, signed))
    return total
