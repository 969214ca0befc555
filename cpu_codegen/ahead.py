"""Rows that come later, asked for while an earlier one is computed.

A processor looks ahead by itself along what it has seen, up to the end of a page; where an index read from memory says which row of a
table is next, it does not know before it gets there. Rows of a kernel that visits its columns more than once wait for each other: what
follows needs the whole row first. In the second pass everything of this row is in the first-level cache, and nothing comes from memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from .body import BodyEmitter, Point
from .builder import Val, i64

# Rows of tables, which are anywhere: far enough ahead for memory to answer, and few enough for the caches.
_TABLE_ROWS = 2

Fetch = Callable[[Sequence[Point]], None]


def nothing(_: Sequence[Point]) -> None:
    """Asks for nothing."""


class Ahead:
    """What the rows after a row read, column beside column. last: the last row of the call. together: how many are computed at a time."""

    def __init__(self, emitter: BodyEmitter, lanes: int, last: Val, together: int) -> None:
        self._emitter, self._last, self._together = emitter, last, together
        self._in_sequence, self._looked_up = emitter.row_loads(lanes)

    def of(self, row: Point, in_sequence: bool) -> Fetch:
        """Asks, at points of `row`, for the same columns of what comes later; in_sequence: also of arrays whose rows follow one another."""
        fn, here = self._emitter.fn, row.axes["r"]
        later: list[tuple[tuple[int, ...], Point]] = []
        if in_sequence and self._in_sequence:
            later.append((self._in_sequence, row.at(r=fn.add(here, i64(self._together)))))
        if self._looked_up:
            # Which row it is has to be read: not beyond the last one.
            later.append((self._looked_up, row.at(r=fn.smin(fn.add(here, i64(max(_TABLE_ROWS, self._together))), self._last))))
        for loads, other in later:
            self._emitter.reach(loads, other, "r")
        return partial(self._fetch, later)

    def last_line(self, row: Point, lines: int, far: bool) -> Fetch:
        """Asks for the last of the lines, if any, that a sum over a window reads at the next row. Others have been read by the rows above;
        where there are more columns than lanes, a processor does not see in time which parts of the line come next. (A convolution 7 x 7
        of 16 images of 64 channels, 56 x 56, takes 0.7 of the time on Zen 4.) far: results do not stay in the second-level cache, and
        their places are asked for, too (0.65 to 0.9 of the time that is left)."""
        if not lines:
            return nothing
        body = self._emitter.body
        loads = tuple(n for n, node in enumerate(body.nodes) if node.op == "load" and body.deps[n] >= {"r", "k", "c"})
        later = [(loads, row.at(r=self._emitter.fn.add(row.axes["r"], i64(1)), k=i64(lines - 1)))]
        self._emitter.reach(loads, later[0][1], "r")
        return partial(self._fetch, later, results=far)

    def _fetch(self, later: list[tuple[tuple[int, ...], Point]], points: Sequence[Point], results: bool = False) -> None:
        for loads, row in later:
            for point in points:
                self._emitter.fetch(loads, point.at(**row.axes), results)
