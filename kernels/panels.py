"""Where the panels of the packed rhs are that a tile reads, inside the function of one product."""

from __future__ import annotations

from ..cpu_codegen.builder import VOID, Function, Val, i64
from ..cpu_codegen.slots import Slots
from ..platforms.target import Target
from .blocking import Blocking, Variant
from .copies import padded
from .micro import MicroKernel, Start, share_of
from .pack_rhs import emit_pack_group
from .spec import GemmSpec

Panels = list[Val]


class PanelReader:
    """rhs: the packed matrix, or one that is packed by groups or not at all. p0: the first panel of all. Panels that a tile does not read
    as they are stored are written out into scratch memory."""

    def __init__(self, fn: Function, slots: Slots, target: Target, spec: GemmSpec, blocking: Blocking, rhs: Val, p0: Val) -> None:
        self.fn, self.slots, self.target, self.spec, self.blocking, self.rhs, self.p0 = fn, slots, target, spec, blocking, rhs, p0
        self.packing = blocking.variants[0].micro.packing
        self.unpacked = fn.alloca(blocking.unpacked_bytes) if blocking.unpacked_bytes else None

    @property
    def size(self) -> Val:
        """Bytes of a panel."""
        return self.slots.dim(self.packing.panel_bytes(self.spec.k, self.spec.rhs))

    def numbers(self, micro: MicroKernel, p: Val) -> list[Val]:
        """Panels p, p + 1, ... of a tile; beyond the end the last one is repeated."""
        fn = self.fn
        last = fn.sub(self.slots.dim(self.packing.panels(self.spec.n)), i64(1))
        return [p, *(fn.smin(fn.add(p, i64(j)), last) for j in range(1, micro.panels))]

    def stored(self, micro: MicroKernel, p: Val, skip: Val) -> Panels:
        """Where the panels of a tile lie in the packed rhs. skip: bytes from the beginning of a panel."""
        return [self.fn.gep(self.fn.gep(self.rhs, self.fn.mul(number, self.size)), skip) for number in self.numbers(micro, p)]

    def read(self, micro: MicroKernel, p: Val, skip: Val, count: Val) -> Panels:
        """`count` k of the panels of a tile in the form that it reads."""
        if self.blocking.panel_bytes:
            return self._packed(micro, p)
        fn, stored = self.fn, self.stored(micro, p, skip)
        if self.unpacked is None or not micro.unpacked_bytes(1):
            return stored
        name, step = micro.emit_unpack(fn.module, self.target)
        steps = fn.udiv(fn.add(count, i64(self.packing.pad - 1)), i64(self.packing.pad))
        apart, each = micro.unpacked_bytes(self.blocking.k_block), micro.unpacked_panels
        places = [fn.gep(self.unpacked, i64(j * apart)) for j in range(micro.panels * each)]
        for panel, to in zip(stored, places[::each], strict=True):
            fn.call(name, VOID, [panel, to, i64(apart), fn.mul(steps, i64(self.packing.pad // step))])
        return places

    def _packed(self, micro: MicroKernel, p: Val) -> Panels:
        """The panels of a rhs that is packed by groups: with the first one of a group, all of the group are."""
        fn, room = self.fn, self.unpacked
        assert room is not None
        number = fn.urem(fn.sub(p, self.p0), i64(self.blocking.panel_block))
        fn.branch(fn.icmp("eq", number, i64(0)), lambda: self._pack_group(p, room))
        return [fn.gep(room, fn.sub(fn.add(each, number), p), scale=self.blocking.panel_bytes) for each in self.numbers(micro, p)]

    def _pack_group(self, p: Val, to: Val) -> list[Val]:
        fn, spec, packing = self.fn, self.spec, self.packing
        assert spec.rhs_strides is not None
        row_bytes, col_bytes = (self.slots.dim(step * spec.rhs.bytes) for step in (spec.rhs_strides.row, spec.rhs_strides.col))
        k = self.slots.dim(spec.k)
        column, most = fn.mul(p, i64(packing.nr)), i64(self.blocking.panel_block * packing.nr)
        start, columns = fn.gep(self.rhs, fn.mul(column, row_bytes)), fn.smin(fn.sub(self.slots.dim(spec.n), column), most)
        name, apart = emit_pack_group(fn.module, self.target, spec, packing), i64(self.blocking.panel_bytes)
        fn.call(name, VOID, [start, row_bytes, col_bytes, columns, k, padded(fn, k, packing.pad), to, apart, to])
        return []

    def operands(self, variant: Variant, p: Val, number: Val, steps: Val, panels: Panels, kind: Start) -> list[Val]:
        """What the function of a tile takes: the way to its share of the panels that follow, its panels, and their column sums where it
        needs them. number: of the tile in its block."""
        fn, spec, micro = self.fn, self.spec, variant.micro
        following = fn.mul(self.size, i64(micro.panels))
        following = share_of(fn, micro, variant.shares, number, steps, following)
        if kind is not Start.SUMS:
            return [following, *panels]
        sums = fn.gep(self.rhs, self.slots.dim(self.packing.sums_offset(spec.n, spec.k, spec.rhs)))
        return [following, *panels, *(fn.gep(sums, number, scale=4 * self.packing.nr) for number in self.numbers(micro, p))]
