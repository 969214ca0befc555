"""Rows of the lhs that lie side by side, as those of a transposed matrix do: squares of them are transposed in registers."""

from __future__ import annotations

from dataclasses import dataclass

from ..cpu_codegen.access import can_mask
from ..cpu_codegen.builder import I32, Function, Ty, Val, const, i64
from ..cpu_codegen.sweep import tail_mask
from ..cpu_codegen.transpose import transposed
from ..platforms.target import Target
from .copies import memory_type, padded
from .micro import MicroKernel

_UNIT = 32  # bits of what is transposed: one element, or neighbouring k of a row


def transposes(target: Target, micro: MicroKernel) -> bool:
    """Whether rows that lie side by side are transposed in registers: of floats, since the code for bytes is long and they hardly occur."""
    layout, whole_step = micro.layout, target.vector_bits // micro.lhs.bits == micro.step_k
    fits = whole_step if layout.group else layout.step_bytes > 0 or micro.lhs.bits * micro.step_k <= _UNIT
    return micro.lhs.is_float and fits and can_mask(target, micro.lhs.bits)


def emit_across(fn: Function, target: Target, micro: MicroKernel, pitch: int) -> None:
    """Rows that lie side by side, by squares of as many units of 32 bits as a vector has. What is beyond the last valid row is zeros."""
    source, _, col_bytes, valid, total, count, scratch, *powers = fn.args
    element, size = memory_type(micro.lhs), micro.layout.element.bits // 8
    k = _square_k(target, micro)
    row_pitch, square_pitch = (k * size, micro.mr * k * size) if micro.layout.group else (pitch, k * size)
    tile_pitch = fn.mul(padded(fn, count, micro.step_k), i64(micro.mr * size)) if micro.layout.group else i64(micro.mr * pitch)

    def tile(first: Val, at: list[Val]) -> list[Val]:
        rows = _Tile(fn, target, micro, fn.gep(source, first, element), fn.sub(valid, first), col_bytes)
        if micro.layout.step_bytes:
            rows.steps(at[0], pitch, count, powers)
        else:
            rows.squares(i64(0), count, at[0], row_pitch, square_pitch)
        return [fn.gep(at[0], tile_pitch)]

    fn.loop(i64(0), total, micro.mr, [scratch], tile)


