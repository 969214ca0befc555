"""Tables of numbers in registers: one instruction looks up a number for every lane."""

from __future__ import annotations

from collections.abc import Sequence

from ..platforms.target import Target
from .builder import I8, Function, Val, const

# By the registers of a table and their bits: a table of one, the index, for two registers the other one.
_PERMUTES = {(1, 256): "llvm.x86.avx2.permps", (2, 512): "llvm.x86.avx512.vpermi2var.ps.512"}
_BYTES = I8.vec(16)


def emit(fn: Function, target: Target, table: Sequence[Val], x: Val) -> Val:
    """The numbers of `table`, one or two vectors as `Target.lookup_entries` has it, that the low bits of the floats `x` choose."""
    ty, lanes = table[0].ty, x.ty.lanes
    if lanes > ty.lanes:
        parts = [fn.shuffle(x, x, range(first, first + ty.lanes)) for first in range(0, lanes, ty.lanes)]
        return fn.concatenate([emit(fn, target, table, part) for part in parts])
    index = fn.convert("bitcast", x, x.ty.of("i32"))
    if lanes != ty.lanes:  # fewer: the rest of the register is of no interest
        index = fn.shuffle(index, index, [*range(lanes), *[-1] * (ty.lanes - lanes)]) if lanes else fn.splat(index, ty.lanes)
    if target.has("neon"):
        found = _by_bytes(fn, table, index)
    else:
        found = fn.call(_PERMUTES[len(table), target.vector_bits], ty, [table[0], index, *table[1:]])
    if lanes == ty.lanes:
        return found
    return fn.shuffle(found, found, list(range(lanes))) if lanes else fn.extract(found, 0)


def _by_bytes(fn: Function, table: Sequence[Val], index: Val) -> Val:
    """TBL looks up bytes: of number n, those from 4 n on. Their numbers are computed once for all tables that one index is for."""
    number = fn.and_(index, const(index.ty, len(table) * index.ty.lanes - 1))
    bytes_ = fn.add(fn.mul(number, const(index.ty, 0x04040404)), const(index.ty, 0x03020100))
    registers = [fn.convert("bitcast", part, _BYTES) for part in (*table, bytes_)]
    return fn.convert("bitcast", fn.call("llvm.aarch64.neon.tbl2.v16i8", _BYTES, registers), table[0].ty)
