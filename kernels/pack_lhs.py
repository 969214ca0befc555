"""Generated functions that copy a block of rows of the lhs into scratch memory, in the form that a micro-kernel reads.

    void name(ptr source, i64 row_bytes, i64 col_bytes, i64 valid, i64 total, i64 count, ptr target[, ptr powers])

`source` points to the first element of the block, `count` is the number of k, `total` a multiple of mr. Rows from `valid` on repeat the
last valid one, or are zeros: whatever a tile computes beyond the end is thrown away, but nothing beyond the end is read. The scratch is
padded with zeros to whole steps of k. powers: from the first k on, for a balanced weight (`Packing.balanced`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import gcd

from ..cpu_codegen.builder import F32, I64, PTR, VOID, Function, Module, Ty, Val, const, i64
from ..cpu_codegen.intrinsics import prefetch
from ..cpu_codegen.sweep import tail_mask
from ..cpu_codegen.transpose import transposed
from ..platforms.target import Target
from .copies import Convert, copy_elements, copy_known, copy_run, fill_steps, memory_type, padded, widths
from .micro import MicroKernel
from .pack_across import emit_across, transposes

# How many rows ahead the lhs is fetched into L1 while it is packed. It counts for few columns of a long k (`benchmarks/vendors.py --shapes
# 512x128x4096`), where packing is a good part of the product; one or two rows come too late.
_ROWS_AHEAD = 4
_SQUARE = 128  # bits of a group that vectors transpose; wider ones are copied as they are


def emit_pack_lhs(
    module: Module, target: Target, micro: MicroKernel, pitch: int, contiguous: bool, plain: bool = False, across: bool = False
) -> str:
    """Adds the function and returns its name. pitch: bytes from row to row of the scratch. contiguous: col_bytes is the element size.
    plain: rows are not padded, since others begin where they end. across: row_bytes is the element size."""
    grouped, steps = micro.layout.group, micro.layout.step_bytes
    across = across and not contiguous and transposes(target, micro)
    shape = f"groups{micro.mr}x{grouped}x{micro.step_k}" if grouped else f"rows{pitch}x{micro.step_k}" + f".{micro.rhs}" * bool(steps)
    way = "" if contiguous else f".across{micro.mr}" if across else ".strided"
    name = f"pack_lhs.{micro.isa}.{micro.lhs}.{shape}{way}" + ".plain" * plain
    if name not in module.functions:
        fn = Function(module, name, VOID, [PTR, I64, I64, I64, I64, I64, PTR, *[PTR] * micro.packing.balanced], internal=True)
        if across:
            emit_across(fn, target, micro, pitch)
        elif grouped * micro.layout.element.bits > _SQUARE:
            _steps(fn, target, micro, contiguous)
        elif grouped:
            _groups(fn, micro, contiguous)
        else:
            _rows(fn, target, micro, pitch, contiguous, plain)
        fn.ret()
        fn.finish()
    return name


def _rows(fn: Function, target: Target, micro: MicroKernel, pitch: int, contiguous: bool, plain: bool) -> None:
    source, row_bytes, col_bytes, valid, total, count, scratch, *powers = fn.args
    lanes = widths(target, max(micro.layout.element.bits, micro.lhs.bits))
    last, pitch_of_k = fn.sub(valid, i64(1)), None if contiguous else col_bytes
    steps = micro.layout.step_bytes
    elements = fn.alloca(micro.step_k * micro.layout.element.bits // 8) if steps else scratch

    def row(index: Val, _: list[Val]) -> list[Val]:
        start = fn.gep(source, fn.mul(fn.smin(index, last), row_bytes))
        to = fn.gep(scratch, index, scale=pitch)

        def step(k: Val, at: list[Val]) -> list[Val]:
            first = fn.gep(start, k, memory_type(micro.lhs)) if contiguous else fn.gep(start, fn.mul(k, col_bytes))
            copy_elements(fn, micro, first, elements, fn.smin(fn.sub(count, k), i64(micro.step_k)), lanes, pitch_of_k)
            micro.pack_step(fn, elements, at[0], fn.gep(powers[0], k, F32) if powers else None)
            return [fn.gep(at[0], i64(steps))]

        if steps:
            fn.loop(i64(0), count, micro.step_k, [to], step)
        else:
            ahead = fn.mul(row_bytes, i64(_ROWS_AHEAD))
            copy_run(fn, memory_type(micro.lhs), micro.convert, start, to, count, micro.layout.element, lanes, pitch_of_k, ahead)
            if not plain:
                fill_steps(fn, micro, to, count)
        return []

    fn.loop(i64(0), total, 1, [], row)


def _steps(fn: Function, target: Target, micro: MicroKernel, contiguous: bool) -> None:
    """[k / group][mr][group] where a group is all that a row has in a step, step by step: lines are written one after the other, and those
    of a row lie in few sets of the cache."""
    source, row_bytes, col_bytes, valid, total, count, scratch = fn.args
    element, lanes, size = memory_type(micro.lhs), widths(target, micro.layout.element.bits), micro.step_k
    step_bytes = size * micro.layout.element.bits // 8
    last, pitch_of_k = fn.sub(valid, i64(1)), None if contiguous else col_bytes
    whole = fn.mul(fn.udiv(count, i64(size)), i64(size)) if contiguous else i64(0)

    following = fn.mul(row_bytes, i64(micro.mr))

    def copy_whole(start: Val, to: Val, k: Val) -> None:
        at = fn.gep(start, k, element)
        prefetch(fn, fn.gep(at, following), 2)  # so many rows are more streams than processors follow by themselves
        copy_known(fn, element, micro.convert, at, to, size, micro.layout.element, lanes)

    def copy_rest(start: Val, to: Val, k: Val) -> None:
        left = fn.smin(fn.sub(count, k), i64(size))
        if contiguous and lanes == (size,):  # what is beyond the mask is the zeros that fill the step
            mask, ty = tail_mask(fn, left, size), element.vec(size)
            fn.store(micro.convert(fn, fn.masked_load(ty, fn.gep(start, k, element), mask, const(ty, 0))), to)
        else:
            first = fn.gep(start, k, element) if contiguous else fn.gep(start, fn.mul(k, col_bytes))
            copy_elements(fn, micro, first, to, left, lanes, pitch_of_k)

    def tile(first: Val, at: list[Val]) -> list[Val]:
        def step(k: Val, to: list[Val], copy: Callable[[Val, Val, Val], None]) -> list[Val]:
            def row(r: Val, _: list[Val]) -> list[Val]:
                start = fn.gep(source, fn.mul(fn.smin(fn.add(first, r), last), row_bytes))
                copy(start, fn.gep(to[0], r, scale=step_bytes), k)
                return []

            fn.loop(i64(0), i64(micro.mr), 1, [], row)
            return [fn.gep(to[0], i64(micro.mr * step_bytes))]

        at = fn.loop(i64(0), whole, size, at, partial(step, copy=copy_whole))
        return fn.loop(whole, count, size, at, partial(step, copy=copy_rest))

    fn.loop(i64(0), total, micro.mr, [scratch], tile)


def _groups(fn: Function, micro: MicroKernel, contiguous: bool) -> None:
    """[k / group][mr][group] for each mr rows: whole 16-byte squares by transposition in registers, the rest element by element."""
    source, row_bytes, col_bytes, valid, total, count, scratch = fn.args
    block_bytes = fn.mul(padded(fn, count, micro.step_k), i64(micro.mr * micro.layout.element.bits // 8))
    last = fn.sub(valid, i64(1))

    def block(first: Val, at: list[Val]) -> list[Val]:
        rows = [fn.gep(source, fn.mul(fn.smin(fn.add(first, i64(r)), last), row_bytes)) for r in range(micro.mr)]
        groups = GroupCopy(fn, memory_type(micro.lhs), micro.layout.element, micro.layout.group, micro.mr, micro.convert)
        done = groups.squares(rows, at[0], count) if contiguous else i64(0)
        groups.rest(rows, at[0], done, count, padded(fn, count, micro.step_k), None if contiguous else col_bytes)
        return [fn.gep(at[0], block_bytes)]

    fn.loop(i64(0), total, micro.mr, [scratch], block)


class GroupCopy:
    """Copies `rows` rows into [k / group][rows][group], for both operands; `convert` turns elements of type `source` into `element`."""

    def __init__(self, fn: Function, source: Ty, element: Ty, group: int, rows: int, convert: Convert) -> None:
        self.fn, self.source, self.element, self.group, self.rows, self.convert = fn, source, element, group, rows, convert
        self.unit = Ty(f"i{group * element.bits}")
        self.group_bytes = rows * group * element.bits // 8

    def squares(self, rows: list[Val], target: Val, count: Val, bits: int = _SQUARE) -> Val:
        """Copies whole squares of so many rows and groups as vectors of `bits` bits have groups, then smaller ones; returns how many k are
        done."""
        done: Val = i64(0)
        for side in dict.fromkeys(gcd(width // self.unit.bits, self.rows) for width in (bits, _SQUARE)):
            done = self._squares(rows, target, done, count, side)
        return done

    def _squares(self, rows: list[Val], target: Val, done: Val, count: Val, side: int) -> Val:
        fn, size = self.fn, self.group * side
        stop = fn.sub(count, fn.urem(fn.sub(count, done), i64(size)))

        def square(index: Val, _: list[Val]) -> list[Val]:
            to = fn.gep(target, fn.udiv(index, i64(self.group)), scale=self.group_bytes)
            for first in range(0, self.rows, side):
                lines = [fn.load(self.source.vec(size), fn.gep(row, index, self.source)) for row in rows[first : first + side]]
                units = [fn.convert("bitcast", self.convert(fn, line), self.unit.vec(side)) for line in lines]
                for k, value in enumerate(transposed(fn, units)):
                    fn.store(value, fn.gep(to, i64(k * self.group_bytes + first * self.unit.bits // 8)), 1)
            return []

        fn.loop(done, stop, size, [], square)
        return stop

    def rest(self, rows: list[Val], target: Val, done: Val, count: Val, end: Val, col_bytes: Val | None) -> None:
        """Copies k from `done` to `count` one by one, then zeros up to `end`. col_bytes None: contiguous."""
        fn = self.fn

        def place(index: Val, row: int) -> Val:
            group = fn.gep(target, fn.udiv(index, i64(self.group)), scale=self.group_bytes)
            return fn.gep(fn.gep(group, i64(row * self.group * self.element.bits // 8)), fn.urem(index, i64(self.group)), self.element)

        def copy(index: Val, _: list[Val]) -> list[Val]:
            for r, row in enumerate(rows):
                at = fn.gep(row, index, self.source) if col_bytes is None else fn.gep(row, fn.mul(index, col_bytes))
                fn.store(self.convert(fn, fn.load(self.source, at)), place(index, r))
            return []

        def zero(index: Val, _: list[Val]) -> list[Val]:
            for r in range(self.rows):
                fn.store(const(self.element, 0), place(index, r))
            return []

        fn.loop(done, count, 1, [], copy)
        fn.loop(count, end, 1, [], zero)
