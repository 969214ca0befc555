"""Convolutions with windows of 3 x 3 by minimal filtering: 16 multiplications for 2 x 2 results instead of 36, in f32 or of integers.

    V = B^T d B              of each patch d of 4 x 4 of the image, for every channel
    M = sum of V * U         over the channels: 16 products of [patches, channels] and [channels, columns]
    y = A^T M A              2 x 2 results; then the epilogue

F(2 x 2, 3 x 3) of Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", 2016. U = G g G^T is made from the weight g when it
is packed, in f64. The entries of A and B are 0, 1 and -1, so that the results are off by a few roundings of numbers that are at most
four times the image's; larger patches would need fewer multiplications, and cost precision.

Of bytes V has at most 11 bits, and 4 U, which is integers, 12: they are products of 16 bits. Their sums in 32 bits are exactly four times
the results, as long as these fit 30 bits, as they do for 1024 channels. That is for processors whose products of bytes are not twice as
fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from ..graph.dims import Dim, evaluate, product, symbols
from ..graph.filtering import Filtering, patches
from ..platforms.target import Target
from .blocking import up
from .micro import MicroKernel
from .packing import int_of, pack_rhs
from .row_costs import tile_cost
from .spec import BATCH, GemmSpec, Pieces
from .windows import Grid, grid_of, strided

POINTS = 16  # products of a patch and a window
SCALE = 4  # of U of integers, which makes integers of its quarters
_WIDTHS = (2, 4, 3, 1)  # panels of a tile, the best for many rows first
_SCRATCH_BYTES = 1 << 20  # on the stacks of threads, which have 2 to 8 MB with glibc
_PAD = 64
_WIDEST = 512  # bytes of a patch in M and of padding, at most
_SKEW = 320  # the matrices of a block do not lie a multiple of 4096 bytes apart, which would be the same sets of L1


@dataclass(frozen=True)
class Image(Grid):
    """What windows of 3 x 3, one for each place, read: `channels` side by side. apart: places from tap to tap, and from one result of a
    patch to the other: patches that begin in the same 2 * apart places are interleaved. The image has 2 * apart more of each."""

    channels: int
    apart: int

    @property
    def across(self) -> int:
        """Patches in a line of patches."""
        return patches(self.width, self.apart)

    @property
    def lines(self) -> int:
        """Lines of patches."""
        return patches(self.height, self.apart)


@lru_cache(maxsize=1 << 10)
def image_of(pieces: Pieces, k: int, m: Dim) -> Image | None:
    """The image behind the left operand of a product with `m` rows; None where the rows are no windows of 3 x 3, one for each place."""
    channels, rest = divmod(k, 9)
    grid = grid_of(pieces.row, m)
    if grid is None or rest or pieces.run not in (channels, 3 * channels) or {s.name for s in symbols(pieces.piece)} != {"b"}:
        return None
    if pieces.run != channels:  # pieces of three pixels
        apart, taps = int(grid.pixel == channels), BATCH * grid.line
    else:
        apart = evaluate(pieces.piece, {"b": 1}) // grid.pixel if grid.pixel > 0 else 0
        taps = strided((3, 3), (apart * grid.line, apart * grid.pixel))
    if apart < 1 or pieces.piece != taps:
        return None
    return Image(grid.width, grid.height, grid.pixel, grid.line, grid.step, channels, apart)


def why_not(target: Target, spec: GemmSpec) -> str | None:
    """Why a product is no convolution that this is for."""
    if spec.lhs_pieces is None or not spec.constant_rhs or not isinstance(spec.k, int) or not isinstance(spec.n, int):
        return "is for windows of 3 x 3 and a constant weight"
    image = image_of(spec.lhs_pieces, spec.k, spec.m)
    if image is None:
        return "is for windows of 3 x 3, one for each place, in images of known size"
    if image.apart * POINTS * (2 * image.channels * 4 + _WIDEST) > _SCRATCH_BYTES:
        return f"has no scratch for {image.channels} channels of {image.apart} interleaved patches"
    images, integers = image.images(spec.m), not spec.lhs.is_float
    known = images if isinstance(images, int) else 1
    asked = Filtering(image.height, image.width, image.channels, spec.n, integers, image.apart, known)
    return asked.why_not(spec.n * spec.k * (1 if integers else 4) > target.l2)


def pack(weight: torch.Tensor, micro: MicroKernel) -> torch.Tensor:
    """Returns weight [n, 9 * channels], windows before channels, as its 16 transformed matrices [n, channels], packed for `micro`."""
    windows = weight.detach().double().view(weight.shape[0], 3, 3, -1)
    points = (point for row in _transformed(windows, 1) for point in _transformed(row, 1))
    scale = 1 if micro.rhs.is_float else SCALE
    return torch.cat([pack_rhs((point * scale).to(micro.rhs.torch), micro.packing) for point in points])


def _transformed(g: torch.Tensor, axis: int) -> tuple[torch.Tensor, ...]:
    """G g, row by row, along an axis of three."""
    first, middle, last = g.unbind(axis)
    mean, half = (first + last) / 2, middle / 2
    return first, mean + half, mean - half, last


@dataclass(frozen=True)
class Plan:
    """How the patches are cut. micro: the tile of the 16 products. span: patches of a strip, which is a line of patches or a part of one;
    strips: of a line. together: strips of a block. pitch: bytes from patch to patch of V; matrix: from one of its 16 matrices to the next.
    out: likewise of M, for the columns of a tile. grouped: of V in the form that tiles of columns of rows read; 0 where they read rows."""

    image: Image
    micro: MicroKernel
    span: int
    strips: int
    together: int
    pitch: int
    matrix: int
    out: int
    grouped: int


def plan(target: Target, spec: GemmSpec, micros: Sequence[MicroKernel]) -> Plan:
    """The blocks of `spec` for the caches of `target`: what lies in scratch takes most of L2 at most, unless the weights come from beyond
    L2; then they are read as seldom as there is room for."""
    assert spec.lhs_pieces is not None and isinstance(spec.k, int)
    image = image_of(spec.lhs_pieces, spec.k, spec.m)
    assert image is not None, "refused"
    first = micros[0]
    size = image.channels * first.rhs.bytes
    pitch, packed = size + _PAD, size if first.layout.group else 0
    stays = POINTS * size * int_of(spec.n) <= target.l2 // 2
    room = (min(target.l2 * 5 // 8, _SCRATCH_BYTES) if stays else _SCRATCH_BYTES) // (POINTS * (pitch + packed + first.nr * 4))
    room = max(1, room // image.apart) * image.apart
    span = up(-(-image.across // -(-image.across // room)), image.apart)
    strips = -(-image.across // span)
    total = product((image.images(spec.m), image.lines, strips))
    count = total if isinstance(total, int) and total else image.lines * strips
    together = -(-count // -(-count // max(1, room // span)))
    micro = _tile(first, together * span, int_of(first.packing.panels(spec.n)))
    rows = up(together * span, micro.mr)
    grouped = _skewed(rows * packed) if packed else 0
    return Plan(image, micro, span, strips, together, pitch, _skewed(rows * pitch), _skewed(rows * micro.nr * 4), grouped)


def _tile(tallest: MicroKernel, patches: int, panels: int) -> MicroKernel:
    """The tile that takes least time for a block of so many patches and all panels; it has no more vectors than the tallest one."""

    def cost(micro: MicroKernel) -> float:
        return -(-patches // micro.mr) * tile_cost(micro) * up(panels, micro.panels)

    held = (tallest.mr + 1) * tallest.panels
    sized = (tallest.resized(rows, wide) for wide in _WIDTHS for rows in range(held // wide - 1, 0, -1))
    return min((micro for micro in sized if micro is not None), key=cost)


def _skewed(size: int) -> int:
    return up(size, 4096) + _SKEW
