"""Micro-kernels of floats times integer weights that widen each weight in registers: i8, and i4 with scales of groups along k."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..cpu_codegen.builder import F32, I8, I32, I64, PTR, VOID, Function, Module, Val, const, const_vec, i64
from ..cpu_codegen.convert import narrow, widen
from ..cpu_codegen.intrinsics import prefetch
from ..graph.types import DType, bf16, f32
from ..platforms.target import Target
from .micro import Lhs, MicroKernel, Tile, offset
from .pack_rhs import interleaved
from .spec import Packing
from .vector_micro import VectorMicro

WORD = 32


@dataclass(frozen=True)
class WeightMicro(VectorMicro):
    """A step reads one 32-bit word of each column: 4 or 8 neighbours along k, which shifts take apart.

    family: the instruction set, first part of `isa`. fused: whether it has a fused multiply-add.
    """

    family: str = "plain"
    fused: bool = True

    field = "shift"

    def resized(self, mr: int, panels: int) -> MicroKernel | None:
        return None  # panels are as wide as their tile

    @property
    def isa(self) -> str:  # type: ignore[override]
        return self.family + self.field

    @property
    def layout(self) -> Lhs:
        return Lhs(F32, direct=self.lhs == f32)

    @property
    def parts(self) -> int:  # type: ignore[override]
        return WORD // self.rhs.bits

    @property
    def step_k(self) -> int:
        return self.parts

    @property
    def panel_cost(self) -> float:
        return 3.0

    def convert(self, fn: Function, value: Val) -> Val:
        return widen(fn, value, bf16) if self.lhs == bf16 else value

    def load_a(self, fn: Function, tile: Tile, index: Val, part: int) -> Iterable[Val]:
        return (fn.splat(value, self.lanes) for value in self.row_scalars(fn, tile, index, F32, part))

    def load_b(self, fn: Function, group: Val, vector: int, part: int) -> Val:
        """Integers of part `part` of the words at `group`, as floats."""
        word = fn.load(I32.vec(self.lanes), offset(fn, group, WORD // 8 * self.lanes * vector))
        above = WORD - self.rhs.bits * (part + 1)
        low = fn.ashr(fn.shl(word, const(word.ty, above)) if above else word, const(word.ty, WORD - self.rhs.bits))
        return fn.convert("sitofp", low, F32.vec(self.lanes))

    def product(self, fn: Function, acc: Val, a: Val, b: Val) -> Val:
        return fn.fma(a, b, acc) if self.fused else fn.add(acc, fn.mul(a, b))

    # -- a step -------------------------------------------------------------------------------------------------
    @property
    def _each(self) -> int:
        """Vectors of a panel."""
        return self.packing.nr // self.lanes

    def _words(self, fn: Function, panel: Val, index: Val) -> tuple[Val, list[Val]]:
        """The words of step `index` of a panel, and the scales of its vectors, if it has any."""
        pitch = self.packing.nr * WORD // 8
        if not self.packing.group:
            return fn.gep(panel, index, scale=pitch), []
        number = fn.udiv(index, const(I64, self.packing.group // self.step_k))
        unit = fn.gep(panel, number, scale=self.packing.unit_bytes(self.rhs))
        scales = [fn.load(F32.vec(self.lanes), offset(fn, unit, 4 * self.lanes * v)) for v in range(self._each)]
        within = fn.urem(index, const(I64, self.packing.group // self.step_k))
        return fn.gep(offset(fn, unit, 4 * self.packing.nr), within, scale=pitch), scales

    def step(self, fn: Function, tile: Tile, index: Val, accumulators: list[Val]) -> list[Val]:
        words, scales = zip(*(self._words(fn, panel, index) for panel in tile.b))
        scale = [value for each in scales for value in each]
        # One row: scaling the sum of a step is cheaper than scaling its weights. More rows share the scaled weights.
        late = bool(scale) and self.mr == 1
        values = [const(F32.vec(self.lanes), 0)] * self.vectors if late else list(accumulators)
        for part in range(self.parts):
            columns = [self.load_b(fn, at, v, part) for at in words for v in range(self._each)]
            if scale and not late:
                columns = [fn.mul(b, s) for b, s in zip(columns, scale, strict=True)]
            for r, a in enumerate(self.load_a(fn, tile, index, part)):
                for v, b in enumerate(columns):
                    values[r * self.vectors + v] = self.product(fn, values[r * self.vectors + v], a, b)
        for at in words if self.ahead else ():
            prefetch(fn, offset(fn, at, self.ahead * self.packing.nr * WORD // 8))
        return [self.product(fn, acc, total, s) for acc, total, s in zip(accumulators, values, scale, strict=True)] if late else values

    # -- for many rows ------------------------------------------------------------------------------------------
    def emit_floats(self, module: Module, target: Target, packing: Packing, dtype: DType) -> str:
        """Adds the function of `MicroKernel.emit_unpack`, which writes a panel out as f32 or bf16 in another packing; returns the name."""
        name = f"unpack.{self.isa}.{self.rhs}x{self.packing.group}.{dtype}x{packing.nr}x{packing.kr}"
        if name in module.functions:
            return name
        fn = Function(module, name, VOID, [PTR, PTR, I64, I64], internal=True)
        panel, to, apart, steps = fn.args

        def step(index: Val, _: list[Val]) -> list[Val]:
            words, scales = self._words(fn, panel, index)
            row = fn.gep(to, index, scale=self.step_k * packing.nr * dtype.bytes)
            for v in range(self._each):
                columns = [self.load_b(fn, words, v, part) for part in range(self.parts)]
                columns = [fn.mul(b, scales[v]) for b in columns] if scales else columns
                columns = [narrow(fn, target, b, bf16) for b in columns] if dtype == bf16 else columns
                number, column = divmod(v * self.lanes, packing.nr)
                start = fn.gep(row, fn.mul(apart, i64(number)))
                for first in range(0, self.parts, packing.kr):
                    place = (first * packing.nr + column * packing.kr) * dtype.bytes
                    fn.store(interleaved(fn, columns[first : first + packing.kr]), offset(fn, start, place))
            return []

        fn.loop(const(I64, 0), steps, 1, [], step)
        fn.ret()
        fn.finish()
        return name


@dataclass(frozen=True)
class ExtendMicro(WeightMicro):
    """i8 that one instruction loads and widens to 32 bits: x86-64. Rows of k lie one after the other."""

    field = "extend"
    ahead = 32  # panels of a single row come from memory: as far as makes `benchmarks/weight_only.py` faster

    def load_b(self, fn: Function, group: Val, vector: int, part: int) -> Val:
        narrow_ = fn.load(I8.vec(self.lanes), offset(fn, group, part * self.packing.nr + vector * self.lanes))
        return fn.convert("sitofp", fn.convert("sext", narrow_, I32.vec(self.lanes)), F32.vec(self.lanes))


@dataclass(frozen=True)
class LookupMicro(WeightMicro):
    """i4 as indices into a register of 16 floats: VPERMPS sees the lowest 4 bits of a lane, which needs no mask and no conversion."""

    field = "lookup"

    def load_b(self, fn: Function, group: Val, vector: int, part: int) -> Val:
        word = fn.load(I32.vec(self.lanes), offset(fn, group, WORD // 8 * self.lanes * vector))
        index = fn.lshr(word, const(word.ty, 4 * part)) if part else word
        numbers = const_vec(F32.vec(self.lanes), [n if n < 8 else n - 16 for n in range(16)])
        return fn.call("llvm.x86.avx512.permvar.sf.512", numbers.ty, [numbers, index])
