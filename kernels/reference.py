"""The micro-kernel that every target can run: plain LLVM vectors, operands widened to 32 bits when the lhs is packed and the rhs is loaded.

It defines what the others compute, and covers operand types that no other row has.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..cpu_codegen.builder import F16, F32, I8, I16, Function, Ty, Val, const
from ..graph.types import DType
from .micro import Lhs, Tile, offset
from .spec import Packing
from .vector_micro import VectorMicro

PACK_PLAIN = Packing(8, 1, 1)


def widened(fn: Function, value: Val, dtype: DType) -> Val:
    """Elements of `dtype` (bf16 as 16-bit integers) as f32 or i32."""
    if dtype.name == "bf16":
        wide = fn.convert("zext", value, value.ty.of("i32"))
        return fn.convert("bitcast", fn.shl(wide, const(wide.ty, 16)), wide.ty.of("float"))
    operation = {"f16": ("fpext", "float"), "i8": ("sext", "i32"), "u8": ("zext", "i32")}.get(dtype.name)
    return value if operation is None else fn.convert(operation[0], value, value.ty.of(operation[1]))


@dataclass(frozen=True)
class PlainMicro(VectorMicro):
    """One multiply and one add for each row and vector, in f32 or i32."""

    isa = "plain"
    ahead = 0

    @property
    def layout(self) -> Lhs:
        return Lhs(self.acc_ty)

    def convert(self, fn: Function, value: Val) -> Val:
        return widened(fn, value, self.lhs)

    def load_a(self, fn: Function, tile: Tile, index: Val, part: int) -> Iterable[Val]:
        return (fn.splat(value, self.lanes) for value in self.row_scalars(fn, tile, index, self.acc_ty, part))

    def load_b(self, fn: Function, group: Val, vector: int, part: int) -> Val:
        element: Ty = {"f32": F32, "bf16": I16, "f16": F16}.get(self.rhs.name, I8)
        return widened(fn, fn.load(element.vec(self.lanes), offset(fn, group, self.rhs.bytes * self.lanes * vector)), self.rhs)

    def product(self, fn: Function, acc: Val, a: Val, b: Val) -> Val:
        return fn.add(acc, fn.mul(a, b))


def plain(lhs: DType, rhs: DType) -> tuple[VectorMicro, ...]:
    """The reference tile."""
    return (PlainMicro(4, 1, PACK_PLAIN, lhs, rhs, 4),)
