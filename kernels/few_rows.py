"""Tiles for a number of rows that is known only when they come: a sentence of any length, the tokens of one expert.

Tall tiles take what fills them and leave the rest to lower ones, which read all panels once more. Few rows are better cut evenly, into
tiles of one height that fits them. Which one is looked up in a table by the number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from .micro import MicroKernel
from .row_costs import LOWEST, evenly, in_turn

MOST_TILES = 8  # of the tallest kind: with more, what is left of the rows is little
_PARTS = (5 / 7, 4 / 7, 3 / 7)  # of the tallest tile's rows


def heights(micros: Sequence[MicroKernel]) -> tuple[MicroKernel, ...]:
    """Tiles between the first two of a family, of which there may be any number of rows; none where their size is part of the form of
    the operands."""
    first, next_one = micros[0], micros[1].mr if len(micros) > 1 else 1
    wanted = dict.fromkeys(round(first.mr * part) for part in _PARTS)
    found = (first.resized(rows, first.panels) for rows in wanted if max(next_one + 1, LOWEST) <= rows < first.mr)
    return tuple(micro for micro in found if micro is not None)


def taker(
    rows: int, micros: Sequence[MicroKernel], least: Sequence[int], another: float, more: Sequence[MicroKernel]
) -> MicroKernel | None:
    """The tile, of `micros` and `more`, that takes all of so many rows; None where `micros` take them in turn, as they do with more than a
    few tiles. least: the smallest rest that each of `micros` takes. another: of `row_costs.pass_cost`."""
    if rows > MOST_TILES * micros[0].mr:
        return None
    best = min((*micros, *more), key=lambda micro: (evenly(rows, micro), -micro.mr))
    return best if evenly(rows, best) < in_turn(rows, micros, least, another) else None


def takers(
    most: int | None, micros: Sequence[MicroKernel], least: Sequence[int], another: float, more: Sequence[MicroKernel]
) -> tuple[MicroKernel | None, ...]:
    """`taker` of each number of rows, as many as are listed. most: rows that there may be, if that is known."""
    listed = MOST_TILES * micros[0].mr
    found = [taker(rows, micros, least, another, more) for rows in range(1 + (listed if most is None else min(listed, most)))]
    while found and found[-1] is None:
        found.pop()
    return tuple(found)
