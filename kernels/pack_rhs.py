"""The generated kernel that packs a dynamic rhs, in the layout of `Packing`, from any strides."""

from __future__ import annotations

from collections.abc import Sequence

from ..cpu_codegen.builder import I8, I32, I64, PTR, VOID, Function, Module, Val, const, i64
from ..cpu_codegen.contract import KernelCode
from ..cpu_codegen.slots import Slots
from ..graph.types import i8
from .indexing import batch_offset
from .pack_lhs import GroupCopy, memory_type
from .spec import GemmSpec, Packing


def emit_pack_rhs(module: Module, spec: GemmSpec, packing: Packing, name: str) -> KernelCode:
    """Adds the kernel; its domain is the panels of all matrices of the batch, its operands are rhs and packed.

    Columns of the last panel that lie beyond n repeat column n - 1; what they give is thrown away.
    """
    assert spec.rhs_strides is not None
    fn = Function(module, name, VOID, [PTR, I64, I64])
    slots = Slots(fn)
    panels = slots.dim(packing.panels(spec.n))
    size = slots.dim(packing.bytes(spec.n, spec.k, spec.rhs))
    panel = _Panel(fn, slots, spec, packing)

    def unit(index: Val, _: list[Val]) -> list[Val]:
        b, p = fn.udiv(index, panels), fn.urem(index, panels)
        assert spec.rhs_strides is not None
        first = fn.gep(slots.buffer(0), fn.mul(batch_offset(fn, slots, spec.rhs_strides.batch, b), i64(spec.rhs.bytes)))
        panel.copy(first, fn.gep(slots.buffer(1), fn.mul(b, size)), p)
        return []

    fn.loop(fn.args[1], fn.args[2], 1, [], unit)
    fn.ret()
    fn.finish()
    return KernelCode(name, slots.order, spec.batch * packing.panels(spec.n), 1, spec.batch * spec.n * spec.k)


class _Panel:
    """Packs one panel."""

    def __init__(self, fn: Function, slots: Slots, spec: GemmSpec, packing: Packing) -> None:
        assert spec.rhs_strides is not None
        self.fn, self.slots, self.spec, self.packing, self.strides = fn, slots, spec, packing, spec.rhs_strides
        self.element = memory_type(spec.rhs)
        self.n, self.k = slots.dim(spec.n), slots.dim(spec.k)
        self.row_bytes = slots.dim(self.strides.row * spec.rhs.bytes)
        self.col_bytes = slots.dim(self.strides.col * spec.rhs.bytes)
        self.depth = slots.dim(packing.k_padded(spec.k))
        self.panel_bytes = slots.dim(packing.panel_bytes(spec.k, spec.rhs))
        self.sums_offset = slots.dim(packing.sums_offset(spec.n, spec.k, spec.rhs))

    def copy(self, matrix: Val, packed: Val, p: Val) -> None:
        """matrix: element (0, 0); packed: panel 0."""
        fn, nr = self.fn, self.packing.nr
        column = fn.mul(p, i64(nr))
        start = fn.gep(matrix, fn.mul(column, self.row_bytes))
        last = fn.sub(fn.smin(fn.sub(self.n, column), i64(nr)), i64(1))
        rows = [fn.gep(start, fn.mul(fn.smin(i64(r), last), self.row_bytes)) for r in range(nr)]
        target = fn.gep(packed, fn.mul(p, self.panel_bytes))
        groups = GroupCopy(fn, self.element, self.element, self.packing.kr, nr, lambda _, value: value)
        done: Val = i64(0)
        col_bytes: Val | None = self.col_bytes
        if self.strides.col == 1:
            done, col_bytes = groups.squares(rows, target, self.k), None
        elif self.strides.row == 1:
            full = fn.icmp("eq", last, i64(nr - 1))
            done = fn.branch(full, lambda: [self._columns(start, target)], lambda: [i64(0)])[0]
        groups.rest(rows, target, done, self.k, self.depth, col_bytes)
        if self.spec.rhs == i8:
            self._sums(target, fn.gep(fn.gep(packed, self.sums_offset), column, I32))

    def _columns(self, start: Val, target: Val) -> Val:
        """Copies whole groups when the columns lie side by side; returns how many k are done."""
        fn, nr, kr = self.fn, self.packing.nr, self.packing.kr
        stop = fn.mul(fn.udiv(self.k, i64(kr)), i64(kr))

        def group(k: Val, _: list[Val]) -> list[Val]:
            lines = [fn.load(self.element.vec(nr), fn.gep(start, fn.mul(fn.add(k, i64(j)), self.col_bytes))) for j in range(kr)]
            fn.store(interleaved(fn, lines), fn.gep(target, k, scale=nr * self.spec.rhs.bytes))
            return []

        fn.loop(i64(0), stop, kr, [], group)
        return stop

    def _sums(self, target: Val, sums: Val) -> None:
        """Stores the sum of each column of a packed panel."""
        fn, nr, kr = self.fn, self.packing.nr, self.packing.kr

        def group(k: Val, totals: list[Val]) -> list[Val]:
            values = fn.load(I8.vec(nr * kr), fn.gep(target, k, scale=nr))
            total = totals[0]
            for j in range(kr):
                part = fn.shuffle(values, values, [c * kr + j for c in range(nr)])
                total = fn.add(total, fn.convert("sext", part, I32.vec(nr)))
            return [total]

        total = fn.loop(i64(0), self.depth, kr, [const(I32.vec(nr), 0)], group)[0]
        fn.store(total, sums)


def interleaved(fn: Function, lines: Sequence[Val]) -> Val:
    """Elements 0 of all lines, then elements 1, ...; the number of lines is a power of two."""
    if len(lines) == 1:
        return lines[0]
    even, odd = interleaved(fn, lines[0::2]), interleaved(fn, lines[1::2])
    count = even.ty.lanes
    return fn.shuffle(even, odd, [lane for i in range(count) for lane in (i, count + i)])
