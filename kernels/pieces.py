"""Left operands whose rows begin anywhere and are in pieces (`spec.Pieces`): windows over an image are read where they lie.

The places of the rows of a block and of the pieces of a row are written into tables; a generated function copies what they say, in the form
that the micro-kernel reads or, where that is no form of rows, as it is, for the usual packing.

    void name(ptr source, ptr rows, ptr pieces, i64 run, i64 valid, i64 total, i64 first, i64 count, ptr target)

copies `count` k from `first` on; `total` rows, of which those from `valid` on repeat the last valid one. Where all k are copied at once and
the pieces are short, such as those of an image with three colours, a row is written out: loops would take most of its time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..cpu_codegen.builder import I64, PTR, VOID, Function, Module, Val, const, i64
from ..cpu_codegen.slots import Slots
from ..graph.dims import evaluate
from ..platforms.target import Target
from .blocking import Blocking, Variant
from .copies import copy_known, copy_run, fill_steps, memory_type, padded, widths
from .indexing import batch_offset
from .micro import MicroKernel
from .pack_lhs import emit_pack_lhs
from .spec import GemmSpec, Pieces

_WRITTEN_OUT = 36  # vectors of a row: copying more takes longer than the loops around it


def emit_gather(module: Module, target: Target, micro: MicroKernel, pitch: int, plain: bool, whole: tuple[int, int] | None = None) -> str:
    """Adds the function and returns its name. pitch: bytes from row to row of the scratch. plain: elements as they are. whole: (pieces, k
    of each) where it copies all of them."""
    lanes = _lanes(target, micro, plain)
    if whole is not None and whole[0] * -(-whole[1] // lanes[0]) > _WRITTEN_OUT:
        whole = None
    name = f"gather_lhs.{micro.lhs}.{pitch}" + ("" if plain else f".{micro.isa}x{micro.step_k}")
    name += "" if whole is None else f".{whole[0]}x{whole[1]}"
    if name not in module.functions:
        fn = Function(module, name, VOID, [PTR, PTR, PTR, I64, I64, I64, I64, I64, PTR], internal=True)
        if whole is None:
            _gather(fn, lanes, micro, pitch, plain)
        else:
            _gather_whole(fn, lanes, micro, pitch, plain, *whole)
        fn.ret()
        fn.finish()
    return name


def _lanes(target: Target, micro: MicroKernel, plain: bool) -> tuple[int, ...]:
    """Of `widths`: how many elements to copy at a time."""
    return widths(target, max(micro.lhs.bits, 0 if plain else micro.layout.element.bits))


def _gather_whole(fn: Function, lanes: tuple[int, ...], micro: MicroKernel, pitch: int, plain: bool, count: int, run: int) -> None:
    source, rows, pieces, _, valid, total, _, _, scratch = fn.args
    element = memory_type(micro.lhs)
    to_type = element if plain else micro.layout.element
    last = fn.sub(valid, i64(1))
    starts = [fn.load(I64, fn.gep(pieces, i64(number), I64)) for number in range(count)]

    def row(index: Val, _: list[Val]) -> list[Val]:
        base = fn.gep(source, fn.load(I64, fn.gep(rows, fn.smin(index, last), I64)))
        to = fn.gep(scratch, index, scale=pitch)
        for number, start in enumerate(starts):
            put = fn.gep(to, i64(number * run), to_type)
            copy_known(fn, element, (lambda _, value: value) if plain else micro.convert, fn.gep(base, start), put, run, to_type, lanes)
        for k in range(count * run, count * run if plain else -(-count * run // micro.step_k) * micro.step_k):
            fn.store(const(to_type, 0), fn.gep(to, i64(k), to_type))
        return []

    fn.loop(i64(0), total, 1, [], row)


def _gather(fn: Function, lanes: tuple[int, ...], micro: MicroKernel, pitch: int, plain: bool) -> None:
    source, rows, pieces, run, valid, total, first, count, scratch = fn.args
    element = memory_type(micro.lhs)
    to_type = element if plain else micro.layout.element
    last, end = fn.sub(valid, i64(1)), fn.add(first, count)
    start, stop = fn.udiv(first, run), fn.udiv(fn.add(end, fn.sub(run, i64(1))), run)

    def row(index: Val, _: list[Val]) -> list[Val]:
        base = fn.gep(source, fn.load(I64, fn.gep(rows, fn.smin(index, last), I64)))
        to = fn.gep(scratch, index, scale=pitch)

        def piece(number: Val, _: list[Val]) -> list[Val]:
            begin = fn.mul(number, run)
            low, high = fn.smax(begin, first), fn.smin(fn.add(begin, run), end)
            at = fn.gep(fn.gep(base, fn.load(I64, fn.gep(pieces, number, I64))), fn.sub(low, begin), element)
            put = fn.gep(to, fn.sub(low, first), to_type)
            convert = (lambda _, value: value) if plain else micro.convert
            copy_run(fn, element, convert, at, put, fn.sub(high, low), to_type, lanes, None)
            return []

        fn.loop(start, stop, 1, [], piece)
        if not plain:
            fill_steps(fn, micro, to, count)
        return []

    fn.loop(i64(0), total, 1, [], row)


@dataclass(frozen=True)
class _Scratch:
    """Plain rows of one tile: where, and bytes from row to row."""

    at: Val
    pitch: int


class PieceReader:
    """The tables inside the function of one product, and the copies that they say."""

    def __init__(self, fn: Function, slots: Slots, target: Target, spec: GemmSpec, pieces: Pieces, blocking: Blocking) -> None:
        self.fn, self.slots, self.target, self.spec, self.pieces = fn, slots, target, spec, pieces
        self.rows = fn.alloca(8 * max(v.rows for v in blocking.variants))
        count = evaluate(spec.k, {}) // pieces.run
        self.starts = fn.alloca(8 * count)
        self._table(self.starts, i64(0), i64(count), pieces.piece)
        self.whole = (count, pieces.run) if blocking.pieces == 1 else None
        others = [v.micro for v in blocking.variants if v.micro.layout.group or v.micro.layout.step_bytes]
        pitch = blocking.k_block * spec.lhs.bytes + 64
        self.scratch = _Scratch(fn.alloca(pitch * max(micro.mr for micro in others)), pitch) if others else None

    def _table(self, table: Val, first: Val, count: Val, expression: object) -> None:
        fn = self.fn

        def entry(n: Val, _: list[Val]) -> list[Val]:
            offset = batch_offset(fn, self.slots, expression, fn.add(first, n))  # type: ignore[arg-type]
            fn.store(fn.mul(offset, i64(self.spec.lhs.bytes)), fn.gep(table, n, I64))
            return []

        fn.loop(i64(0), count, 1, [], entry)

    def enter_block(self, row: Val, rows: Val) -> None:
        """Looks up the rows [row, row + rows), which the next copies are of."""
        self._table(self.rows, row, rows, self.pieces.row)

    def pack(
        self, variant: Variant, source: Val, rows: Val, total: Val, k0: Val, count: Val, to: Val, powers: Sequence[Val] = ()
    ) -> None:
        """Packs `count` k from k0 on of the rows of the block, up to `total` rows. powers: of `emit_pack_lhs`."""
        fn, micro = self.fn, variant.micro
        if not (micro.layout.group or micro.layout.step_bytes):
            name = emit_gather(fn.module, self.target, micro, variant.pitch, False, self.whole)
            fn.call(name, VOID, [source, self.rows, self.starts, i64(self.pieces.run), rows, total, k0, count, to])
            return
        assert self.scratch is not None
        at, pitch = self.scratch.at, self.scratch.pitch
        gather = emit_gather(fn.module, self.target, micro, pitch, True, self.whole)
        pack = emit_pack_lhs(fn.module, self.target, micro, variant.pitch, True)
        row_bytes = i64(variant.pitch)
        if micro.layout.group:
            row_bytes = fn.mul(padded(fn, count, micro.step_k), i64(micro.layout.element.bits // 8))

        def tile(i: Val, _: list[Val]) -> list[Val]:
            valid = fn.smin(fn.sub(rows, i), i64(micro.mr))
            fn.call(gather, VOID, [source, fn.gep(self.rows, i, I64), self.starts, i64(self.pieces.run), valid, valid, k0, count, at])
            size = i64(self.spec.lhs.bytes)
            fn.call(pack, VOID, [at, i64(pitch), size, valid, i64(micro.mr), count, fn.gep(to, fn.mul(i, row_bytes)), *powers])
            return []

        fn.loop(i64(0), total, micro.mr, [], tile)
