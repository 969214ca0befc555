"""Attention in bf16 on AMX: both products by TDPBF16PS, sums in f32.

    products   [32 keys][queries]        += k tile [16 keys][32 of depth]    .  q pairs [16 pairs of depth][queries][2]
    sums       [32 columns of v][queries] += v tile [16 columns][32 keys]    .  weights [16 pairs of keys][queries][2]

Queries are columns of the tiles, so that scores come out with queries as lanes and two rows of weights make the pairs of the second product
without a shuffle. Only v must be transposed; a kernel that runs before does that once for each head (`attention_amx_pack.py`).

Products of 32 keys go beside the scores of the keys before them, and weighted values beside the weights of those after them: vector units
work meanwhile. Emerald Rapids takes 12 to 19 % less time so, with the request for the results' lines (64 to 197 keys, heads of 32 and 64).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..cpu_codegen.builder import Function, Module, Val, i64
from ..cpu_codegen.intrinsics import prefetch
from ..cpu_codegen.slots import Slots
from ..graph.dims import bounds
from ..platforms.target import Target
from ..stitch.loops import Body
from .amx import INSTRUCTIONS, ROW_BYTES, ROWS, TILE_BYTES, Tiles
from .attention_amx_pack import KEYS, emit_pack, layout_of
from .attention_blocks import Family, emit_blocks
from .attention_pairs import PairStream
from .attention_softmax import short_pair
from .attention_spec import WORKSPACE, AttentionCode, AttentionSpec, heads_as_queries
from .attention_stream import Stream
from .attention_tiling import Tiling, even_block, sizes_for
from .micro import offset

_LANES = 16
_LINE = 64


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
    overlaps = True

    def __init__(
        self, fn: Function, target: Target, spec: AttentionSpec, slots: Slots, body: Body, tiling: Tiling, tiles: Tiles
    ) -> None:
        super().__init__(fn, target, spec, slots, body, tiling)
        self.tiles, self.layout = tiles, layout_of(spec)
        self.pitch = i64(tiling.queries * 4)
        # What is read once for each block of queries should not push the scratch out of L1, unless it fits beside it.
        most = bounds(spec.s)[1]
        self.streamed = most is None or most * (spec.depth + spec.width) * 2 > target.l1d // 2

    def load_queries(self) -> None:
        super().load_queries()
        self._request_results()

    def _request_results(self) -> None:
        """Asks for the lines that the results will be stored into: they come while products and softmax are computed."""
        fn, spec = self.fn, self.spec
        if spec.out.col != 1:
            return
        pitch = self.slots.dim(spec.out.row * spec.stored.bytes)

        def row(index: Val, _: list[Val]) -> list[Val]:
            for line in range(0, spec.width * spec.stored.bytes, _LINE):
                prefetch(fn, offset(fn, fn.gep(self.out, fn.mul(index, pitch)), line), writes=True)
            return []

        fn.loop(i64(0), self.rows, 1, [], row)

    # -- products -----------------------------------------------------------------------------------------------
    def products(self, start: Val, count: Val) -> None:
        """Those of the first keys. Before them those of the last ones, if these do not fill two tiles: they may write others again."""
        fn, left = self.fn, self.fn.urem(count, i64(KEYS))

        def of(at: Val) -> list[Val]:
            self._multiply(start, at)
            return self._store_products(start, at)

        fn.branch(fn.icmp("sgt", left, i64(0)), lambda: of(fn.sub(count, left)))
        fn.branch(fn.icmp("sge", count, i64(KEYS)), lambda: of(i64(0)))

    def beside_scores(self, start: Val, at: Val, count: Val, scores: Callable[[], list[Val]]) -> list[Val]:
        """Products are stored last of all: until then they are computed."""
        fn, following = self.fn, self.fn.add(at, i64(KEYS))
        more = fn.icmp("sle", fn.add(following, i64(KEYS)), count)
        fn.branch(more, lambda: self._multiply(start, following))
        found = scores()
        fn.branch(more, lambda: self._store_products(start, following))
        return found

    def _multiply(self, start: Val, at: Val) -> list[Val]:
        """Two tiles of keys by all queries, from key `at` of the block that begins at key `start`."""
        fn, layout = self.fn, self.layout
        if layout.direct:
            pitch, step = self.slots.dim(self.spec.k.row * 2), ROW_BYTES
            keys = [fn.gep(self.k, fn.mul(key, pitch)) for key in self._keys(start, at)]
        else:
            pitch, step = i64(ROW_BYTES), TILE_BYTES
            number = fn.add(fn.mul(self.group(), self.slots.dim(layout.blocks)), fn.udiv(fn.add(start, at), i64(KEYS)))
            first = fn.gep(fn.gep(self.slots.buffer(WORKSPACE), self.slots.dim(layout.k_start)), number, scale=layout.k_block)
            keys = [first, fn.gep(first, i64(layout.chunks * TILE_BYTES))]

        def chunk(index: Val, _: list[Val]) -> list[Val]:
            many = fn.gep(self.queries, index, scale=ROWS * self.tiling.queries * 4)
            self._dot([(fn.gep(key, index, scale=step), pitch) for key in keys], many)
            return []

        for register in range(2 * self.tiling.vectors):
            self.tiles.zero(fn, register)
        fn.loop(i64(0), i64(layout.chunks), 1, [], chunk)
        return []

    def _store_products(self, start: Val, at: Val) -> list[Val]:
        rows = [self.fn.sub(key, start) for key in self._keys(start, at)]
        for register, place in enumerate(self._places(self.scores, rows)):
            self.tiles.store(self.fn, register, place, self.pitch)
        return []

    def _keys(self, start: Val, at: Val) -> list[Val]:
        """The first key of both tiles. One of rows in place that would reach beyond the last key is moved back and computes some again."""
        fn = self.fn
        keys = [fn.add(fn.add(start, at), i64(ROWS * n)) for n in range(2)]
        last = fn.sub(self.slots.dim(self.spec.s), i64(ROWS))
        return [fn.smin(key, last) for key in keys] if self.layout.direct else keys

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

    def pair(self, even: Val, odd: Val) -> Val:
        return short_pair(self.fn, even, odd)

    # -- weighted values ----------------------------------------------------------------------------------------
    def before_weights(self, alpha: list[Val]) -> None:
        def scaled(index: Val, _: list[Val]) -> list[Val]:
            for v, factor in enumerate(alpha):
                place = self.place(self.sums, self.row(index), v)
                self.fn.store(self.fn.mul(self.fn.load(self.vector, place), factor), place)
            return []

        if not self.once:
            self.fn.loop(i64(0), i64(self.layout.columns * ROWS), 1, [], scaled)
        self._begin_values(i64(0), min(2, self.layout.columns))

    def beside_weights(self, start: Val, at: Val, weights: Callable[[], list[Val]]) -> list[Val]:
        """The first columns of v: for as many there are accumulators."""

        def before() -> list[Val]:
            self._values(start, fn.sub(fn.udiv(at, i64(KEYS)), i64(1)), i64(0), min(2, self.layout.columns))
            return []

        fn = self.fn
        fn.branch(fn.icmp("sgt", at, i64(0)), before)
        return weights()

    def accumulate(self, start: Val, count: Val, alpha: list[Val]) -> None:
        """The values of the last keys, and the other columns."""
        del alpha
        fn, columns = self.fn, self.layout.columns
        steps = fn.udiv(fn.add(count, i64(KEYS - 1)), i64(KEYS))
        self._values(start, fn.sub(steps, i64(1)), i64(0), min(2, columns))
        self._end_values(i64(0), min(2, columns))

        def some(first: Val, tiles: int) -> list[Val]:
            self._begin_values(first, tiles)
            fn.loop(i64(0), steps, 1, [], lambda index, _: self._values(start, index, first, tiles))
            self._end_values(first, tiles)
            return []

        fn.loop(i64(2), i64(columns // 2 * 2), 2, [], lambda first, _: some(first, 2))
        if columns > 2 and columns % 2:
            some(i64(columns - 1), 1)

    def _values(self, start: Val, index: Val, first: Val, tiles: int) -> list[Val]:
        """sums += values of the keys number `index` of the block, of so many tiles of columns, times their weights."""
        fn, layout = self.fn, self.layout
        number = fn.add(fn.add(fn.mul(self.group(), self.slots.dim(layout.blocks)), fn.udiv(start, i64(KEYS))), index)
        values = fn.gep(fn.gep(self.slots.buffer(WORKSPACE), number, scale=layout.v_block), first, scale=TILE_BYTES)
        many = fn.gep(self.scores, index, scale=ROWS * self.tiling.queries * 4)
        self._dot([(fn.gep(values, i64(n * TILE_BYTES)), i64(ROW_BYTES)) for n in range(tiles)], many)
        return []

    def _begin_values(self, first: Val, tiles: int) -> None:
        for register, place in enumerate(self._sums(first, tiles)):
            if self.once:
                self.tiles.zero(self.fn, register)
            else:
                self.tiles.load(self.fn, register, place, self.pitch, False)

    def _end_values(self, first: Val, tiles: int) -> None:
        for register, place in enumerate(self._sums(first, tiles)):
            self.tiles.store(self.fn, register, place, self.pitch)

    def _sums(self, first: Val, tiles: int) -> list[Val]:
        """Where the accumulators of so many tiles of columns lie."""
        return self._places(self.sums, [self.fn.mul(self.fn.add(first, i64(n)), i64(ROWS)) for n in range(tiles)])
