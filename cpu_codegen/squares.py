"""Loads across: elements that lie side by side along the rows of a kernel are read in squares, which are transposed in registers.

As many rows are computed at a time as a vector has lanes. For a vector of columns of each of these rows, one vector is read along the rows
for each of the columns; transposed they are what the rows need. Columns are then gathered nowhere, and what is read of a line of the
cache is used at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..graph.dims import Dim, Poly, bounds, symbols
from ..platforms.target import Target
from ..stitch.costs import SHUFFLED
from ..stitch.loops import Body, LoopKernel
from . import index as forms
from . import schedule
from .access import can_mask
from .body import BodyEmitter, Point
from .builder import Function, Ty, Val, const, i64
from .slots import Slots
from .sweep import Copies, Sweep

# Squares at a time. One takes half of the registers or all; of eight most wait on the stack, which still takes far less than gathers.
_MOST_LOADS = 8
_MOST_OPERATIONS = 48  # of a vector: they are written out for every row


Masks = dict[int, Val | None]


@dataclass(frozen=True)
class Across:
    """loads: those that are squares. run: so many rows from a multiple of it on lie side by side in all of them. whole: squares fill it.
    alone: nothing else is read at each point, so that rows may be computed twice."""

    loads: tuple[int, ...]
    run: Dim
    whole: bool
    alone: bool


def loads_across(target: Target, kernel: LoopKernel, plan: Sequence[schedule.Pass], lanes: int) -> Across | None:
    """The loads of a kernel that squares pay for; None where there are none, or rows cannot be computed side by side."""
    body = kernel.body
    single = kernel.depth is None and len(plan) == 1 and not body.accumulates
    plain = single and all(n.op not in ("reduce", "scan", "check") for n in body.nodes)
    if kernel.rows is None or not plain or any("c" not in {s.name for s in symbols(store.index)} for store in body.stores):
        return None
    used = sorted(schedule.needed(body))
    found = tuple(n for n in used if _is_across(target, body, n, lanes))
    if not 0 < len(found) <= _MOST_LOADS or schedule.column_cost(body, lanes, ("load",)) > _MOST_OPERATIONS:
        return None
    run = forms.row_run(body.indices, kernel.rows)
    if run is None or (bounds(run)[1] or lanes) < lanes:
        return None
    alone = all(n in found or body.nodes[n].op != "load" or not body.deps[n] >= {"r", "c"} for n in used)
    return Across(found, run, isinstance(run, int) and run % lanes == 0, alone)


def _is_across(target: Target, body: Body, n: int, lanes: int) -> bool:
    """Whether a load reads side by side along the rows, and far apart along the columns; of some rows it may read nothing."""
    node = body.nodes[n]
    if node.op != "load" or any(s.name.startswith("%") for s in symbols(node.index)):
        return False
    if node.args:
        guard, other = node.args
        if not can_mask(target, node.dtype.bits) or body.deps[guard] != {"r"} or body.deps[other]:
            return False
    form = forms.lane_form(node.index, lanes, lambda name: name == "c")
    if form is None or form.offsets or (isinstance(form.step, int) and abs(form.step) <= SHUFFLED):
        return False
    return _step(node.index) == 1


def _step(index: Dim) -> Dim | None:
    """How many elements on the next row of a run is; None: that is not the same for all."""
    step: Dim = 0
    for mono, factor in index.terms if isinstance(index, Poly) else ():
        moving = [atom for atom in mono if forms.moves(atom)]
        if moving and len(mono) > 1:
            return None
        step = step + (factor if moving else 0)
    return step


def beside(emitter: BodyEmitter, first: Val, count: int, lanes: int) -> list[Point]:
    """So many rows from one on, all of one run."""
    rows = [Point(lanes, {"r": emitter.fn.add(first, i64(n)) if n else first}) for n in range(count)]
    for n, row in enumerate(rows[1:], 1):
        emitter.beside(rows[0], row, n)
    return rows


class Squares:
    """Emits the rows of a kernel by squares, whose only pass is `each`."""

    def __init__(
        self, emitter: BodyEmitter, slots: Slots, kernel: LoopKernel, across: Across, each: schedule.Pass, lanes: int
    ) -> None:
        self._emitter, self._fn, self._slots, self._kernel = emitter, emitter.fn, slots, kernel
        self._across, self._each, self._lanes = across, each, lanes

    def rows(self, begin: Val, end: Val, one: Callable[[Val], None]) -> None:
        """Rows [begin, end), run by run. one: emits a row that is left over."""
        fn: Function = self._fn
        if self._across.run == self._kernel.rows:
            self._side_by_side(begin, end, one)
            return
        run = self._slots.dim(self._across.run)
        last = fn.sub(end, i64(1))

        def of_run(number: Val, _: list[Val]) -> list[Val]:
            start = fn.mul(number, run)
            self._side_by_side(fn.smax(begin, start), fn.smin(end, fn.add(start, run)), one)
            return []

        fn.loop(fn.udiv(begin, run), fn.add(fn.udiv(last, run), i64(1)), 1, [], of_run)

    def _side_by_side(self, begin: Val, end: Val, one: Callable[[Val], None]) -> None:
        """Rows of one run. Those that fill no square are computed with some of those before them again, or one by one."""
        fn, lanes = self._fn, self._lanes
        if self._across.whole:
            fn.loop(begin, end, lanes, [], lambda first, _: self._tile(first))
            return
        most = fn.add(begin, fn.and_(fn.sub(end, begin), i64(-lanes)))
        fn.loop(begin, most, lanes, [], lambda first, _: self._tile(first))

        def left_over(row: Val, _: list[Val]) -> list[Val]:
            with self._emitter.scope():
                one(row)
            return []

        def one_by_one() -> list[Val]:
            return fn.loop(most, end, 1, [], left_over)

        if self._across.alone:
            again = fn.and_(fn.icmp("slt", begin, most), fn.icmp("slt", most, end))
            fn.branch(again, lambda: self._tile(fn.sub(end, i64(lanes))), one_by_one)
        else:
            one_by_one()

    def _tile(self, first: Val) -> list[Val]:
        """As many rows as there are lanes, column after column of squares."""
        emitter, columns = self._emitter, self._kernel.cols
        with emitter.scope():
            points = beside(emitter, first, self._lanes, self._lanes)
            for point in points:
                emitter.prepare(self._each.roots(emitter.body, emitter.column_stores), emitter.column_stores, point, "r")
            masks = {n: self._mask(n, points) for n in self._across.loads}
            static = columns if isinstance(columns, int) else None
            sweep = Sweep(emitter, self._lanes, i64(0), self._slots.dim(columns), static, shortens=False)
            sweep.run(points[0], 1, [], lambda found, states: self._visit(points, masks, found, states))
        return []

    def _mask(self, load: int, rows: Sequence[Point]) -> Val | None:
        """The rows at which something is read; None: all."""
        fn, args = self._fn, self._emitter.body.nodes[load].args
        if not args:
            return None
        bits = Ty(f"i{len(rows)}")
        total = const(bits, 0)
        for n, row in enumerate(rows):
            one = fn.convert("zext", self._emitter.value(args[0], row), bits)
            total = fn.or_(total, fn.shl(one, const(bits, n)) if n else one)
        return fn.convert("bitcast", total, Ty("i1", len(rows)))

    def _visit(self, rows: Sequence[Point], masks: Masks, columns: Sequence[Point], states: Copies) -> Copies:
        emitter = self._emitter
        for column in columns:
            points = [row.at_column(column) for row in rows]
            for n in self._across.loads if column.lanes else ():
                emitter.load_square(n, points, masks[n], None if column.mask is None else self._left(column))
            for point in points:
                emitter.checks(point, self._each.checks)
                emitter.stores_beside([point], emitter.column_stores)
        return states

    def _left(self, column: Point) -> Val:
        return self._fn.sub(self._slots.dim(self._kernel.cols), column.axes["c"])
