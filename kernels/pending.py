"""An epilogue that is done between the steps of the next tile.

That of a whole tile is written out there: what it reads for each column is loaded once and stays in registers, which tile registers leave
free. Others, of the last rows and columns, are done before the first step.

Beside tile products, the vector units of Intel's processors multiply and convert floats at half their rate (measured on Emerald Rapids: one
operation a cycle, and two of sums and of integers). So no more rows are done at a step than leave it as long as it is; those that a long
epilogue leaves are done after the last step, where less is multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..cpu_codegen import schedule
from ..cpu_codegen.body import BodyEmitter
from ..cpu_codegen.builder import I64, PTR, VOID, Function, Ty, Val, i64
from ..cpu_codegen.choices import vector_lanes
from ..cpu_codegen.contract import Slot
from ..cpu_codegen.epilogue import whole_tile
from ..cpu_codegen.slots import Slots
from ..platforms.target import Target
from .indexing import request
from .spec import FIRST_EPILOGUE_BUFFER, GemmSpec

if TYPE_CHECKING:
    from .micro import MicroKernel

PENDING = (PTR, PTR, I64, I64, I64, I64, I64)  # the types of its arguments and its share


# Operations of an epilogue beside the products of a step. GELU's took 148 us with it at 512x1024x256, 160 with 48 to 112, and 175 with all
# rows shared evenly (Emerald Rapids).
_BESIDE = 144
# Bytes of a row of k up to which an epilogue takes longer than the products beside it. Two rows packed together take fewer operations, but
# more of those that wait for the unit from which tile products begin: 256 are 4 to 8 % faster so, and 384 and more 1 to 4 % slower.
_SHORT = 256


@dataclass(frozen=True)
class Epilogue:
    """That of a product. name: its function, see `gemm.py`; order: the slots of the kernel; width: columns of a tile."""

    name: str
    target: Target
    spec: GemmSpec
    order: tuple[Slot, ...]
    width: int

    def share(self, fn: Function, steps: Val, rows: int) -> Val:
        """How many of so many rows to do at each of `steps` steps."""
        lanes = vector_lanes(self.target, self.spec.epilogue)
        row = max(1, schedule.column_cost(self.spec.epilogue, lanes) * (self.width // lanes))
        return fn.smin(fn.udiv(fn.add(steps, i64(rows - 1)), fn.smax(steps, i64(1))), i64(max(1, _BESIDE // row)))


@dataclass(frozen=True)
class Pending:
    """The epilogue of a finished tile that is still to be done, and how many rows of it to do at a time.

    args: ptr slots, ptr tile, i64 row, i64 rows, i64 col, i64 cols; see `gemm.py`.
    """

    epilogue: Epilogue
    args: list[Val]
    share: Val

    def whole(self, fn: Function, rows: int) -> Val:
        """Whether all so many rows and all columns of the tile count."""
        return fn.and_(fn.icmp("eq", self.args[3], i64(rows)), fn.icmp("eq", self.args[5], i64(self.epilogue.width)))

    @property
    def tile(self) -> Val:
        """Where the accumulators are stored."""
        return self.args[1]

    def emit(self, fn: Function, micro: MicroKernel) -> list[Val]:
        """All of it, if there is any. micro: what the finished tile is in the registers of."""

        def some() -> list[Val]:
            micro.put(fn, self.tile, self.epilogue.width)
            fn.call(self.epilogue.name, VOID, self.args)
            return []

        return fn.branch(fn.icmp("sgt", self.args[3], i64(0)), some)

    @contextmanager
    def between(self, fn: Function, acc: Ty, rows: int, steps: Val) -> Iterator[Callable[[Val], None]]:
        """For a whole tile: gives what emits the rows of step i, if there are any left, and for i = steps the rest of them. acc: the type
        of the accumulators."""
        of, (slots, tile, row, _, col, _) = self.epilogue, self.args
        own = Slots(fn, of.spec.params, slots)
        request(own, of.order)
        emitter = BodyEmitter(fn, of.target, of.spec.epilogue, own, FIRST_EPILOGUE_BUFFER)
        with emitter.scope():
            short = isinstance(of.spec.k, int) and of.spec.k * of.spec.lhs.bytes <= _SHORT
            emit = whole_tile(fn, emitter, tile, acc, of.width, row, col, of.width, short)

            def step(index: Val) -> None:
                first = fn.mul(index, self.share)
                end = fn.select(fn.icmp("eq", index, steps), i64(rows), fn.add(first, self.share))
                emit(first, fn.smin(end, i64(rows)))

            yield step
