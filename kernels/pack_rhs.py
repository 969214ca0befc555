"""The generated kernel that packs a dynamic rhs, in the layout of `Packing`, from any strides: a loop over panels, which calls a function
that all products of one layout share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ..cpu_codegen.builder import I8, I32, I64, PTR, VOID, Function, Module, Val, const, i64
from ..cpu_codegen.contract import KernelCode
from ..cpu_codegen.slots import Slots
from ..graph.dims import ceildiv
from ..graph.types import i8
from ..platforms.target import Target
from .copies import memory_type
from .indexing import batch_offset
from .pack_lhs import GroupCopy
from .spec import GemmSpec, Packing

_GROUP, _TOGETHER = 16, 4  # panels that are packed in a call, and line by line together

def emit_pack_rhs(module: Module, target: Target, spec: GemmSpec, packing: Packing, name: str) -> KernelCode:
    """Adds the kernel; its domain is groups of panels of all matrices of the batch, its operands are rhs and packed.

    Columns of the last panel that lie beyond n repeat column n - 1; what they give is thrown away.
    """
    strides = spec.rhs_strides
    assert strides is not None
    group = emit_pack_group(module, target, spec, packing)
    fn = Function(module, name, VOID, [PTR, I64, I64])
    slots = Slots(fn)
    size, panel_bytes = slots.dim(packing.bytes(spec.n, spec.k, spec.rhs)), slots.dim(packing.panel_bytes(spec.k, spec.rhs))
    n, k, depth = slots.dim(spec.n), slots.dim(spec.k), slots.dim(packing.k_padded(spec.k))
    row_bytes, col_bytes = slots.dim(strides.row * spec.rhs.bytes), slots.dim(strides.col * spec.rhs.bytes)
    sums_offset = slots.dim(packing.sums_offset(spec.n, spec.k, spec.rhs))
    groups = ceildiv(packing.panels(spec.n), _GROUP)

    def unit(index: Val, _: list[Val]) -> list[Val]:
        b, p = fn.udiv(index, slots.dim(groups)), fn.mul(fn.urem(index, slots.dim(groups)), i64(_GROUP))
        matrix = fn.gep(slots.buffer(0), fn.mul(batch_offset(fn, slots, strides.batch, b), i64(spec.rhs.bytes)))
        packed, column = fn.gep(slots.buffer(1), fn.mul(b, size)), fn.mul(p, i64(packing.nr))
        start, to = fn.gep(matrix, fn.mul(column, row_bytes)), fn.gep(packed, fn.mul(p, panel_bytes))
        columns = fn.smin(fn.sub(n, column), i64(_GROUP * packing.nr))
        sums = fn.gep(fn.gep(packed, sums_offset), column, I32)
        fn.call(group, VOID, [start, row_bytes, col_bytes, columns, k, depth, to, panel_bytes, sums])
        return []

    fn.loop(fn.args[1], fn.args[2], 1, [], unit)
    fn.ret()
    fn.finish()
    return KernelCode(name, slots.order, spec.batch * groups, 1, spec.batch * spec.n * spec.k)


def emit_pack_group(module: Module, target: Target, spec: GemmSpec, packing: Packing) -> str:
    """Adds the function that packs neighbouring panels, and returns its name. All products of one layout share it.

        void name(ptr start, i64 row_bytes, i64 col_bytes, i64 columns, i64 k, i64 depth, ptr target, i64 apart, ptr sums)

    apart: bytes from panel to panel. Where columns lie side by side, the lines of all panels are read one after the other, as they lie in
    memory: processors follow by themselves where that goes on, but not from one line to another page.
    """
    strides = spec.rhs_strides
    assert strides is not None
    panel = _emit_panel(module, target, spec, packing)
    name = panel.replace("pack_rhs.", "pack_rhs.group.")
    if name not in module.functions:
        fn = Function(module, name, VOID, [PTR, *[I64] * 5, PTR, I64, PTR], internal=True)
        _group(fn, spec, packing, panel, beside=panel.endswith(".beside"))
        fn.ret()
        fn.finish()
    return name


def _group(fn: Function, spec: GemmSpec, packing: Packing, panel: str, beside: bool) -> None:
    start, row_bytes, col_bytes, columns, count, depth, target, apart, sums = fn.args
    nr, done = packing.nr, i64(0)
    whole = fn.udiv(columns, i64(nr))

    def together(p: Val, _: list[Val], panels: int) -> list[Val]:
        step = nr * spec.rhs.bytes
        first, to = fn.gep(start, p, scale=step), fn.gep(target, fn.mul(p, apart))

        def lines(k: Val, at: list[Val]) -> list[Val]:
            for j in range(panels):
                place = fn.gep(at[1], fn.mul(apart, i64(j))) if j else at[1]
                _copy_group(fn, spec, packing, fn.gep(at[0], i64(j * step)), col_bytes, place)
            return [fn.gep(at[0], fn.mul(col_bytes, i64(packing.kr))), fn.gep(at[1], i64(packing.kr * step))]

        fn.loop(i64(0), done, packing.kr, [first, to], lines)
        return []

    def rest(p: Val, _: list[Val]) -> list[Val]:
        column = fn.mul(p, i64(nr))
        last = fn.sub(fn.smin(fn.sub(columns, column), i64(nr)), i64(1))
        before = fn.select(fn.icmp("slt", p, whole), done, i64(0))
        first, to = fn.gep(start, fn.mul(column, row_bytes)), fn.gep(target, fn.mul(p, apart))
        fn.call(panel, VOID, [first, row_bytes, col_bytes, last, before, count, depth, to, fn.gep(sums, column, I32)])
        return []

    if beside:
        done = fn.sub(count, fn.urem(count, i64(packing.kr)))
        several = fn.sub(whole, fn.urem(whole, i64(_TOGETHER)))
        fn.loop(i64(0), several, _TOGETHER, [], partial(together, panels=_TOGETHER))
        fn.loop(several, whole, 1, [], partial(together, panels=1))
    fn.loop(i64(0), fn.udiv(fn.add(columns, i64(nr - 1)), i64(nr)), 1, [], rest)


def _emit_panel(module: Module, target: Target, spec: GemmSpec, packing: Packing) -> str:
    """Adds the function that packs one panel, and returns its name. All products of one layout share it.

        void name(ptr start, i64 row_bytes, i64 col_bytes, i64 last, i64 done, i64 k, i64 depth, ptr target, ptr sums)

    `start` points to the first element of the panel's first column; columns after number `last` repeat that one. The first `done` k, whole
    groups, are packed already. Of i8 the sums of the columns are stored, too.
    """
    strides = spec.rhs_strides
    assert strides is not None
    form = ".contiguous" if strides.col == 1 else ".beside" if strides.row == 1 else ""
    name = f"pack_rhs.{spec.rhs}.{packing.nr}x{packing.kr}{form}"
    if name not in module.functions:
        fn = Function(module, name, VOID, [PTR, *[I64] * 6, PTR, PTR], internal=True)
        _panel(fn, target, spec, packing, form)
        fn.ret()
        fn.finish()
    return name


def _panel(fn: Function, machine: Target, spec: GemmSpec, packing: Packing, form: str) -> None:
    start, row_bytes, stride, last, done, k, depth, target, sums = fn.args
    element, nr = memory_type(spec.rhs), packing.nr
    rows = [fn.gep(start, fn.mul(fn.smin(i64(r), last), row_bytes)) for r in range(nr)]
    groups = GroupCopy(fn, element, element, packing.kr, nr, lambda _, value: value)
    col_bytes = stride if form != ".contiguous" else None
    if form == ".contiguous":
        done = groups.squares(rows, target, k, machine.vector_bits)
    elif form == ".beside":
        full = fn.icmp("eq", last, i64(nr - 1))
        done = fn.branch(full, lambda: [_columns(fn, spec, packing, start, stride, done, k, target)], lambda: [done])[0]
    groups.rest(rows, target, done, k, depth, col_bytes)
    if spec.rhs == i8:
        _sums(fn, packing, target, depth, sums)


def _columns(fn: Function, spec: GemmSpec, packing: Packing, start: Val, col_bytes: Val, done: Val, count: Val, target: Val) -> Val:
    """Copies whole groups from k `done` on when the columns lie side by side; returns how many k are done then."""
    stop = fn.mul(fn.udiv(count, i64(packing.kr)), i64(packing.kr))

    def group(k: Val, _: list[Val]) -> list[Val]:
        to = fn.gep(target, k, scale=packing.nr * spec.rhs.bytes)
        _copy_group(fn, spec, packing, fn.gep(start, fn.mul(k, col_bytes)), col_bytes, to)
        return []

    fn.loop(done, stop, packing.kr, [], group)
    return stop


def _copy_group(fn: Function, spec: GemmSpec, packing: Packing, start: Val, col_bytes: Val, target: Val) -> None:
    """One group of k of a panel whose columns lie side by side."""
    ty = memory_type(spec.rhs).vec(packing.nr)
    lines = [fn.load(ty, fn.gep(start, fn.mul(i64(j), col_bytes))) for j in range(packing.kr)]
    fn.store(interleaved(fn, lines), target)


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
