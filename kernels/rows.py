"""Where the rows of the lhs are that a tile reads, inside the function of one product."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..cpu_codegen.builder import F32, VOID, Function, Val, i64
from ..cpu_codegen.slots import Slots
from ..platforms.target import Target
from .blocking import Blocking, Variant
from .pack_lhs import emit_pack_lhs
from .pieces import PieceReader
from .spec import GemmSpec


@dataclass(frozen=True)
class Rows:
    """Rows [row, row + count) of the lhs, or a piece of k of them.

    at: where they are, in place or packed. rest: where those of a last tile are that is not whole, if it alone is packed.
    """

    row: Val
    count: Val
    at: Val
    rest: Val | None = None


class RowReader:
    """lhs: the matrix; rhs: the packed weight. Rows that a tile does not read in place are packed into scratch memory."""

    def __init__(self, fn: Function, slots: Slots, target: Target, spec: GemmSpec, blocking: Blocking, lhs: Val, rhs: Val) -> None:
        self.fn, self.target, self.spec, self.blocking, self.lhs = fn, target, spec, blocking, lhs
        packing = blocking.variants[0].micro.packing
        self.powers = fn.gep(rhs, slots.dim(packing.sums_offset(spec.n, spec.k, spec.rhs))) if packing.balanced else None
        self.row_bytes = slots.dim(spec.lhs_strides.row * spec.lhs.bytes)
        self.col_bytes = slots.dim(spec.lhs_strides.col * spec.lhs.bytes)
        self.k = slots.dim(spec.k)
        self.scratch = fn.alloca(max(blocking.packed_bytes(v) for v in blocking.variants))
        pieces = spec.lhs_pieces if spec.lines is None else None
        self.pieces = None if pieces is None else PieceReader(fn, slots, target, spec, pieces, blocking)

    def enter(self, variant: Variant, row: Val, count: Val, partial_tiles: bool) -> Rows:
        """The rows of a block: in place where that is possible, else packed, else still to be packed piece by piece. partial_tiles: its
        last tile may not be whole."""
        fn = self.fn
        if self.pieces is not None:
            self.pieces.enter_block(row, count)
        start = self.lhs if self.pieces is not None else fn.gep(self.lhs, fn.mul(row, self.row_bytes))
        rows = Rows(row, count, start)
        if self.blocking.pack_late(variant):
            return rows
        if not variant.direct:
            return replace(rows, at=self._packed(variant, start, count))
        if not partial_tiles or variant.last_rows or self.spec.lines is not None:
            return rows
        left = fn.urem(count, i64(variant.micro.mr))
        last = fn.gep(start, fn.mul(fn.sub(count, left), self.row_bytes))
        some = fn.icmp("sgt", left, i64(0))
        return replace(rows, rest=fn.branch(some, lambda: [self._packed(variant, last, left)], lambda: [start])[0])

    def _packed(self, variant: Variant, start: Val, count: Val) -> Val:
        """Packs all pieces of `count` rows that begin at `start`."""
        for piece in range(self.blocking.pieces or 0):
            to = self.fn.gep(self.scratch, i64(piece * variant.piece))
            self._pack(variant, start, count, i64(piece * self.blocking.k_block), to)
        return self.scratch

    def _pack(self, variant: Variant, start: Val, rows: Val, k0: Val, to: Val) -> None:
        fn, micro, count = self.fn, variant.micro, self.count(k0)
        total = fn.mul(fn.udiv(fn.add(rows, i64(micro.mr - 1)), i64(micro.mr)), i64(micro.mr))
        powers = [] if self.powers is None else [fn.gep(self.powers, k0, F32)]
        if self.pieces is not None:
            self.pieces.pack(variant, start, rows, total, k0, count, to, powers)
            return
        row, col = self.spec.lhs_strides.row, self.spec.lhs_strides.col
        name = emit_pack_lhs(fn.module, self.target, micro, variant.pitch, col == 1, variant.direct, row == 1)
        first = fn.gep(start, fn.mul(k0, self.col_bytes))
        fn.call(name, VOID, [first, self.row_bytes, self.col_bytes, rows, total, count, to, *powers])

    def piece(self, variant: Variant, rows: Rows, k0: Val) -> Rows:
        """The piece of k of a block that begins at k0."""
        fn = self.fn
        if self.blocking.pack_late(variant):
            self._pack(variant, rows.at, rows.count, k0, self.scratch)
            return replace(rows, at=self.scratch)
        way = fn.mul(fn.udiv(k0, i64(self.blocking.k_block)), i64(variant.piece))
        return replace(rows, at=fn.gep(rows.at, way), rest=None if rows.rest is None else fn.gep(rows.rest, way))

    def count(self, k0: Val) -> Val:
        """How many k the piece that begins at k0 has."""
        return self.fn.smin(self.fn.sub(self.k, k0), i64(self.blocking.k_block))

    def steps(self, variant: Variant, count: Val) -> Val:
        """Whole steps of so many k."""
        step = variant.micro.step_k
        return self.fn.udiv(count if variant.direct else self.fn.add(count, i64(step - 1)), i64(step))

    def tile(self, variant: Variant, rows: Rows, i: Val, steps: Val) -> Val:
        """Where the rows of a tile are that begins at row i of a block."""
        fn, micro = self.fn, variant.micro
        if self.spec.lines is not None:  # the last tile of all computes rows of the one before again: it must not read beyond the end
            i = fn.smin(i, fn.sub(rows.count, i64(micro.mr)))
        group_bytes = fn.mul(steps, i64(micro.step_k * micro.layout.element.bits // 8))
        there = fn.gep(rows.at, fn.mul(i, group_bytes if micro.layout.group else i64(variant.pitch)))
        return there if rows.rest is None else fn.select(fn.icmp("sgt", fn.add(i, i64(micro.mr)), rows.count), rows.rest, there)
