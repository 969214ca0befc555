"""What scores are computed from besides products, such as masks and biases, where the keys of a query lie side by side in memory.

Queries are the lanes of scores: to read such numbers as they lie takes a read from another row for every lane, and again for the next key.
For each block of keys they are brought into the order of the scores instead, squares of them transposed in registers.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..cpu_codegen import convert
from ..cpu_codegen.builder import F32, I32, I64, PTR, VOID, Function, Module, Ty, Val, i64
from ..cpu_codegen.intrinsics import prefetch
from ..cpu_codegen.scopes import Point
from ..cpu_codegen.slots import Slots
from ..cpu_codegen.transpose import transposed
from ..graph.dims import Dim, coefficient, symbols
from ..graph.types import DType, f32
from ..stitch.loops import Body, Node
from .attention_rows import store_columns
from .attention_score import ScoreEmitter

TURNED = 32  # keys of which they are brought into the order of scores at a time; those of the next ones are asked for meanwhile


def turned(body: Body) -> dict[int, Dim]:
    """The loads of a score of queries (c) and keys (k) that are read in another order than theirs, and how far apart queries are."""
    found = {n: _pitch(node) for n, node in enumerate(body.nodes) if node.op == "load" and not node.args and node.dtype.bits <= 32}
    return {n: pitch for n, pitch in found.items() if pitch not in (0, 1)}


def _pitch(node: Node) -> Dim:
    """How far apart queries are in memory whose keys are neighbours; 0 where they are none."""
    by_query, by_key = coefficient(node.index, "c"), coefficient(node.index, "k")
    known = not any(s.name.startswith("%") for s in symbols(node.index))
    return by_query[0] if known and by_query is not None and by_key is not None and by_key[0] == 1 else 0


class Beside:
    """Such numbers of one block of queries: `lanes` queries of a vector, `vectors` of them, and at most `TURNED` keys at a time."""

    def __init__(self, fn: Function, slots: Slots, score: ScoreEmitter, lanes: int, vectors: int) -> None:
        self.fn, self.score, self.lanes, self.row_bytes = fn, score, lanes, lanes * vectors * 4
        pitches = turned(score.body)
        self.nodes = {n: score.body.nodes[n].dtype for n in pitches}
        self.pitches = {n: slots.dim(pitch * self.nodes[n].bytes) for n, pitch in pitches.items()}
        self.scratch = {n: fn.alloca(TURNED * self.row_bytes) for n in self.nodes}

    def fetch(self, points: Sequence[Point], rows: Val, start: Val, count: Val) -> None:
        """Those of keys start .. start + count - 1. rows: how many queries there are; what others get is nobody's."""
        fn = self.fn
        for n, dtype in self.nodes.items():
            name = emit_turn(fn.module, self.lanes, dtype)
            for v, point in enumerate(points):
                left = fn.sub(rows, i64(v * self.lanes))

                def some(n: int = n, v: int = v, point: Point = point, left: Val = left, name: str = name) -> list[Val]:
                    with self.score.emitter.scope():
                        source = self.score.emitter.address(n, Point(0, {**point.axes, "k": start}))
                        fn.call(name, VOID, [source, self.pitches[n], left, self._place(n, i64(0), v), i64(self.row_bytes), count])
                    return []

                fn.branch(fn.icmp("sgt", left, i64(0)), some)

    def provide(self, row: Val, v: int) -> None:
        """Vector v of queries, key `row` of the block."""
        for n, dtype in self.nodes.items():
            element = convert.memory_type(dtype)
            value = self.fn.load(_unit(dtype).vec(self.lanes), self._place(n, row, v))
            narrow = value if element.bits == 32 else self.fn.convert("trunc", value, element.vec(self.lanes))
            self.score.emitter.provide(n, convert.from_memory(self.fn, narrow, dtype))

    def _place(self, n: int, row: Val, v: int) -> Val:
        return self.fn.gep(self.fn.gep(self.scratch[n], row, scale=self.row_bytes), i64(v * self.lanes * 4))


def _unit(dtype: DType) -> Ty:
    return F32 if dtype == f32 else I32


def emit_turn(module: Module, lanes: int, dtype: DType) -> str:
    """Adds `void name(ptr source, i64 source pitch, i64 rows, ptr target, i64 target pitch, i64 count)` and returns its name.

    target[column][row] = source[row][column] in 32 bits, for `lanes` rows, of which those beyond the last repeat it, and `count` columns;
    pitches are bytes. Nothing else is read or written.
    """
    name = f"attention.turn{lanes}.{dtype}"
    if name in module.functions:
        return name
    fn = Function(module, name, VOID, [PTR, I64, I64, PTR, I64, I64], internal=True)
    source, pitch, rows, target, target_pitch, count = fn.args
    element, last = convert.memory_type(dtype), fn.sub(fn.smax(fn.smin(rows, i64(lanes)), i64(1)), i64(1))

    def place(row: Val, column: Val) -> Val:
        return fn.gep(fn.gep(source, fn.mul(fn.smin(row, last), pitch)), column, element)

    def read(row: Val, column: Val, width: int) -> Val:
        value = fn.load(element.vec(width), place(row, column))
        return value if element.bits == 32 else fn.convert("zext", value, I32.vec(width))

    def four(column: Val, _: list[Val]) -> list[Val]:
        corners = [read(i64(n), column, 4) for n in range(lanes)]
        store_columns(fn, corners, fn.gep(target, fn.mul(column, target_pitch)), target_pitch)
        return []

    def square(column: Val, _: list[Val]) -> list[Val]:
        """Each row at once: rows that are a power of two apart share a place in the cache, and soon lose it."""
        for n in range(lanes):
            prefetch(fn, place(i64(n), fn.add(column, i64(TURNED))), 2)
        columns = transposed(fn, [read(i64(n), column, lanes) for n in range(lanes)])
        to = fn.gep(target, fn.mul(column, target_pitch))
        for n, value in enumerate(columns):
            fn.store(value, fn.gep(to, fn.mul(target_pitch, i64(n))))
        return []

    def one(column: Val, _: list[Val]) -> list[Val]:
        to = fn.gep(target, fn.mul(column, target_pitch))

        def element_of(row: Val, _: list[Val]) -> list[Val]:
            fn.store(read(row, column, 0), fn.gep(to, row, I32))
            return []

        return fn.loop(i64(0), i64(lanes), 1, [], element_of)

    def rest() -> list[Val]:
        """The last four again, or the few that there are."""
        enough = fn.icmp("sge", count, i64(4))
        return fn.branch(enough, lambda: four(fn.sub(count, i64(4)), []), lambda: fn.loop(i64(0), count, 1, [], one)) or []

    squares, whole = fn.and_(count, i64(-lanes)), fn.and_(count, i64(-4))
    fn.loop(i64(0), squares, lanes, [], square)
    fn.loop(squares, whole, 4, [], four)
    fn.branch(fn.icmp("slt", whole, count), rest)
    fn.ret()
    fn.finish()
    return name
