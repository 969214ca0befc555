"""The epilogue of a contraction: a body evaluated over a tile of accumulators that was written to a scratch array."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import gcd

from ..diagnostics.errors import InvalidGraph
from . import rounding, schedule
from .body import BodyEmitter, Point
from .builder import Function, Ty, Val, const, i64
from .choices import vector_lanes
from .lines import Lines
from .sweep import shorter, tail_mask
from .turns import CHAINS

_SHORT = 12  # operations: with so few, tables and what else is at hand want the registers
_HOISTED = 4  # vectors of columns whose per-column values (scales, biases) are loaded once for all rows


def accumulator_node(emitter: BodyEmitter) -> int:
    """The position of the body's `acc` node. InvalidGraph when there is not exactly one."""
    found = [n for n, node in enumerate(emitter.body.nodes) if node.op == "acc"]
    if len(found) != 1:
        raise InvalidGraph(f"an epilogue has one accumulator, this one has {len(found)}", "code generation")
    return found[0]


def emit_tile_epilogue(
    fn: Function,
    emitter: BodyEmitter,
    acc_ptr: Val,
    acc_ty: Ty,
    pitch: int,
    rows: Val,
    cols: Val,
    row0: Val,
    col0: Val,
    tile_cols: int,
    last: int | None = None,
    lines: Lines | None = None,
) -> None:
    """Evaluates the emitter's body over a tile of accumulators and stores what it stores.

    acc[i][j] = acc_ptr[i * pitch + j] of scalar type acc_ty is the accumulator of row row0 + i, column col0 + j, for
    0 <= i < rows, 0 <= j < cols <= tile_cols (i64 values); nothing else of acc is read. col0 is a multiple of tile_cols; acc_ptr needs
    the alignment of one element. Body stores that do not depend on the column happen once a row. last: what `cols` is where it is not
    tile_cols, 0 where it always is; None: not known. lines: how rows of the tile are rows of the result, where not all are.
    """
    _Tile(fn, emitter, acc_ptr, acc_ty, pitch, row0, col0, tile_cols, lines).emit(rows, cols, last)


def whole_tile(
    fn: Function, emitter: BodyEmitter, acc_ptr: Val, acc_ty: Ty, pitch: int, row0: Val, col0: Val, tile_cols: int, packs: bool = True,
    lines: Lines | None = None,
) -> Callable[[Val, Val], None]:
    """The same for a tile all columns of which count: loads what depends on the columns alone, and returns what emits rows [begin, end).
    The emitter's scope is the caller's. packs: whether bytes of several rows may be packed together."""
    return _Tile(fn, emitter, acc_ptr, acc_ty, pitch, row0, col0, tile_cols, lines).columns(tile_cols, packs)


