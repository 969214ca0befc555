"""Tiles for a number of rows that is known only when they come: a sentence of any length, the tokens of one expert.

Tall tiles take what fills them and leave the rest to lower ones, which read all panels once more. Few rows are better cut evenly, into
tiles of one height that fits them. Which one is looked up in a table by the number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from .micro import MicroKernel

PASS_COST = 3.0
"""Of another variant, which reads all panels once more; in rows, like the cost of a tile."""
_MOST_TILES = 8  # of the tallest kind: with more, what is left of the rows is little
_PARTS = (5 / 7, 4 / 7, 3 / 7)  # of the tallest tile's rows
LOWEST = 4  # rows of a tile between others; with fewer, reading the panels takes longer than the products


def heights(micros: Sequence[MicroKernel]) -> tuple[MicroKernel, ...]:
    """Tiles between the first two of a family, of which there may be any number of rows; none where their size is part of the form of
    the operands."""
    first, next_one = micros[0], micros[1].mr if len(micros) > 1 else 1
    wanted = dict.fromkeys(round(first.mr * part) for part in _PARTS)
    found = (first.resized(rows, first.panels) for rows in wanted if max(next_one + 1, LOWEST) <= rows < first.mr)
    return tuple(micro for micro in found if micro is not None)


def tile_cost(micro: MicroKernel) -> float:
    """Time of one tile in rows of a vector kernel, reading the panels included."""
    return micro.mr * micro.row_cost + micro.panel_cost


def in_turn(rows: int, micros: Sequence[MicroKernel], least: Sequence[int]) -> float:
    """Time for so many rows where each tile takes what fills it, and a rest of at least so many."""
    total = 0.0
    for micro, fewest in zip(micros, least, strict=True):
        full, rest = divmod(rows, micro.mr)
        tiles = full + (rest >= fewest)
        if tiles:
            total += tiles * tile_cost(micro) + (PASS_COST if total else 0.0)
            rows = 0 if rest >= fewest else rest
    return total


def evenly(rows: int, micro: MicroKernel) -> float:
    """Time for so many rows in tiles of one height."""
    return -(-rows // micro.mr) * tile_cost(micro)


def taker(rows: int, micros: Sequence[MicroKernel], least: Sequence[int], more: Sequence[MicroKernel] = ()) -> MicroKernel | None:
    """The tile, of `micros` and `more`, that takes all of so many rows; None where `micros` take them in turn, as they do with more than a
    few tiles. least: the smallest rest that each of `micros` takes."""
    if rows > _MOST_TILES * micros[0].mr:
        return None
    best = min((*micros, *more), key=lambda micro: (evenly(rows, micro), -micro.mr))
    return best if evenly(rows, best) < in_turn(rows, micros, least) else None


def takers(
    most: int | None, micros: Sequence[MicroKernel], least: Sequence[int], more: Sequence[MicroKernel]
) -> tuple[MicroKernel | None, ...]:
    """`taker` of each number of rows, as many as are listed. most: rows that there may be, if that is known."""
    listed = _MOST_TILES * micros[0].mr
    found = [taker(rows, micros, least, more) for rows in range(1 + (listed if most is None else min(listed, most)))]
    while found and found[-1] is None:
        found.pop()
    return tuple(found)


def least_of(micros: Sequence[MicroKernel]) -> list[int]:
    """`fewest_rows` of each variant, with those after it for what it leaves."""
    return [fewest_rows(micros[n:]) for n in range(len(micros))]


def fewest_rows(micros: Sequence[MicroKernel]) -> int:
    """The fewest rows from which on one tile of the first variant costs no more than what the other variants need for them."""
    first, others = micros[0], micros[1:]
    if not others:
        return 1
    count = first.mr
    while count > 1 and tile_cost(first) <= _cover_cost(count - 1, others):
        count -= 1
    return count


def _cover_cost(count: int, micros: Sequence[MicroKernel]) -> float:
    """Time for `count` rows with these variants: full tiles of the first, and the best for the rest."""
    first, others = micros[0], micros[1:]
    full, rest = divmod(count, first.mr)
    if rest == 0:
        return full * tile_cost(first)
    whole = (full + 1) * tile_cost(first)
    return min(whole, full * tile_cost(first) + _cover_cost(rest, others)) if others else whole
