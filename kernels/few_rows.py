"""Tiles for a number of rows that is known only when they come: a sentence of any length, the tokens of one expert.

Tall tiles take what fills them and leave the rest to lower ones, which read all panels once more. Few rows are better cut evenly, into
tiles of one height that fits them. Which one is looked up in a table by the number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..graph.dims import bounds
from ..platforms.target import Target
from .micro import MicroKernel
from .spec import GemmSpec

# Of another variant, which reads all panels once more, from L2 or from beyond it; in rows, like the cost of a tile.
_NEAR, _FAR = 3.0, 10.0
MOST_TILES = 8  # of the tallest kind: with more, what is left of the rows is little
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


def _near(target: Target, spec: GemmSpec, micro: MicroKernel) -> bool:
    """Whether the weights are small enough for L2; those of tile registers share it with the rows of one tile."""
    weights, room = bounds(spec.n * spec.k)[1], target.l2 * 5 // 8 if micro.overlaps else target.l2 // 2
    return weights is not None and weights * spec.rhs.bits // 8 <= room


def stays(target: Target, spec: GemmSpec, micro: MicroKernel) -> bool:
    """Whether what tiles read of the weights stays in L2."""
    return _near(target, spec, micro) and not micro.unpacked_bytes(1)


def pass_cost(target: Target, spec: GemmSpec, micro: MicroKernel) -> float:
    """Time of a pass of its own over all panels, for rows that others leave. Panels in L2 pass each tile of rows in tile registers anyway.

    Measured on Emerald Rapids with tile registers, 100 rows of 768 k in bf16 (`benchmarks/products.py`): without such a pass 768 columns
    take 20 % longer, 3072 columns, from beyond L2, 24 % less.
    """
    if micro.overlaps and stays(target, spec, micro):
        return 0.0
    return _NEAR if _near(target, spec, micro) else _FAR


def in_turn(rows: int, micros: Sequence[MicroKernel], least: Sequence[int], another: float) -> float:
    """Time for so many rows where each tile takes what fills it, and a rest of at least so many. another: of `pass_cost`."""
    total = 0.0
    for micro, fewest in zip(micros, least, strict=True):
        full, rest = divmod(rows, micro.mr)
        tiles = full + (rest >= fewest)
        if tiles:
            total += tiles * tile_cost(micro) + (another if total else 0.0)
            rows = 0 if rest >= fewest else rest
    return total


def evenly(rows: int, micro: MicroKernel) -> float:
    """Time for so many rows in tiles of one height."""
    return -(-rows // micro.mr) * tile_cost(micro)


def taker(
    rows: int, micros: Sequence[MicroKernel], least: Sequence[int], another: float, more: Sequence[MicroKernel]
) -> MicroKernel | None:
    """The tile, of `micros` and `more`, that takes all of so many rows; None where `micros` take them in turn, as they do with more than a
    few tiles. least: the smallest rest that each of `micros` takes. another: of `pass_cost`."""
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