def emit_register_epilogue(
    fn: Function, emitter: BodyEmitter, accumulators: Sequence[Sequence[Val]], row0: Val, col0: Val, last: Val | None
) -> None:
    """The same where accumulators[i][v] is the vector of row row0 + i and columns from col0 + v * lanes on, every column of which counts.

    The body stores nothing but by columns. last: how many columns of the last vector count; None: all. Needs masked memory unless None.
    """
    node, lanes = accumulator_node(emitter), accumulators[0][0].ty.lanes
    vectors = len(accumulators[0])
    with emitter.scope():
        points = [Point(lanes, {"c": fn.add(col0, i64(v * lanes))}) for v in range(vectors)]
        if last is not None:
            points[-1] = Point(lanes, points[-1].axes, tail_mask(fn, last, lanes))
        for point in points:
            emitter.prepare([], emitter.column_stores, point, "c")

        def finish(point: Point, value: Val) -> None:
            emitter.provide(node, value)
            emitter.stores(point)

        long = schedule.column_cost(emitter.body, lanes) > _SHORT
        together = max(1, CHAINS // vectors) if long else 1
        for first in range(0, len(accumulators), together):
            with emitter.scope():
                parts: list[Callable[[], None]] = []
                for i, row in enumerate(accumulators[first : first + together], first):
                    r = fn.add(row0, i64(i))
                    emitter.prepare([], emitter.column_stores, Point(lanes, {"r": r}), "r")
                    parts += [partial(finish, point.at(r=r), value) for point, value in zip(points, row, strict=True)]
                fn.side_by_side(parts)


class _Tile:
    def __init__(
        self, fn: Function, emitter: BodyEmitter, acc_ptr: Val, acc_ty: Ty, pitch: int, row0: Val, col0: Val, tile_cols: int,
        lines: Lines | None,
    ) -> None:
        self._fn, self._emitter, self._acc, self._ty, self._pitch = fn, emitter, acc_ptr, acc_ty, pitch
        self._row0, self._col0, self._tile_cols, self._lines = row0, col0, tile_cols, lines
        self._node = accumulator_node(emitter)
        self._lanes = gcd(vector_lanes(emitter.target, emitter.body), tile_cols)
        self._others = [n for n in range(len(emitter.body.stores)) if n not in emitter.column_stores]

    def emit(self, rows: Val, cols: Val, last: int | None) -> None:
        if last == 0:
            self._known(rows, self._tile_cols)
            return
        full = self._fn.icmp("eq", cols, i64(self._tile_cols))
        others = (lambda: self._ragged(rows, cols)) if last is None else (lambda: self._known(rows, last))
        self._fn.branch(full, lambda: self._known(rows, self._tile_cols), others)

    def _known(self, rows: Val, count: int) -> list[Val]:
        with self._emitter.scope():
            self.columns(count)(i64(0), rows)
        return []

    def columns(self, count: int, packs: bool = True) -> Callable[[Val, Val], None]:
        """So many columns: the vectors of a row are written out, what depends on the column alone is loaded before the rows."""
        fn, emitter, lanes = self._fn, self._emitter, self._lanes
        rest = count % lanes
        masked = rest and emitter.target.masked_memory
        pieces = [(at, lanes) for at in range(0, count if masked else count - rest, lanes)]
        pieces += [] if masked else shorter(count - rest, count, lanes)
        single = sum(pieces[-1]) if pieces else 0  # from here on one by one
        points = [Point(width, {"c": fn.add(self._col0, i64(at))}) for at, width in pieces]
        if masked:
            points[-1] = Point(lanes, points[-1].axes, tail_mask(fn, i64(rest), lanes))
        if len(points) <= _HOISTED:
            for point in points:
                self._prepare(point, "c")

        def row(i: Val, _: list[Val], row0: Val) -> list[Val]:
            with emitter.scope():
                r = fn.add(row0, i)
                self._prepare(Point(lanes, {"r": r}), "r")
                fn.side_by_side([partial(self._vector, point.at(r=r), i, i64(at)) for (at, _), point in zip(pieces, points)])
                if single < count:
                    self._elements(r, i, i64(single), i64(count))
                self._once_a_row(Point(0, {"r": r}))
            return []

        together = self._together(len(points)) if packs and not rest else 0

        def several(i: Val, _: list[Val], row0: Val) -> list[Val]:
            places: list[Point] = []
            with emitter.scope():
                for each in (fn.add(i, i64(n)) for n in range(together)):
                    for n, point in enumerate(points):
                        places.append(point.at(r=fn.add(row0, each)))
                        emitter.remember(self._node, places[-1], self._accumulators(point, each, i64(n * lanes)))
                emitter.side_by_side([emitter.body.stores[0].node], places)
                emitter.stores_beside(places, emitter.column_stores)
            return []

        def rows(begin: Val, end: Val, row0: Val) -> None:
            if together:
                whole = fn.sub(end, fn.urem(fn.sub(end, begin), i64(together)))
                fn.loop(begin, whole, together, [], partial(several, row0=row0))
                begin = whole
            if together != 1:
                fn.loop(begin, end, 1, [], partial(row, row0=row0))

        return lambda begin, end: self._each_line(begin, end, rows)

    def _each_line(self, begin: Val, end: Val, emit: Callable[[Val, Val, Val], None]) -> None:
        """emit(begin, end, number of the tile's first row in the result) for rows [begin, end), of some at a time."""
        if self._lines is None:
            emit(begin, end, self._row0)
        else:
            self._lines.each(self._fn, self._row0, begin, end, emit)

    def _together(self, vectors: int) -> int:
        """How many rows of so many vectors are done together, since bytes that fill a register take less to pack; 0: none."""
        emitter, body = self._emitter, self._emitter.body
        if self._others or len(body.stores) != 1 or emitter.all_checks or not emitter.target.has("avx2"):
            return 0
        [store], chains, count = body.stores, rounding.chains(body), emitter.joins(0, self._lanes)
        if store.node not in chains or not rounding.saturates(chains[store.node], body.buffers[store.buffer]):
            return 0
        return 0 if count == 1 or count % vectors else count // vectors

    def _elements(self, r: Val, row: Val, begin: Val, end: Val) -> None:
        """Columns [begin, end) one by one."""

        def element(j: Val, _: list[Val]) -> list[Val]:
            with self._emitter.scope():
                self._vector(Point(0, {"r": r, "c": self._fn.add(self._col0, j)}), row, j)
            return []

        self._fn.loop(begin, end, 1, [], element)

    def _ragged(self, rows: Val, cols: Val) -> list[Val]:
        """Fewer columns: one masked loop, or whole vectors and then single elements."""
        fn, emitter, lanes = self._fn, self._emitter, self._lanes
        masked = emitter.target.masked_memory

        def row(i: Val, _: list[Val], row0: Val) -> list[Val]:
            with emitter.scope():
                r = fn.add(row0, i)
                self._prepare(Point(lanes, {"r": r}), "r")

                def vectors(j: Val, _: list[Val]) -> list[Val]:
                    with emitter.scope():
                        mask = tail_mask(fn, fn.sub(cols, j), lanes) if masked else None
                        self._vector(Point(lanes, {"r": r, "c": fn.add(self._col0, j)}, mask), i, j)
                    return []

                whole = cols if masked else fn.and_(cols, i64(-lanes))
                fn.loop(i64(0), whole, lanes, [], vectors)
                if not masked:
                    self._elements(r, i, whole, cols)
                self._once_a_row(Point(0, {"r": r}))
            return []

        def some(begin: Val, end: Val, row0: Val) -> None:
            fn.loop(begin, end, 1, [], partial(row, row0=row0))

        self._each_line(i64(0), rows, some)
        return []

    def _accumulators(self, point: Point, row: Val, column: Val) -> Val:
        fn = self._fn
        pointer = fn.gep(fn.gep(self._acc, fn.mul(row, i64(self._pitch)), self._ty), column, self._ty)
        ty = self._ty.vec(point.lanes)
        return fn.load(ty, pointer) if point.mask is None else fn.masked_load(ty, pointer, point.mask, const(ty, 0))

    def _vector(self, point: Point, row: Val, column: Val) -> None:
        self._emitter.provide(self._node, self._accumulators(point, row, column))
        self._emitter.stores(point)

    def _once_a_row(self, point: Point) -> None:
        emitter = self._emitter
        emitter.checks(point, [n for n in emitter.all_checks if emitter.deps[n] <= {"r"}])
        emitter.stores(point, self._others)

    def _prepare(self, point: Point, axes: str) -> None:
        stores = self._emitter.column_stores
        self._emitter.prepare([], stores, point, axes)
