"""The generated kernel that packs a dynamic rhs, in the layout of `Packing`, from any strides: a loop over panels, which calls a function
that all products of one layout share."""

from __future__ import annotations

from collections.abc import Sequence

from ..cpu_codegen.builder import I8, I32, I64, PTR, VOID, Function, Module, Val, const, i64
from ..cpu_codegen.contract import KernelCode
from ..cpu_codegen.slots import Slots
from ..graph.types import i8
from .copies import memory_type
from .indexing import batch_offset
from .pack_lhs import GroupCopy
from .spec import GemmSpec, Packing


def emit_pack_rhs(module: Module, spec: GemmSpec, packing: Packing, name: str) -> KernelCode:
    """Adds the kernel; its domain is the panels of all matrices of the batch, its operands are rhs and packed.

    Columns of the last panel that lie beyond n repeat column n - 1; what they give is thrown away.
    """
    strides = spec.rhs_strides
    assert strides is not None
    panel = _emit_panel(module, spec, packing)
    fn = Function(module, name, VOID, [PTR, I64, I64])
    slots = Slots(fn)
    panels, size, panel_bytes = (slots.dim(d) for d in (packing.panels(spec.n), packing.bytes(spec.n, spec.k, spec.rhs),
                                                        packing.panel_bytes(spec.k, spec.rhs)))
    n, k, depth = slots.dim(spec.n), slots.dim(spec.k), slots.dim(packing.k_padded(spec.k))
    row_bytes, col_bytes = slots.dim(strides.row * spec.rhs.bytes), slots.dim(strides.col * spec.rhs.bytes)
    sums_offset = slots.dim(packing.sums_offset(spec.n, spec.k, spec.rhs))

    def unit(index: Val, _: list[Val]) -> list[Val]:
        b, p = fn.udiv(index, panels), fn.urem(index, panels)
        matrix = fn.gep(slots.buffer(0), fn.mul(batch_offset(fn, slots, strides.batch, b), i64(spec.rhs.bytes)))
        packed, column = fn.gep(slots.buffer(1), fn.mul(b, size)), fn.mul(p, i64(packing.nr))
        start, target = fn.gep(matrix, fn.mul(column, row_bytes)), fn.gep(packed, fn.mul(p, panel_bytes))
        last = fn.sub(fn.smin(fn.sub(n, column), i64(packing.nr)), i64(1))
        sums = fn.gep(fn.gep(packed, sums_offset), column, I32)
        fn.call(panel, VOID, [start, row_bytes, col_bytes, last, k, depth, target, sums])
        return []

    fn.loop(fn.args[1], fn.args[2], 1, [], unit)
    fn.ret()
    fn.finish()
    return KernelCode(name, slots.order, spec.batch * packing.panels(spec.n), 1, spec.batch * spec.n * spec.k)


def _emit_panel(module: Module, spec: GemmSpec, packing: Packing) -> str:
    """Adds the function that packs one panel, and returns its name. All products of one layout share it.

        void name(ptr start, i64 row_bytes, i64 col_bytes, i64 last, i64 k, i64 depth, ptr target, ptr sums)

    `start` points to the first element of the panel's first column; columns after number `last` repeat that one. Of i8 the sums of the
    columns are stored, too.
    """
    strides = spec.rhs_strides
    assert strides is not None
    form = ".contiguous" if strides.col == 1 else ".beside" if strides.row == 1 else ""
    name = f"pack_rhs.{spec.rhs}.{packing.nr}x{packing.kr}{form}"
    if name not in module.functions:
        fn = Function(module, name, VOID, [PTR, I64, I64, I64, I64, I64, PTR, PTR], internal=True)
        _panel(fn, spec, packing, form)
        fn.ret()
        fn.finish()
    return name


def _panel(fn: Function, spec: GemmSpec, packing: Packing, form: str) -> None:
    start, row_bytes, stride, last, k, depth, target, sums = fn.args
    element, nr = memory_type(spec.rhs), packing.nr
    rows = [fn.gep(start, fn.mul(fn.smin(i64(r), last), row_bytes)) for r in range(nr)]
    groups = GroupCopy(fn, element, element, packing.kr, nr, lambda _, value: value)
    done, col_bytes = i64(0), stride if form != ".contiguous" else None
    if form == ".contiguous":
        done = groups.squares(rows, target, k)
    elif form == ".beside":
        full = fn.icmp("eq", last, i64(nr - 1))
        done = fn.branch(full, lambda: [_columns(fn, spec, packing, start, stride, k, target)], lambda: [i64(0)])[0]
    groups.rest(rows, target, done, k, depth, col_bytes)
    if spec.rhs == i8:
        _sums(fn, packing, target, depth, sums)


def _columns(fn: Function, spec: GemmSpec, packing: Packing, start: Val, col_bytes: Val, count: Val, target: Val) -> Val:
    """Copies whole groups when the columns lie side by side; returns how many k are done."""
    nr, kr = packing.nr, packing.kr
    stop = fn.mul(fn.udiv(count, i64(kr)), i64(kr))

    def group(k: Val, _: list[Val]) -> list[Val]:
        lines = [fn.load(memory_type(spec.rhs).vec(nr), fn.gep(start, fn.mul(fn.add(k, i64(j)), col_bytes))) for j in range(kr)]
        fn.store(interleaved(fn, lines), fn.gep(target, k, scale=nr * spec.rhs.bytes))
        return []

    fn.loop(i64(0), stop, kr, [], group)
    return stop


def _sums(fn: Function, packing: Packing, target: Val, depth: Val, sums: Val) -> None:
    """Stores the sum of each column of a packed panel."""
    nr, kr = packing.nr, packing.kr

    def group(k: Val, totals: list[Val]) -> list[Val]:
        values = fn.load(I8.vec(nr * kr), fn.gep(target, k, scale=nr))
        total = totals[0]
        for j in range(kr):
            part = fn.shuffle(values, values, [c * kr + j for c in range(nr)])
            total = fn.add(total, fn.convert("sext", part, I32.vec(nr)))
        return [total]

    total = fn.loop(i64(0), depth, kr, [const(I32.vec(nr), 0)], group)[0]
    fn.store(total, sums)


def interleaved(fn: Function, lines: Sequence[Val]) -> Val:
    """Elements 0 of all lines, then elements 1, ...; the number of lines is a power of two."""
    if len(lines) == 1:
        return lines[0]
    even, odd = interleaved(fn, lines[0::2]), interleaved(fn, lines[1::2])
    count = even.ty.lanes
    return fn.shuffle(even, odd, [lane for i in range(count) for lane in (i, count + i)])
