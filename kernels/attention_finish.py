"""The end of a block of queries: sums of weighted values are divided by sums of weights, rounded, and written as rows of the result."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..cpu_codegen.builder import Val, const, i64
from .attention_rows import write_row
from .attention_softmax import finite, inverse, sink_weight

if TYPE_CHECKING:
    from .attention_stream import Stream


def with_sinks(stream: Stream, largest: list[Val], totals: list[Val]) -> list[Val]:
    """The sums of weights with those of the sinks, if there are any: keys whose value is 0. largest: the scores that weights are of."""
    fn = stream.fn
    sinks = [sink for point in stream.points if (sink := stream.score.sink(point)) is not None]
    found = []
    for sink, top, factor, total in zip(sinks, largest, stream.factors, totals):
        top = finite(fn, top) if factor is None else fn.mul(finite(fn, top), factor)
        weight = sink_weight(fn, stream.target, sink, top)
        found.append(fn.fma(weight, const(weight.ty, 2.0**stream.octave), total))
    return found or totals


def write_results(stream: Stream, totals: list[Val]) -> None:
    """Divides and rounds, puts neighbouring columns together in units of 32 bits, and transposes these into the valid rows.

    totals: the sums of weights, of each query.
    """
    fn, spec, each = stream.fn, stream.spec, stream.results.each
    units = -(-spec.width // each)
    factors = [inverse(fn, total) for total in totals]
    fn.loop(i64(0), i64(units), 1, [], lambda unit, _: _divided(stream, unit, factors))
    in_place = spec.out.col == 1 and spec.width % (each * stream.tiling.lanes) == 0
    stream.when_whole(in_place, lambda: _rows_in_place(stream, units), lambda: _staged_rows(stream, units))


def _divided(stream: Stream, unit: Val, factors: list[Val]) -> list[Val]:
    """Writes a row of units over a row of sums, never beyond those that it is made of."""
    fn, each = stream.fn, stream.results.each
    for v, factor in enumerate(factors):
        rows = [stream.row(fn.add(fn.mul(unit, i64(each)), i64(n))) for n in range(each)]
        parts = [fn.mul(fn.load(stream.vector, stream.place(stream.sums, row, v)), factor) for row in rows]
        fn.store(stream.results.units(parts), stream.place(stream.sums, stream.row(unit), v))
    return []


def _rows_in_place(stream: Stream, units: int) -> list[Val]:
    spec = stream.spec
    _units_to_rows(stream, units, stream.out, stream.slots.dim(spec.out.row * spec.stored.bytes))
    return []


def _staged_rows(stream: Stream, units: int) -> list[Val]:
    fn, spec, pitch = stream.fn, stream.spec, stream.staging_pitch * 4
    _units_to_rows(stream, units, stream.staging, i64(pitch))
    row_bytes, col = stream.slots.dim(spec.out.row * spec.stored.bytes), stream.slots.dim(spec.out.col)
    lanes = stream.tiling.lanes * stream.results.each

    def row(index: Val, _: list[Val]) -> list[Val]:
        to = fn.gep(stream.out, fn.mul(index, row_bytes))
        write_row(fn, spec.stored, fn.gep(stream.staging, index, scale=pitch), spec.width, to, col, lanes)
        return []

    fn.loop(i64(0), stream.rows, 1, [], row)
    return []


def _units_to_rows(stream: Stream, units: int, rows: Val, pitch: Val) -> None:
    """Transposes [unit][query] to whole squares of rows."""
    fn, lanes = stream.fn, stream.tiling.lanes
    for v in range(stream.tiling.vectors):
        first = fn.gep(rows, fn.mul(pitch, i64(v * lanes)))

        def square(index: Val, _: list[Val], v: int = v, first: Val = first) -> list[Val]:
            source = stream.place(stream.sums, stream.row(fn.mul(index, i64(lanes))), v)
            stream.transpose(source, i64(stream.row_bytes), fn.gep(first, index, scale=lanes * 4), pitch, lanes)
            return []

        fn.loop(i64(0), i64(-(-units // lanes)), 1, [], square)
