"""The generator of matrix products: everything that is not the instruction set.

Around the functions of one register tile (`micro.py`) it writes, for each product,

    <name>           the kernel whose domain is rows, and <name>.columns, whose domain is column panels;
    <name>.body      the product of rows [r0, r1) and panels [p0, p1) of one matrix of the batch:
                     see `nest.py`
    <name>.epilogue  the loop IR of the epilogue over the valid part of one tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..cpu_codegen.body import BodyEmitter
from ..cpu_codegen.builder import I64, PTR, VOID, Function, Module, Ty, Val, i64
from ..cpu_codegen.contract import BufferSlot, KernelCode, Slot
from ..cpu_codegen.epilogue import emit_tile_epilogue
from ..cpu_codegen.slots import Slots
from ..graph.dims import Dim, ceildiv
from ..platforms.target import Target
from .blocking import Blocking, choose
from .dynamic_rhs import in_place
from .fetch import accesses, emit_fetch
from .indexing import batch_offset, request, wanted_slots
from .known_rows import tailored
from .lines import in_lines
from .micro import MicroKernel
from .nest import Body
from .pack_rhs import emit_pack_rhs
from .spec import FIRST_EPILOGUE_BUFFER, GemmCode, GemmSpec
from .whole_steps import in_whole_steps

LHS, RHS = 0, 1


def emit(module: Module, target: Target, spec: GemmSpec, micros: Sequence[MicroKernel], name: str) -> GemmCode:
    """Adds the functions of the product `spec` on `micros` (one family, most rows first), and returns what they are."""
    return _Gemm(module, target, spec, micros, name).emit()


def emit_epilogue(module: Module, target: Target, spec: GemmSpec, acc: Ty, width: int, name: str) -> tuple[Slot, ...]:
    """Adds void <name>.epilogue(ptr slots, ptr tile, i64 row, i64 rows, i64 column, i64 columns): what `spec` does with a tile of
    accumulators of type `acc`, `width` columns side by side. Returns the slots that it reads."""
    fn = Function(module, f"{name}.epilogue", VOID, [PTR, PTR, I64, I64, I64, I64], internal=True)
    slots = Slots(fn, spec.params)
    _, tile, row, rows, col, cols = fn.args
    emitter = BodyEmitter(fn, target, spec.epilogue, slots, FIRST_EPILOGUE_BUFFER)
    with emitter.scope():
        # Panels are split at multiples of the width alone, so that only the last columns of all do not fill it.
        last = spec.n % width if isinstance(spec.n, int) else None
        emit_tile_epilogue(fn, emitter, tile, acc, width, rows, cols, row, col, width, last, spec.lines)
    fn.ret()
    fn.finish()
    return slots.order


@dataclass(frozen=True)
class Cut:
    """What a domain cuts: how many there are of one matrix of the batch, done `grain` at a time."""

    extent: Dim
    grain: int

    def padded(self, batch: Dim) -> Dim:
        """Where those of the next matrix begin: at a multiple of the grain."""
        return self.extent if batch == 1 else ceildiv(self.extent, self.grain) * self.grain


def emit_entries(
    module: Module, spec: GemmSpec, micro: MicroKernel, order: tuple[Slot, ...], packed: Dim | None, name: str, rows: Cut, columns: Cut,
    work: Dim,
) -> tuple[KernelCode, KernelCode]:
    """Adds the kernel over the rows of all matrices, <name>, and that over their column panels, <name>.columns. Both call, for each matrix,

        void <name>.body(ptr slots, ptr lhs, ptr rhs, i64 row_base, i64 r0, i64 r1, i64 p0, i64 p1)

    with its operands, the number of its first row in the result, and the rows and panels to do. packed: bytes of one packed weight, None
    where the rhs lies as the user's does."""
    for by_rows in (True, False):
        _emit_entry(module, spec, micro, order, packed, name, rows, columns, by_rows)
    return (
        KernelCode(name, order, spec.batch * rows.padded(spec.batch), rows.grain, work),
        KernelCode(f"{name}.columns", order, spec.batch * columns.padded(spec.batch), columns.grain, work),
    )


