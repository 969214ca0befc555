"""Attention by vector fused multiply-adds in f32, for any instruction set; f16 and bf16 are widened as they are read.

A register tile multiplies the vectors of a block's queries by scalars that are broadcast from rows of k (or v), which lie as the user has
them. Only element types other than f32 and columns that are not contiguous are copied first, a block of keys at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from ..cpu_codegen.builder import F32, Function, Val, const, i64
from ..cpu_codegen.slots import Slots
from ..graph.types import f32
from ..platforms.target import Target
from ..stitch.loops import Body
from .attention_blocks import Family
from .attention_rows import read_row
from .attention_spec import AttentionSpec, HeadStrides
from .attention_stream import Stream
from .attention_tiling import PADDING, Tiling, even_block, sizes_for, up

_UNROLL = 2  # of the loop over the depth; more was measured no faster, and of 16 registers none are left to hold what comes next


class VectorFamily(Family):
    """Blocks by `VectorStream`."""

    def tilings(self, target: Target, spec: AttentionSpec) -> tuple[Tiling, ...]:
        """Accumulators, a vector or more of queries and a broadcast share the registers. A block of scores stays in L1 beside the sums."""
        lanes = target.lanes(32)
        if target.registers >= 32:
            vectors, keys, columns = (2, 12, 12) if lanes >= 8 else (4, 5, 4)
        else:
            vectors, keys, columns = 2, 6, 6
        found = []
        for count in (vectors, 1):
            queries = count * lanes
            room = target.l1d * 3 // 4 - queries * 4 * max(spec.depth, spec.width)
            most = min(240, max(60, room // (queries * 4) // 60 * 60))
            found.append(Tiling(lanes, count, keys, columns, even_block(spec, most, 4)))
        return sizes_for(spec, found)

    def stream(self, fn: Function, target: Target, spec: AttentionSpec, slots: Slots, body: Body, tiling: Tiling) -> Stream:
        return VectorStream(fn, target, spec, slots, body, tiling)


class VectorStream(Stream):
    """`Stream` by fused multiply-adds of f32 vectors."""

    pack = 1
    """How many neighbours, along the depth and among the keys, an element of 32 bits holds."""

    def __init__(self, fn: Function, target: Target, spec: AttentionSpec, slots: Slots, body: Body, tiling: Tiling) -> None:
        super().__init__(fn, target, spec, slots, body, tiling)
        self.sum = self.vector  # what a register tile adds up in
        # A register holds a few neighbours to multiply by, one lane after the other, where that is an instruction.
        self.by_lane = "neon" in target.features
        self.ahead = tiling.lanes if self.by_lane else _UNROLL if target.registers > 16 else 1

    def load_queries(self) -> None:
        self.queries = self.fn.alloca(-(-self.spec.depth // 16) * 16 * self.tiling.queries * 4)
        self.transpose_queries(self.queries)

    def steps(self, count: Val) -> Val:
        """Rows of `values` for so many keys."""
        return self.fn.udiv(up(self.fn, count, self.pack), i64(self.pack))

    def keys(self, start: Val, count: Val) -> tuple[Val, Val]:
        """Where rows of k are, elements of 32 bits side by side, and how many bytes from one to the next."""
        return self._f32_rows(self.k, self.spec.k, start, count, self.spec.depth)

    def values(self, start: Val, count: Val) -> tuple[Val, Val]:
        """The same for v."""
        return self._f32_rows(self.v, self.spec.v, start, count, self.spec.width)

    def _f32_rows(self, base: Val, strides: HeadStrides, start: Val, count: Val, length: int) -> tuple[Val, Val]:
        """Rows as the user has them, or copied as f32."""
        fn, dtype = self.fn, self.spec.dtype
        row_bytes, col = self.slots.dim(strides.row * dtype.bytes), self.slots.dim(strides.col)
        first = fn.gep(base, fn.mul(start, row_bytes))
        if dtype == f32 and strides.col == 1:
            return first, row_bytes

        def copy(index: Val, to: Val) -> None:
            read_row(fn, dtype, fn.gep(first, fn.mul(index, row_bytes)), col, length, to, self.tiling.lanes)

        return self.stage(count, length, copy)

    def stage(self, count: Val, length: int, copy: Callable[[Val, Val], None]) -> tuple[Val, Val]:
        """Calls copy(index, target) for rows of `length` elements of 32 bits in scratch; returns where they are and how far apart."""
        fn, pitch = self.fn, (length + PADDING) * 4
        rows = fn.alloca(self.tiling.block * pitch)

        def one(index: Val, _: list[Val]) -> list[Val]:
            copy(index, fn.gep(rows, fn.mul(index, i64(pitch))))
            return []

        fn.loop(i64(0), count, 1, [], one)
        return rows, i64(pitch)

    # -- products -----------------------------------------------------------------------------------------------
    def products(self, start: Val, count: Val) -> None:
        fn, tile = self.fn, self.tiling.keys
        rows, pitch = self.keys(start, count)

        def whole(at: Val, _: list[Val]) -> list[Val]:
            base = fn.gep(rows, fn.mul(at, pitch))
            self._product([fn.gep(base, fn.mul(pitch, i64(n))) for n in range(tile)], at)
            return []

        def rest(at: Val, _: list[Val]) -> list[Val]:
            # Beyond the last key it is repeated, so that nothing is read that is not there.
            last = fn.sub(count, i64(1))
            self._product([fn.gep(rows, fn.mul(fn.smin(fn.add(at, i64(n)), last), pitch)) for n in range(4)], at)
            return []

        full = fn.mul(fn.udiv(count, i64(tile)), i64(tile))
        fn.loop(i64(0), full, tile, [], whole)
        fn.loop(full, count, 4, [], rest)

    def _product(self, keys: Sequence[Val], at: Val) -> None:
        """Products of some keys with all queries, to the rows of `scores` from `at` on."""
        fn, vectors, depth = self.fn, self.tiling.vectors, -(-self.spec.depth // self.pack)

        def steps(index: Val, values: list[Val], many: int) -> list[Val]:
            columns = [self.scalars(fn.gep(key, index, F32), many) for key in keys]
            for d in range(many):
                row = self.row(fn.add(index, i64(d))) if index.ref.isdigit() else fn.add(self.row(index), i64(d * self.tiling.queries))
                query = [fn.load(self.vector, self.place(self.queries, row, v)) for v in range(vectors)]
                values = self.multiplied(values, (column[d]() for column in columns), query)
            return values

        start = [const(self.sum, 0)] * (len(keys) * vectors)
        full = depth // self.ahead * self.ahead
        values = fn.loop(i64(0), i64(full), self.ahead, start, lambda index, values: steps(index, values, self.ahead))
        if depth > full:
            values = steps(i64(full), values, depth - full)
        for n, key in enumerate(keys):
            for v in range(vectors):
                fn.store(self.whole_product(values[n * vectors + v], key, v), self.place(self.scores, self.row(fn.add(at, i64(n))), v))

    def whole_product(self, total: Val, key: Val, v: int) -> Val:
        """The products, in f32, of vector v of the queries with the key at this address, from their sums."""
        return total

    def multiplied(self, values: list[Val], scalars: Iterable[Val], vectors: Sequence[Val]) -> list[Val]:
        """values[scalar][vector] + scalar * vector. The scalars are asked for one by one: LLVM keeps about to the order of loads and
        products, and with all loads first it holds more scalars than there are registers for."""
        each = len(vectors)
        found: list[Val] = []
        for n, scalar in enumerate(scalars):
            found += [self.product(value, scalar, vector) for value, vector in zip(values[n * each : (n + 1) * each], vectors, strict=True)]
        return found

    def product(self, value: Val, scalar: Val, vector: Val) -> Val:
        """value + scalar * vector."""
        return self.fn.fma(scalar, vector, value)

    def scalars(self, pointer: Val, count: int) -> list[Callable[[], Val]]:
        """What gives each of `count` neighbours in memory, in all lanes."""
        fn, lanes = self.fn, self.tiling.lanes
        if self.by_lane and count == lanes:
            several = fn.load(self.vector, pointer)
            return [partial(fn.shuffle, several, several, [n] * lanes) for n in range(count)]

        def scalar(n: int) -> Val:
            return fn.splat(fn.load(F32, fn.gep(pointer, i64(4 * n)) if n else pointer, 4 // self.pack), lanes)

        return [partial(scalar, n) for n in range(count)]

    # -- weighted values ----------------------------------------------------------------------------------------
    def store_weights(self, row: Val, weights: list[list[Val]]) -> None:
        for n, vectors in enumerate(weights):
            for v, value in enumerate(vectors):
                self.fn.store(value, self.place(self.scores, self.row(self.fn.add(row, i64(n))), v))

    def accumulate(self, start: Val, count: Val, alpha: list[Val]) -> None:
        fn, width, tile = self.fn, self.spec.width, self.tiling.columns
        rows, pitch = self.values(start, count)
        done = 0
        for height, times in self._heights(width, tile):

            def columns(at: Val, _: list[Val], height: int = height) -> list[Val]:
                self._weighted(fn.gep(rows, at, F32), pitch, at, height, self.steps(count), alpha)
                return []

            fn.loop(i64(done), i64(done + height * times), height, [], columns)
            done += height * times

    def _heights(self, width: int, tile: int) -> list[tuple[int, int]]:
        """(columns of a tile, how many such tiles): as even as can be, but whole vectors where lanes are multiplied by."""
        if self.by_lane:
            return [(h, n) for h, n in ((tile, width // tile), (width % tile, 1)) if h and n]
        tiles = -(-width // tile)
        return [(h, n) for h, n in ((-(-width // tiles), width % tiles or tiles), (width // tiles, tiles - (width % tiles or tiles))) if n]

    def _weighted(self, base: Val, pitch: Val, at: Val, height: int, steps: Val, alpha: list[Val]) -> None:
        """A tile of `height` columns of v, which begins at `base`."""
        fn, vectors = self.fn, self.tiling.vectors
        places = [self.place(self.sums, self.row(fn.add(at, i64(n))), v) for n in range(height) for v in range(vectors)]
        start = self.first_sums(places, alpha)

        def key(index: Val, values: list[Val]) -> list[Val]:
            scalars = self.scalars(fn.gep(base, fn.mul(index, pitch)), height)
            weights = [fn.load(self.vector, self.place(self.scores, self.row(index), v)) for v in range(vectors)]
            return self.multiplied(values, (scalar() for scalar in scalars), weights)

        for place, value in zip(places, self.last_sums(fn.loop(i64(0), steps, 1, start, key), places, at, alpha)):
            fn.store(value, place)

    def first_sums(self, places: Sequence[Val], alpha: Sequence[Val]) -> list[Val]:
        """What the weighted values of a block are added to, of the sums at these places: those of a column side by side."""
        if self.once:
            return [const(self.sum, 0)] * len(places)
        return [self.fn.mul(self.fn.load(self.vector, place), alpha[n % len(alpha)]) for n, place in enumerate(places)]

    def last_sums(self, values: list[Val], places: Sequence[Val], at: Val, alpha: Sequence[Val]) -> list[Val]:
        """The sums from what these have become. at: their first column."""
        return values
