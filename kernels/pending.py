"""An epilogue that is done between the steps of the next tile."""

from __future__ import annotations

from dataclasses import dataclass

from ..cpu_codegen import schedule
from ..cpu_codegen.builder import I64, PTR, VOID, Function, Val, i64
from ..cpu_codegen.choices import vector_lanes
from ..platforms.target import Target
from ..stitch.loops import Body

PENDING = (PTR, PTR, I64, I64, I64, I64, I64)  # the types of its arguments and its share
_SHARE = 4  # rows of a pending epilogue at a time, where these take no time: a call of it loads its constants
_FREE = 80  # vector operations that take no time beside the products of a step; measured on Sapphire Rapids


def least_share(target: Target, epilogue: Body, columns: int) -> int:
    """How many rows of so many columns to do at a time, at least. More in the first steps than are free would make these longer, and the
    last ones have nothing to hide."""
    lanes = max(1, vector_lanes(target, epilogue))
    row = schedule.column_cost(epilogue, lanes, without=("acc", "load")) * -(-columns // lanes)
    return max(1, min(_SHARE, _FREE // max(1, row)))


def share(fn: Function, steps: Val, rows: int, least: int) -> Val:
    """How many of so many rows to do at each of `steps` steps."""
    return fn.smax(fn.udiv(fn.add(steps, i64(rows - 1)), fn.smax(steps, i64(1))), i64(least))


@dataclass(frozen=True)
class Pending:
    """The epilogue of a finished tile that is still to be done: the function, its arguments, and how many rows of it to do at a time.

    args: ptr slots, ptr tile, i64 row, i64 rows, i64 col, i64 cols; see `gemm.py`.
    """

    epilogue: str
    args: list[Val]
    share: Val

    def emit(self, fn: Function, first: Val, count: Val, pitch: int) -> None:
        """Rows [first, first + count) of it, as far as there are any. pitch: columns of a row of the tile."""
        slots, tile, row, rows, col, cols = self.args
        count = fn.smin(count, fn.sub(rows, first))

        def some() -> list[Val]:
            at = fn.gep(tile, fn.mul(first, i64(4 * pitch)))
            fn.call(self.epilogue, VOID, [slots, at, fn.add(row, first), count, col, cols])
            return []

        fn.branch(fn.icmp("sgt", count, i64(0)), some)
