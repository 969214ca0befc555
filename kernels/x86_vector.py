"""Micro-kernels of x86-64 on vectors: AVX-512 and AVX2.

All of them broadcast from rows of the lhs. Integer products are exact: VPDPBUSD takes an unsigned lhs, and reads it where it lies; a signed
one is shifted by 128 while it is packed, and the accumulators start at -128 times the column sums; VPMADDWD works on 16-bit
operands, where pairs of 8-bit products cannot overflow. VPMADDUBSW, which saturates, is used for weights with which it does not
(`graph.sums16`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..cpu_codegen import convert
from ..cpu_codegen.builder import BF16, F16, F32, I8, I16, I32, Function, Val, const
from ..cpu_codegen.dots import vpdpbusd
from ..graph.types import DType, bf16, f16, f32, i8, i16
from .micro import Lhs, Tile, offset
from .spec import Packing
from .vector_micro import VectorMicro

PACK_F32 = Packing(16, 1, 1)
PACK_QUADS = Packing(16, 4, 64)
PACK_PAIRS_I8 = Packing(16, 2, 2)
PACK_PAIRS_I16 = Packing(16, 2, 2, sums=False)
PACK_PAIRS_BF16 = Packing(16, 2, 32)


@dataclass(frozen=True)
class FmaMicro(VectorMicro):
    """f32: one fused multiply-add for each row and vector."""

    # Weights of 4096 x 4096 from memory (`benchmarks/weight_only.py --rows 8`) take 4.7 ms for 8 rows, 8 steps ahead 5.6, and 3 to 6 % less
    # for 4 to 32; with AVX2 those of 2048 x 2048 1.37 instead of 1.72 for 4. Where L2 holds them it is the same (Emerald Rapids).
    ahead = 32

    @property
    def isa(self) -> str:  # type: ignore[override]
        return "avx512" if self.lanes == 16 else "avx2"

    @property
    def layout(self) -> Lhs:
        return Lhs(F32, direct=self.lhs == f32)

    def load_a(self, fn: Function, tile: Tile, index: Val, part: int) -> Iterable[Val]:
        return (fn.splat(value, self.lanes) for value in self.row_scalars(fn, tile, index, F32, part))

    def load_b(self, fn: Function, group: Val, vector: int, part: int) -> Val:
        return fn.load(F32.vec(self.lanes), offset(fn, group, 4 * self.lanes * vector))

    def operand(self, fn: Function, words: Val) -> Val:
        return fn.convert("bitcast", words, F32.vec(words.ty.lanes))

    def product(self, fn: Function, acc: Val, a: Val, b: Val) -> Val:
        return fn.fma(a, b, acc)


@dataclass(frozen=True)
class WidenMicro(FmaMicro):
    """bf16 through f32: rows are packed as f32, the two halves of a pair of the rhs are widened by a shift and by a mask."""

    parts = 2

    @property
    def isa(self) -> str:  # type: ignore[override]
        return "avx512widen" if self.lanes == 16 else "avx2widen"

    def convert(self, fn: Function, value: Val) -> Val:
        return convert.widen(fn, value, bf16)

    def load_b(self, fn: Function, group: Val, vector: int, part: int) -> Val:
        pair = fn.load(I32.vec(self.lanes), offset(fn, group, 4 * self.lanes * vector))
        half = fn.shl(pair, const(pair.ty, 16)) if part == 0 else fn.and_(pair, const(pair.ty, -65536))
        return fn.convert("bitcast", half, F32.vec(self.lanes))


@dataclass(frozen=True)
class HalfMicro(FmaMicro):
    """f16 through f32: rows are packed as f32, the rhs is widened by VCVTPH2PS as it is loaded."""

    @property
    def isa(self) -> str:  # type: ignore[override]
        return "avx512half" if self.lanes == 16 else "avx2half"

    def convert(self, fn: Function, value: Val) -> Val:
        return fn.convert("fpext", value, value.ty.of("float"))

    def load_b(self, fn: Function, group: Val, vector: int, part: int) -> Val:
        return self.convert(fn, fn.load(F16.vec(self.lanes), offset(fn, group, 2 * self.lanes * vector)))


@dataclass(frozen=True)
class DotBf16Micro(VectorMicro):
    """bf16 with VDPBF16PS: pairs of products are added to f32 accumulators; denormals count as zero."""

    isa = "avx512bf16"

    @property
    def layout(self) -> Lhs:
        return Lhs(I16, direct=True, ragged=True)

    def load_a(self, fn: Function, tile: Tile, index: Val, part: int) -> Iterable[Val]:
        return (fn.splat(value, self.lanes) for value in self.row_scalars(fn, tile, index, I32, part))

    def load_b(self, fn: Function, group: Val, vector: int, part: int) -> Val:
        return fn.load(I32.vec(self.lanes), offset(fn, group, 4 * self.lanes * vector))

    def product(self, fn: Function, acc: Val, a: Val, b: Val) -> Val:
        # The instruction itself broadcasts from memory what comes last. That spares a load, and tiles of one panel wait for loads.
        pairs = BF16.vec(2 * self.lanes)
        operands = [acc, fn.convert("bitcast", b, pairs), fn.convert("bitcast", a, pairs)]
        return fn.call(f"llvm.x86.avx512bf16.dpbf16ps.{32 * self.lanes}", acc.ty, operands)


@dataclass(frozen=True)
class VnniMicro(VectorMicro):
    """8-bit with VPDPBUSD: four products of an unsigned lhs and a signed rhs are added to each accumulator."""

    @property
    def isa(self) -> str:  # type: ignore[override]
        return "avx512vnni" if self.lanes == 16 else "avxvnni"

    @property
    def layout(self) -> Lhs:
        return Lhs(I8, direct=self.lhs != i8)

    @property
    def sums_factor(self) -> int:
        return -128 if self.lhs == i8 else 0

    def convert(self, fn: Function, value: Val) -> Val:
        return fn.xor(value, const(value.ty, -128)) if self.lhs == i8 else value

    def load_a(self, fn: Function, tile: Tile, index: Val, part: int) -> Iterable[Val]:
        return (fn.splat(value, self.lanes) for value in self.row_scalars(fn, tile, index, I32, part))

    def load_b(self, fn: Function, group: Val, vector: int, part: int) -> Val:
        return fn.load(I32.vec(self.lanes), offset(fn, group, 4 * self.lanes * vector))

    def product(self, fn: Function, acc: Val, a: Val, b: Val) -> Val:
        return vpdpbusd(fn, acc, a, b)


@dataclass(frozen=True)
class PairsMicro(VectorMicro):
    """16-bit with VPMADDWD: two products are added to each accumulator."""

    @property
    def isa(self) -> str:  # type: ignore[override]
        return "avx512madd" if self.lanes == 16 else "avx2madd"

    @property
    def layout(self) -> Lhs:
        return Lhs(I16, direct=self.lhs == i16)

    def load_a(self, fn: Function, tile: Tile, index: Val, part: int) -> Iterable[Val]:
        scalars = self.row_scalars(fn, tile, index, I32, part)
        return (fn.convert("bitcast", fn.splat(value, self.lanes), I16.vec(2 * self.lanes)) for value in scalars)

    def load_b(self, fn: Function, group: Val, vector: int, part: int) -> Val:
        return fn.load(I16.vec(2 * self.lanes), offset(fn, group, 4 * self.lanes * vector))

    def product(self, fn: Function, acc: Val, a: Val, b: Val) -> Val:
        return pairs_added(fn, acc, a, b)


@dataclass(frozen=True)
class MaddMicro(PairsMicro):
    """8-bit likewise: rows are packed as 16 bits, pairs of the rhs are widened on load."""

    def convert(self, fn: Function, value: Val) -> Val:
        return fn.convert("sext" if self.lhs == i8 else "zext", value, value.ty.of("i16"))

    def load_b(self, fn: Function, group: Val, vector: int, part: int) -> Val:
        narrow = fn.load(I8.vec(2 * self.lanes), offset(fn, group, 2 * self.lanes * vector))
        return fn.convert("sext", narrow, I16.vec(2 * self.lanes))


@dataclass(frozen=True)
class MaddubsMicro(VnniMicro):
    """8-bit with VPMADDUBSW, for weights of which `sums` products, 4 or 2, are added in 16 bits (`graph.sums16`), and VPMADDWD, which adds
    pairs of these in 32.

    For 64 products of 256 bits that is 5 instructions, or 6; VPMADDWD alone takes 8, and widened operands.
    """

    sums: int = 4

    ahead = 4

    @property
    def isa(self) -> str:  # type: ignore[override]
        return f"{'avx512' if self.lanes == 16 else 'avx2'}maddubs{self.sums}"

    @property
    def parts(self) -> int:  # type: ignore[override]
        return self.sums // 2

    @property
    def step_k(self) -> int:
        return self.packing.kr * self.parts

    def load_b(self, fn: Function, group: Val, vector: int, part: int) -> Val:
        return super().load_b(fn, offset(fn, group, part * self.packing.nr * self.packing.kr), vector, part)

    def product(self, fn: Function, acc: Val, a: Val, b: Val) -> Val:
        products = pair_products(fn, a, b)
        return pairs_added(fn, acc, products, const(products.ty, 1))

    def multiplied(self, fn: Function, tile: Tile, index: Val, groups: list[Val], accumulators: list[Val]) -> list[Val]:
        values = list(accumulators)
        columns = [self.columns(fn, groups, part) for part in range(self.parts)]
        rows = zip(*(self.load_a(fn, tile, index, part) for part in range(self.parts)), strict=True)
        for r, row in enumerate(rows):
            for v, column in enumerate(zip(*columns, strict=True)):
                first, *others = (pair_products(fn, a, b) for a, b in zip(row, column, strict=True))
                sums = fn.add(first, *others) if others else first
                values[r * self.vectors + v] = pairs_added(fn, values[r * self.vectors + v], sums, const(sums.ty, 1))
        return values


def pair_products(fn: Function, a: Val, b: Val) -> Val:
    """a[2 i] b[2 i] + a[2 i + 1] b[2 i + 1] in 16 bits, saturated, of the unsigned bytes in the words of `a` and the signed ones in `b`."""
    name = "llvm.x86.avx512.pmaddubs.w.512" if a.ty.lanes == 16 else "llvm.x86.avx2.pmadd.ub.sw"
    operands = [fn.convert("bitcast", value, I8.vec(4 * a.ty.lanes)) for value in (a, b)]
    return fn.call(name, I16.vec(2 * a.ty.lanes), operands)


def pairs_added(fn: Function, acc: Val, a: Val, b: Val) -> Val:
    """acc[i] + a[2 i] b[2 i] + a[2 i + 1] b[2 i + 1], of 16 bits in 32."""
    name = "llvm.x86.avx512.pmaddw.d.512" if acc.ty.lanes == 16 else "llvm.x86.avx2.pmadd.wd"
    return fn.add(acc, fn.call(name, acc.ty, [a, b]))


# Rows and panels of the register tiles. 32 registers: 28 accumulators, the vectors of the rhs and a broadcast. 16 registers: 12.
_WIDE = ((14, 2), (4, 4), (1, 4))
_NARROW = ((6, 1), (2, 2), (1, 4))
# The same where a vector of the rhs becomes two, and all of these are held.
_WIDE_TWICE = ((12, 2), (4, 4), (1, 4))
_NARROW_TWICE = ((5, 1), (2, 2), (1, 4))
# With VPMADDUBSW these and ones.
_WIDE_SUMS = ((12, 2), (4, 4), (1, 4))
_NARROW_SUMS = ((3, 1), (1, 2))


def fma(lanes: int) -> tuple[VectorMicro, ...]:
    """The f32 tiles for vectors of 16 (AVX-512) or 8 (AVX2) elements, most rows first."""
    return tuple(FmaMicro(mr, panels, PACK_F32, f32, f32, lanes) for mr, panels in (_WIDE if lanes == 16 else _NARROW))


def widen(lanes: int) -> tuple[VectorMicro, ...]:
    """The bf16 tiles that compute in f32. With AVX-512 they share the packing of AMX."""
    tiles = _WIDE_TWICE if lanes == 16 else _NARROW_TWICE
    return tuple(WidenMicro(mr, panels, PACK_PAIRS_BF16, bf16, bf16, lanes) for mr, panels in tiles)


def half(lanes: int) -> tuple[VectorMicro, ...]:
    """The f16 tiles, which compute in f32."""
    return tuple(HalfMicro(mr, panels, PACK_F32, f16, f16, lanes) for mr, panels in (_WIDE if lanes == 16 else _NARROW))


def dot_bf16(lanes: int = 16) -> tuple[VectorMicro, ...]:
    """The bf16 tiles of VDPBF16PS."""
    return tuple(DotBf16Micro(mr, panels, PACK_PAIRS_BF16, bf16, bf16, lanes) for mr, panels in _WIDE)


def vnni(lhs: DType, lanes: int) -> tuple[VectorMicro, ...]:
    """The 8-bit tiles of VPDPBUSD. They share the packing of AMX."""
    return tuple(VnniMicro(mr, panels, PACK_QUADS, lhs, i8, lanes) for mr, panels in (_WIDE if lanes == 16 else _NARROW))


def madd(lhs: DType, lanes: int) -> tuple[VectorMicro, ...]:
    """The 8-bit tiles of VPMADDWD."""
    return tuple(MaddMicro(mr, panels, PACK_PAIRS_I8, lhs, i8, lanes) for mr, panels in (_WIDE if lanes == 16 else _NARROW))


def pairs(lanes: int) -> tuple[VectorMicro, ...]:
    """The 16-bit tiles of VPMADDWD."""
    return tuple(PairsMicro(mr, panels, PACK_PAIRS_I16, i16, i16, lanes) for mr, panels in (_WIDE if lanes == 16 else _NARROW))


def maddubs(lhs: DType, sums: int, lanes: int) -> tuple[VectorMicro, ...]:
    """The 8-bit tiles of VPMADDUBSW, for weights of which so many products are added in 16 bits. They share the packing of AMX."""
    tiles = _WIDE_SUMS if lanes == 16 else _NARROW_SUMS
    return tuple(MaddubsMicro(mr, panels, PACK_QUADS, lhs, i8, lanes, sums) for mr, panels in tiles)
