"""What it costs to compute some rows with these tiles or those: what every choice of tiles is made by.

In the time of one row of the vector kernel for the same operands.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..graph.dims import bounds
from ..platforms.target import Target
from .micro import MicroKernel
from .spec import GemmSpec

LOWEST = 4  # rows of a tile between others; with fewer, reading the panels takes longer than the products
_NEAR, _FAR = 3.0, 10.0  # another pass over all panels, from L2 or from beyond it


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

    Emerald Rapids with tile registers, 100 rows of 768 k in bf16, compared by hand: without such a pass 768 columns take 20 % longer, 3072
    columns, from beyond L2, 24 % less.
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
