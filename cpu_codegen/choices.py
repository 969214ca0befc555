"""How the loops of a kernel are cut: how many rows and vectors at a time, and whether rows stay in registers."""

from __future__ import annotations

from collections.abc import Sequence

from ..graph.dims import bounds, product
from ..graph.types import DType, f64
from ..platforms.target import Target
from ..stitch.loops import Body, LoopKernel
from . import index, schedule

_JOINED_OPERATIONS = 400  # vector operations of a loop that is unrolled to store whole registers
_UNROLLED_OPERATIONS = 900  # vector operations of rows written out without a loop
_FOUR_AT_ONCE, _TWO_AT_ONCE = 32, 60  # operations of a vector with which so many are computed at once
_SUMS_AT_ONCE = 16  # over k, of all vectors: registers
_FEW_OPERATIONS = 8
_SCRATCH_BYTES = 64 * 1024
_FEW_STEPS = 64  # over k, as of windows
_ROWS_OF_SUMS = (4, 3, 2)  # that share what they read at a step, the best first: with 4 vectors of each, sums fill half of 32 registers
_WORD = 4
_SHORT_ROW = 1024  # columns: longer rows hardly notice what waits between their passes
# Rows at a time: by fours where all stay in registers or rows have so few vectors, by twos where longer ones are read again.
_MANY_ROWS, _FEW_ROWS = 4, 2
# On Emerald Rapids norms of 16 vectors take 5 to 12 % less by fours than by twos, and of 24 vectors 1 % more.
_FEW_VECTORS = 16
# Vector operations that wait for what a row's passes reduce, up to which a processor looks beyond them to the next row (measured on Zen 5).
_SEEN_AHEAD = 230


def vector_lanes(target: Target, body: Body) -> int:
    """Lanes of a kernel's vectors: one register of its widest common elements; 64-bit ones count only where they are all there is."""
    used = schedule.needed(body)
    widths = {_width(body.nodes[n].dtype) for n in used if "c" in body.deps[n] and body.nodes[n].op not in ("const", "check")}
    narrower = {bits for bits in widths if bits < 64}
    return target.lanes(max(narrower) if narrower else 64 if widths else 32)


def _width(dtype: DType) -> int:
    return 32 if dtype.is_float and dtype != f64 else dtype.bits


