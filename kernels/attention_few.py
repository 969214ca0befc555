"""Attention of few queries, as in steps of text generation: keys and values are read once, as they lie, and little else is done.

    for blocks of keys:
        products  = q . k                       a key at a time, along the depth; those of as many keys as a vector has lanes are summed up
                                                across lanes together, and are a vector
        scores    = body(products)              scratch [query][key]
        m, m_old  = max(m, maximum), m          alpha = exp(m_old - m)
        weights   = exp(scores - m)             sum = sum * alpha + total of weights
        o         = o * alpha + weights . v     a key at a time, along its columns
    out = o / sum

Keys are the lanes of scores and columns those of results, where many queries would be both (`attention_stream.py`). The domain are the
heads; of a few heads with many keys it is parts of the keys (`attention_parts.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

from ..cpu_codegen import convert
from ..cpu_codegen.body import Point
from ..cpu_codegen.builder import F32, I64, PTR, VOID, Function, Module, Val, const, i64
from ..cpu_codegen.contract import KernelCode, Slot
from ..cpu_codegen.math.exponential import exp_weight
from ..cpu_codegen.slots import Slots
from ..graph.dims import Dim, product
from ..graph.types import DType, bf16, f32
from ..platforms.target import Target
from .attention_result import Results
from .attention_rows import head_start, read_row, write_row, zero_row
from .attention_score import ScoreEmitter, keys_across, minus_infinity, over
from .attention_softmax import finite, inverse, larger, sink_weight
from .attention_spec import OUT, AttentionSpec, HeadStrides, K, Q, V, heads_as_queries
from .attention_tiling import up
from .attention_window import seen_by_few
from .indexing import request
from .selection import lacks

# Of a block of keys: their scores stay in L1, and so do they where they are copied, of so many elements in all.
_KEYS, _COPIED = 256, 4096
_UNROLLED = 16  # vectors of a row


def most_queries(target: Target, dtype: DType) -> int:
    """Of a key, with which this takes no longer than the kernels for many though all keys be seen. Those that multiply by tiles take less
    for more than a few, but put all keys in order, seen or not."""
    return target.lanes(32) // (4 if dtype == bf16 and target.has("amx_bf16") else 2)


def enough_keys(queries: int, keys: Dim) -> bool:
    """Whether there are so many keys that what is done once for each query, and for whole vectors of keys, takes no longer. In f32 of depth
    32 on an Emerald Rapids 24 keys take 0.97 of the time for 2 queries, 0.77 for 4 and 1.25 for 8, 16 keys 1.02, 0.92 and 1.27."""
    return not isinstance(keys, int) or keys >= (24 if queries <= 4 else 32)


def why_not_few(target: Target, spec: AttentionSpec) -> str | None:
    """None where a key has few queries, those of all heads that share it, and a query enough keys, and there are vectors."""
    if (missing := lacks(target, () if target.has("neon") else ("avx2", "fma", "f16c"))) is not None:
        return missing
    queries, most = heads_as_queries(spec).m, most_queries(target, spec.dtype)
    if not isinstance(queries, int) or queries > most:
        return f"is for {most} queries of a key at most, here there are {queries}"
    return None if enough_keys(queries, spec.s) else f"is for more keys than {spec.s} with {queries} queries"


def emit_few(module: Module, target: Target, spec: AttentionSpec, name: str) -> KernelCode:
    """Adds the kernel, whose domain is the heads, of a spec with heads as queries."""
    fn = Function(module, name, VOID, [PTR, I64, I64])
    few = Few(fn, target, spec)
    fn.loop(fn.args[1], fn.args[2], 1, [], few.emit)
    fn.ret()
    fn.finish()
    return KernelCode(name, few.slots.order, product((spec.batch, spec.heads)), 1, spec.work)


def emit_one(module: Module, target: Target, spec: AttentionSpec, name: str, order: tuple[Slot, ...]) -> tuple[Slot, ...]:
    """Adds the function of these arguments, some of all heads, for an attention of any number of queries where a call has one. Returns its
    slots, which begin with those of `order`."""
    fn = Function(module, name, VOID, [PTR, I64, I64], internal=True)
    alone = replace(spec, m=1)
    few = Few(fn, target, heads_as_queries(alone) if why_not_few(target, alone) is None else alone, order)

    def group(head: Val) -> Val:
        """The first of those whose first head is not before this one."""
        return fn.udiv(fn.add(head, i64(few.queries - 1)), i64(few.queries))

    fn.loop(group(fn.args[1]), group(fn.args[2]), 1, [], few.emit)
    fn.ret()
    fn.finish()
    return few.slots.order


class Few:
    """Emits the work of a head. order: slots that come first."""

    def __init__(self, fn: Function, target: Target, spec: AttentionSpec, order: tuple[Slot, ...] = ()) -> None:
        assert isinstance(spec.m, int)
        self.fn, self.target, self.spec, self.queries, self.axes = fn, target, spec, spec.m, keys_across(spec)
        self.slots = Slots(fn, spec.params)
        request(self.slots, order)
        self.lanes = target.lanes(32)
        self.vector = F32.vec(self.lanes)
        self.tile = max(self.lanes, 8)  # keys whose products are summed up together
        self.results = Results(fn, target, spec, self.slots)
        self.score = ScoreEmitter(fn, target, self.slots, over(self.axes, spec), False)
        self.depth, self.width = (max(1, -(-length // self.lanes)) * self.lanes for length in (spec.depth, spec.width))
        copied = not (self._in_place(spec.k, spec.depth, self.depth) and self._in_place(spec.v, spec.width, self.width))
        most = max(self.tile, _COPIED // max(self.depth, self.width)) if copied else _KEYS
        # Queries whose products with a key are computed together: of each there is a vector for every halving of the lanes.
        room = 4 if target.registers > 16 else 2
        self.together = max(n for n in range(1, room + 1) if self.queries % n == 0)
        self.block = most // self.tile * self.tile
        self.q, self.sums = (fn.alloca(self.queries * length * 4) for length in (self.depth, self.width))
        self.scores = fn.alloca(self.queries * self.block * 4)
        self.copy = fn.alloca(self.block * max(self.depth, self.width) * 4) if copied else self.scores
        self.largest, self.totals, self.alphas = (fn.alloca(self.queries * 4) for _ in range(3))

    def _in_place(self, strides: HeadStrides, length: int, padded: int) -> bool:
        """Whether rows of keys or values are read where they lie."""
        return strides.col == 1 and length == padded

    def emit(self, head: Val, _: list[Val]) -> list[Val]:
        with self.score.emitter.scope():
            self.enter(head)
            self.each_query(self.begin)
            self.attend(i64(0), self.slots.dim(self.spec.s))
            self.each_query(self.finish)
        return []

    def enter(self, head: Val) -> None:
        """Says which head is next."""
        fn, spec = self.fn, self.spec
        heads, groups = self.slots.dim(spec.heads), self.slots.dim(spec.groups)
        b, h = (i64(0), head) if spec.batch == 1 else (fn.udiv(head, heads), fn.urem(head, heads))
        g = h if spec.heads == spec.groups else fn.udiv(h, fn.udiv(heads, groups))
        element = convert.memory_type(spec.dtype)
        self.given = head_start(fn, self.slots, Q, spec.q, element, b, h)
        self.k, self.v = head_start(fn, self.slots, K, spec.k, element, b, g), head_start(fn, self.slots, V, spec.v, element, b, g)
        self.head, self.item_head = head, (b, h)

    def attend(self, begin: Val, end: Val) -> None:
        """Adds the weighted values of these keys to the sums of all queries, as far as they are seen."""
        fn, spec = self.fn, self.spec

        def read(query: Val) -> None:
            source = fn.gep(self.given, fn.mul(query, self.slots.dim(spec.q.row * spec.dtype.bytes)))
            self._copy_row(source, self.slots.dim(spec.q.col), spec.depth, fn.gep(self.q, query, scale=self.depth * 4), self.depth)

        self.each_query(read)
        begin, self.limit = seen_by_few(self, begin, end)
        fn.loop(begin, self.limit, self.block, [], self._block)

    def point(self, query: Val) -> Point:
        """Where a query is, whatever the key."""
        return Point(0, {"r": self.head, "k": query})

    def each_query(self, body: Callable[[Val], None]) -> None:
        def one(query: Val, _: list[Val]) -> list[Val]:
            with self.score.emitter.scope():
                body(query)
            return []

        self.fn.loop(i64(0), i64(self.queries), 1, [], one)

    def begin(self, query: Val) -> None:
        """Sums of no keys."""
        fn, zero = self.fn, const(F32, 0.0)
        zero_row(fn, f32, fn.gep(self.sums, query, scale=self.width * 4), self.width, self.lanes)
        fn.store(minus_infinity(zero), fn.gep(self.largest, query, F32))
        fn.store(zero, fn.gep(self.totals, query, F32))

    def _copy_row(self, source: Val, col: Val, length: int, to: Val, padded: int) -> None:
        read_row(self.fn, self.spec.dtype, source, col, length, to, self.lanes)
        zero_row(self.fn, f32, self.fn.gep(to, i64(length), F32), padded - length, self.lanes)

    def _rows(self, base: Val, strides: HeadStrides, length: int, padded: int, start: Val, count: Val) -> tuple[Val, Val, DType]:
        """Where rows of keys or values are, how many bytes from one to the next, and of what type: as the user has them, or copied."""
        fn, dtype = self.fn, self.spec.dtype
        pitch, col = self.slots.dim(strides.row * dtype.bytes), self.slots.dim(strides.col)
        first = fn.gep(base, fn.mul(start, pitch))
        if self._in_place(strides, length, padded):
            return first, pitch, dtype

        def one(index: Val, _: list[Val]) -> list[Val]:
            self._copy_row(fn.gep(first, fn.mul(index, pitch)), col, length, fn.gep(self.copy, index, scale=padded * 4), padded)
            return []

        fn.loop(i64(0), count, 1, [], one)
        return self.copy, i64(padded * 4), f32

    def vector_of(self, dtype: DType, row: Val, n: int) -> Val:
        """Vector n of a row, in f32."""
        fn = self.fn
        value = fn.load(convert.memory_type(dtype).vec(self.lanes), fn.gep(row, i64(n * self.lanes * dtype.bytes)))
        return value if dtype == f32 else convert.widen(fn, value, dtype)

    def _block(self, start: Val, _: list[Val]) -> list[Val]:
        fn, spec = self.fn, self.spec
        count = fn.smin(fn.sub(self.limit, start), i64(self.block))
        self._products(*self._rows(self.k, spec.k, spec.depth, self.depth, start, count), count)
        self.each_query(lambda query: self._softmax(start, count, query))
        self._weighted(*self._rows(self.v, spec.v, spec.width, self.width, start, count), count)
        return []

    def _products(self, rows: Val, pitch: Val, dtype: DType, count: Val) -> None:
        """Those of all keys of a block with all queries. The last keys are taken again rather than those that are none; where there are
        fewer than a tile in all, the last one is repeated."""
        fn = self.fn
        last = fn.sub(fn.smin(count, i64(self.tile)), i64(1))
        places = [fn.mul(fn.smin(i64(n), last), pitch) for n in range(self.tile)]

        def tile(at: Val, _: list[Val]) -> list[Val]:
            first = fn.smax(fn.smin(at, fn.sub(count, i64(self.tile))), i64(0))
            keys = fn.gep(rows, fn.mul(first, pitch))

            def some(query: Val, _: list[Val]) -> list[Val]:
                each = [fn.add(query, i64(n)) for n in range(self.together)]
                for n in range(0, self.tile, self.lanes):
                    dots = [partial(self._dots, each, fn.gep(keys, place), dtype) for place in places[n : n + self.lanes]]
                    for one, total in zip(each, _summed(fn, dots)):
                        fn.store(total, self._score_place(one, fn.add(first, i64(n))))
                return []

            fn.loop(i64(0), i64(self.queries), self.together, [], some)
            return []

        fn.loop(i64(0), count, self.tile, [], tile)

    def _score_place(self, query: Val, key: Val) -> Val:
        return self.fn.gep(self.fn.gep(self.scores, query, scale=self.block * 4), key, F32)

    def _dots(self, queries: Sequence[Val], key: Val, dtype: DType) -> list[Val]:
        """The products of queries with a key, to be summed up across lanes."""
        fn, vectors = self.fn, self.depth // self.lanes
        rows = [fn.gep(self.q, query, scale=self.depth * 4) for query in queries]

        def added(first: Val, totals: Sequence[Val], count: int) -> list[Val]:
            k, found = fn.gep(key, first, scale=self.lanes * dtype.bytes), list(totals)
            starts = [fn.gep(row, first, scale=self.lanes * 4) for row in rows]
            for n in range(count):
                vector = self.vector_of(dtype, k, n)
                found = [fn.fma(self.vector_of(f32, q, n), vector, total) for q, total in zip(starts, found)]
            return found

        whole, totals = (vectors - 1) // _UNROLLED * _UNROLLED, [const(self.vector, 0.0)] * len(rows)
        if whole:
            totals = fn.loop(i64(0), i64(whole), _UNROLLED, totals, lambda first, totals: added(first, totals, _UNROLLED))
        return added(i64(whole), totals, vectors - whole)

    def _softmax(self, start: Val, count: Val, query: Val) -> None:
        """Products become scores, and these weights; those beyond the last key become 0."""
        fn, none, axes = self.fn, minus_infinity(const(self.vector, 0.0)), self.point(query).axes
        whole = fn.and_(count, i64(-self.lanes))
        self.score.emitter.prepare([self.score.result], [], Point(self.lanes, axes), "rk")

        def scores(at: Val, top: list[Val], mask: Val | None = None) -> list[Val]:
            place = self._score_place(query, at)
            point = Point(self.lanes, {**axes, "c": fn.add(start, at)}, mask)
            with self.score.emitter.scope():
                value = self.score.score(fn, fn.load(self.vector, place), point)
            value = value if mask is None else fn.select(mask, value, none)
            fn.store(value, place)
            return [larger(fn, self.target, value, top[0])]

        def rest(at: Val, top: list[Val]) -> list[Val]:
            ids = fn.lane_ids(I64.vec(self.lanes))
            return scores(at, top, fn.icmp("slt", ids, fn.splat(fn.sub(count, at), self.lanes)))

        top = fn.loop(whole, count, self.lanes, fn.loop(i64(0), whole, self.lanes, [none], scores), rest)[0]
        old = fn.load(F32, fn.gep(self.largest, query, F32))
        found = larger(fn, self.target, fn.call(f"llvm.vector.reduce.fmax.{self.vector.mangled}", F32, [top]), old)
        safe = finite(fn, found)
        alpha = exp_weight(fn, self.target, fn.splat(fn.sub(old, safe), self.lanes))

        def weights(at: Val, total: list[Val]) -> list[Val]:
            place = self._score_place(query, at)
            weight = exp_weight(fn, self.target, fn.sub(fn.load(self.vector, place), fn.splat(safe, self.lanes)))
            fn.store(weight, place)
            return [fn.add(weight, total[0])]

        total = fn.loop(i64(0), up(fn, count, self.lanes), self.lanes, [const(self.vector, 0.0)], weights)[0]
        total = fn.call(f"llvm.vector.reduce.fadd.{self.vector.mangled}", F32, [const(F32, 0.0), total])
        place, alpha = fn.gep(self.totals, query, F32), fn.extract(alpha, 0)
        fn.store(fn.fma(fn.load(F32, place), alpha, total), place)
        fn.store(alpha, fn.gep(self.alphas, query, F32))
        fn.store(found, fn.gep(self.largest, query, F32))

    def _weighted(self, rows: Val, pitch: Val, dtype: DType, count: Val) -> None:
        """Adds the weighted values of a block to the sums: some columns at a time, of all queries."""
        fn, vectors = self.fn, self.width // self.lanes
        most = max(1, self.target.registers * 3 // 4 // self.queries)
        parts = -(-vectors // most)
        ends = [n * vectors // parts for n in range(parts + 1)]
        places = [fn.gep(self.sums, i64(query * self.width * 4)) for query in range(self.queries)]
        for first, end in pairwise(ends):
            alphas = [fn.splat(fn.load(F32, fn.gep(self.alphas, i64(query * 4))), self.lanes) for query in range(self.queries)]
            start = [fn.mul(self.vector_of(f32, place, n), alpha) for place, alpha in zip(places, alphas) for n in range(first, end)]

            def key(at: Val, sums: list[Val], first: int = first, end: int = end) -> list[Val]:
                row = fn.gep(rows, fn.mul(at, pitch))
                values = [self.vector_of(dtype, row, n) for n in range(first, end)]
                weights = [fn.splat(fn.load(F32, self._score_place(i64(query), at)), self.lanes) for query in range(self.queries)]
                products = [(weight, value) for weight in weights for value in values]
                return [fn.fma(weight, value, total) for (weight, value), total in zip(products, sums)]

            sums = iter(fn.loop(i64(0), count, 1, start, key))
            for place in places:
                for n in range(first, end):
                    fn.store(next(sums), fn.gep(place, i64(n * self.lanes * 4)))

    def finish(self, query: Val) -> None:
        """Sums of weighted values are divided by sums of weights, rounded, and written."""
        fn, spec = self.fn, self.spec
        total, top = (fn.load(F32, fn.gep(place, query, F32)) for place in (self.totals, self.largest))
        sink = self.score.sink(self.point(query))
        if sink is not None:
            total = fn.add(total, sink_weight(fn, self.target, sink, finite(fn, top)))
        row, vectors, each = fn.gep(self.sums, query, scale=self.width * 4), self.width // self.lanes, self.results.each
        factor, each = fn.splat(inverse(fn, total), self.lanes), each if vectors % each == 0 else 1
        for first in range(0, vectors, each):
            parts = [fn.mul(self.vector_of(f32, row, n), factor) for n in range(first, first + each)]
            fn.store(self.results.row(parts), fn.gep(row, i64(first * self.lanes * spec.stored.bytes)))
        out = head_start(fn, self.slots, OUT, spec.out, convert.memory_type(spec.stored), *self.item_head)
        to = fn.gep(out, fn.mul(query, self.slots.dim(spec.out.row * spec.stored.bytes)))
        write_row(fn, spec.stored, row, spec.width, to, self.slots.dim(spec.out.col), self.lanes * self.results.each)


def _summed(fn: Function, parts: Sequence[Callable[[], list[Val]]]) -> list[Val]:
    """The sums across lanes of as many vectors as these have lanes, as a vector, for each that the parts give. Two are added at a time, as
    soon as both are there, so that few are at once, and half of their lanes exchanged for it."""
    if len(parts) == 1:
        return parts[0]()
    half = len(parts) // 2
    pairs = list(zip(_summed(fn, parts[:half]), _summed(fn, parts[half:]), strict=True))
    lanes = pairs[0][0].ty.lanes
    own = [n + lanes * bool(n & half) for n in range(lanes)]
    other = [(n ^ half) + lanes * bool(n & half) for n in range(lanes)]
    return [fn.add(fn.shuffle(a, b, own), fn.shuffle(a, b, other)) for a, b in pairs]
