"""Tables of numbers in registers: one instruction looks up a number for every lane."""

from __future__ import annotations

from collections.abc import Sequence

from ..platforms.target import Target
from .builder import Function, Val

# By the registers of a table and their bits: a table of one, the index, for two registers the other one.
_PERMUTES = {(1, 256): "llvm.x86.avx2.permps", (2, 512): "llvm.x86.avx512.vpermi2var.ps.512"}


def emit(fn: Function, target: Target, table: Sequence[Val], x: Val) -> Val:
    """The numbers of `table`, one or two vectors as `Target.lookup_entries` has it, that the low bits of the floats `x` choose."""
    ty, lanes = table[0].ty, x.ty.lanes
    index = fn.convert("bitcast", x, x.ty.of("i32"))
    if lanes != ty.lanes:  # fewer: the rest of the register is of no interest
        index = fn.shuffle(index, index, [*range(lanes), *[-1] * (ty.lanes - lanes)]) if lanes else fn.splat(index, ty.lanes)
    name = _PERMUTES[len(table), target.vector_bits]
    found = fn.call(name, ty, [table[0], index, *table[1:]])
    if lanes == ty.lanes:
        return found
    return fn.shuffle(found, found, list(range(lanes))) if lanes else fn.extract(found, 0)
