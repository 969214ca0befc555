"""Micro-kernels of AArch64 on 128-bit vectors: SDOT (Neoverse N1), SMMLA and BFMMLA (Neoverse N2), FMLA.

The lhs is packed in groups, [k / kr][mr][kr], and multiplied by element (SDOT, FMLA) or as 2 x kr blocks (SMMLA, BFMMLA). 24
accumulators: in llvm-mca's models of both processors the inner loops reach the rate of two products a cycle.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from ..cpu_codegen import convert
from ..cpu_codegen.builder import BF16, F16, F32, I8, I16, I32, Function, Ty, Val, const
from ..graph.types import DType, bf16, f16, f32, i8, u8
from .micro import Lhs, MicroKernel, Start, Tile, offset
from .spec import Packing
from .vector_micro import VectorMicro

PACK_SDOT = Packing(12, 4, 4)
PACK_SMMLA = Packing(12, 8, 8)
PACK_BFMMLA = Packing(12, 4, 4)
PACK_FMLA = Packing(12, 1, 1)


def _lanes(fn: Function, tile: Tile, index: Val, rows: int, ty: Ty) -> list[Val]:
    """One operand for each row: its element of the group of step `index`, in every lane."""
    group = fn.gep(tile.a, index, scale=rows * 4)
    quads = [fn.load(ty.vec(4), offset(fn, group, 16 * q)) for q in range(rows // 4)]
    return [fn.shuffle(quads[r // 4], quads[r // 4], [r % 4] * 4) for r in range(rows)]


@dataclass(frozen=True)
class FmlaMicro(VectorMicro):
    """f32: FMLA by element."""

    isa = "fmla"
    ahead = 0

    def resized(self, mr: int, panels: int) -> MicroKernel | None:
        return super().resized(mr, panels) if mr % 4 == 0 else None

    @property
    def layout(self) -> Lhs:
        return Lhs(F32, group=self.packing.kr)

    def load_a(self, fn: Function, tile: Tile, index: Val, part: int) -> list[Val]:
        return _lanes(fn, tile, index, self.mr, F32)

    def load_b(self, fn: Function, group: Val, vector: int, part: int) -> Val:
        return fn.load(F32.vec(4), offset(fn, group, 16 * vector))

    def operand(self, fn: Function, words: Val) -> Val:
        return fn.convert("bitcast", words, F32.vec(words.ty.lanes))

    def product(self, fn: Function, acc: Val, a: Val, b: Val) -> Val:
        return fn.fma(a, b, acc)


@dataclass(frozen=True)
class FmlaBf16Micro(FmlaMicro):
    """bf16 through f32, for processors without BFMMLA."""

    isa = "fmlabf16"

    def convert(self, fn: Function, value: Val) -> Val:
        return convert.widen(fn, value, bf16)

    def load_b(self, fn: Function, group: Val, vector: int, part: int) -> Val:
        return convert.widen(fn, fn.load(I16.vec(4), offset(fn, group, 8 * vector)), bf16)


@dataclass(frozen=True)
class FmlaF16Micro(FmlaMicro):
    """f16 through f32."""

    isa = "fmlaf16"

    def convert(self, fn: Function, value: Val) -> Val:
        return fn.convert("fpext", value, value.ty.of("float"))

    def load_b(self, fn: Function, group: Val, vector: int, part: int) -> Val:
        return self.convert(fn, fn.load(F16.vec(4), offset(fn, group, 8 * vector)))


@dataclass(frozen=True)
class SdotMicro(VectorMicro):
    """8-bit with SDOT by element; an unsigned lhs is shifted by -128 while it is packed."""

    isa = "sdot"
    ahead = 0

    def resized(self, mr: int, panels: int) -> MicroKernel | None:
        return super().resized(mr, panels) if mr % 4 == 0 else None

    @property
    def layout(self) -> Lhs:
        return Lhs(I8, group=self.packing.kr)

    @property
    def sums_factor(self) -> int:
        return 128 if self.lhs == u8 else 0

    def convert(self, fn: Function, value: Val) -> Val:
        return fn.xor(value, const(value.ty, -128)) if self.lhs == u8 else value

    def load_a(self, fn: Function, tile: Tile, index: Val, part: int) -> list[Val]:
        return [fn.convert("bitcast", value, I8.vec(16)) for value in _lanes(fn, tile, index, self.mr, I32)]

    def load_b(self, fn: Function, group: Val, vector: int, part: int) -> Val:
        return fn.load(I8.vec(16), offset(fn, group, 16 * vector))

    def operand(self, fn: Function, words: Val) -> Val:
        return fn.convert("bitcast", words, I8.vec(4 * words.ty.lanes))

    def product(self, fn: Function, acc: Val, a: Val, b: Val) -> Val:
        return fn.call("llvm.aarch64.neon.sdot.v4i32.v16i8", acc.ty, [acc, b, a])


@dataclass(frozen=True)
class BlockMicro(MicroKernel):
    """Accumulators are 2 x 2 blocks: [row 0 col 0, row 0 col 1, row 1 col 0, row 1 col 1]. One product for each block and step."""

    @abstractmethod
    def product(self, fn: Function, acc: Val, a: Val, b: Val) -> Val:
        """Returns acc plus the 2 x kr block a times the transposed 2 x kr block b."""

    @property
    @abstractmethod
    def operand(self) -> Ty:
        """Type of a block."""

    def _quads(self, fn: Function, tile: Tile, pair: int, quad: int) -> tuple[Val, Val]:
        """Where 4 columns of the two rows of a pair lie in `out`."""
        upper, lower = (self.out_bytes(tile.out_pitch, 2 * pair + i, 4 * quad) for i in range(2))
        return offset(fn, tile.out, upper), offset(fn, tile.out, lower)

    def start(self, fn: Function, tile: Tile, kind: Start) -> list[Val]:
        ty = self.acc_ty.vec(4)
        if kind is not Start.OUT:
            return [const(ty, 0)] * (self.mr * self.nr // 4)
        values: list[Val] = []
        for pair in range(self.mr // 2):
            for quad in range(self.nr // 4):
                upper, lower = (fn.load(ty, place) for place in self._quads(fn, tile, pair, quad))
                values += [fn.shuffle(upper, lower, [0, 1, 4, 5]), fn.shuffle(upper, lower, [2, 3, 6, 7])]
        return values

    def step(self, fn: Function, tile: Tile, index: Val, accumulators: list[Val]) -> list[Val]:
        group_bytes = self.packing.nr * self.packing.kr * self.rhs.bytes
        groups = [fn.gep(panel, index, scale=group_bytes) for panel in tile.b]
        columns = [fn.load(self.operand, offset(fn, group, 16 * j)) for group in groups for j in range(self.packing.nr // 2)]
        rows = fn.gep(tile.a, index, scale=8 * self.mr)
        values: list[Val] = []
        for pair in range(self.mr // 2):
            a = fn.load(self.operand, offset(fn, rows, 16 * pair))
            for b in columns:
                values.append(self.product(fn, accumulators[len(values)], a, b))
        return values

    def finish(self, fn: Function, tile: Tile, accumulators: list[Val]) -> None:
        values = iter(accumulators)
        for pair in range(self.mr // 2):
            for quad in range(self.nr // 4):
                left, right = next(values), next(values)
                upper, lower = self._quads(fn, tile, pair, quad)
                fn.store(fn.shuffle(left, right, [0, 1, 4, 5]), upper)
                fn.store(fn.shuffle(left, right, [2, 3, 6, 7]), lower)


@dataclass(frozen=True)
class SmmlaMicro(BlockMicro):
    """8-bit with SMMLA, or USMMLA for an unsigned lhs: 2 x 8 times 8 x 2 in one instruction."""

    isa = "smmla"

    @property
    def layout(self) -> Lhs:
        return Lhs(I8, group=self.packing.kr)

    @property
    def operand(self) -> Ty:
        return I8.vec(16)

    def product(self, fn: Function, acc: Val, a: Val, b: Val) -> Val:
        name = "smmla" if self.lhs == i8 else "usmmla"
        return fn.call(f"llvm.aarch64.neon.{name}.v4i32.v16i8", acc.ty, [acc, a, b])


@dataclass(frozen=True)
class BfmmlaMicro(BlockMicro):
    """bf16 with BFMMLA: 2 x 4 times 4 x 2 in one instruction; sums of products are rounded as the processor does it."""

    isa = "bfmmla"

    @property
    def layout(self) -> Lhs:
        return Lhs(I16, group=self.packing.kr)

    @property
    def operand(self) -> Ty:
        return BF16.vec(8)

    def product(self, fn: Function, acc: Val, a: Val, b: Val) -> Val:
        return fn.call("llvm.aarch64.neon.bfmmla", acc.ty, [acc, a, b])


# Rows and panels of the register tiles: 24 accumulators, or fewer for few rows.
_BY_ELEMENT = ((8, 1), (4, 2))
_BY_BLOCK = ((8, 1), (2, 3))


def fmla() -> tuple[VectorMicro, ...]:
    """The f32 tiles."""
    return tuple(FmlaMicro(mr, panels, PACK_FMLA, f32, f32, 4) for mr, panels in _BY_ELEMENT)


def fmla_bf16() -> tuple[MicroKernel, ...]:
    """The bf16 tiles that compute in f32."""
    return tuple(FmlaBf16Micro(mr, panels, PACK_FMLA, bf16, bf16, 4) for mr, panels in _BY_ELEMENT)


def fmla_f16() -> tuple[MicroKernel, ...]:
    """The f16 tiles, which compute in f32."""
    return tuple(FmlaF16Micro(mr, panels, PACK_FMLA, f16, f16, 4) for mr, panels in _BY_ELEMENT)


def sdot(lhs: DType) -> tuple[VectorMicro, ...]:
    """The 8-bit tiles of SDOT."""
    return tuple(SdotMicro(mr, panels, PACK_SDOT, lhs, i8, 4) for mr, panels in _BY_ELEMENT)


def smmla(lhs: DType) -> tuple[MicroKernel, ...]:
    """The 8-bit tiles of SMMLA."""
    return tuple(SmmlaMicro(mr, panels, PACK_SMMLA, lhs, i8) for mr, panels in _BY_BLOCK)


def bfmmla() -> tuple[MicroKernel, ...]:
    """The bf16 tiles of BFMMLA."""
    return tuple(BfmmlaMicro(mr, panels, PACK_BFMMLA, bf16, bf16) for mr, panels in _BY_BLOCK)
