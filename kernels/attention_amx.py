"""Attention in bf16 on AMX: both products by TDPBF16PS, sums in f32.

    products   [32 keys][queries]        += k tile [16 keys][32 of depth]    .  q pairs [16 pairs of depth][queries][2]
    sums       [32 columns of v][queries] += v tile [16 columns][32 keys]    .  weights [16 pairs of keys][queries][2]

Queries are columns of the tiles, so that scores come out with queries as lanes and two rows of weights make the pairs of the second product
without a shuffle. Only v must be transposed; a kernel that runs before does that once for each head (`attention_amx_pack.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..cpu_codegen.builder import Function, Module, Val, i64
from ..cpu_codegen.slots import Slots
from ..graph.dims import bounds
from ..platforms.target import Target
from ..stitch.loops import Body
from .amx import INSTRUCTIONS, ROW_BYTES, ROWS, TILE_BYTES, Tiles
from .attention_amx_pack import KEYS, emit_pack, layout_of
from .attention_blocks import Family, emit_blocks
from .attention_pairs import PairStream
from .attention_spec import WORKSPACE, AttentionCode, AttentionSpec, heads_as_queries
from .attention_stream import Stream
from .attention_tiling import Tiling, even_block, sizes_for

_LANES = 16


@dataclass(frozen=True)
class AmxFamily(Family):
    """Blocks by `AmxStream`."""

    tiles: Tiles = INSTRUCTIONS

    def tilings(self, target: Target, spec: AttentionSpec) -> tuple[Tiling, ...]:
        found = []
        for vectors in (2, 1):
            queries = vectors * _LANES
            room = target.l1d * 3 // 4 - queries * 4 * spec.width - queries * 2 * spec.depth
            most = min(256, max(2 * KEYS, room // (queries * 4) // KEYS * KEYS))
            found.append(Tiling(_LANES, vectors, KEYS, KEYS, even_block(spec, most, KEYS)))
        return sizes_for(spec, found)

    def stream(self, fn: Function, target: Target, spec: AttentionSpec, slots: Slots, body: Body, tiling: Tiling) -> Stream:
        return AmxStream(fn, target, spec, slots, body, tiling, self.tiles)

    def enter(self, fn: Function) -> None:
        self.tiles.configure(fn)

    def leave(self, fn: Function) -> None:
        self.tiles.release(fn)


def emit_amx(module: Module, target: Target, spec: AttentionSpec, name: str, tiles: Tiles = INSTRUCTIONS) -> AttentionCode:
    """Adds the kernel and the one that packs."""
    layout = layout_of(spec)
    run = emit_blocks(module, target, heads_as_queries(spec), name, AmxFamily(tiles))
    return AttentionCode(run, emit_pack(module, layout, f"{name}.pack"), layout.bytes)


class AmxStream(PairStream):
    """`Stream` on tiles."""

    unit = KEYS
    margin = ROWS

    def __init__(
        self, fn: Function, target: Target, spec: AttentionSpec, slots: Slots, body: Body, tiling: Tiling, tiles: Tiles
    ) -> None:
        super().__init__(fn, target, spec, slots, body, tiling)
        self.tiles, self.layout = tiles, layout_of(spec)
        self.pitch = i64(tiling.queries * 4)
        # What is read once for each block of queries should not push the scratch out of L1, unless it fits beside it.
        most = bounds(spec.s)[1]
        self.streamed = most is None or most * (spec.depth + spec.width) * 2 > target.l1d // 2

    # -- products -----------------------------------------------------------------------------------------------
    def products(self, start: Val, count: Val) -> None:
        fn, layout = self.fn, self.layout
        if layout.direct:
            pitch = self.slots.dim(self.spec.k.row * 2)
            last = fn.sub(self.slots.dim(self.spec.s), i64(ROWS))

            def rows(at: Val, _: list[Val]) -> list[Val]:
                # A tile that would reach beyond the last key is moved back and computes some keys again.
                first = [fn.smin(fn.add(fn.add(start, at), i64(ROWS * n)), last) for n in range(2)]
                tiles = [fn.gep(self.k, fn.mul(key, pitch)) for key in first]
                self._product(tiles, pitch, ROW_BYTES, [fn.sub(key, start) for key in first])
                return []

            fn.loop(i64(0), count, KEYS, [], rows)
            return
        number = fn.add(fn.mul(self.group(), self.slots.dim(layout.blocks)), fn.udiv(start, i64(KEYS)))
        base = fn.gep(fn.gep(self.slots.buffer(WORKSPACE), self.slots.dim(layout.k_start)), number, scale=layout.k_block)

        def packed(at: Val, _: list[Val]) -> list[Val]:
            first = fn.gep(base, fn.udiv(at, i64(KEYS)), scale=layout.k_block)
            second = fn.gep(first, i64(layout.chunks * TILE_BYTES))
            self._product([first, second], i64(ROW_BYTES), TILE_BYTES, [at, fn.add(at, i64(ROWS))])
            return []

        fn.loop(i64(0), count, KEYS, [], packed)

    def _product(self, keys: list[Val], pitch: Val, step: int, rows: list[Val]) -> None:
        """Two tiles of keys by all queries. step: bytes from a tile of k to the next along the depth; rows: where the results go."""

        def chunk(index: Val, _: list[Val]) -> list[Val]:
            many = self.fn.gep(self.queries, index, scale=ROWS * self.tiling.queries * 4)
            self._dot([(self.fn.gep(key, index, scale=step), pitch) for key in keys], many)
            return []

        for register in range(2 * self.tiling.vectors):
            self.tiles.zero(self.fn, register)
        self.fn.loop(i64(0), i64(self.layout.chunks), 1, [], chunk)
        for register, place in enumerate(self._places(self.scores, rows)):
            self.tiles.store(self.fn, register, place, self.pitch)

    def _places(self, base: Val, rows: list[Val]) -> list[Val]:
        return [self.place(base, self.row(row), v) for row in rows for v in range(self.tiling.vectors)]

    def _dot(self, left: list[tuple[Val, Val]], right: Val) -> None:
        """Accumulator tiles (row of tiles, vector) += tiles of the left times 16 pairs by all queries."""
        fn, vectors = self.fn, self.tiling.vectors
        for v in range(vectors):
            self.tiles.load(fn, 6 + v, self.place(right, i64(0), v), self.pitch, False)
        for n, (pointer, pitch) in enumerate(left):
            self.tiles.load(fn, 4 + n, pointer, pitch, self.streamed)
        for n in range(len(left)):
            for v in range(vectors):
                self.tiles.dot(fn, "tdpbf16ps", n * vectors + v, 4 + n, 6 + v)

    # -- weighted values ----------------------------------------------------------------------------------------
    def accumulate(self, start: Val, count: Val, alpha: list[Val]) -> None:
        fn, layout, vectors = self.fn, self.layout, self.tiling.vectors
        number = fn.add(fn.mul(self.group(), self.slots.dim(layout.blocks)), fn.udiv(start, i64(KEYS)))
        base = fn.gep(self.slots.buffer(WORKSPACE), number, scale=layout.v_block)
        steps = fn.udiv(fn.add(count, i64(KEYS - 1)), i64(KEYS))

        def columns(first: Val, tiles: int) -> None:
            rows = [fn.mul(fn.add(first, i64(n)), i64(ROWS)) for n in range(tiles)]
            places = self._places(self.sums, rows)
            for register, place in enumerate(places):
                if self.once:
                    self.tiles.zero(fn, register)
                else:
                    self.tiles.load(fn, register, place, self.pitch, False)

            def keys(index: Val, _: list[Val]) -> list[Val]:
                left = fn.gep(fn.gep(base, index, scale=layout.v_block), first, scale=TILE_BYTES)
                many = fn.gep(self.scores, index, scale=ROWS * self.tiling.queries * 4)
                self._dot([(fn.gep(left, i64(n * TILE_BYTES)), i64(ROW_BYTES)) for n in range(tiles)], many)
                return []

            fn.loop(i64(0), steps, 1, [], keys)
            for register, place in enumerate(places):
                self.tiles.store(fn, register, place, self.pitch)

        def two(index: Val, _: list[Val]) -> list[Val]:
            columns(index, 2)
            return []

        def scaled(index: Val, _: list[Val]) -> list[Val]:
            for v in range(vectors):
                place = self.place(self.sums, self.row(index), v)
                fn.store(fn.mul(fn.load(self.vector, place), alpha[v]), place)
            return []

        if not self.once:
            fn.loop(i64(0), i64(layout.columns * ROWS), 1, [], scaled)
        fn.loop(i64(0), i64(layout.columns // 2 * 2), 2, [], two)
        if layout.columns % 2:
            columns(i64(layout.columns - 1), 1)
