"""Tiles for a number of rows that is known: few and full ones, of which the last may be lower."""

from __future__ import annotations

from collections.abc import Sequence

from ..graph.dims import Dim
from ..platforms.target import Target
from .few_rows import MOST_TILES
from .micro import MicroKernel
from .row_costs import LOWEST, evenly, in_turn, least_of, pass_cost, tile_cost
from .spec import GemmSpec


def tailored(target: Target, spec: GemmSpec, micros: Sequence[MicroKernel]) -> Sequence[MicroKernel]:
    """The tiles for a product, most rows first: where the number of rows is known and tiles can have any, these are as few and as
    full as possible, the last one lower than the others, and as wide as a result of one or three panels. Where they cannot, all rows are
    one kind of tile's, or the tallest takes what fills it and another kind the rest, or the family is as it is."""
    first, m = _as_wide(spec, micros[0]), spec.rows
    if not isinstance(m, int) or m < 1:
        return micros
    if first.resized(first.mr, first.panels) is None:
        return _of_family(m, micros, pass_cost(target, spec, first))
    widths = [first.panels] if first != micros[0] else sorted({micro.panels for micro in micros}, reverse=True)
    if m <= first.mr:
        return (_of_height(m, first, widths),)
    if first.layout.group:
        return _heights_in_turn(m, first, widths, pass_cost(target, spec, first))
    tiles = (first.resized(rows, first.panels) for rows in range(first.mr, first.mr // 2, -1))
    return (min((tile for tile in tiles if tile is not None), key=lambda tile: (_in_one_pass(m, tile), m % tile.mr)),)


def _of_family(rows: int, micros: Sequence[MicroKernel], another: float) -> Sequence[MicroKernel]:
    """The fastest choice for so many rows where the heights of tiles are given, but for one that takes all of its rows at once. another: of
    `pass_cost`."""
    first, rest = micros[0], rows % micros[0].mr
    evenly_by = micros if rows <= MOST_TILES * first.mr else micros[:1]
    choices: list[tuple[float, Sequence[MicroKernel]]] = [(evenly(rows, micro), (micro.alone(rows),)) for micro in evenly_by]
    if rows > rest > 0:
        last = min((micro.alone(rest) for micro in micros if rest <= micro.mr), key=tile_cost)
        choices.append((rows // first.mr * tile_cost(first) + another + tile_cost(last), (first, last)))
    choices.append((in_turn(rows, micros, least_of(micros), another), micros))
    return min(choices, key=lambda choice: choice[0])[1]


def _heights_in_turn(rows: int, first: MicroKernel, widths: Sequence[int], another: float) -> Sequence[MicroKernel]:
    """Tiles of one height, or of two whose form the packed lhs has, so that the last rows are another pass, which costs so much."""
    full, rest = divmod(rows, first.mr)
    tiles = -(-rows // first.mr)
    even = _of_height(-(-rows // tiles), first, widths)
    if rest == 0:
        return (even,)
    last = _of_height(rest, first, widths)
    apart = full * tile_cost(first) + tile_cost(last) + another
    return (even,) if tiles * tile_cost(even) <= apart else (first, last)


def _in_one_pass(rows: int, micro: MicroKernel) -> float:
    """Time for so many rows in tiles of one height, and a lower one that reads the same panels."""
    full, left = divmod(rows, micro.mr)
    lower = micro.resized(max(rows_of_last(rows, micro), LOWEST), micro.panels) or micro
    return full * tile_cost(micro) + (tile_cost(lower) if left else 0)


def rows_of_last(rows: Dim, micro: MicroKernel) -> int:
    """Rows of the last of the tiles that so many rows take, if that can be lower than the others; else 0."""
    left = rows % micro.mr if isinstance(rows, int) else 0
    return left if left and not micro.layout.group and micro.resized(left, micro.panels) is not None else 0


def _as_wide(spec: GemmSpec, micro: MicroKernel) -> MicroKernel:
    """The tile as wide as the whole result, with as many accumulators, where that is less than two tiles and no whole number of them."""
    panels = micro.packing.panels(spec.n)
    if not isinstance(panels, int) or panels % micro.panels == 0 or panels >= 2 * micro.panels:
        return micro
    return micro.resized(micro.mr * micro.panels // panels, panels) or micro


def _of_height(rows: int, tallest: MicroKernel, widths: Sequence[int]) -> MicroKernel:
    """The lowest tile of at least `rows` rows, with as many panels of `widths` (most first) as registers allow."""
    held = tallest.mr * tallest.panels + tallest.panels  # accumulators and the vectors of the rhs, in panels
    fitting = (width for width in widths if rows == 1 or rows * width + width <= held)
    return tallest.resized(rows, next(fitting, widths[-1])) or _of_height(rows + 1, tallest, widths)
