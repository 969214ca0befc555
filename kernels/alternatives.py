"""Other ways to compute a product than the one that is estimated to be the fastest: what is worth measuring."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..platforms.target import Target
from . import table
from .blocking import Blocking
from .gemm import planned
from .spec import Choice, GemmSpec
from .table import Kernel

_TILES = (1, 4, 16)
_SLOWEST = 1 / 8  # of the best rate: a slower instruction is no alternative even where tiles are mostly empty


def alternatives(target: Target, spec: GemmSpec) -> tuple[Choice, ...]:
    """Choices that give other code than the empty one: the most promising first."""
    first = table.select(target, replace(spec, choice=Choice())).kernel
    return (*_blockings(target, spec, first), *_rows(target, spec, first))


def _rows(target: Target, spec: GemmSpec, first: Kernel) -> Iterator[Choice]:
    """Other rows of the table; the rate of a vendor's is that of the same instructions."""
    for row in table.accepting(target, spec):
        if row is not first and row.rate >= first.rate * _SLOWEST:
            yield Choice(row.name)


def _blockings(target: Target, spec: GemmSpec, first: Kernel) -> Iterator[Choice]:
    if not first.micros or spec.rhs.is_float != spec.lhs.is_float:
        return  # a vendor's, or weights that are unpacked by blocks of their own

    def blocking(choice: Choice) -> Blocking:
        return planned(target, replace(spec, choice=choice), first.micros)[1]

    usual = blocking(Choice())
    known, wanted = [usual], [Choice(tiles=tiles) for tiles in _TILES]
    if usual.pieces is not None and usual.pieces > 1:
        wanted.append(Choice(pieces=usual.pieces // 2))
    if usual.pieces is not None and usual.k_block >= 2 * first.micros[0].packing.pad:
        wanted.append(Choice(pieces=usual.pieces * 2))
    for choice in wanted:
        found = blocking(choice)
        if found not in known:
            known.append(found)
            yield choice