class Choices:
    """Choices for one kernel with vectors of `lanes`. plan: its passes."""

    def __init__(
        self, target: Target, kernel: LoopKernel, plan: Sequence[schedule.Pass], column_stores: tuple[int, ...], lanes: int
    ) -> None:
        self._target, self._kernel, self._body, self._lanes = target, kernel, kernel.body, lanes
        self._plan, self._column_stores = list(plan), column_stores

    def kept(self, rows: int) -> dict[int, int]:
        """What is worth keeping between passes, and the bytes it takes on the stack for each of so many rows, as far as there is room."""
        schedule.add_kept(self._body, self._plan, self._column_stores, self._lanes)
        high = bounds(self._kernel.cols)[1]
        room, found = _SCRATCH_BYTES // rows, dict[int, int]()
        for n in [n for each in self._plan for n in each.keep]:
            size = (-(-(high or 0) // self._lanes) * self._lanes) * self._body.nodes[n].dtype.bytes
            if high is not None and size <= room:
                found[n] = max(size, 64)
                room -= size
        return found

    def unroll(self, each: schedule.Pass, joined: int) -> int:
        """Vectors at once: enough to hide latencies and, with `joined`, to store whole registers; fewer where one is a lot of code."""
        operations = self._operations(each)
        sums = sum(node.op == "reduce" and node.axis == "k" for node in self._body.nodes)
        if self._kernel.depth is not None and sums:
            most = self._target.registers // 2 // self.rows_of_sums() if self._walks_far() else 4
            return max(1, min(most, _SUMS_AT_ONCE // sums))
        enough = 4 if operations <= _FOUR_AT_ONCE else 2 if operations <= _TWO_AT_ONCE else 1
        return max(enough, joined) if joined * operations <= _JOINED_OPERATIONS else enough

    def rows_of_sums(self) -> int:
        """How many rows have their sums over k computed at once: those that read something alike at every step, a few of them."""
        body, rows = self._body, self._kernel.rows
        run = index.row_run(body.indices, rows) if rows is not None and self._kernel.depth is not None and self._walks_far() else None
        plain = all(node.op not in ("check", "scan") and (node.op != "reduce" or "c" in body.deps[n]) for n, node in enumerate(body.nodes))
        shared = any(node.op == "load" and not node.args and body.deps[n] >= {"k", "c"} and index.same_in_run(node.index)
                     for n, node in enumerate(body.nodes))
        if not isinstance(run, int) or not plain or not shared or body.accumulates or len(self._plan) != 1:
            return 1
        return next((count for count in _ROWS_OF_SUMS if run % count == 0), 1)

    def _walks_far(self) -> bool:
        """Whether a sum over k takes many steps, each of which is a load or two from another line of memory: the more of a line is read at
        a step, the fewer lines there are to go to. Sums over 1024 rows of 4096 columns take half the time with 16 vectors instead of 4."""
        depth, inside = self._kernel.depth, sum("k" in deps for deps in self._body.deps)
        return isinstance(self._kernel.cols, int) and not (isinstance(depth, int) and depth <= _FEW_STEPS) and inside <= _FEW_OPERATIONS

    def side_by_side(self, each: schedule.Pass) -> bool:
        """Whether vectors are computed a step of each at a time: where that is more than a few steps, and not more than registers hold."""
        return _FEW_OPERATIONS < self._operations(each) <= _TWO_AT_ONCE

    def rows(self) -> tuple[int, bool]:
        """Rows at a time, and whether they stay in registers between the passes.

        A pass waits for what the one before has reduced, and meanwhile there are other rows to go on with. Rows that do not all stay in
        registers are read again in each pass, which is no loss where there is one array to read; where there are two it is less than what
        a processor waits that does not see the next row by itself. Beyond the caches memory is what takes the time, and it likes one row
        after the other; they are computed as the others are, so that the results are the same.
        """
        if not self._waits() or self._body.accumulates:
            return 1, False
        high = bounds(self._kernel.cols)[1]
        again = high is not None and high <= _SHORT_ROW and self._arrays_read() <= (1 if self._sees_ahead(high) else 2)
        several = _MANY_ROWS if high is not None and high <= _FEW_VECTORS * self._lanes else _FEW_ROWS
        many = next((rows for rows in (_MANY_ROWS, _FEW_ROWS) if self.in_registers(rows)), several if again else 1)
        return 1 if self._beyond_caches() else many, self.in_registers(many)

    def in_registers(self, rows: int) -> bool:
        """Whether so many rows are so short that all their vectors stay in registers between the passes."""
        columns = self._kernel.cols
        if not isinstance(columns, int) or columns == 0 or not self._waits():
            return False
        vectors, tail = divmod(columns, self._lanes)
        if tail and not self._target.masked_memory:
            return False
        vectors = rows * (vectors + (1 if tail else 0))
        alive = schedule.live_between(self._body, self._plan, self._column_stores)
        budget = self._target.registers - (8 if self._target.registers > 16 else 6)
        operations = sum(self._operations(each) for each in self._plan)
        return vectors * alive <= budget and vectors * operations <= _UNROLLED_OPERATIONS

    def _sees_ahead(self, columns: int) -> bool:
        """Whether so little of a row of so many columns is left to do in its last pass that the next row is begun meanwhile."""
        return -(-columns // self._lanes) * self._operations(self._plan[-1]) <= _SEEN_AHEAD

    def _waits(self) -> bool:
        """Whether there is more than one pass. A scan goes through the columns in its own order, one row at a time."""
        return len(self._plan) > 1 and self._kernel.depth is None and all(node.op != "scan" for node in self._body.nodes)

    def _beyond_caches(self) -> bool:
        """Whether what is read and what is written, as far as is known, do not stay in half of the last cache."""
        elements = product((self._kernel.rows or 1, self._kernel.cols))
        large = isinstance(elements, int) and elements * 2 * _WORD > max(self._target.l3, self._target.l2) // 2
        return large or any(store.streams for store in self._body.stores)

    def _arrays_read(self) -> int:
        """How many elements a row's first pass reads for each column."""
        seen: set[int] = set()
        pending = self._plan[0].roots(self._body, self._column_stores)
        while pending:
            n = pending.pop()
            if n not in seen:
                seen.add(n)
                pending += self._body.operands(n)
        return sum(self._body.nodes[n].op == "load" and self._body.deps[n] >= {"r", "c"} for n in seen)

    def _operations(self, each: schedule.Pass) -> int:
        own = schedule.costs(self._body, self._lanes)
        known: set[int] = set()
        return sum(schedule.recompute_cost(self._body, n, own, known) for n in each.roots(self._body, self._column_stores))
