"""Visiting all columns of a range with vectors: unrolled, then single ones, then the tail; partial results carried along.

With mask registers everything after the unrolled loop is one masked loop. Elsewhere whole vectors come first, then, where it is known
how many columns are left, shorter ones, and the rest is done element by element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .body import BodyEmitter, Point
from .builder import I64, Function, Ty, Val, const, const_vec, i64
from .reduce import BLOCK, Reduction, State, flatten, unflatten

Copies = list[list[State]]  # for each unrolled vector the state of each reduction
Visit = Callable[[list[Point], Copies], Copies]
_SHORTEST = 4  # lanes of a vector


class Sweep:
    """Columns [start, stop) of one row, `lanes` at a time. `static`: how many there are, when known (then start is 0).

    start is a multiple of `lanes`. `visit(points, states)` emits the code of some vectors and gives their states. shortens: it can do so
    of shorter vectors.
    """

    def __init__(self, emitter: BodyEmitter, lanes: int, start: Val, stop: Val, static: int | None = None, shortens: bool = True) -> None:
        self._emitter, self._fn, self._lanes, self._shortens = emitter, emitter.fn, lanes, shortens
        self._start, self._stop, self._static = start, stop, static

    def run(self, row: Point, unroll: int, reductions: Sequence[Reduction], visit: Visit) -> list[State]:
        """Emits the whole visit; gives the scalar states of the reductions."""
        self._row, self._reductions, self._visit = row, reductions, visit
        if self._static is not None:
            return self._run_static(unroll, self._static)
        return self._run_dynamic(unroll)

    # -- the two plans -----------------------------------------------------------------------------------------------
    def _run_static(self, unroll: int, count: int) -> list[State]:
        lanes = self._lanes
        vectors, tail = divmod(count, lanes)
        trips = vectors // unroll if vectors > unroll else 0
        left = vectors - trips * unroll
        states = [self._identity(lanes) for _ in range(max(unroll if trips else left, 1))]
        if trips:
            states = self._loop(i64(0), i64(trips * unroll * lanes), unroll, states, trips > 2 * BLOCK)
        if left:
            at = [i64((trips * unroll + n) * lanes) for n in range(left)]
            states[:left] = self._step([self._point(c) for c in at], states[:left])
        merged = self._merged(states)
        if tail and self._emitter.target.masked_memory:
            mask = const_vec(Ty("i1", lanes), [lane < tail for lane in range(lanes)])
            merged = self._step([self._point(i64(vectors * lanes), mask)], [merged])[0]
        scalars = self._across(merged)
        return scalars if self._emitter.target.masked_memory else self._rest(vectors * lanes, count, scalars)

    def _run_dynamic(self, unroll: int) -> list[State]:
        fn, lanes = self._fn, self._lanes
        states = [self._identity(lanes) for _ in range(unroll)]
        main = self._whole(self._start, unroll * lanes)
        states = self._loop(self._start, main, unroll, states, True)
        merged = self._merged(states)
        if self._emitter.target.masked_memory:
            def masked(c: Val, carried: list[Val]) -> list[Val]:
                point = self._point(c, tail_mask(fn, fn.sub(self._stop, c), lanes))
                return flatten(self._step([point], [unflatten(carried, merged)])[0])

            return self._across(unflatten(fn.loop(main, self._stop, lanes, flatten(merged), masked), merged))
        vectors = main
        if unroll > 1:
            vectors = self._whole(self._start, lanes)
            merged = self._loop(main, vectors, 1, [merged])[0]
        return self._elements(vectors, self._stop, self._across(merged))

    def _rest(self, start: int, stop: int, scalars: list[State]) -> list[State]:
        """Fewer columns than lanes without masks: by shorter vectors, then one by one."""
        shortens = self._shortens and all(each.restarts for each in self._reductions)
        for at, width in shorter(start, stop, self._lanes) if shortens else ():
            point = Point(width, {**self._row.axes, "c": i64(at)})
            states = self._step([point], [self._identity(width)])[0]
            scalars = self._merged([scalars, self._across(states)])
            start = at + width
        return self._elements(i64(start), i64(stop), scalars) if start < stop else scalars

    # -- parts -------------------------------------------------------------------------------------------------------
    def _loop(self, start: Val, stop: Val, unroll: int, states: Copies, long: bool = False) -> Copies:
        """long: there may be so many columns that sums are taken of some after the other first; `states` are those of nothing."""
        fn, step = self._fn, unroll * self._lanes
        begun = flatten([s for copy in states for s in copy])

        def body(c: Val, carried: list[Val]) -> list[Val]:
            points = [self._point(fn.add(c, i64(n * self._lanes))) for n in range(unroll)]
            return flatten([s for copy in self._step(points, self._split(carried, states)) for s in copy])

        def block(c: Val, carried: list[Val]) -> list[Val]:
            end = fn.smin(fn.add(c, i64(BLOCK * step)), stop)
            before = self._split(carried, states)
            first = [[a if r.restarts else b for r, a, b in zip(self._reductions, *both)] for both in zip(states, before)]
            part = self._split(fn.loop(c, end, step, flatten([s for copy in first for s in copy]), body), states)
            return flatten([r.merge(a, b) if r.restarts else b for both in zip(before, part) for r, a, b in zip(self._reductions, *both)])

        if long and any(each.rounds and each.restarts for each in self._reductions):
            return self._split(fn.loop(start, stop, BLOCK * step, begun, block), states)
        return self._split(fn.loop(start, stop, step, begun, body), states)

    def _elements(self, start: Val, stop: Val, states: list[State]) -> list[State]:
        """One element at a time."""
        def body(c: Val, carried: list[Val]) -> list[Val]:
            point = Point(0, {**self._row.axes, "c": c})
            return flatten(self._step([point], [unflatten(carried, states)])[0])

        return unflatten(self._fn.loop(start, stop, 1, flatten(states), body), states)

    def _step(self, points: list[Point], states: Copies) -> Copies:
        with self._emitter.scope():
            return self._visit(points, states)

    def _point(self, c: Val, mask: Val | None = None) -> Point:
        return Point(self._lanes, {**self._row.axes, "c": c}, mask)

    def _identity(self, lanes: int) -> list[State]:
        return [reduction.identity(lanes) for reduction in self._reductions]

    def _split(self, values: list[Val], like: Copies) -> Copies:
        states = unflatten(values, [s for copy in like for s in copy])
        each = len(self._reductions)
        return [states[n * each : (n + 1) * each] for n in range(len(like))]

    def _merged(self, copies: Copies) -> list[State]:
        return merge_copies(self._reductions, copies)

    def _across(self, states: list[State]) -> list[State]:
        return [reduction.across(state) for reduction, state in zip(self._reductions, states)]

    def _whole(self, start: Val, size: int) -> Val:
        """The end of the last whole group of `size` columns."""
        fn = self._fn
        count = fn.sub(self._stop, start)
        return fn.add(start, fn.and_(count, i64(-size))) if size & (size - 1) == 0 else fn.sub(self._stop, fn.urem(count, i64(size)))


def merge_copies(reductions: Sequence[Reduction], copies: Copies) -> list[State]:
    """The states of all copies together, pairwise so that no chain is long."""
    while len(copies) > 1:
        pairs = [[r.merge(a, b) for r, a, b in zip(reductions, x, y)] for x, y in zip(copies[::2], copies[1::2])]
        copies = pairs + ([copies[-1]] if len(copies) % 2 else [])
    return copies[0]


def shorter(start: int, stop: int, lanes: int) -> list[tuple[int, int]]:
    """(column, lanes) of the vectors that fewer columns than `lanes` are visited by, the longest first; they may leave a few columns."""
    found = []
    while (lanes := lanes // 2) >= _SHORTEST:
        if start + lanes <= stop:
            found.append((start, lanes))
            start += lanes
    return found


def tail_mask(fn: Function, left: Val, lanes: int) -> Val:
    """Lanes below `left` (i64, at least 1), as a mask."""
    ty = Ty(f"i{max(8, min(64, 512 // lanes))}", lanes)
    capped = fn.smin(left, const(I64, lanes))
    narrow = capped if ty.bits == 64 else fn.convert("trunc", capped, ty.vec(0))
    return fn.icmp("slt", fn.lane_ids(ty), fn.splat(narrow, lanes))