def _square_k(target: Target, micro: MicroKernel) -> int:
    """How many k a square has."""
    return target.lanes(_UNIT) * (_UNIT // micro.lhs.bits)


@dataclass(frozen=True)
class _Tile:
    """The rows of a tile from `source` on, of which `valid` or more are there. col_bytes: from k to k."""

    fn: Function
    target: Target
    micro: MicroKernel
    source: Val
    valid: Val
    col_bytes: Val

    def squares(self, k: Val, count: Val, to: Val, row_pitch: int, square_pitch: int) -> None:
        """So many k from k on, and zeros up to a whole step."""
        fn, micro, element, lanes = self.fn, self.micro, memory_type(self.micro.lhs), self.target.lanes(_UNIT)
        start = fn.gep(self.source, fn.mul(k, self.col_bytes))

        def rows(above: Val, height: int) -> list[Val]:
            mask = tail_mask(fn, fn.smin(fn.sub(self.valid, above), i64(height)), lanes)
            square = _Square(fn, micro, element.vec(lanes), height, mask, row_pitch)
            square.along(fn.gep(start, above, element), self.col_bytes, fn.gep(to, above, scale=row_pitch), square_pitch, count)
            return []

        whole = micro.mr // lanes * lanes
        if whole:
            fn.loop(i64(0), i64(whole), lanes, [], lambda above, _: rows(above, lanes))
        if whole < micro.mr:
            rows(i64(whole), micro.mr - whole)

    def steps(self, to: Val, pitch: int, count: Val, powers: list[Val]) -> None:
        """A step after the other, which is written out as numbers before the micro-kernel packs it, row by row."""
        fn, micro = self.fn, self.micro
        size, square, element = micro.step_k, _square_k(self.target, micro), micro.layout.element
        width = -(-size // square) * square
        line = width * element.bits // 8
        numbers = fn.alloca(micro.mr * line)

        def step(k: Val, at: list[Val]) -> list[Val]:
            def zeros(n: Val, _: list[Val]) -> list[Val]:
                fn.store(const(element.vec(square), 0), fn.gep(numbers, n, element))
                return []

            def row(r: Val, _: list[Val]) -> list[Val]:
                given = fn.gep(powers[0], k, element) if powers else None
                micro.pack_step(fn, fn.gep(numbers, r, scale=line), fn.gep(at[0], r, scale=pitch), given)
                return []

            left = fn.smin(fn.sub(count, k), i64(size))
            fn.branch(fn.icmp("slt", left, i64(size)), lambda: fn.loop(i64(0), i64(micro.mr * width), square, [], zeros))
            self.squares(k, left, numbers, line, square * element.bits // 8)
            fn.loop(i64(0), i64(micro.mr), 1, [], row)
            return [fn.gep(at[0], i64(micro.layout.step_bytes))]

        fn.loop(i64(0), count, size, [to], step)


@dataclass(frozen=True)
class _Square:
    """Transposes `height` rows, at most as many as there are lanes in `ty`, their elements side by side; mask: those that are there."""

    fn: Function
    micro: MicroKernel
    ty: Ty
    height: int
    mask: Val
    pitch: int

    def along(self, source: Val, col_bytes: Val, target: Val, square_pitch: int, count: Val) -> None:
        """All `count` k of the rows at `source`, and zeros up to a whole step."""
        fn, unit = self.fn, _UNIT // self.ty.bits
        size = self.ty.lanes * unit
        left = fn.urem(count, i64(size))

        def square(_: Val, at: list[Val]) -> list[Val]:
            pointers = self._pointers(at[0], [col_bytes] * size)
            for row, value in enumerate(self._rows(pointers)):
                fn.store(value, fn.gep(at[1], i64(row * self.pitch)))
            return [pointers[-1], fn.gep(at[1], i64(square_pitch))]

        def rest(at: Val, to: Val) -> list[Val]:
            # The last k again and again: it may be read, and its place is filled with zeros.
            steps = [fn.select(fn.icmp("slt", i64(k), left), col_bytes, i64(0)) for k in range(1, size + 1)]
            there, padding = (tail_mask(fn, end, size) for end in (left, padded(fn, left, self.micro.step_k)))
            for row, value in enumerate(self._rows(self._pointers(at, steps))):
                fn.masked_store(fn.select(there, value, const(value.ty, 0)), fn.gep(to, i64(row * self.pitch)), padding)
            return []

        end = fn.loop(i64(0), fn.sub(count, left), size, [source, target], square)
        fn.branch(fn.icmp("sgt", left, i64(0)), lambda: rest(*end))

    def _pointers(self, start: Val, steps: list[Val]) -> list[Val]:
        """Where each k of a square is, and what follows it."""
        found = [start]
        for step in steps:
            found.append(self.fn.gep(found[-1], step))
        return found

    def _rows(self, pointers: list[Val]) -> list[Val]:
        fn, unit = self.fn, _UNIT // self.ty.bits
        columns = [self._units(pointers[k : k + unit]) for k in range(0, unit * self.ty.lanes, unit)]
        row = self.ty.vec(self.ty.lanes * unit)
        return [self.micro.convert(fn, fn.convert("bitcast", units, row)) for units in transposed(fn, columns)[: self.height]]

    def _units(self, pointers: list[Val]) -> Val:
        """The neighbouring k at these places of every row."""
        fn, numbers, units = self.fn, Ty(f"i{self.ty.bits}", self.ty.lanes), I32.vec(self.ty.lanes)
        found = const(units, 0)
        for k, pointer in enumerate(pointers):
            column = fn.masked_load(numbers, pointer, self.mask, const(numbers, 0))
            wide = column if numbers == units else fn.convert("zext", column, units)
            found = fn.or_(found, fn.shl(wide, const(units, k * self.ty.bits))) if k else wide
        return found
