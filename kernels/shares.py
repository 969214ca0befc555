"""Which rows of a call each variant computes."""

from __future__ import annotations

from collections.abc import Iterator

from ..cpu_codegen.builder import I64, Function, Val, i64
from .blocking import Blocking


def shares_of(fn: Function, blocking: Blocking, first: Val, last: Val) -> Iterator[tuple[Val, Val]]:
    """Cuts rows [first, last): for each variant where its rows begin and where they end. What is emitted for one variant comes
    before what belongs to the next."""
    taker, none = _taker(fn, blocking, fn.sub(last, first)), i64(len(blocking.variants))
    begin = first
    for number, variant in enumerate(blocking.variants):
        left, height = fn.sub(last, begin), i64(variant.micro.mr)
        full = fn.mul(fn.div(left, height), height)
        taken = fn.select(fn.icmp("sge", fn.sub(left, full), i64(variant.least)), left, full)
        if taker is not None:
            in_turn = i64(0) if variant.alone else fn.select(fn.icmp("eq", taker, none), taken, i64(0))
            taken = fn.select(fn.icmp("eq", taker, i64(number)), left, in_turn)
        end = fn.add(begin, taken)
        yield begin, end
        begin = end


def _taker(fn: Function, blocking: Blocking, rows: Val) -> Val | None:
    """The number of the variant that takes all of so many rows, or how many variants there are; None: they always take them in turn."""
    takers = blocking.takers
    if not takers:
        return None
    entries = fn.module.table(I64, [*takers, len(blocking.variants)])
    return fn.load(I64, fn.gep(entries, fn.smin(rows, i64(len(takers))), I64))
