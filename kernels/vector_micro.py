"""Tiles whose accumulators are vectors of columns: what the vector instruction sets have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ..cpu_codegen.builder import Function, Ty, Val, const, i64
from ..cpu_codegen.intrinsics import prefetch
from .micro import MicroKernel, Start, Tile, offset

_LINE = 64
# Of L1 of x86 processors, at least; no others fetch here. Rows of a rhs that is read where it lies may all share the same sets, which hold
# no more of them: with 32 rows ahead 1 to 4 rows times 1024 x 4096 take 1.4 to 1.7 times as long (those of `benchmarks/operations.py --only
# products`, Emerald Rapids, both ways run in turn).
_WAYS = 8


@dataclass(frozen=True)
class VectorMicro(MicroKernel):
    """Accumulators are vectors of `lanes` columns of one row; a step multiplies every row's operand with every vector of the panels.

    A class gives the three operations of its instruction set: `load_a`, `load_b` and `product`; `parts` is how often
    they are done in a step.
    """

    lanes: int = 16

    parts = 1
    # How many steps ahead the panels are prefetched into L1, where a panel seldom is; `benchmarks/products.py` shows what another number
    # costs.
    ahead = 8

    def resized(self, mr: int, panels: int) -> MicroKernel | None:
        return replace(self, mr=mr, panels=panels)

    @property
    def vectors(self) -> int:
        """Vectors in a row of the tile."""
        return self.nr // self.lanes

    @abstractmethod
    def load_a(self, fn: Function, tile: Tile, index: Val, part: int) -> Iterable[Val]:
        """Gives the operand of each row for a part of step `index`, one when it is asked for where each is loaded by itself: LLVM keeps
        about to the order of loads and products, and with all loads first it holds more rows than there are registers for."""

    @abstractmethod
    def load_b(self, fn: Function, group: Val, vector: int, part: int) -> Val:
        """Returns the operand of vector number `vector` of a panel, whose kr groups of this step are at `group`."""

    def operand(self, fn: Function, words: Val) -> Val:
        """A vector of words of 32 bits, which hold as many elements of rows as go there, as `product` takes them."""
        return words

    @abstractmethod
    def product(self, fn: Function, acc: Val, a: Val, b: Val) -> Val:
        """Returns acc plus the products."""

    def start(self, fn: Function, tile: Tile, kind: Start) -> list[Val]:
        ty = self.acc_ty.vec(self.lanes)
        if kind is Start.ZERO:
            return [const(ty, 0)] * (self.mr * self.vectors)
        if kind is Start.OUT:
            return [fn.load(ty, self.place(fn, tile, r, v)) for r in range(self.mr) for v in range(self.vectors)]
        return self.scaled_sums(fn, tile) * self.mr

    def scaled_sums(self, fn: Function, tile: Tile) -> list[Val]:
        """Returns the first accumulators of one row."""
        ty = self.acc_ty.vec(self.lanes)
        each = self.packing.nr // self.lanes
        sums = [fn.load(ty, offset(fn, pointer, 4 * self.lanes * v)) for pointer in tile.sums for v in range(each)]
        return [fn.mul(value, const(ty, self.sums_factor)) for value in sums]

    def place(self, fn: Function, tile: Tile, row: int, vector: int) -> Val:
        return offset(fn, tile.out, self.out_bytes(tile.out_pitch, row, vector * self.lanes))

    def step(self, fn: Function, tile: Tile, index: Val, accumulators: list[Val]) -> list[Val]:
        groups = [fn.gep(panel, index, scale=self.panel_step) for panel in tile.b]
        values = self.multiplied(fn, tile, index, groups, accumulators)
        ahead = min(self.ahead, _WAYS) if self.packing.pitch else self.ahead
        for group in groups if ahead else ():
            for line in range(0, self.step_read, _LINE):
                prefetch(fn, offset(fn, group, ahead * self.panel_step + line))
        share = self.panel_step // max(1, tile.shares)
        # Tiles of one or two rows read as fast as memory gives.
        for panel in tile.b if self.ahead and tile.shares and self.mr >= 3 else ():
            for line in range(0, min(share, self.step_read), _LINE):
                prefetch(fn, offset(fn, fn.gep(fn.gep(panel, tile.next), index, scale=share), line), 2)
        return values

    def multiplied(self, fn: Function, tile: Tile, index: Val, groups: list[Val], accumulators: list[Val]) -> list[Val]:
        """The accumulators after the products of step `index`, whose part of each panel is at `groups`."""
        values = list(accumulators)
        for part in range(self.parts):
            columns = self.columns(fn, groups, part)
            for r, a in enumerate(self.load_a(fn, tile, index, part)):
                for v, b in enumerate(columns):
                    values[r * self.vectors + v] = self.product(fn, values[r * self.vectors + v], a, b)
        return values

    def columns(self, fn: Function, groups: list[Val], part: int) -> list[Val]:
        """The operands of all vectors of the panels for a part of a step."""
        return [self.load_b(fn, group, v, part) for group in groups for v in range(self.packing.nr // self.lanes)]

    def finish(self, fn: Function, tile: Tile, accumulators: list[Val]) -> None:
        for position, value in enumerate(accumulators):
            fn.store(value, self.place(fn, tile, *divmod(position, self.vectors)))

    def row_scalars(self, fn: Function, tile: Tile, index: Val, ty: Ty, part: int) -> Iterator[Val]:
        """Gives one scalar of each row at step `index`, for lhs in rows; a step has `parts` of them in memory."""
        base = fn.gep(tile.a, index, scale=ty.bits // 8 * self.parts)
        at = [fn.gep(base, fn.add(fn.mul(i64(r), tile.a_pitch), i64(part * ty.bits // 8))) for r in range(self.mr)]
        return (self._first(fn, pointer, ty, tile.left) if tile.left else fn.load(ty, pointer) for pointer in at)

    def _first(self, fn: Function, pointer: Val, ty: Ty, count: int) -> Val:
        """`count` elements of a scalar that holds more, the others zero; nothing beyond them is read."""
        element = self.layout.element
        parts = [fn.convert("zext", fn.load(element, fn.gep(pointer, i64(n), element)), ty) for n in range(count)]
        total = parts[0]
        for n, value in enumerate(parts[1:], 1):
            total = fn.or_(total, fn.shl(value, const(ty, n * element.bits)))
        return total
