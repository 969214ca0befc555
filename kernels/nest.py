"""The loops around the tiles of one matrix product.

    for blocks of rows:                         tallest variant first, what is left to the next ones
        pack the lhs of the block               unless it is read in place, or is packed in pieces below
        for groups of panels:                   one group when k is in one piece
            for pieces of k:                    the rows of a tile stay in L1 while the panels of a group pass
                for panels of the group:    write them out, where a tile does not read them as they are stored
                    for tiles of the block:     tile function into scratch; with the last piece: epilogue

The last tile of all rows may be lower than the others. It takes its turn with them, as panels are read from far away once for all rows.

Where tiles overlap, one is stored and its epilogue done while the next is computed: loops carry what is pending (see `_later`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ..cpu_codegen.builder import VOID, Function, Val, i64
from ..cpu_codegen.slots import Slots
from ..platforms.target import Target
from . import finished
from .blocking import Blocking, Variant
from .micro import MicroKernel, Start
from .panels import PanelReader, Panels
from .pending import Epilogue, Pending, valid_rows
from .rows import RowReader, Rows
from .shares import shares_of
from .spec import GemmSpec
from .tile import emit_tile, in_blocks

State = list[Val]  # the arguments of the epilogue that is pending, after the slots; empty where tiles do not overlap


@dataclass(frozen=True)
class _Block:
    """A block of rows under one variant, and panels [begin, end).

    height: rows from tile to tile. last: the last panels of all may be among them.
    """

    variant: Variant
    lhs: Rows
    begin: Val
    end: Val
    height: int
    last: bool = True


EachTile = Callable[[_Block, Val, Val, Val, Panels, State], State]


class Body:
    """Writes void body(ptr slots, ptr lhs, ptr rhs, i64 row_base, i64 r0, i64 r1, i64 p0, i64 p1): one matrix of the batch.

    row_base: the number of its row 0 in the result. Rows [r0, r1), panels [p0, p1).
    """

    def __init__(self, fn: Function, slots: Slots, target: Target, spec: GemmSpec, blocking: Blocking, name: str) -> None:
        self.fn, self.slots, self.target, self.spec, self.blocking, self.name = fn, slots, target, spec, blocking, name
        self.packing = blocking.variants[0].micro.packing
        _, lhs, rhs, self.row_base, self.r0, self.r1, self.p0, self.p1 = fn.args
        self.k = slots.dim(spec.k)
        self.panels = self.packing.panels(spec.n)
        # Tiles take turns at distances that are no multiple of 4096, so that stores of one do not stall loads of the other.
        self.tiles = fn.alloca(max(blocking.scratch_tiles_bytes(v, v.narrow(self.panels) is not None) for v in blocking.variants))
        self.rows = RowReader(fn, slots, target, spec, blocking, lhs, rhs)
        self.columns = PanelReader(fn, slots, target, spec, blocking, rhs, self.p0)

    def emit(self) -> None:
        blocking, shares = self.blocking, shares_of(self.fn, self.blocking, self.r0, self.r1)
        each = zip(blocking.variants, blocking.partial_tiles(self.spec.rows), shares, strict=True)
        modes = {variant.micro.mode for variant in blocking.variants} - {None}
        for variant, partial_tiles, (begin, end) in each:
            if len(modes) > 1:
                variant.micro.enter(self.fn)
            self._blocks(variant, begin, end, partial_tiles)

    def _blocks(self, variant: Variant, begin: Val, end: Val, partial_tiles: bool) -> None:
        """Rows [begin, end) in blocks of one variant."""
        fn = self.fn

        def rows(row: Val) -> _Block:
            lhs = self.rows.enter(variant, row, fn.smin(fn.sub(end, row), i64(variant.rows)), partial_tiles)
            return _Block(variant, lhs, self.p0, self.p1, variant.micro.mr)

        nothing = [i64(0), *self._nothing(variant)]

        def block(row: Val, at: list[Val]) -> list[Val]:
            parts = self._parts(rows(row))
            for part in parts:
                at = self._one_piece(part, at)
                if len(parts) > 1:
                    self._catch_up(part.variant.micro, at[1:])
                    at = nothing
            return at

        if self.blocking.pieces == 1:
            _, *state = fn.loop(begin, end, variant.rows, nothing, block)
            self._catch_up(variant.micro, state)
        else:
            width = self.blocking.panel_block
            fn.loop(begin, end, variant.rows, [], lambda row, _: fn.loop(self.p0, self.p1, width, [], partial(self._group, rows(row))))

    def _parts(self, block: _Block) -> list[_Block]:
        """The block over the panels that fill its tiles, and with narrower ones over the last panels of all."""
        fn, narrow = self.fn, block.variant.narrow(self.panels)
        if narrow is None:
            return [block]
        assert isinstance(self.panels, int)
        edge = i64(self.panels - narrow.micro.panels)
        return [replace(block, end=fn.smin(self.p1, edge), last=False), replace(block, variant=narrow, begin=fn.smax(self.p0, edge))]

    # -- k in one piece -----------------------------------------------------------------------------------------
    def _one_piece(self, block: _Block, at: list[Val]) -> list[Val]:
        """at: which of the two tiles in scratch is next, and what is pending."""
        fn, micro = self.fn, block.variant.micro
        steps = self.rows.steps(block.variant, self.k)
        turn = self.blocking.turn_bytes(block.variant)

        def panel(p: Val, at: list[Val]) -> list[Val]:
            panels = self.columns.read(micro, p, i64(0), self.k)

            def tile(block: _Block, i: Val, state: State) -> State:
                out = fn.gep(self.tiles, state[0])
                self._fetch(block, i, p)

                def through_memory() -> State:
                    self._tile(block, micro.begins, i, steps, out, p, panels, block.variant.left(self.spec.k), state[1:])
                    return self._later(block, out, i, p)

                if finished.applies(self.target, self.spec, micro) and not block.variant.alone:
                    later = self._in_registers(block, i, steps, p, panels, through_memory)
                else:
                    later = through_memory()
                return [fn.sub(i64(turn), state[0]), *later]

            return self._in_turn(block, at, tile)

        return fn.loop(block.begin, block.end, micro.panels, at, panel)

    def _in_turn(self, block: _Block, state: State, tile: Callable[[_Block, Val, State], State]) -> State:
        """state = tile(block of the tile's height, row in it, state) for all tiles of a block."""
        fn, lower = self.fn, block.variant.lower
        if lower is None:
            return fn.loop(i64(0), block.lhs.count, block.height, state, lambda i, state: tile(block, i, state))
        whole = fn.sub(block.lhs.count, fn.urem(block.lhs.count, i64(block.height)))
        state = fn.loop(i64(0), whole, block.height, state, lambda i, state: tile(block, i, state))
        some = fn.icmp("slt", whole, block.lhs.count)
        return fn.branch(some, lambda: tile(replace(block, variant=lower), whole, state), lambda: state)

    def _in_registers(self, block: _Block, i: Val, steps: Val, p: Val, panels: Panels, otherwise: Callable[[], State]) -> State:
        """A tile whose epilogue takes the accumulators from registers, if all its rows and vectors count, else `otherwise`."""
        fn, spec, variant, micro = self.fn, self.spec, block.variant, block.variant.micro
        row, rows, first, end = self._valid(block, i, p)
        columns = fn.sub(end, first)
        before = micro.nr - finished.lanes(micro)
        masked = self.target.masked_memory and block.last and not (isinstance(spec.n, int) and spec.n % finished.lanes(micro) == 0)
        wide = fn.icmp("sgt", columns, i64(before)) if masked else fn.icmp("sge", columns, i64(micro.nr))

        def finish() -> State:
            name = finished.emit_finished(
                fn.module, self.target, spec, self.slots.order, variant, variant.left(spec.k), masked,
                in_blocks(micro, self.blocking.k_block), self.name,
            )
            operands = self.columns.operands(variant, p, fn.udiv(i, i64(block.height)), steps, panels, micro.begins)
            lhs = self.rows.tile(variant, block.lhs, i, steps)
            fn.call(name, VOID, [fn.args[0], lhs, steps, row, first, fn.sub(columns, i64(before)), *operands])
            return []

        return fn.branch(fn.and_(wide, fn.icmp("eq", rows, i64(micro.mr))), finish, otherwise)

    # -- k in pieces --------------------------------------------------------------------------------------------
    def _group(self, block: _Block, first: Val, _: list[Val]) -> list[Val]:
        """All pieces of k for the panels from `first` on."""
        fn, pieces = self.fn, self.blocking.pieces
        last = fn.smin(fn.add(first, i64(self.blocking.panel_block)), self.p1)

        def start(part: _Block, p: Val, i: Val, out: Val, panels: Panels, _: State) -> State:
            self._tile(part, part.variant.micro.begins, i, i64(0), out, p, panels)
            return []

        def finish(part: _Block, p: Val, i: Val, out: Val, panels: Panels, _: State) -> State:
            del panels
            self._finish(part, out, i, p)
            return []

        if pieces is None:
            # How many pieces there are is not known: a tile of no steps stores what the accumulators start with.
            self._each(block, first, last, start, lambda part, p: self.columns.stored(part.variant.micro, p, i64(0)))
            fn.loop(i64(0), self.k, self.blocking.k_block, [], lambda k0, _: self._piece(block, first, last, k0, Start.OUT))
            self._each(block, first, last, finish)
            return []
        end = i64((pieces - 1) * self.blocking.k_block)
        self._piece(block, first, last, i64(0), block.variant.micro.begins)
        fn.loop(i64(self.blocking.k_block), end, self.blocking.k_block, [], lambda k0, _: self._piece(block, first, last, k0, Start.OUT))
        self._piece(block, first, last, end, Start.OUT, finishes=True)
        return []

    def _piece(self, block: _Block, first: Val, last: Val, k0: Val, kind: Start, finishes: bool = False) -> list[Val]:
        fn, variant, micro = self.fn, block.variant, block.variant.micro
        count = self.rows.count(k0)
        block = replace(block, lhs=self.rows.piece(variant, block.lhs, k0))
        steps = self.rows.steps(variant, count)
        skip = fn.mul(fn.udiv(k0, i64(self.packing.unit_k)), i64(self.packing.unit_bytes(micro.rhs)))

        def act(part: _Block, p: Val, i: Val, out: Val, panels: Panels, state: State) -> State:
            if finishes:
                self._fetch(part, i, p)
            self._tile(part, kind, i, steps, out, p, panels, variant.left(self.spec.k) if finishes else 0, state)
            return self._later(part, out, i, p) if finishes else []

        state = self._nothing(block.variant) if finishes else []

        def read(part: _Block, p: Val) -> Panels:
            return self.columns.read(part.variant.micro, p, skip, count)

        self._each(block, first, last, act, read, state)
        return []

    def _each(
        self, block: _Block, first: Val, last: Val, act: EachTile, panels: Callable[[_Block, Val], Panels] = lambda part, p: [],
        state: Sequence[Val] = (),
    ) -> None:
        """state = act(block of the tile's width, panel, row in it, its tile in scratch, panels(that block, panel), state) for a group."""
        fn, wide = self.fn, block.variant.micro.panels
        parts = self._parts(block)
        across = self.blocking.panel_block // wide + len(parts) - 1
        turn = self.blocking.turn_bytes(block.variant)

        def panel(p: Val, state: State, part: _Block) -> State:
            # Rounded up: a narrower tile comes after one that may reach beyond its first panel.
            column = fn.udiv(fn.add(fn.sub(p, first), i64(wide - 1)), i64(wide))
            operands = panels(part, p)

            def tile(part: _Block, i: Val, state: State) -> State:
                number = fn.add(fn.mul(fn.udiv(i, i64(part.height)), i64(across)), column)
                return act(part, p, i, fn.gep(self.tiles, fn.mul(number, i64(turn))), operands, state)

            return self._in_turn(part, state, tile)

        for part in parts:
            begin, end = fn.smax(first, part.begin), fn.smin(last, part.end)
            self._catch_up(part.variant.micro, fn.loop(begin, end, part.variant.micro.panels, state, partial(panel, part=part)))

    # -- tiles --------------------------------------------------------------------------------------------------
    def _tile(
        self, block: _Block, kind: Start, i: Val, steps: Val, out: Val, p: Val, panels: Panels, left: int = 0, state: Sequence[Val] = ()
    ) -> None:
        """Calls the function of a tile: rows from i on of the block; panels: where panels p, p + 1, ... are; left: of `Tile`."""
        fn, variant, micro = self.fn, block.variant, block.variant.micro
        epilogue = self._epilogue if state else None
        every = tuple(steps for steps, _ in self.spec.ways)
        name = emit_tile(
            fn.module, micro, kind, self.blocking.out_pitch, variant.pitch, variant.shares, left, epilogue, variant.reverses, every,
            in_blocks(micro, self.blocking.k_block),
        )
        pending = [fn.args[0], *state, epilogue.share(fn, steps, micro)] if epilogue else []
        rows, number = self.rows.tile(variant, block.lhs, i, steps), fn.udiv(i, i64(block.height))
        operands = self.columns.operands(variant, p, number, steps, panels, kind)
        operands += [i64(way) for _, way in self.spec.ways]
        if variant.reverses:
            odd = fn.and_(fn.add(number, fn.udiv(p, i64(micro.panels))), i64(1))
            operands.append(fn.sub(i64(0), odd))
        fn.call(name, VOID, [rows, i64(variant.pitch), out, steps, *operands, *pending])

    def _fetch(self, block: _Block, i: Val, p: Val) -> None:
        """Asks for what the epilogue of a tile will read and write."""
        name = f"{self.name}.fetch"
        if name in self.fn.module.functions:
            row, rows, first, _ = self._valid(block, i, p)
            self.fn.call(name, VOID, [self.fn.args[0], row, rows, first])

    @property
    def _epilogue(self) -> Epilogue:
        return Epilogue(f"{self.name}.epilogue", self.target, self.spec, self.slots.order, self.blocking.out_pitch)

    def _nothing(self, variant: Variant) -> State:
        """The state in which no epilogue is pending."""
        return [self.tiles, *[i64(0)] * 4] if variant.overlaps else []

    def _later(self, block: _Block, out: Val, i: Val, p: Val) -> State:
        """The state in which the epilogue of a finished tile is pending; where tiles do not overlap it is done now."""
        if not block.variant.overlaps:
            self._finish(block, out, i, p)
            return []
        row, rows, first, end = self._valid(block, i, p)
        return [out, row, rows, first, self.fn.sub(end, first)]

    def _catch_up(self, micro: MicroKernel, state: State) -> None:
        """What is still pending, of a tile of this kind."""
        if state:
            Pending(self._epilogue, [self.fn.args[0], *state], i64(0)).emit(self.fn, micro)

    def _valid(self, block: _Block, i: Val, p: Val) -> tuple[Val, Val, Val, Val]:
        """First row of a tile in the result, number of rows, first column and end of those columns that are this call's."""
        fn, micro = self.fn, block.variant.micro
        first = fn.mul(p, i64(self.packing.nr))
        end = fn.smin(self.slots.dim(self.spec.n), fn.mul(block.end, i64(self.packing.nr)))
        end = fn.smin(end, fn.add(first, i64(micro.nr)))
        return fn.add(self.row_base, fn.add(block.lhs.row, i)), fn.smin(i64(micro.mr), fn.sub(block.lhs.count, i)), first, end

    def _finish(self, block: _Block, out: Val, i: Val, p: Val) -> None:
        """The epilogue of a finished tile, over its valid rows and columns, block by block."""
        fn, micro, width = self.fn, block.variant.micro, self.blocking.out_pitch
        result_row, rows, first, end = self._valid(block, i, p)
        out = valid_rows(fn, self.spec, out, micro.mr, rows, width)

        def columns(col: Val, at: list[Val]) -> list[Val]:
            cols = fn.smin(i64(width), fn.sub(end, col))
            fn.call(f"{self.name}.epilogue", VOID, [fn.args[0], at[0], result_row, rows, col, cols])
            return [fn.gep(at[0], i64(4 * micro.mr * width))]

        fn.loop(first, end, width, [out], columns)