def _emit_entry(
    module: Module, spec: GemmSpec, micro: MicroKernel, order: Sequence[Slot], packed: Dim | None, name: str, rows: Cut, columns: Cut,
    by_rows: bool,
) -> None:
    fn = Function(module, name if by_rows else f"{name}.columns", VOID, [PTR, I64, I64])
    slots = Slots(fn, spec.params)
    request(slots, order)
    cut, other = (rows, columns) if by_rows else (columns, rows)
    begin, end = fn.args[1:]
    lhs, rhs, m, whole = slots.buffer(LHS), slots.buffer(RHS), slots.dim(spec.m), (i64(0), slots.dim(other.extent))
    micro.enter(fn)

    def number(b: Val) -> Val:
        return fn.urem(fn.udiv(b, slots.dim(spec.turn)), i64(spec.weights)) if spec.weights > 1 else i64(0)

    def weight(b: Val) -> Val:
        if packed is None:
            assert spec.rhs_strides is not None
            return fn.gep(rhs, fn.mul(batch_offset(fn, slots, spec.rhs_strides.batch, b), i64(spec.rhs.bytes)))
        return fn.gep(rhs, fn.mul(number(b) if spec.constant_rhs else b, slots.dim(packed)))

    def run(b: Val, first: Val, last: Val) -> None:
        a, w = fn.gep(lhs, fn.mul(batch_offset(fn, slots, spec.lhs_strides.batch, b), i64(spec.lhs.bytes))), weight(b)
        ranges = (first, last, *whole) if by_rows else (*whole, first, last)
        fn.call(f"{name}.body", VOID, [fn.args[0], a, w, batch_offset(fn, slots, spec.first_row, b), *ranges])

    def matrix(b: Val, _: list[Val]) -> list[Val]:
        base = fn.mul(b, slots.dim(cut.padded(spec.batch)))
        run(b, fn.smax(fn.sub(begin, base), i64(0)), fn.smin(fn.sub(end, base), slots.dim(cut.extent)))
        return []

    def group(e: Val, before: list[Val]) -> list[Val]:
        (start,) = before
        given = fn.load(I64, fn.gep(slots.buffer(spec.ends), e, I64))
        stop = fn.smax(fn.smin(fn.select(fn.icmp("eq", e, i64(spec.weights - 1)), m, given), m), start)
        first, last = (fn.smax(start, begin), fn.smin(stop, end)) if by_rows else (start, stop)
        ranges = (first, last, *whole) if by_rows else (first, last, begin, fn.smin(end, slots.dim(cut.extent)))

        def some() -> list[Val]:
            fn.call(f"{name}.body", VOID, [fn.args[0], lhs, weight(e), i64(0), *ranges])
            return []

        fn.branch(fn.icmp("slt", first, last), some)
        return [stop]

    if spec.routed:
        fn.loop(i64(0), i64(spec.weights), 1, [i64(0)], group)
    elif spec.batch == 1:
        run(i64(0), begin, fn.smin(end, slots.dim(cut.extent)))
    else:
        size = slots.dim(cut.padded(spec.batch))
        last = fn.udiv(fn.sub(fn.add(end, size), i64(1)), size)
        fn.loop(fn.udiv(begin, size), last, 1, [], matrix)
    micro.leave(fn)
    fn.ret()
    fn.finish()


def planned(target: Target, spec: GemmSpec, micros: Sequence[MicroKernel]) -> tuple[GemmSpec, Blocking]:
    """The product as it is computed with these tiles, and how it is cut."""
    spec, micros = in_lines(target, spec, micros)
    micros = micros if spec.lines else in_whole_steps(spec, tailored(target, spec, micros))
    return spec, choose(target, spec, in_place(spec, micros))


