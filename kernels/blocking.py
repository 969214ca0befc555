"""How a product is cut: which rows of tiles are used for what is left, how many rows share a panel, and pieces of k."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd, lcm

from ..graph.dims import Dim, bounds, mod
from ..platforms.target import Target
from .dynamic_rhs import MOST_TILES, PANELS_BYTES, WAY, by_groups, packed_panel_bytes
from .few_rows import heights, takers
from .known_rows import rows_of_last
from .micro import MicroKernel, shares_of
from .row_costs import fewest_rows, least_of, pass_cost, stays
from .spec import GemmSpec

_LINE = 64
_SCRATCH_TILES_BYTES = 96 << 10
_GROUP_COLUMNS = 256
_SHARING = 4  # tiles of rows in a block
_RAGGED_COLUMNS = 192
_STACK_BYTES = 512 << 10  # for packed rows; the stacks of threads are small on some systems


@dataclass(frozen=True)
class Variant:
    """One register tile and how it is used.

    rows: rows of a block, a multiple of mr, whose lhs is at hand while a panel is used. least: a rest of fewer rows is left to the next
    variant. pitch, piece: bytes from row to row and from piece to piece of the lhs in the form that the tile reads. direct: whole tiles
    are read in place, and what is packed lies as it does there. shares: as in `Tile`; a rest of a tile has the same code. overlaps: whether
    the epilogue of a tile is done with the next one, be that narrower. reverses: whether every other tile goes back through k. last_rows:
    rows of the last tile of all, where they are known to be fewer, and it can be lower; else it is computed as if it were whole.
    """

    micro: MicroKernel
    rows: int
    least: int
    pitch: int
    piece: int
    direct: bool
    shares: int
    alone: bool = False
    overlaps: bool = False
    reverses: bool = False
    last_rows: int = 0

    @property
    def packed_bytes(self) -> int:
        """Packed rows of a block, for one piece of k; where blocks are read in place, all k of a tile that is not whole."""
        return (self.micro.mr if self.direct else self.rows) * self.pitch

    def left(self, k: Dim) -> int:
        """How many of `k` k are left after the whole steps; 0 where the lhs is padded to these."""
        return k % self.micro.step_k if self.direct and isinstance(k, int) else 0

    def narrow(self, panels: Dim) -> Variant | None:
        """The variant for those of so many panels that do not fill a tile of this one, if there are any and it can be narrower."""
        left = panels % self.micro.panels if isinstance(panels, int) else 0
        micro = self.micro.resized(self.micro.mr, left) if left else None
        return None if micro is None else replace(self, micro=micro)

    @property
    def lower(self) -> Variant | None:
        """The variant for the last tile of all rows, where that is lower than the others."""
        micro = self.micro.resized(self.last_rows, self.micro.panels) if self.last_rows else None
        return None if micro is None else replace(self, micro=micro)


@dataclass(frozen=True)
class Blocking:
    """variants: most rows first. takers: for each number of rows, as many as are listed, which variant takes all of them; where it is
    none of them, and for more rows, they take what is theirs in turn. k_block: k of a piece; pieces: how many there are, None when that is
    not known.

    panel_block: panels whose accumulators wait in scratch while the pieces of k pass. out_pitch: columns that the epilogue takes at a
    time; a tile in scratch is [nr / out_pitch][mr][out_pitch]. packed_most: room for packed rows, in bytes. panel_bytes: of a panel of
    a rhs that is packed by groups (`dynamic_rhs.by_groups`), else 0.
    """

    variants: tuple[Variant, ...]
    k_block: int
    pieces: int | None
    panel_block: int
    out_pitch: int
    packed_most: int
    takers: tuple[int, ...] = ()
    panel_bytes: int = 0

    def turn_bytes(self, variant: Variant) -> int:
        """From tile to tile in scratch."""
        size = variant.micro.mr * variant.micro.nr * 4
        return size + _LINE if size % 4096 == 0 else size

    def scratch_tiles_bytes(self, variant: Variant, more: int = 0) -> int:
        """Room for the tiles of a block. more: tiles of a group of panels that are narrower, beside those that fill it."""
        across = self.panel_block // variant.micro.panels + more
        count = 2 if self.pieces == 1 else variant.rows // variant.micro.mr * across
        return count * self.turn_bytes(variant)

    @property
    def unpacked_bytes(self) -> int:
        """Room for the panels of a tile, for one piece of k, in variants that write them out before they read them."""
        if self.panel_bytes:
            return self.panel_bytes * self.panel_block
        return max(v.micro.panels * v.micro.unpacked_panels * v.micro.unpacked_bytes(self.k_block) for v in self.variants)

    def partial_tiles(self, m: Dim) -> list[bool]:
        """For each variant whether some of `m` rows, or of those that are left from a whole number of the first tiles on, may be a tile of
        it that is not whole."""
        if self.takers:
            return [True] * len(self.variants)
        result: list[bool] = []
        for variant in self.variants:
            m = mod(m, variant.micro.mr)
            result.append(not isinstance(m, int) or m >= variant.least)
            m = 0 if isinstance(m, int) and result[-1] else m
        return result

    def pack_late(self, variant: Variant) -> bool:
        """Whether the rows of a block are packed piece by piece, again for each group of panels, as there is no room for all pieces. A
        piece that is all there is has no turn of its own, whatever room it takes."""
        return self.pieces is None or (self.pieces > 1 and not variant.direct and self.pieces * variant.packed_bytes > self.packed_most)

    def packed_bytes(self, variant: Variant) -> int:
        """Room for the packed rows of a block."""
        return variant.packed_bytes * (1 if variant.direct or self.pieces is None or self.pack_late(variant) else self.pieces)


def choose(target: Target, spec: GemmSpec, micros: Sequence[MicroKernel]) -> Blocking:
    """Returns the blocking of `spec` with these tiles (most rows first) for the caches of `target`."""
    micros = _used(spec, micros)
    least = dict(zip(micros, least_of(micros), strict=True))
    another = pass_cost(target, spec, micros[0])
    few = () if isinstance(spec.rows, int) else takers(bounds(spec.rows)[1], micros, list(least.values()), another, heights(micros))
    micros = sorted(dict.fromkeys((*micros, *(micro for micro in few if micro is not None))), key=lambda micro: -micro.mr)
    most = packed_most(target, micros[0])
    grouped = by_groups(target, spec, micros, most)
    pieces, k_block = _pieces(target, spec, micros)
    widest = max(micro.panels for micro in micros)
    nr = micros[0].packing.nr
    panel_bytes = packed_panel_bytes(spec, micros[0]) if grouped else 0
    columns = nr * (PANELS_BYTES // panel_bytes) if panel_bytes else _GROUP_COLUMNS
    panel_block = max(widest, min(columns, _group_columns(target, spec, micros[0])) // nr // widest * widest)
    out_pitch = gcd(*(micro.nr for micro in micros))
    variants: list[Variant] = []
    last_rows = rows_of_last(spec.rows, micros[0]) if len(micros) == 1 else 0
    for micro in micros:
        overlaps = micro.overlaps and micro.nr == out_pitch
        reverses = _reverses(target, micro, k_block)
        row = spec.lhs_strides.row
        form = micro.copied if spec.lhs_pieces is None else micro
        pitch = -(-k_block // form.step_k) * form.step_bytes + _LINE
        if spec.lines is not None and isinstance(row, int):  # all that a row adds to what others have
            pitch = row * spec.lhs.bytes + _LINE
        tiles = MOST_TILES if grouped else 0
        rows, alone = _rows(target, spec, micro, pitch, pieces, panel_block * nr, tiles), micro not in least
        fewest, shares = least.get(micro, 1), 0 if grouped or micro.packing.pitch else shares_of(rows // micro.mr)
        # Rows that are used for one group of columns after the other are better copied, where that gives them a better form.
        again = micro.overlaps and rows > micro.mr and spec.lhs_pieces is None
        there = micro.reads_windows or spec.lines is not None
        if isinstance(row, int) and (there or (not again and _direct(target, spec, micro, row * spec.lhs.bytes, most))):
            apart = row * spec.lhs.bytes, k_block * spec.lhs.bytes
            variants.append(Variant(micro, rows, fewest, *apart, True, shares, alone, overlaps, reverses, last_rows))
            continue
        pitch -= _LINE if form != micro else 0
        variants.append(Variant(form, rows, fewest, pitch, rows * pitch, False, shares, alone, overlaps, reverses, last_rows))
    numbers = {micro: number for number, micro in enumerate(micros)}
    taken = tuple(len(micros) if micro is None else numbers[micro] for micro in few)
    return Blocking(tuple(variants), k_block, pieces, panel_block, out_pitch, most, taken, panel_bytes)


def up(value: int, step: int) -> int:
    """value rounded up to a multiple of step."""
    return -(-value // step) * step


def _pieces(target: Target, spec: GemmSpec, micros: Sequence[MicroKernel]) -> tuple[int | None, int]:
    """Number and length of the pieces of k, which are of equal length.

    One piece, if the rows of a tile fit a part of L2: they stream from there, panels stream whole, and no accumulators are stored between
    pieces; but a few where weights come from beyond the caches (`_of_far`). Otherwise, rows of pieces take two thirds of L1 where they are
    read in place, and twice that where they are packed. Tile registers load panels again for each tile of rows that shares them, and want
    them in L1.
    """
    first = micros[0]
    widest = max(-(-micro.mr * micro.step_bytes // micro.step_k) for micro in micros)
    pad = max(micro.packing.pad for micro in micros)
    room = target.l1d * 2 // 3 if first.layout.direct else target.l1d * 4 // 3
    most = max(pad, room // widest // pad * pad)
    if not isinstance(spec.k, int):
        highest = bounds(spec.k)[1]
        return None, most if highest is None else min(most, up(highest, pad))
    if spec.lines is not None or first.reads_windows or by_groups(target, spec, micros, packed_most(target, first)):
        return 1, up(spec.k, pad)
    whole = target.l1d if _streams(target, spec, first) else target.l2 // 4
    if first.unpacked_bytes(1):  # several tiles share what is written out
        whole = min(whole, packed_most(target, first) // _SHARING)
    one = spec.k * widest <= whole
    pieces = spec.choice.pieces or (_of_far(target, spec, first, spec.k * widest) if one else max(1, -(-spec.k // most)))
    k_block = up(-(-spec.k // pieces), lcm(pad, *(micro.step_k for micro in micros)))  # steps in place may be narrower than packed ones
    return (-(-spec.k // k_block), k_block) if k_block < spec.k else (1, up(spec.k, pad))


def _streams(target: Target, spec: GemmSpec, micro: MicroKernel) -> bool:
    """Whether the rows of a block stream past one group of panels after the other. Tile registers are faster than weights come from beyond
    L2, so that many rows share them there; weights that stay in L2 stream past one tile of rows instead."""
    most = bounds(spec.rows)[1]
    return micro.overlaps and not stays(target, spec, micro) and (most is None or most > micro.mr)


def _of_far(target: Target, spec: GemmSpec, micro: MicroKernel, tile_bytes: int) -> int:
    """Pieces with which as many tiles of rows share a panel as scratch has room for, where the weights are read from memory: they are read
    again for the rows of each block."""
    most, weights = bounds(spec.rows)[1], bounds(spec.n * spec.k)[1]
    if not target.l3 or (weights is not None and weights * spec.rhs.bits // 8 <= target.l3 // 2):
        return 1
    tiles = _SCRATCH_TILES_BYTES // (micro.mr * _GROUP_COLUMNS * 4)
    tiles = tiles if most is None else min(tiles, -(-most // micro.mr))
    return max(1, -(-tiles * tile_bytes // min(target.l2 // 2, _STACK_BYTES)))


def _used(spec: GemmSpec, micros: Sequence[MicroKernel]) -> Sequence[MicroKernel]:
    """The tiles that so few rows may need, the last one at least, up to the one that leaves none over."""
    most, left = bounds(spec.rows)[1], spec.rows
    first = next((n for n in range(len(micros)) if most is None or fewest_rows(micros[n:]) <= most), len(micros) - 1)
    for last in range(first, len(micros)):
        left = mod(left, micros[last].mr)
        if left == 0 or (isinstance(left, int) and left >= fewest_rows(micros[last:])):
            return micros[first : last + 1]
    return micros[first:]


def _rows(target: Target, spec: GemmSpec, micro: MicroKernel, row_bytes: int, pieces: int | None, columns: int, tiles: int) -> int:
    """Rows of a block: of up to `tiles` tiles, if that is not 0; else of some while the weights stay in L2, and of as many as fit a part of
    it where these do not, so that they are read less often."""
    tiles = tiles or spec.choice.tiles or (_sharing_tiles(spec, micro) if stays(target, spec, micro) else MOST_TILES)
    if _streams(target, spec, micro):
        row_bytes = (row_bytes - _LINE) * (pieces or 1)
    by_lhs = packed_most(target, micro) // (micro.mr * row_bytes)
    by_tiles = _SCRATCH_TILES_BYTES // (micro.mr * columns * 4) if pieces != 1 else by_lhs
    most = bounds(spec.rows)[1]
    if most is None:
        return micro.mr * max(1, min(by_lhs, by_tiles, tiles))
    there = max(1, -(-most // micro.mr))
    blocks = -(-there // max(1, min(by_lhs, by_tiles, tiles, there)))
    return micro.mr * -(-there // blocks)  # all blocks read the weights: they are of one size


def _reverses(target: Target, micro: MicroKernel, k: int) -> bool:
    """Whether every other tile goes back through k. Tile registers load the operand that tiles share again in each of them: where L1 does
    not hold it all beside the other, it holds what the tile before read last. Emerald Rapids in bf16: 6 to 8 % faster at 512x256x1024 and
    512x768x768, 5 % at 128x3072x768, as fast with fewer rows; 2 to 4 % slower where L1 holds it.
    """
    return micro.overlaps and -(-k // micro.step_k) * micro.step_bytes * micro.mr > target.l1d * 2 // 3


def packed_most(target: Target, micro: MicroKernel) -> int:
    """Room for the packed rows of a block, in bytes."""
    return min(target.l2 * 3 // 8, 2 * _STACK_BYTES) if micro.overlaps else min(target.l2 // 2, _STACK_BYTES)


def _group_columns(target: Target, spec: GemmSpec, micro: MicroKernel) -> int:
    """Columns whose accumulators wait while the pieces of k pass: of one tile where these follow each other on the same rows."""
    return micro.nr if _streams(target, spec, micro) else _GROUP_COLUMNS


def _sharing_tiles(spec: GemmSpec, micro: MicroKernel) -> int:
    """How many tiles of rows use a panel that is in L2, or comes there from farther away the first time in a call: they wait for it
    together. Tile registers are loaded again in each step, so that products are faster with the rows of one tile in L1.
    """
    panels = micro.packing.panels(spec.n)
    if micro.overlaps or (isinstance(panels, int) and panels <= micro.panels):
        return 1  # in the second case all columns are one tile's, which nothing is read for again
    return _SHARING


def _direct(target: Target, spec: GemmSpec, micro: MicroKernel, pitch: int, most: int) -> bool:
    """Whether whole tiles of rows, `pitch` bytes apart, can be read in place, as they do not share more sets of L1 than it has ways. Rows
    of `most` bytes can be packed in the same form."""
    if spec.lhs_pieces is not None or not micro.layout.direct or spec.lhs_strides.col != 1:
        return False
    if not isinstance(spec.k, int) or pitch < spec.k * spec.lhs.bytes:
        return False
    # Rows that are no whole steps begin within lines, and tile registers take two loads for each: not for many columns.
    few = not micro.overlaps or (isinstance(spec.n, int) and spec.n <= _RAGGED_COLUMNS)
    if spec.k % micro.step_k and not (micro.layout.ragged and few):
        return False
    return micro.mr * pitch <= most and not share_sets(target, pitch, micro.mr)


def share_sets(target: Target, pitch: int, rows: int) -> bool:
    """Whether so many rows, `pitch` bytes apart, do not find room in L1 at the same k: more lie in one set than it has ways."""
    counts = (Counter((row * pitch + start) % WAY // _LINE for row in range(rows)) for start in range(0, _LINE, 16))
    return max(max(count.values()) for count in counts) >= target.l1d // WAY
