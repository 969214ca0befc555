"""Rows of a tile that are no rows of the result: where windows are read in place, those at the end of a line reach into the next one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .builder import Function, Val, i64


@dataclass(frozen=True)
class Lines:
    """Rows come in lines of `length`, of which the first `valid` are rows of the result, one line after the other."""

    length: int
    valid: int

    def before(self, fn: Function, row: Val) -> Val:
        """How many rows of the result come before a row."""
        line = fn.udiv(row, i64(self.length))
        within = fn.sub(row, fn.mul(line, i64(self.length)))
        return fn.add(fn.mul(line, i64(self.valid)), fn.smin(within, i64(self.valid)))

    def each(self, fn: Function, first: Val, begin: Val, end: Val, emit: Callable[[Val, Val, Val], None]) -> None:
        """emit(i, j, r) for rows first + begin to first + end of the result, a line at a time: row first + i of the lines is row r + i of
        the result."""
        skipped = self.length - self.valid

        def line(number: Val, _: list[Val]) -> list[Val]:
            of_line = fn.sub(fn.mul(number, i64(self.length)), first)
            start = fn.smax(begin, of_line)
            stop = fn.smax(start, fn.smin(end, fn.add(of_line, i64(self.valid))))
            emit(start, stop, fn.sub(first, fn.mul(number, i64(skipped))))
            return []

        last = fn.udiv(fn.add(fn.add(first, end), i64(self.length - 1)), i64(self.length))
        fn.loop(fn.udiv(fn.add(first, begin), i64(self.length)), last, 1, [], line)
