"""An epilogue that is done between the steps of the next tile, or between their products.

That of a whole tile is written out there: what it reads for each column is loaded once and stays in registers, which tile registers leave
free. Others, of the last rows and columns, are done before the first step.

Beside tile products, the vector units of Intel's processors multiply and convert floats at half their rate (measured on Emerald Rapids: one
operation a cycle, and two of sums and of integers). So no more rows are done at a step than leave it as long as it is; those that are left
are done after the last step, where less is multiplied. An epilogue that takes much longer than all products is done evenly after each of
them, which are what hides behind it then: they begin as soon as their operands are there, and wait for no others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..cpu_codegen import schedule
from ..cpu_codegen.body import BodyEmitter
from ..cpu_codegen.builder import I64, PTR, VOID, Function, Val, i64
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


_PRODUCT_CYCLES = 16  # of a tile product
# How many operations of an epilogue for each cycle of products are many. Done after each product, GELU's takes 9 % less at 512x1024x256 in
# int8 and in bf16, where they are 4.8 and 1.8, 4 % less at 197x1536x384 (3.2), and as long at 128x3072x768 (1.6); others, of 1 and less,
# take up to 5 % more.
_LONG = 1.5
# Operations of an epilogue beside the products of a step, after all of which it comes. GELU's took 148 us with it so at 512x1024x256, 160
# with 48 to 112, and 175 with all rows shared evenly (Emerald Rapids).
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

    @property
    def _row(self) -> int:
        """Operations of a row of a tile."""
        lanes = vector_lanes(self.target, self.spec.epilogue)
        return max(1, schedule.column_cost(self.spec.epilogue, lanes) * (self.width // lanes))

    def places(self, micro: MicroKernel) -> int:
        """At how many places of a step rows are done: after each product where they take much longer than all products."""
        k = self.spec.k
        cycles = -(-k // micro.step_k) * micro.turns * _PRODUCT_CYCLES if isinstance(k, int) else 0
        return micro.turns if 0 < cycles * _LONG <= self._row * micro.mr else 1

    def share(self, fn: Function, steps: Val, micro: MicroKernel) -> Val:
        """How many 16ths of rows of a tile to do at each place of `steps` steps."""
        count, rows = fn.mul(fn.smax(steps, i64(1)), i64(self.places(micro))), i64(16 * micro.mr - 1)
        even = fn.udiv(fn.add(count, rows), count)
        return even if self.places(micro) > 1 else fn.smin(even, i64(16 * max(1, _BESIDE // self._row)))


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
            slots, tile, row, rows, *columns = self.args
            tile = valid_rows(fn, self.epilogue.spec, tile, micro.mr, rows, self.epilogue.width)
            fn.call(self.epilogue.name, VOID, [slots, tile, row, rows, *columns])
            return []

        return fn.branch(fn.icmp("sgt", self.args[3], i64(0)), some)

    @contextmanager
    def between(self, fn: Function, micro: MicroKernel, steps: Val) -> Iterator[Callable[[Val, Val, Val], Val]]:
        """For a whole tile: gives what emits rows at a place, of (its step, its number in that, how many rows are done), and returns how
        many are done then. After the last step that is all. micro: what the finished tile is in the registers of."""
        of, (slots, tile, row, _, col, _) = self.epilogue, self.args
        places, own = of.places(micro), Slots(fn, of.spec.params, slots)
        request(own, of.order)
        emitter = BodyEmitter(fn, of.target, of.spec.epilogue, own, FIRST_EPILOGUE_BUFFER)
        with emitter.scope():
            short = isinstance(of.spec.k, int) and of.spec.k * of.spec.lhs.bytes <= _SHORT
            emit = whole_tile(fn, emitter, tile, micro.acc_ty, of.width, row, col, of.width, short, of.spec.lines)
            rows = i64(micro.mr)

            def place(index: Val, number: Val, done: Val) -> Val:
                until = fn.add(fn.add(fn.mul(index, i64(places)), number), i64(1))
                stored = fn.select(fn.icmp("eq", index, i64(0)), micro.stored(fn, number), rows) if places > 1 else rows
                wanted = fn.smin(fn.lshr(fn.mul(until, self.share), i64(4)), stored)
                end = fn.select(fn.icmp("eq", index, steps), rows, wanted)
                emit(done, end)
                return end

            yield place


def valid_rows(fn: Function, spec: GemmSpec, tile: Val, height: int, rows: Val, width: int) -> Val:
    """Where the first row of a tile is that counts, of `rows` that do: the last ones where it computes others once more (`lines.py`)."""
    return tile if spec.lines is None else fn.gep(tile, fn.mul(fn.sub(i64(height), rows), i64(4 * width)))
