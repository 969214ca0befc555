"""Loads across: elements that lie side by side along the rows of a kernel are read in squares, which are transposed in registers.

As many rows are computed at a time as a vector has lanes. For a vector of columns of each of these rows, one vector is read along the rows
for each of the columns; transposed they are what the rows need. Columns are then gathered nowhere, and what is read of a line of the
cache is used at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..graph.dims import Dim, Func, Poly, bounds, divides, symbols
from ..platforms.target import Target
from ..stitch.costs import SHUFFLED
from ..stitch.loops import Body, LoopKernel
from . import index as forms
from . import schedule
from .body import BodyEmitter, Point
from .builder import Function, Ty, Val, const, i64
from .slots import Slots
from .sweep import Copies, Sweep

_MOST_LOADS = 2  # squares at a time: one takes half of the registers or all
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
    plain = kernel.depth is None and len(plan) == 1 and all(n.op not in ("reduce", "scan", "check") for n in body.nodes)
    if kernel.rows is None or not plain or any("c" not in {s.name for s in symbols(store.index)} for store in body.stores):
        return None
    used = sorted(schedule.needed(body))
    found = tuple(n for n in used if _is_across(target, body, n, lanes))
    runs = {run for index in body.indices for run in _runs(index)}
    if not 0 < len(found) <= _MOST_LOADS or schedule.column_cost(body, lanes, ("load",)) > _MOST_OPERATIONS or None in runs:
        return None
    run = _shortest([kernel.rows, *(run for run in runs if run is not None)])
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
        maskable = target.masked_memory or (target.has("avx2") and node.dtype.bits in (32, 64))
        if not maskable or body.deps[guard] != {"r"} or body.deps[other]:
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


def _runs(index: Dim) -> Iterator[Dim | None]:
    """What the row is divided by; None where it is part of an expression in another way."""
    for atom in forms.functions(index):
        names = {s.name for argument in atom.args for s in symbols(argument)}
        if "r" not in names:
            continue
        if atom.kind in ("floordiv", "mod") and forms.is_row(atom.args[0]) and "r" not in {s.name for s in symbols(atom.args[1])}:
            yield atom.args[1]
        elif names & {"c", "k"} or any(name.startswith("%") for name in names) or not _stays(atom):
            yield None


def _stays(atom: Func) -> bool:
    """Whether a function is the same in all of a run: the row is in it only as a quotient."""
    inner = [a for argument in atom.args for mono, _ in (argument.terms if isinstance(argument, Poly) else ()) for a in mono]
    of_row = [a for a in inner if "r" in {s.name for s in symbols(forms.atom_dim(a))}]
    return all(
        isinstance(a, Func) and not forms.moves(a) and ((a.kind == "floordiv" and forms.is_row(a.args[0])) or _stays(a)) for a in of_row
    )


def _shortest(runs: Sequence[Dim]) -> Dim | None:
    """The run that all others are multiples of; None where there is none."""
    return next((run for run in runs if all(divides(run, other) for other in runs)), None)


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
        emitter, fn, columns = self._emitter, self._fn, self._kernel.cols
        with emitter.scope():
            points = [Point(self._lanes, {"r": fn.add(first, i64(n)) if n else first}) for n in range(self._lanes)]
            for n, point in enumerate(points[1:]):
                emitter.beside(points[0], point, n + 1)
            for point in points:
                emitter.prepare(self._each.roots(emitter.body, emitter.column_stores), emitter.column_stores, point, "r")
            masks = {n: self._mask(n, points) for n in self._across.loads}
            static = columns if isinstance(columns, int) else None
            sweep = Sweep(emitter, self._lanes, i64(0), self._slots.dim(columns), static)
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
            points = [Point(column.lanes, {**row.axes, "c": column.axes["c"]}, column.mask) for row in rows]
            for n in self._across.loads if column.lanes else ():
                emitter.load_square(n, points, masks[n], None if column.mask is None else self._left(column))
            for point in points:
                emitter.checks(point, self._each.checks)
                emitter.stores_beside([point], emitter.column_stores)
        return states

    def _left(self, column: Point) -> Val:
        return self._fn.sub(self._slots.dim(self._kernel.cols), column.axes["c"])
