"""A rhs that is no constant: read where it lies, packed by groups of panels when it is their turn, or packed as a whole before.

A copy is work that few rows do not pay for, and one of a whole matrix goes through the caches once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..platforms.target import Target
from .micro import MicroKernel
from .spec import GemmSpec

WAY = 4096  # bytes of L1 that lie in different sets: lines so far apart share them
_PASSES = 2  # tiles that may read lines which do not stay in the caches from one to the next
MOST_TILES = 16  # of rows in a block
PANELS_BYTES = 256 << 10  # room for a group of packed panels


def in_place(spec: GemmSpec, micros: Sequence[MicroKernel]) -> Sequence[MicroKernel]:
    """The tiles that read the rhs where it lies, if whole panels lie side by side in its rows, else `micros`."""
    lies, packing = spec.rhs_strides, micros[0].packing
    if spec.constant_rhs or lies is None or lies.row != 1 or not spec.rhs.is_float or packing.kr * packing.pad > 1:
        return micros
    if not (isinstance(lies.col, int) and isinstance(spec.n, int) and isinstance(spec.rows, int)) or spec.n % packing.nr:
        return micros
    pitch, tiles = lies.col * spec.rhs.bytes, -(-spec.rows // micros[0].mr)
    if tiles > _PASSES and pitch % WAY == 0:
        return micros
    return [replace(micro, packing=replace(packing, pitch=pitch)) for micro in micros]


def by_groups(target: Target, spec: GemmSpec, micros: Sequence[MicroKernel], most: int) -> bool:
    """Whether panels are packed by groups: where all rows of a matrix are one block, so that it happens once. Tile registers are too fast
    for it, and sums of integers stand behind all panels. most: room for the packed rows of a block, in bytes."""
    if spec.constant_rhs or micros[0].packing.pitch or micros[0].overlaps or not spec.rhs.is_float or len(micros) > 1:
        return False
    if not isinstance(spec.rows, int) or not isinstance(spec.k, int):
        return False
    tiles, tile_bytes = -(-spec.rows // micros[0].mr), spec.k * micros[0].mr * micros[0].step_bytes // micros[0].step_k
    # The rows of a tile have all their k at once (`blocking._pieces`), and so has the block.
    few = tiles <= MOST_TILES and tile_bytes <= target.l2 // 4 and tiles * tile_bytes <= most
    return few and micros[0].panels * packed_panel_bytes(spec, micros[0]) <= PANELS_BYTES


def packed_panel_bytes(spec: GemmSpec, micro: MicroKernel) -> int:
    """Of a panel of all k."""
    size = micro.packing.panel_bytes(spec.k, spec.rhs)
    assert isinstance(size, int)
    return size
