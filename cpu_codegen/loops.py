"""Loop kernels to machine code: the loops around a body, for the three kinds of kernels of `stitch/loops.py`.

    flat      begin and end cut the columns
    rows      begin and end cut the rows; each row visits its columns in as many passes as its reductions require
    k         as either of them, with a sequential loop over k inside each vector of columns
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial, reduce

from ..graph.dims import Dim, bounds
from ..platforms.target import Target
from ..stitch.loops import LoopKernel
from . import schedule
from .ahead import Ahead, Fetch, nothing
from .body import BodyEmitter, Point
from .builder import I1, I64, PTR, VOID, Function, Module, Val, const_vec, i64
from .choices import Choices, vector_lanes
from .contract import KernelCode
from .depth import Depth, visit_rows
from .intrinsics import stores_done
from .ranges import column_ranges, part_of
from .reduce import Reduction, State, reductions_of, results
from .scan import followed, scans_of
from .slots import Slots
from .squares import Squares, beside, loads_across
from .sweep import Copies, Sweep, merge_copies
from .turns import CHAINS
from .written import Written, written_out

_FLAT_GRAIN = 64  # elements: no two threads write the same cache line of an output
_FEW_LINES = 13  # of windows: there are more operations in those of more than would wait for a line


def emit_loop_kernel(module: Module, target: Target, kernel: LoopKernel) -> KernelCode:
    """Adds the kernel's function to the module. Domain: rows, or columns of a flat kernel."""
    fn = Function(module, kernel.name, VOID, [PTR, I64, I64])
    slots = Slots(fn, kernel.params)
    whole = vector_lanes(target, kernel.body)
    written = written_out(target, kernel)
    kernel = kernel if written is None else written.kernel
    parts = column_ranges(kernel, whole)
    writers = [_Writer(fn, slots, target, part, written) for part in parts]
    domain = kernel.cols if kernel.rows is None else kernel.rows
    begin, end = (i64(0), slots.dim(domain)) if kernel.body.accumulates else fn.args[1:]

    def row_by_row(row: Val, _: list[Val]) -> list[Val]:
        for writer in writers:
            with writer.emitter.scope():
                writer.rows(row, fn.add(row, i64(1)), several=False)
        return []

    def inside() -> list[Val]:
        if kernel.rows is not None and len(parts) > 1 and written is None and not any(writer.across for writer in writers):
            return fn.loop(begin, end, 1, [], row_by_row)
        first: Dim = 0
        for writer, part in zip(writers, parts):
            with writer.emitter.scope():
                if kernel.rows is None:
                    ends = [at if len(parts) == 1 else part_of(fn, at, first, part.cols, writer.lanes) for at in (begin, end)]
                    first += part.cols
                    writer.flat(*ends)
                elif written is None or not written.conditions:
                    writer.rows(begin, end)
                else:
                    inner = _Writer(fn, slots, target, written.inner, written)
                    fn.loop(begin, end, 1, [], partial(_either, writer, inner, written.conditions))
        return []

    # Nothing is read when there is nothing to do: what does not change during the call is loaded inside.
    fn.branch(fn.icmp("slt", begin, end), inside)
    if any(writer.emitter.streams for writer in writers):
        stores_done(fn)
    fn.ret()
    fn.finish()
    grain = max(whole, _FLAT_GRAIN) if kernel.rows is None else max(writer.grain for writer in writers)
    cut = (1, 1) if kernel.body.accumulates else (domain, grain)
    return KernelCode(kernel.name, slots.order, *cut, schedule.work(kernel))


def _either(general: _Writer, inner: _Writer, conditions: Sequence[int], row: Val, _: list[Val]) -> list[Val]:
    """One row, by the code for rows where all the conditions hold, if they do."""
    fn, emitter = general.emitter.fn, general.emitter
    following = fn.add(row, i64(1))

    def by(writer: _Writer) -> list[Val]:
        with writer.emitter.scope():
            writer.rows(row, following, several=False)
        return []

    with emitter.scope():
        asked = [emitter.value(n, Point(0, {"r": row})) for n in conditions]
        fn.branch(reduce(fn.and_, asked), lambda: by(inner), lambda: by(general))
    return []


