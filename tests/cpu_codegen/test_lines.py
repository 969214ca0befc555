"""Rows of lines and of the result."""

from __future__ import annotations

import numpy as np
import pytest

from sashiko.cpu_codegen.builder import I64, PTR, VOID, Function, Module, Val, i64
from sashiko.cpu_codegen.lines import Lines
from tests.emulation import Buffer, Call, Runner, runners

LINES = Lines(5, 3)
# Which rows of lines are rows of the result, and their numbers there; -1: none.
NUMBERS = [row // 5 * 3 + row % 5 if row % 5 < 3 else -1 for row in range(40)]


def _module() -> Module:
    """f(ptr slots, i64 first, i64 end): for rows from first + 2 to `end` writes what `each` says they are, and behind that `before`."""
    module = Module()
    fn = Function(module, "f", VOID, [PTR, I64, I64])
    slots, first, end = fn.args
    out = fn.load(PTR, fn.gep(slots, i64(8)))  # behind the status

    def some(begin: Val, stop: Val, number: Val) -> None:
        def row(i: Val, _: list[Val]) -> list[Val]:
            at = fn.gep(out, fn.add(first, i), I64)
            fn.store(fn.add(number, i), at)
            fn.store(LINES.before(fn, fn.add(first, i)), fn.gep(at, i64(40), I64))
            return []

        fn.loop(begin, stop, 1, [], row)

    LINES.each(fn, first, i64(2), fn.sub(end, first), some)
    fn.ret()
    fn.finish()
    return module


@pytest.mark.parametrize("runner", runners(few=True))
@pytest.mark.parametrize(("first", "end"), [(0, 40), (3, 4), (4, 9), (7, 8), (11, 12), (6, 31)])
def test_every_row_of_the_result_once(runner: Runner, first: int, end: int) -> None:
    [got] = runner.run_calls(_module().text(), [np.full((2, 40), -1, np.int64)], [Call("f", (Buffer(0),), first, end)])
    expected = [number if first + 2 <= row < end else -1 for row, number in enumerate(NUMBERS)]
    assert got[0].tolist() == expected and got[1].tolist() == expected
