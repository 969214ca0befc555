"""What AMX attention wants packed before it runs, and the kernel that packs it.

    workspace   v   [batch * groups][blocks of 32 keys][16s of columns][16 columns][32 keys]
                k   [batch * groups][blocks of 32 keys][2][32s of depth][16 keys][32 of depth]   where rows of k cannot serve as tiles

Whatever lies beyond the last key, column or element of depth is 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..cpu_codegen.builder import F32, I16, I64, PTR, VOID, Function, Module, Val, i64
from ..cpu_codegen.contract import KernelCode
from ..cpu_codegen.slots import Slots
from ..graph.dims import Dim, bounds, ceildiv, product
from ..graph.types import bf16
from .amx import ROW_BYTES, ROWS, TILE_BYTES
from .attention_rows import copy_row, head_start, store_columns, zero_row
from .attention_spec import WORKSPACE, AttentionSpec, HeadStrides, K, V
from .attention_tiling import first_to_pack

_WORDS = 32  # elements of a vector
KEYS = 32  # keys of one tile of v, and of two tiles of k
_BAD_PITCH = 2048  # rows so far apart share so few cache sets that tiles of them would push each other out


@dataclass(frozen=True)
class Layout:
    """Where packed operands lie in the workspace, in bytes. direct: tiles of k are read from the user's rows."""

    spec: AttentionSpec
    direct: bool

    @property
    def blocks(self) -> Dim:
        return ceildiv(self.spec.s, KEYS)

    @property
    def v_block(self) -> int:
        return self.columns * TILE_BYTES

    @property
    def k_block(self) -> int:
        return 0 if self.direct else 2 * self.chunks * TILE_BYTES

    @property
    def columns(self) -> int:
        """Tiles across the columns of v."""
        return -(-self.spec.width // ROWS)

    @property
    def chunks(self) -> int:
        """Tiles along the depth."""
        return -(-self.spec.depth // 32)

    @property
    def k_start(self) -> Dim:
        return product((self.spec.all_groups, self.blocks, self.v_block))

    @property
    def bytes(self) -> Dim:
        return product((self.spec.all_groups, self.blocks, self.v_block + self.k_block))


def layout_of(spec: AttentionSpec) -> Layout:
    """Rows of k serve as tiles when they are whole tiles wide and there are 16 of them, so that the last tile may overlap."""
    least, row = bounds(spec.s)[0], spec.k.row
    spread = not (isinstance(row, int) and row * 2 % _BAD_PITCH == 0)
    return Layout(spec, spec.k.col == 1 and spec.depth % 32 == 0 and least is not None and least >= ROWS and spread)


def emit_pack(module: Module, layout: Layout, name: str) -> KernelCode:
    """Adds the kernel that packs; its domain is the blocks of keys of all groups."""
    spec = layout.spec
    fn = Function(module, name, VOID, [PTR, I64, I64])
    slots = Slots(fn)
    pack = _Pack(fn, slots, layout)
    fn.loop(first_to_pack(fn, slots, spec), fn.args[2], 1, [], pack.block)
    fn.ret()
    fn.finish()
    work = product((spec.all_groups, spec.s, spec.depth + spec.width))
    return KernelCode(name, slots.order, product((spec.all_groups, layout.blocks)), 1, work)


class _Pack:
    """Packs blocks of 32 keys. Rows that cannot be read as they are, as they are not all there or not of whole vectors, are copied to the
    stack before, with zeros around them."""

    def __init__(self, fn: Function, slots: Slots, layout: Layout) -> None:
        self.fn, self.slots, self.layout, self.spec = fn, slots, layout, layout.spec
        self.width = max(-(-layout.columns // 2), layout.chunks) * _WORDS
        self.rows = fn.alloca(KEYS * self.width * 2)
        self.pairs = fn.alloca(KEYS * self.width * 2)

    def block(self, index: Val, _: list[Val]) -> list[Val]:
        fn, layout, dim = self.fn, self.layout, self.slots.dim
        head = fn.udiv(index, dim(layout.blocks))
        key = fn.mul(fn.urem(index, dim(layout.blocks)), i64(KEYS))
        workspace = self.slots.buffer(WORKSPACE)
        valid = fn.smin(i64(KEYS), fn.sub(dim(self.spec.s), key))
        first = self._first(V, self.spec.v, head, key)
        self._paired(first, valid)
        to = fn.gep(workspace, index, scale=layout.v_block)
        fn.loop(i64(0), i64(layout.columns), 1, [], lambda column, _: self._transposed(column, to))
        if not layout.direct:
            self._copy(self._first(K, self.spec.k, head, key), self.spec.k, valid, self.spec.depth)
            tiles = fn.gep(fn.gep(workspace, dim(layout.k_start)), index, scale=layout.k_block)
            fn.loop(i64(0), i64(KEYS), 1, [], lambda row, _: self._spread(row, tiles))
        return []

    def _first(self, operand: int, strides: HeadStrides, head: Val, key: Val) -> Val:
        """The first row of the block."""
        fn, dim = self.fn, self.slots.dim
        b, g = fn.udiv(head, dim(self.spec.groups)), fn.urem(head, dim(self.spec.groups))
        return fn.gep(head_start(fn, self.slots, operand, strides, I16, b, g), fn.mul(key, dim(strides.row)), I16)

    def _copy(self, first: Val, strides: HeadStrides, valid: Val, count: int) -> None:
        """Rows of the block, zeros beyond the last column and the last key."""
        fn, dim = self.fn, self.slots.dim

        def row(index: Val, _: list[Val]) -> list[Val]:
            source = fn.gep(first, fn.mul(index, dim(strides.row)), I16)
            copy_row(fn, bf16, source, dim(strides.col), count, fn.gep(self.rows, index, scale=self.width * 2), self.width, _WORDS)
            return []

        def empty(index: Val, _: list[Val]) -> list[Val]:
            zero_row(fn, bf16, fn.gep(self.rows, index, scale=self.width * 2), self.width, _WORDS)
            return []

        fn.loop(i64(0), valid, 1, [], row)
        fn.loop(valid, i64(KEYS), 1, [], empty)

    def _paired(self, first: Val, valid: Val) -> None:
        """The keys of v two by two: column by column the element of the one before that of the other, four columns of every eight before
        the other four in each 32 columns, which is how one instruction mixes two rows."""
        fn, spec = self.fn, self.spec

        def from_rows(source: Val, pitch: Val) -> list[Val]:
            def pair(index: Val, _: list[Val]) -> list[Val]:
                even = fn.gep(source, fn.mul(index, fn.mul(pitch, i64(2))))
                to = fn.gep(self.pairs, index, scale=2 * self.width * 2)
                for at in range(0, spec.width, _WORDS):
                    low, high = (fn.load(I16.vec(_WORDS), fn.gep(row, i64(at * 2))) for row in (even, fn.gep(even, pitch)))
                    for half in range(2):
                        places = [8 * lane + 4 * half + n for lane in range(4) for n in range(4)]
                        mixed = fn.shuffle(low, high, [place + row for place in places for row in (0, _WORDS)])
                        fn.store(mixed, fn.gep(to, i64(at * 4 + half * ROW_BYTES)))
                return []

            return fn.loop(i64(0), i64(KEYS // 2), 1, [], pair)

        def copied() -> list[Val]:
            self._copy(first, spec.v, valid, spec.width)
            return from_rows(self.rows, i64(self.width * 2))

        if spec.v.col == 1 and spec.width % _WORDS == 0:
            pitch = fn.mul(self.slots.dim(spec.v.row), i64(2))
            fn.branch(fn.icmp("eq", valid, i64(KEYS)), lambda: from_rows(first, pitch), copied)
        else:
            copied()

    def _transposed(self, column: Val, to: Val) -> list[Val]:
        """The tile of 16 columns: the pairs of four of them at a time as rows."""
        fn = self.fn
        first = fn.gep(fn.gep(self.pairs, fn.udiv(column, i64(2)), scale=2 * ROW_BYTES), fn.urem(column, i64(2)), scale=ROW_BYTES // 2)
        tile = fn.gep(to, column, scale=TILE_BYTES)
        for four in range(4):
            begin = fn.gep(first, i64(four % 2 * ROW_BYTES + four // 2 * 16))
            corners = [fn.load(F32.vec(4), fn.gep(begin, i64(n * 2 * self.width * 2))) for n in range(KEYS // 2)]
            store_columns(fn, corners, fn.gep(tile, i64(four * 4 * ROW_BYTES)), i64(ROW_BYTES))
        return []

    def _spread(self, row: Val, tiles: Val) -> list[Val]:
        """One row of k over the tiles along the depth."""
        fn, chunks = self.fn, self.layout.chunks
        source = fn.gep(self.rows, row, scale=self.width * 2)
        half = fn.gep(tiles, fn.udiv(row, i64(ROWS)), scale=chunks * TILE_BYTES)
        target = fn.gep(half, fn.urem(row, i64(ROWS)), scale=ROW_BYTES)

        def chunk(index: Val, _: list[Val]) -> list[Val]:
            fn.store(fn.load(I16.vec(32), fn.gep(source, index, scale=ROW_BYTES)), fn.gep(target, index, scale=TILE_BYTES))
            return []

        fn.loop(i64(0), i64(chunks), 1, [], chunk)
        return []
