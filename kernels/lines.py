"""Windows that tile registers read where they lie, not in a copy of their own: the rows of a tile need only lie equally far apart.

Those of one line of places do, and so do those of the next ones if the places are counted on through the ends of lines, where windows
would reach into the next line: they are multiplied, too, and thrown away (`cpu_codegen/lines.py`). Each image is a matrix of its own.
Neighbouring windows share most of what they read, so that all of it is in L1, where copies of them come from L2. Weights that do not stay
in L2 are read once for the rows of several tiles, of more than there is room for copies of.

A step is as much of a piece as fills registers to the same part each time, down to a quarter: the few channels of a group, say, whose
products take as long as those of many, but copying them takes longer still.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..cpu_codegen.lines import Lines
from ..graph.dims import evaluate, floordiv, mod, product, substitute, symbols
from ..platforms.target import Target
from .blocking import packed_most, share_sets
from .dynamic_rhs import MOST_TILES
from .micro import MicroKernel
from .row_costs import stays
from .spec import BATCH, GemmSpec, Pieces, Strides
from .windows import Grid, grid_of

# Cycles, for a row, of a product of a step and a panel; of copying 64 bytes, or less where that is all of a piece, and reading them from
# L2; and of 64 bytes of weights from beyond. Emerald Rapids in bf16, 3 x 3 windows of as many channels as columns: 56 x 56 with 64
# channels, 28 x 28 with 128 and 14 x 14 with 256 take 0.54, 0.58 and 0.66 of the time in place, 14 x 14 with 512 0.7.
_PRODUCT, _COPY, _FAR = 1, 5, 6


def in_lines(target: Target, spec: GemmSpec, micros: Sequence[MicroKernel]) -> tuple[GemmSpec, Sequence[MicroKernel]]:
    """The product with its rows counted through lines, and its tile, where that reads them in place and takes less; else as they are."""
    if not spec.constant_rhs or spec.routed:
        return spec, micros
    found = _one_line(target, spec, micros[0]) if spec.lhs_pieces is None else _of_images(target, spec, micros[0], spec.lhs_pieces)
    if found is None:
        return spec, micros
    spec, micro = found
    panels = min(micro.panels, evaluate(micro.packing.panels(spec.n), {}))
    return spec, (micro.resized(micro.mr, panels) or micro,)


def _one_line(target: Target, spec: GemmSpec, micro: MicroKernel) -> tuple[GemmSpec, MicroKernel] | None:
    """Windows along one line: rows that share numbers with the next ones. Where weights come from afar a copy is as fast."""
    row, size = spec.lhs_strides.row, spec.lhs.bytes
    if not (isinstance(spec.m, int) and isinstance(spec.k, int) and isinstance(row, int) and spec.lhs_strides.col == 1):
        return None
    if not 0 < row < spec.k or spec.m < micro.mr or micro.in_steps(spec.k * size) != micro:
        return None
    if share_sets(target, row * size, micro.mr) or not stays(target, spec, micro):
        return None
    return replace(spec, lines=Lines(spec.m, spec.m)), micro


def _of_images(target: Target, spec: GemmSpec, micro: MicroKernel, pieces: Pieces) -> tuple[GemmSpec, MicroKernel] | None:
    """Windows at all places of images, or some of them in each line, by rows of an image."""
    grid, tile, size = grid_of(pieces.row, spec.m), micro.in_steps(pieces.run * spec.lhs.bytes), spec.lhs.bytes
    if grid is None or tile is None or grid.pixel <= 0 or grid.line % grid.pixel or grid.line < grid.width * grid.pixel:
        return None
    length, images = grid.line // grid.pixel, grid.images(spec.m)
    rows, ways = (grid.height - 1) * length + grid.width, _ways(pieces, evaluate(spec.k, {}), size, tile)
    if ways is None or rows < micro.mr or share_sets(target, grid.pixel * size, micro.mr) or not _pays(target, spec, micro, tile, grid):
        return None
    batch = substitute(spec.lhs_strides.batch, {"b": floordiv(BATCH, images)}) + mod(BATCH, images) * grid.step
    found = replace(
        spec,
        m=rows,
        batch=product((spec.batch, images)),
        lhs_strides=Strides(batch, grid.pixel),
        lhs_pieces=replace(pieces, row=BATCH * grid.pixel),
        lines=Lines(length, grid.width),
        ways=ways,
        turn=images,
    )
    return found, tile


def _pays(target: Target, spec: GemmSpec, micro: MicroKernel, tile: MicroKernel, grid: Grid) -> bool:
    """Whether the products of the rows of an image take less than those of its places and copying these."""
    k, n, size = evaluate(spec.k, {}), evaluate(micro.packing.panels(spec.n), {}), spec.lhs.bytes
    assert spec.lhs_pieces is not None
    places, run = grid.width * grid.height, spec.lhs_pieces.run
    tiles = -(-((grid.height - 1) * (grid.line // grid.pixel) + grid.width) // micro.mr)
    lines = k // run * -(-run * size // micro.step_bytes)
    in_place: float = tiles * micro.mr * (k // tile.step_k) * n * _PRODUCT
    copied: float = places * (-(-k // micro.step_k) * n * _PRODUCT + lines * _COPY)
    if not stays(target, spec, micro):  # read once for the rows of each block
        weights = n * micro.packing.nr * k * size // micro.step_bytes * _FAR
        together = max(1, packed_most(target, micro) // (micro.mr * k * size))
        blocks = places / micro.mr / together
        in_place += -(-tiles // MOST_TILES) * weights
        copied += (max(1.0, blocks) if grid.images(spec.m) == 1 else blocks) * weights
    return in_place < copied


def _ways(pieces: Pieces, k: int, size: int, tile: MicroKernel) -> tuple[tuple[int, int], ...] | None:
    """`GemmSpec.ways`: the pieces equally far apart, or rows of such at equal distances; None where they are not."""
    if {s.name for s in symbols(pieces.piece)} - {"b"}:
        return None
    starts = [evaluate(pieces.piece, {"b": n}) * size for n in range(k // pieces.run)]
    steps, step = pieces.run // tile.step_k, tile.step_bytes
    apart = starts[1] if len(starts) > 1 else steps * step
    across = next((n for n, start in enumerate(starts) if start != n * apart), len(starts))
    turn = starts[across] - across * apart if across < len(starts) else 0
    if starts != [n * apart + n // across * turn for n in range(len(starts))]:
        return None
    ways = [(1, apart)] if steps == 1 else [(1, step), (steps, apart - steps * step)]
    return (*ways, (steps * across, turn)) if turn else tuple(ways)
