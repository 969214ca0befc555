"""Streaming attention: one block of queries of one head, over blocks of keys, with a running maximum and sum.

    for blocks of keys:
        products  = k . q                       scratch [key][query], the instruction set's part
        scores    = body(products)              in place; maximum of each query
        m, m_old  = max(m, maximum), m          alpha = exp(m_old - m)
        weights   = exp(scores - m)             sum = sum * alpha + total of weights
        o         = o * alpha + v^T . weights   scratch [column of v][query], the instruction set's part
    out = o / sum

Queries are the lanes everywhere, so that nothing is reduced across lanes and neither keys nor values need to be transposed. (Online
softmax: Milakov and Gimelshein, 2018; blocks as in Rabe and Staats, 2021.)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial, reduce

from ..cpu_codegen import convert
from ..cpu_codegen.builder import F32, I64, VOID, Function, Val, const, i64
from ..cpu_codegen.math.exponential import exp_weight
from ..cpu_codegen.scopes import Point
from ..cpu_codegen.slots import Slots
from ..graph.types import DType, f32
from ..platforms.target import Target
from ..stitch.loops import Body
from .attention_beside import TURNED, Beside
from .attention_finish import with_sinks, write_results
from .attention_result import Results
from .attention_rows import emit_transpose, head_start, read_row
from .attention_score import ScoreEmitter, minus_infinity
from .attention_softmax import bounded_weight, finite, larger, octaves, short_weight
from .attention_spec import OUT, AttentionSpec, HeadStrides, K, Q, V
from .attention_tiling import PADDING, Tiling, up
from .attention_window import seen_keys


class Stream(ABC):
    """Emits the work of a function `void block(ptr slots, i64 head, i64 first query, i64 queries)`."""

    unit = 4
    """Keys are padded to a multiple of it inside a block."""
    short = False
    """Whether weights are rounded to 16 bits."""
    octave = 0
    """0, or that weights are times 2 to this power, and none is larger: those that are rounded to integers."""
    apart = False
    """Whether the largest weight of every block of keys is that, not only the largest of all."""
    by_blocks = False  # whether blocks of keys begin at multiples of their size alone, not of `unit`
    margin = 0
    """Rows of scratch before the first score that `products` may overwrite."""
    overlaps = False
    """Whether products go beside the softmax of other keys, `unit` at a time; `products` writes those of the first ones."""

    def __init__(self, fn: Function, target: Target, spec: AttentionSpec, slots: Slots, body: Body, tiling: Tiling) -> None:
        self.fn, self.target, self.spec, self.slots, self.tiling = fn, target, spec, slots, tiling
        self.head, self.first, self.rows = fn.args[1:4]
        self.vector = F32.vec(tiling.lanes)
        self.results = Results(fn, target, spec, slots)
        self.share: list[Val] = []  # of the weights of a block in all, by which its sums are to be multiplied, where blocks are `apart`
        self.score = ScoreEmitter(fn, target, slots, body, self.short)
        self.beside = Beside(fn, slots, self.score, tiling.lanes, tiling.vectors)
        self.once = isinstance(spec.s, int) and 0 < spec.s <= tiling.block  # a single block of keys: nothing to add to
        self.whole = isinstance(spec.m, int) and spec.m % tiling.queries == 0  # all blocks have all their queries
        self.row_bytes = tiling.queries * 4
        queries, padded = tiling.queries, -(-spec.width // 16) * 16
        scores = fn.alloca((self.margin + tiling.block + max(tiling.keys, self.unit)) * queries * 4)
        self.scores = fn.gep(scores, i64(self.margin * queries * 4))
        self.sums = fn.alloca(padded * queries * 4)
        self.staging_pitch = max(padded, -(-spec.depth // 16) * 16) + PADDING
        self.staging = fn.alloca(queries * self.staging_pitch * 4)

    # -- the instruction set's part -----------------------------------------------------------------------------
    @abstractmethod
    def load_queries(self) -> None:
        """Brings the queries into the form that `products` wants."""

    @abstractmethod
    def products(self, start: Val, count: Val) -> None:
        """Writes the products of keys start .. start + count - 1 into `scores`, whose first `count` rows they are."""

    @abstractmethod
    def store_weights(self, row: Val, weights: list[list[Val]]) -> None:
        """Stores the weights of keys row, row + 1, ... of the block: weights[key][vector]."""

    @abstractmethod
    def accumulate(self, start: Val, count: Val, alpha: list[Val]) -> None:
        """sums = sums * alpha + the weighted values of keys start .. start + count - 1; padded weights are 0. Where it `overlaps`, what is
        not done yet.

        `once`: sums hold nothing yet.
        """

    def beside_scores(self, start: Val, at: Val, count: Val, scores: Callable[[], list[Val]]) -> list[Val]:
        """scores(), of keys from `at` of the block that begins at key `start`, and the products of those that follow."""
        raise AssertionError("nothing goes beside them")

    def before_weights(self, alpha: list[Val]) -> None:
        """Begins the weighted values of a block."""
        raise AssertionError("nothing goes beside weights")

    def beside_weights(self, start: Val, at: Val, weights: Callable[[], list[Val]]) -> list[Val]:
        """weights(), of keys from `at` of that block, and the weighted values of those before them."""
        raise AssertionError("nothing goes beside them")

    def factors_of_scores(self, factor: Val | None) -> list[Val | None]:
        """What the scores of each vector of queries lack, a positive factor, or None. factor: what those of all queries lack."""
        return [factor] * self.tiling.vectors

    # -- the common part ----------------------------------------------------------------------------------------
    def emit(self) -> None:
        fn, tiling = self.fn, self.tiling
        heads, groups = self.slots.dim(self.spec.heads), self.slots.dim(self.spec.groups)
        b, h = (i64(0), self.head) if self.spec.batch == 1 else (fn.udiv(self.head, heads), fn.urem(self.head, heads))
        g = h if self.spec.heads == self.spec.groups else fn.udiv(h, fn.udiv(heads, groups))
        self.q = self._from_first(Q, self.spec.q, b, h, self.spec.dtype)
        self.out = self._from_first(OUT, self.spec.out, b, h, self.spec.stored)
        self.k, self.v, self.batch_group = self._operand(K, self.spec.k, b, g), self._operand(V, self.spec.v, b, g), (b, g)
        self.load_queries()
        if not self.once:
            self._clear()
        self.points = [self._point(v) for v in range(tiling.vectors)]
        for point in self.points:
            self.score.prepare(point)
        self.factors = self.factors_of_scores(self.score.factor(self.points[0]))
        start = [minus_infinity(const(self.vector, 0))] * tiling.vectors + [const(self.vector, 0.0)] * tiling.vectors
        begin, self.limit = seen_keys(self)
        state = fn.loop(begin, self.limit, tiling.block, start, self._block)
        write_results(self, with_sinks(self, state[: tiling.vectors], state[tiling.vectors :]))

    def _from_first(self, index: int, strides: HeadStrides, b: Val, h: Val, dtype: DType) -> Val:
        """Where the rows of this block begin, of elements of `dtype`."""
        head = head_start(self.fn, self.slots, index, strides, convert.memory_type(dtype), b, h)
        return self.fn.gep(head, self.fn.mul(self.first, self.slots.dim(strides.row * dtype.bytes)))

    def _operand(self, index: int, strides: HeadStrides, b: Val, h: Val) -> Val:
        """Where the rows of a head begin."""
        return head_start(self.fn, self.slots, index, strides, convert.memory_type(self.spec.dtype), b, h)

    def _point(self, v: int) -> Point:
        fn, tiling = self.fn, self.tiling
        query = fn.add(self.first, i64(v * tiling.lanes))
        mask = None
        if self.score.reads_queries() and not self.whole:
            ty = I64.vec(tiling.lanes)
            left = fn.sub(self.rows, i64(v * tiling.lanes))
            mask = fn.icmp("slt", fn.lane_ids(ty), fn.splat(left, tiling.lanes))
        return Point(tiling.lanes, {"r": self.head, "c": query}, mask)

    def _clear(self) -> None:
        fn, size = self.fn, self.tiling.queries

        def row(index: Val, _: list[Val]) -> list[Val]:
            for v in range(self.tiling.vectors):
                fn.store(const(self.vector, 0.0), self.place(self.sums, fn.mul(index, i64(size)), v))
            return []

        fn.loop(i64(0), i64(-(-self.spec.width // 16) * 16), 1, [], row)

    def group(self) -> Val:
        """Which of the spec's `all_groups` this block reads."""
        b, g = self.batch_group
        return self.fn.add(self.fn.mul(b, self.slots.dim(self.spec.groups)), g)

    def place(self, base: Val, element: Val, v: int) -> Val:
        """Address of vector v of a row of scratch that begins at `element`."""
        at = self.fn.gep(base, element, F32)
        return self.fn.gep(at, i64(v * self.tiling.lanes * 4)) if v else at

    def row(self, index: Val) -> Val:
        return self.fn.mul(index, i64(self.tiling.queries))

    def _block(self, start: Val, state: list[Val]) -> list[Val]:
        fn, tiling = self.fn, self.tiling
        old, sums = state[: tiling.vectors], state[tiling.vectors :]
        count = fn.smin(fn.sub(self.limit, start), i64(tiling.block))
        self.products(start, count)
        found = self._scores(start, count)
        self._pad(count)
        new = [larger(fn, self.target, a, b) for a, b in zip(found, old)]
        safe = [finite(fn, x) for x in new]
        alpha = [] if self.once else self._ratios(old, safe)
        tops = safe
        if self.apart and not self.once:
            tops = [finite(fn, x) for x in found]
            self.share = self._ratios(found, safe)
        if self.overlaps:
            self.before_weights(alpha)
        totals = self._weights(start, count, tops)
        self.accumulate(start, count, alpha)
        if self.once:
            return new + totals
        if self.apart:
            totals = [fn.mul(total, share) for total, share in zip(totals, self.share)]
        return new + [fn.fma(x, a, total) for x, a, total in zip(sums, alpha, totals)]

    def _ratios(self, scores: Sequence[Val], largest: Sequence[Val]) -> list[Val]:
        """exp(score - largest), of each query."""
        fn = self.fn
        differences = [fn.sub(x, y) for x, y in zip(scores, largest, strict=True)]
        scaled = [x if factor is None else fn.mul(x, factor) for x, factor in zip(differences, self.factors, strict=True)]
        return [exp_weight(fn, self.target, x) for x in scaled]

    @property
    def unroll(self) -> int:
        """How many keys a step of the softmax takes."""
        return max(1, min(4, 8 // self.tiling.vectors))

    def _scores(self, start: Val, count: Val) -> list[Val]:
        """Turns products into scores, in place; returns the largest of each query. All of them lack their factor."""
        fn, tiling = self.fn, self.tiling
        last, step = fn.sub(count, i64(1)), self.unit if self.overlaps else TURNED

        def keys(at: Val, largest: list[Val], turned: Val) -> list[Val]:
            # What lies beyond the last key repeats it, which leaves the maximum alone.
            rows = [at, *(fn.smin(fn.add(at, i64(n)), last) for n in range(1, self.unroll))]
            loaded = [[fn.load(self.vector, self.place(self.scores, self.row(row), v)) for v in range(tiling.vectors)] for row in rows]
            found = list(largest)
            with self.score.emitter.scope():
                for n, row in enumerate(rows):
                    key = fn.add(start, row)
                    for v, point in enumerate(self.points):
                        self.beside.provide(fn.sub(row, turned), v)
                        value = self.score.score(fn, loaded[n][v], point.at(k=key))
                        if not self.score.plain:
                            fn.store(value, self.place(self.scores, self.row(fn.add(at, i64(n))), v))
                        found[v] = larger(fn, self.target, value, found[v])
            return found

        def some(at: Val, largest: list[Val]) -> list[Val]:
            end = fn.smin(fn.add(at, i64(step)), count)

            def scores() -> list[Val]:
                self.beside.fetch(self.points, self.rows, fn.add(start, at), fn.sub(end, at))
                return fn.loop(at, end, self.unroll, largest, lambda n, found: keys(n, found, at))

            return self.beside_scores(start, at, count, scores) if self.overlaps else scores()

        lowest = [minus_infinity(const(self.vector, 0))] * tiling.vectors
        if self.beside.nodes or self.overlaps:
            return fn.loop(i64(0), count, step, lowest, some)
        return fn.loop(i64(0), count, self.unroll, lowest, lambda n, found: keys(n, found, i64(0)))

    def _pad(self, count: Val) -> None:
        fn = self.fn

        def row(index: Val, _: list[Val]) -> list[Val]:
            for v in range(self.tiling.vectors):
                fn.store(minus_infinity(const(self.vector, 0)), self.place(self.scores, self.row(index), v))
            return []

        fn.loop(count, up(fn, count, self.unit), 1, [], row)

    def _weights(self, start: Val, count: Val, largest: list[Val]) -> list[Val]:
        """exp(score - largest) for all keys of the block that begins at key `start`; returns their totals."""
        fn, tiling = self.fn, self.tiling
        rates = list(map(partial(octaves, fn), largest, self.factors)) if self.short and not self.octave else []
        tops = [fn.mul(top, rate) for top, rate in zip(largest, rates)]

        def of_key(row: Val, v: int) -> Val:
            score = fn.load(self.vector, self.place(self.scores, row, v))
            if self.octave:
                return bounded_weight(fn, self.target, fn.sub(score, largest[v]), self.factors[v], self.octave)
            if self.short:
                return short_weight(fn, self.target, score, rates[v], tops[v])
            return exp_weight(fn, self.target, fn.sub(score, largest[v]))

        def keys(at: Val, totals: list[Val]) -> list[Val]:
            rows = [self.row(fn.add(at, i64(n))) for n in range(self.unroll)]
            values = fn.side_by_side([partial(of_key, row, v) for row in rows for v in range(tiling.vectors)])
            each = [values[n : n + tiling.vectors] for n in range(0, len(values), tiling.vectors)]
            self.store_weights(at, each)
            return [reduce(fn.add, column, total) for total, column in zip(totals, zip(*each, strict=True), strict=True)]

        def some(at: Val, totals: list[Val]) -> list[Val]:
            return self.beside_weights(start, at, lambda: fn.loop(at, fn.add(at, i64(self.unit)), self.unroll, totals, keys))

        nothing = [const(self.vector, 0.0)] * tiling.vectors
        if self.overlaps:
            return fn.loop(i64(0), up(fn, count, self.unit), self.unit, nothing, some)
        return fn.loop(i64(0), up(fn, count, self.unit), self.unroll, nothing, keys)

    # -- for the instruction sets' parts --------------------------------------------------------------------------
    def when_whole(self, possible: bool, whole: Callable[[], list[Val]], general: Callable[[], list[Val]]) -> None:
        """Emits `whole` for blocks that have all their queries, and `general` for others; where it is not possible, that for all."""
        if possible and self.whole:
            whole()
        elif possible:
            self.fn.branch(self.fn.icmp("eq", self.rows, i64(self.tiling.queries)), whole, general)
        else:
            general()

    def transpose(self, source: Val, source_pitch: Val, target: Val, target_pitch: Val, count: int) -> None:
        """Exchanges rows and columns of `lanes` rows by `count` columns of 32 bits, rounded up to squares. Pitches are bytes."""
        squares = i64(-(-count // self.tiling.lanes))
        name = emit_transpose(self.fn.module, self.tiling.lanes)
        self.fn.call(name, VOID, [source, source_pitch, target, target_pitch, squares])

    def transpose_queries(self, target: Val) -> None:
        """f32 queries as [depth][query]; the depth is rounded up to whole vectors."""
        spec, tiling, pitch = self.spec, self.tiling, self.slots.dim(self.spec.q.row * 4)

        def transposed(rows: Val, pitch: Val) -> list[Val]:
            for v in range(tiling.vectors):
                source = self.fn.gep(rows, self.fn.mul(pitch, i64(v * tiling.lanes)))
                self.transpose(source, pitch, self.place(target, i64(0), v), i64(self.row_bytes), spec.depth)
            return []

        def staged() -> list[Val]:
            self._stage_queries()
            return transposed(self.staging, i64(self.staging_pitch * 4))

        in_place = spec.dtype == f32 and spec.q.col == 1 and spec.depth % tiling.lanes == 0
        self.when_whole(in_place, lambda: transposed(self.q, pitch), staged)

    def _stage_queries(self) -> None:
        """Copies the queries into rows of f32 scratch; those beyond the last one repeat it."""
        fn, spec = self.fn, self.spec
        row_bytes, col = self.slots.dim(spec.q.row * spec.dtype.bytes), self.slots.dim(spec.q.col)
        last = fn.sub(self.rows, i64(1))

        def row(index: Val, _: list[Val]) -> list[Val]:
            source = fn.gep(self.q, fn.mul(fn.smin(index, last), row_bytes))
            to = fn.gep(self.staging, index, scale=self.staging_pitch * 4)
            read_row(fn, spec.dtype, source, col, spec.depth, to, self.tiling.lanes)
            return []

        fn.loop(i64(0), i64(self.tiling.queries), 1, [], row)