@dataclass
class _Rows:
    """How rows are computed. arrays: for each of the rows computed at a time, where values are kept between passes."""

    in_registers: bool
    ahead: Ahead
    arrays: list[dict[int, Val]] = field(default_factory=list)


class _Writer:
    """Emits the loops of one kernel."""

    def __init__(self, fn: Function, slots: Slots, target: Target, kernel: LoopKernel, written: Written | None) -> None:
        self._sums = () if written is None else written.sums
        self._fn, self._slots, self._target, self._kernel, self._body = fn, slots, target, kernel, kernel.body
        self.emitter = BodyEmitter(fn, target, kernel.body, slots)
        self.lanes = vector_lanes(target, kernel.body)
        self._depth = None
        if kernel.depth is not None:
            lines = None if written is None else written.lines(kernel.body)
            self._depth = Depth(self.emitter, slots.dim(kernel.depth), kernel.depth if isinstance(kernel.depth, int) else None, lines)
        self._column_stores = self.emitter.column_stores
        self._other_stores = [n for n in range(len(self._body.stores)) if n not in self._column_stores]
        checks = [n for n in self.emitter.all_checks if not self._body.deps[n] & {"c", "k"}]
        self._late_checks = [n for n in checks if schedule.reduced(self._body, [n])]  # of what the passes over a row find out
        self._other_checks = [n for n in checks if n not in self._late_checks]
        self._plan = schedule.passes(self._body, self._column_stores)
        squares = min(self.lanes, target.lanes(32))
        self.across = None if written else loads_across(target, kernel, self._plan, squares)
        if self.across is not None:
            self.lanes = squares
        self._choices = Choices(target, kernel, self._plan, self._column_stores, self.lanes)
        self._together, self._in_registers = self._choices.rows()
        # Where there are no rows left over, none is computed alone.
        self.grain = self._together if isinstance(kernel.rows, int) and kernel.rows % self._together == 0 else 1
        if self.across is not None and self.across.whole:
            self.grain = self.lanes
        self._lines = kernel.depth if written and isinstance(kernel.depth, int) and kernel.depth <= _FEW_LINES else 0
        most = None if kernel.rows is None else bounds(4 * kernel.rows * kernel.cols * len(self._body.stores))[1]
        self._far = most is None or most > target.l2 // 2
        self._rows_of_sums = 1 if written else self._choices.rows_of_sums()
        self.grain = max(self.grain, self._rows_of_sums)

    # -- kinds -------------------------------------------------------------------------------------------------------
    def flat(self, begin: Val, end: Val) -> None:
        top = Point(self.lanes)
        self._fixed(top)
        if self._plan:
            self._sweep(Sweep(self.emitter, self.lanes, begin, end), self._plan[0], top)
        if self._other_stores:
            # Not of any column: the call that has the first column stores them.
            self._fn.branch(self._fn.icmp("eq", begin, i64(0)), lambda: self._store_others(top))

    def rows(self, begin: Val, end: Val, several: bool = True) -> None:
        """several: rows may be computed a few at a time."""
        fn = self._fn
        self._fixed(Point(self.lanes))
        together = self._together if several else 1
        rows = _Rows(self._in_registers, Ahead(self.emitter, self.lanes, fn.sub(end, i64(1)), together))
        if not rows.in_registers:
            kept = self._choices.kept(together)
            rows.arrays = [{n: fn.alloca(size) for n, size in kept.items()} for _ in range(together)]
        if self.across is not None and several:
            squares = Squares(self.emitter, self._slots, self._kernel, self.across, self._plan[0], self.lanes)
            squares.rows(begin, end, lambda row: self.rows(row, fn.add(row, i64(1)), several=False))
            return
        if self._rows_of_sums > 1 and several:
            fn.loop(begin, end, self._rows_of_sums, [], lambda first, _: self._rows_with_sums(first))
            return

        def some(count: int, first: Val) -> list[Val]:
            with self.emitter.scope():
                self._some_rows([Point(self.lanes, {"r": fn.add(first, i64(n))}) for n in range(count)], rows)
            return []

        if together > 1 and self.grain == together:
            fn.loop(begin, end, together, [], lambda first, _: some(together, first))
            return
        if together > 1:
            count = fn.sub(end, begin)
            most = fn.add(begin, fn.sub(count, fn.urem(count, i64(together))))
            fn.loop(begin, most, together, [], lambda first, _: some(together, first))
            begin = most
        fn.loop(begin, end, 1, [], lambda row, _: some(1, row))

    def _rows_with_sums(self, first: Val) -> list[Val]:
        """Some rows of one run, whose sums over k grow side by side."""
        assert self._depth is not None
        each = self._plan[0]
        with self.emitter.scope():
            rows = beside(self.emitter, first, self._rows_of_sums, self.lanes)
            for row in rows:
                self._prepare(each, row)
            unroll, roots = self._choices.unroll(each, self._joined(each)), each.roots(self._body, self._column_stores)
            visit_rows(self._depth, rows, roots, self._columns(), unroll, partial(self._effects, each))
        return []

    def _columns(self) -> Sweep:
        columns = self._kernel.cols
        return Sweep(self.emitter, self.lanes, i64(0), self._slots.dim(columns), columns if isinstance(columns, int) else None)

    def _prepare(self, each: schedule.Pass, row: Point) -> None:
        self.emitter.prepare(each.roots(self._body, self._column_stores), self._stores_of(each), row, "r")

    # -- passes ------------------------------------------------------------------------------------------------------
    def _some_rows(self, points: list[Point], rows: _Rows) -> None:
        """Pass by pass, and in each one row after the other: while one waits for what a pass reduced, the next one is computed."""
        sweep, kept = self._columns(), list[int]()
        for point in points:
            self.emitter.checks(point.scalar, [n for n in self._other_checks if self._body.deps[n]])
        for number, each in enumerate(self._plan):
            for at, point in enumerate(points):
                arrays = rows.arrays[at] if rows.arrays else {}
                for n in kept:
                    self.emitter.keep(n, arrays[n])
                fetch = rows.ahead.of(point, not rows.in_registers) if number == 1 else rows.ahead.last_line(point, self._lines, self._far)
                self._resolve(self._roots_within(each, frozenset("r")), [point.scalar])
                self._prepare(each, point)
                if rows.in_registers:
                    self._columns_in_registers(each, point, fetch)
                else:
                    self._sweep(sweep, each, point, arrays, fetch)
                self.emitter.release(kept)
            kept += [n for n in each.keep if rows.arrays and n in rows.arrays[0]]
        for at, point in enumerate(points):
            for n in kept:
                self.emitter.keep(n, rows.arrays[at][n])
            self.emitter.checks(point.scalar, self._late_checks)
            self._store_others(point.scalar)
            self.emitter.release(kept)

    def _sweep(
        self, sweep: Sweep, each: schedule.Pass, row: Point, arrays: dict[int, Val] | None = None, fetch: Fetch = nothing
    ) -> None:
        """One pass over the columns with loops; what it reduces is remembered afterwards."""
        reductions = self._reductions(each)
        roots = each.roots(self._body, self._column_stores)
        kept = [(n, arrays[n]) for n in each.keep if arrays and n in arrays]
        scans = scans_of(self.emitter, roots)
        together = not scans and self._depth is None and self._choices.side_by_side(each)

        def visit(points: list[Point], states: Copies) -> Copies:
            self._resolve(roots, points)
            if together:
                self.emitter.side_by_side(roots, points)
            result = [[*followed(scans, p, s), *self._updated(each, reductions, p, s[len(scans) :])] for p, s in zip(points, states)]
            fetch(points)
            for n, array in kept:
                for point in points:
                    self.emitter.save(n, array, point)
            self._effects(each, points)
            return result

        unroll = 1 if scans else self._choices.unroll(each, self._joined(each))
        states = sweep.run(row, unroll, [*scans, *reductions], visit)
        self._remember(each, reductions, states[len(scans) :], row)

    def _columns_in_registers(self, each: schedule.Pass, row: Point, fetch: Fetch) -> None:
        """One pass over a row that is written out in full: its points are those of the pass before, so their values are still known."""
        count = self._kernel.cols
        assert isinstance(count, int)
        vectors, tail = divmod(count, self.lanes)
        points = [row.at(c=i64(n * self.lanes)) for n in range(vectors)]
        if tail:
            mask = const_vec(I1.vec(self.lanes), [lane < tail for lane in range(self.lanes)])
            points.append(Point(self.lanes, {**row.axes, "c": i64(vectors * self.lanes)}, mask))
        reductions = self._reductions(each)
        roots = each.roots(self._body, self._column_stores)
        self._resolve(roots, points)
        copies: Copies = []
        beside, together = self._joined(each), self._choices.side_by_side(each)
        for n, point in enumerate(points):
            if together and n % CHAINS == 0:
                self.emitter.side_by_side(roots, points[n : n + CHAINS])
            fetch([point])
            before = copies[n % CHAINS] if n >= CHAINS else None
            copies[n % CHAINS : n % CHAINS + 1] = [self._updated(each, reductions, point, before)]
            if (n + 1) % beside == 0 or n + 1 == len(points):
                self._effects(each, points[n // beside * beside : n + 1])
        merged = merge_copies(reductions, copies)
        self._remember(each, reductions, [r.across(state) for r, state in zip(reductions, merged)], row)

    def _updated(self, each: schedule.Pass, reductions: list[Reduction], point: Point, states: list[State] | None) -> list[State]:
        """The states of the pass's reductions with one more point; None: it is the first one."""
        result = []
        for which, (n, reduction) in enumerate(zip(each.reductions, reductions)):
            x = self.emitter.operand(self._body.nodes[n].args[0], point.lanes, point)
            position = self._position(point) if reduction.needs_position else None
            if states is None:
                result.append(reduction.start(x, position, point.mask))
            else:
                result.append(reduction.update(states[which], x, position, point.mask))
        return result

    def _effects(self, each: schedule.Pass, points: list[Point]) -> None:
        for point in points:
            self.emitter.checks(point, each.checks)
        if each.stores:
            self.emitter.stores_beside(points, self._column_stores)

    def _remember(self, each: schedule.Pass, reductions: list[Reduction], states: list[State], row: Point) -> None:
        for n, value in zip(each.reductions, results(reductions, states)):
            self.emitter.remember(n, row, value)

    def _position(self, point: Point) -> Val:
        c = self._fn.splat(point.axes["c"], point.lanes)
        return self._fn.add(c, self._fn.lane_ids(I64.vec(point.lanes))) if point.lanes else c

    # -- what surrounds them -------------------------------------------------------------------------------------------
    def _fixed(self, top: Point) -> None:
        """Everything that does not change during the call."""
        everything = [r for each in self._plan for r in each.roots(self._body, self._column_stores)]
        self._resolve([n for each in self._plan for n in self._roots_within(each, frozenset())], [top.scalar])
        self.emitter.checks(top.scalar, [n for n in self._other_checks if not self._body.deps[n]])
        stores = self._column_stores if any(each.stores for each in self._plan) else ()
        self.emitter.prepare(everything, stores, top, "")

    def _store_others(self, point: Point) -> list[Val]:
        with self.emitter.scope():
            roots = [m for n in self._other_stores for m in (self._body.stores[n].node, self._body.stores[n].guard) if m >= 0]
            self._resolve(roots, [point.scalar])
            self.emitter.stores(point.scalar, self._other_stores)
        return []

    def _resolve(self, roots: list[int], points: list[Point]) -> None:
        if self._depth is not None and points:
            self._depth.resolve(roots, points)
        for point in points if self._sums and "c" in points[0].axes else ():
            self.emitter.compute(self._sums, point)

    def _roots_within(self, each: schedule.Pass, axes: frozenset[str]) -> list[int]:
        return schedule.within(self._body, each.roots(self._body, self._column_stores), axes)

    def _stores_of(self, each: schedule.Pass) -> tuple[int, ...]:
        return self._column_stores if each.stores else ()

    def _reductions(self, each: schedule.Pass) -> list[Reduction]:
        return reductions_of(self._fn, self._target, self._body, each.reductions, bounds(self._kernel.cols)[1])

    # -- choices -------------------------------------------------------------------------------------------------------
    def _joined(self, each: schedule.Pass) -> int:
        """How many vectors beside each other the narrowest store of a pass needs to fill a register."""
        return max((self.emitter.joins(n, self.lanes) for n in self._stores_of(each)), default=1)
