"""Windows that tile registers read where they lie, not in a copy of their own: the rows of a tile need only lie equally far apart.

Those of one line of places do, and so do those of the next ones if the places are counted on through the ends of lines, where windows
would reach into the next line: they are multiplied, too, and thrown away (`cpu_codegen/lines.py`). Each image is a matrix of its own.
Neighbouring windows share most of what they read, so that all of it is in L1, where copies of them come from L2. That is for weights that
stay in L2 and stream past the rows of one tile; others are read once for the rows of several, which are better copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..cpu_codegen.lines import Lines
from ..graph.dims import coefficient
from ..platforms.target import Target
from .blocking import share_sets
from .micro import MicroKernel
from .row_costs import stays
from .spec import BATCH, GemmSpec, Pieces, Strides
from .windows import grid_of

# Tiles that may be computed for each one that copied rows fill. Emerald Rapids in bf16, one image, 3 x 3 windows of as many channels as
# columns, beside copies: 56 x 56 with 64 channels 0.54 of the time, 28 x 28 with 128 0.58, 14 x 14 with 256 0.66.
_MOST_WASTE = 1.4


def in_lines(target: Target, spec: GemmSpec, micros: Sequence[MicroKernel]) -> GemmSpec:
    """The product with its rows counted through lines, where these tiles read them in place and that takes less; else as it is."""
    micro, known = micros[0], spec.constant_rhs and not spec.routed
    if not micro.in_pieces or spec.lines is not None or not known or not stays(target, spec, micro):
        return spec
    return _one_line(target, spec, micro) if spec.lhs_pieces is None else _of_images(target, spec, micro, spec.lhs_pieces)


def _one_line(target: Target, spec: GemmSpec, micro: MicroKernel) -> GemmSpec:
    """Windows along one line: rows that share numbers with the next ones."""
    row, size = spec.lhs_strides.row, spec.lhs.bytes
    if not (isinstance(spec.m, int) and isinstance(spec.k, int) and isinstance(row, int) and spec.lhs_strides.col == 1):
        return spec
    if not 0 < row < spec.k or spec.m < micro.mr or (spec.k * size) % micro.step_bytes or share_sets(target, row * size, micro.mr):
        return spec
    return replace(spec, lines=Lines(spec.m, spec.m))


def _of_images(target: Target, spec: GemmSpec, micro: MicroKernel, pieces: Pieces) -> GemmSpec:
    grid, start = grid_of(pieces.row, spec.m), coefficient(pieces.piece, "b")
    if grid is None or start is None or grid.pixel <= 0 or grid.line % grid.pixel or (pieces.run * spec.lhs.bytes) % micro.step_bytes:
        return spec
    length, images = grid.line // grid.pixel, grid.images(spec.m)
    rows, pitch = (grid.height - 1) * length + grid.width, grid.pixel * spec.lhs.bytes
    if length < grid.width or rows < micro.mr or share_sets(target, pitch, micro.mr):
        return spec
    if -(-rows // micro.mr) * micro.mr > _MOST_WASTE * grid.width * grid.height or (images != 1 and spec.batch != 1):
        return spec
    return replace(
        spec,
        m=rows,
        batch=spec.batch if images == 1 else images,
        lhs_strides=Strides(spec.lhs_strides.batch + (0 if images == 1 else BATCH * grid.step), grid.pixel),
        lhs_pieces=Pieces(BATCH * grid.pixel, pieces.piece, pieces.run),
        lines=Lines(length, grid.width),
    )