class _Gemm:
    def __init__(self, module: Module, target: Target, spec: GemmSpec, micros: Sequence[MicroKernel], name: str) -> None:
        spec, self.blocking = planned(target, spec, micros)
        self.module, self.target, self.spec, self.name = module, target, spec, name
        self.micros = [variant.micro for variant in self.blocking.variants]
        self.packing = self.micros[0].packing
        self.panels = self.packing.panels(spec.n)
        self.fetched = accesses(target, spec, any(variant.overlaps for variant in self.blocking.variants))
        self.order: tuple[Slot, ...] = ()

    # -- functions ----------------------------------------------------------------------------------------------
    def emit(self) -> GemmCode:
        spec, mr, group = self.spec, self.micros[0].mr, self.micros[0].panels
        lies = spec.rhs_strides if self.blocking.panel_bytes or self.packing.pitch else None
        packed = self.packing.bytes(spec.n, spec.k, spec.rhs) if lies is None else None
        self.order = emit_epilogue(self.module, self.target, spec, self.micros[0].acc_ty, self.blocking.out_pitch, self.name)
        pieces = () if spec.lhs_pieces is None else (spec.lhs_pieces.row, spec.lhs_pieces.piece)
        wanted = wanted_slots(self._dims(), spec.lhs_strides.batch, spec.first_row, *(() if lies is None else (lies.batch,)), *pieces)
        ends = (BufferSlot(spec.ends),) if spec.routed else ()
        self.order = tuple(dict.fromkeys((*self.order, BufferSlot(LHS), BufferSlot(RHS), *ends, *wanted)))
        self._emit_fetch()
        self._emit_body()
        work = spec.batch * spec.m * spec.n * spec.k
        cuts = Cut(spec.m, mr), Cut(self.panels, group)
        rows, columns = emit_entries(self.module, spec, self.micros[0], self.order, packed, self.name, *cuts, work)
        if packed is None:
            return GemmCode(rows, columns, self.packing, None, 0)
        pack = None if spec.constant_rhs else emit_pack_rhs(self.module, self.target, spec, self.packing, f"{self.name}.pack")
        return GemmCode(rows, columns, self.packing, pack, packed * (spec.weights if spec.constant_rhs else spec.batch))

    def _dims(self) -> tuple[Dim, ...]:
        """Every expression that the functions need as a number."""
        spec, packing = self.spec, self.packing
        mr, group = self.micros[0].mr, self.micros[0].panels
        lies = ((spec.lhs_strides, spec.lhs), (spec.rhs_strides, spec.rhs))
        strides = tuple(step * dtype.bytes for each, dtype in lies if each is not None for step in (each.row, each.col))
        rhs = (spec.n, spec.k, spec.rhs)
        sizes = (packing.panel_bytes(spec.k, spec.rhs), packing.sums_offset(*rhs), packing.bytes(*rhs))
        padded = (ceildiv(spec.m, mr) * mr, ceildiv(self.panels, group) * group)
        places = tuple(part for access in self.fetched for part in (access.base, access.row))
        return (spec.m, spec.turn, spec.n, spec.k, self.panels, *strides, *sizes, *padded, *places)

    def _slots(self, fn: Function) -> Slots:
        """All functions ask for all slots in the same order, so that one numbering serves them; LLVM drops unused loads."""
        slots = Slots(fn, self.spec.params)
        request(slots, self.order)
        return slots

    def _emit_fetch(self) -> None:
        if not self.fetched:
            return
        fn = Function(self.module, f"{self.name}.fetch", VOID, [PTR, I64, I64, I64], internal=True)
        emit_fetch(fn, self._slots(fn), self.fetched, FIRST_EPILOGUE_BUFFER, self.micros[0].nr, self.spec.lines)
        fn.ret()
        fn.finish()

    def _emit_body(self) -> None:
        fn = Function(self.module, f"{self.name}.body", VOID, [PTR, PTR, PTR, *[I64] * 5], internal=True)
        Body(fn, self._slots(fn), self.target, self.spec, self.blocking, self.name).emit()
        fn.ret()
        fn.finish()
