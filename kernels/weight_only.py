"""Families of micro-kernels of floats times integer weights: i8, and i4 with a scale for each group of neighbours along k.

For few rows reading the weight takes the time. Where instructions multiply bytes exactly, `weight_digits` multiplies weights as they are
packed, 8 or 4 bits each; elsewhere `weight_float` widens them in registers. For many rows `Unpacked` writes a panel out as floats
once for a block of rows and multiplies with a tile of the float family. In all of them the scale of an i4 weight counts in f32, as
dequantizing first would; per-channel scales of i8 are the epilogue's affair.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..cpu_codegen.builder import Function, Module, Val
from ..graph.types import DType, i4, i8
from ..platforms.target import Target
from .micro import Lhs, MicroKernel, Start, Tile
from .spec import Packing
from .weight_digits import DigitMicro, MaddubsDigits, SdotDigits, VnniDigits, step_of
from .weight_float import WORD, ExtendMicro, LookupMicro, WeightMicro

LEAST_GROUP = 32  # shorter groups would take longer to join their digits than to multiply


@dataclass(frozen=True)
class Unpacked(MicroKernel):
    """A tile of a float family, `inner`, on panels that `source` has written out. small: names the family's small tiles."""

    inner: MicroKernel
    source: WeightMicro
    small: str = ""

    @property
    def isa(self) -> str:  # type: ignore[override]
        return f"{self.inner.isa}unpack{self.small}"

    @property
    def step_k(self) -> int:
        return self.inner.step_k

    @property
    def row_cost(self) -> float:
        return self.inner.row_cost

    @property
    def panel_cost(self) -> float:
        return 5.0

    @property
    def layout(self) -> Lhs:
        layout = self.inner.layout
        return layout if self.inner.lhs == self.lhs else replace(layout, direct=False)

    def convert(self, fn: Function, value: Val) -> Val:
        return self.inner.convert(fn, value) if self.inner.lhs == self.lhs else self.source.convert(fn, value)

    @property
    def unpacked_panels(self) -> int:
        return self.packing.nr // self.inner.packing.nr

    def unpacked_bytes(self, k: int) -> int:
        return self.inner.packing.nr * self.inner.rhs.bytes * -(-k // self.packing.pad) * self.packing.pad

    def emit_unpack(self, module: Module, target: Target) -> tuple[str, int]:
        return self.source.emit_floats(module, target, self.inner.packing, self.inner.rhs), self.source.step_k

    def start(self, fn: Function, tile: Tile, kind: Start) -> list[Val]:
        return self.inner.start(fn, tile, kind)

    def step(self, fn: Function, tile: Tile, index: Val, accumulators: list[Val]) -> list[Val]:
        return self.inner.step(fn, tile, index, accumulators)

    def finish(self, fn: Function, tile: Tile, accumulators: list[Val]) -> None:
        self.inner.finish(fn, tile, accumulators)

    def enter(self, fn: Function) -> None:
        self.inner.enter(fn)

    def leave(self, fn: Function) -> None:
        self.inner.leave(fn)


@dataclass(frozen=True)
class Small:
    """The tiles of an instruction set for few rows: (rows, panels) of each, columns of a panel, lanes of a vector.

    digits: the class that multiplies bytes, for the weights that it takes; others are widened. digit_tiles: its tiles, if they differ.
    """

    family: str
    nr: int
    lanes: int
    tiles: tuple[tuple[int, int], ...]
    fused: bool = True
    digits: type[DigitMicro] | None = None
    digit_tiles: tuple[tuple[int, int], ...] = ()

    def micros(self, lhs: DType, rhs: DType, group: int, k: int) -> tuple[WeightMicro, ...]:
        """The family for these operands, with so many k."""
        digits = self.digits_for(rhs)
        if digits is None or (rhs == i4 and group < LEAST_GROUP):
            return tuple(self._micro(self._widening(rhs), *tile, lhs, rhs, group, k) for tile in self.tiles)
        return tuple(self._micro(digits, *tile, lhs, rhs, group, k) for tile in self.digit_tiles or self.tiles)

    def digits_for(self, rhs: DType) -> type[DigitMicro] | None:
        """What multiplies weights of this type as they are packed, if anything does."""
        return self.digits if self.digits and rhs in self.digits.weights else None

    def source(self, lhs: DType, rhs: DType, group: int, k: int) -> WeightMicro:
        """What writes panels out as floats."""
        return self._micro(self._widening(rhs), *self.tiles[0], lhs, rhs, group, k)

    def packing(self, rhs: DType, group: int, k: int) -> Packing:
        """How weights of k lie in memory: rows of k of bytes for instructions that widen them, else words of neighbours along k."""
        kr = 1 if self._extends(rhs) else WORD // rhs.bits
        return Packing(self.nr, kr, group or (step_of(k) if self.digits_for(rhs) else 32), False, group)

    def _micro(self, kind: type[WeightMicro], mr: int, panels: int, lhs: DType, rhs: DType, group: int, k: int) -> WeightMicro:
        return kind(mr, panels, self.packing(rhs, group, k), lhs, rhs, self.lanes, self.family, self.fused)

    def _widening(self, rhs: DType) -> type[WeightMicro]:
        return ExtendMicro if self._extends(rhs) else LookupMicro if rhs == i4 and self.lanes == 16 else WeightMicro

    def _extends(self, rhs: DType) -> bool:
        return rhs == i8 and self.family.startswith("avx") and not self.digits_for(rhs)


AVX512 = Small("avx512", 16, 16, ((8, 2), (4, 4), (1, 4)))
# A single row reads two panels side by side: two streams bring more from memory. `benchmarks/weight_only.py --rows 1` gave 85 and 73 % of a
# plain loop's speed for int8 and int4 on Emerald Rapids, and 73 and 52 % in the run before, with one panel.
AVX512_VNNI = Small("avx512vnni", 32, 16, ((8, 1), (4, 1), (2, 1), (1, 2)), digits=VnniDigits)
AVX2 = Small("avx2", 16, 8, ((6, 1), (4, 1), (2, 2), (1, 2)), digits=MaddubsDigits, digit_tiles=((1, 2),))
AVX_VNNI = Small("avxvnni", 32, 8, ((1, 1),), digits=VnniDigits)
NEON = Small("neon", 12, 4, ((4, 1), (1, 2)))
SDOT = Small("sdot", 12, 4, ((2, 1), (1, 2)), digits=SdotDigits)
PLAIN = Small("plain", 8, 4, ((4, 1),), False)


def family(inner: MicroKernel | None, small: Small, lhs: DType, rhs: DType, group: int, k: int) -> tuple[MicroKernel, ...]:
    """A family: `inner`, a tall tile of floats on panels that make up those of the small ones, and the small tiles."""
    few = small.micros(lhs, rhs, group, k)
    if inner is None:
        return few
    tag = "digits" if small.digits_for(rhs) else ""
    panels = inner.nr // small.nr
    return (Unpacked(inner.mr, panels, few[0].packing, lhs, rhs, inner, small.source(lhs, rhs, group, k), tag), *few)
