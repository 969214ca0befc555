"""Products of few columns over windows, and of columns in narrow groups, as those of grouped convolutions.

Where groups are joined to fill a vector, the weight is block-diagonal (`GemmSpec.diagonal`). A broadcast of one number is multiplied by
all columns of the vector, and by zeros in those of the other groups. Here each lane takes a number of its own group instead: the numbers
of a tap of the window lie side by side, and a permutation puts one of each group into the lanes of its columns. That spares the zeros.

Copies of windows, which other tiles read, are spared as well: a tile reads rows where they lie, and what several rows and taps read alike
is read once. With few columns that is most of what there is to read. The rows are neighbouring places in one line of an image, which is a
matrix of its own, so that they are equally far apart and none is computed in vain. Its lines pass one by one, with all weights for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd

import torch

from ..cpu_codegen.builder import I32, Function, Module, Val, const, i64
from ..graph.dims import evaluate, floordiv, mod, product, substitute, symbols
from ..graph.types import f32
from ..platforms.target import Target
from . import gemm, winograd
from .blocking import up
from .micro import Lhs, Tile, offset
from .packing import int_of, pack_rhs
from .spec import BATCH, GemmCode, GemmSpec, Packing, Strides
from .vector_micro import VectorMicro
from .windows import Grid, grid_of, line_of

WORD = 4  # bytes that a lane takes at a time: one f32, two bf16, four bytes
_TALLEST, _LOWEST = 14, 4  # rows of a tile
_WORDS = 32  # that the groups of a vector read at a tap: two vectors of them
_FEWEST = 4  # groups of a vector, of rows that are no windows: zeros of fewer take as long as permutations
_INDEPENDENT = 6  # sums, with fewer of which products wait for the ones before
_PRODUCTS = 128  # of all rows and vectors that are written out; the rest of a window is a loop over taps, or over the words of some


@dataclass(frozen=True)
class Taps:
    """What a tile reads, in bytes. places: of the taps of a step, from the first row on; step: from step to step, row: from row to row.
    groups: that the columns are in, `words` words of each, side by side."""

    places: tuple[int, ...]
    step: int
    row: int
    groups: int
    words: int

    def __str__(self) -> str:
        return f"{self.groups}x{self.words}.{'_'.join(map(str, self.places))}.{self.step}.{self.row}"


@dataclass(frozen=True)
class NarrowMicro(VectorMicro):
    """inner: the instructions. A step is all that is read of some taps, written out. columns_each: columns of a group."""

    inner: VectorMicro | None = None
    taps: Taps = Taps((), 0, 0, 1, 1)
    columns_each: int = 1

    ahead = 0
    reads_windows = True

    @property
    def _inner(self) -> VectorMicro:
        assert self.inner is not None
        return self.inner

    @property
    def isa(self) -> str:  # type: ignore[override]
        return self._inner.isa

    @property
    def name(self) -> str:
        return f"{super().name}.{self.lanes}.each{self.columns_each}.{self.taps}"

    @property
    def layout(self) -> Lhs:
        return Lhs(self._inner.layout.element, direct=True)

    @property
    def step_k(self) -> int:
        return len(self.taps.places) * self.taps.words * self.packing.kr

    @property
    def sums_factor(self) -> int:
        return self._inner.sums_factor

    def load_a(self, fn: Function, tile: Tile, index: Val, part: int) -> Sequence[Val]:
        raise AssertionError("rows share what they read")

    def load_b(self, fn: Function, group: Val, vector: int, part: int) -> Val:
        return self._inner.load_b(fn, group, vector, part)

    def product(self, fn: Function, acc: Val, a: Val, b: Val) -> Val:
        return self._inner.product(fn, acc, a, b)

    def multiplied(self, fn: Function, tile: Tile, index: Val, groups: list[Val], accumulators: list[Val]) -> list[Val]:
        taps = self.taps
        (panel,) = groups
        base = fn.gep(tile.a, index, scale=taps.step)
        readers: dict[int, list[tuple[int, int]]] = {}
        for tap, place in enumerate(taps.places):
            for row in range(self.mr):
                readers.setdefault(place + row * taps.row, []).append((row, tap))

        each = self._words_at_once

        def some(at: Val | None, sums: list[Val]) -> list[Val]:
            """The products of `each` words of all taps, from word `at` on; None: the first one."""
            sums = list(sums)
            near, weights_near = (base, panel) if at is None else (fn.gep(base, at, scale=WORD), fn.gep(panel, at, scale=self.nr * WORD))
            for word in range(each):
                starts = [offset(fn, weights_near, (tap * taps.words + word) * self.nr * WORD) for tap in range(len(taps.places))]
                weights = [[self.load_b(fn, start, v, 0) for v in range(self.vectors)] for start in starts]
                for place in sorted(readers):
                    read: dict[tuple[int, ...], Val] = {}
                    for v in range(self.vectors):
                        order = self._order(v, word)
                        if order not in read:
                            read[order] = self._read(fn, offset(fn, near, place), order)
                        for row, tap in readers[place]:
                            n = row * self.vectors + v
                            sums[n] = self.product(fn, sums[n], read[order], weights[tap][v])
            return sums

        return some(None, accumulators) if each == taps.words else fn.loop(i64(0), i64(taps.words), each, accumulators, some)

    @property
    def _words_at_once(self) -> int:
        """How many words of the taps of a step are written out; more of them are a loop."""
        words, products = self.taps.words, len(self.taps.places) * self.mr * self.vectors
        return max(n for n in range(1, words + 1) if words % n == 0 and (n == 1 or n * products <= _PRODUCTS))

    def _order(self, vector: int, word: int) -> tuple[int, ...]:
        """Which word of a tap each lane of a vector takes."""
        columns = range(vector * self.lanes, (vector + 1) * self.lanes)
        return tuple(min(column // self.columns_each, self.taps.groups - 1) * self.taps.words + word for column in columns)

    def _read(self, fn: Function, pointer: Val, order: tuple[int, ...]) -> Val:
        low, span = min(order), max(order) - min(order) + 1
        width = 1 << span.bit_length() - 1
        starts = (low,) if width == span else (low, low + span - width)
        ty, align = I32.vec(width if width > 1 else 0), self.layout.element.bits // 8
        parts = [fn.load(ty, offset(fn, pointer, start * WORD), align) for start in starts]
        if self.sums_factor:  # the instruction is for bytes of the other sign
            parts = [fn.xor(part, const(part.ty, -0x7F7F7F80)) for part in parts]
        if span == 1:
            words = fn.splat(parts[0], self.lanes)
        else:
            where = [word - low if word - low < width else word - low - span + 2 * width for word in order]
            words = fn.shuffle(parts[0], parts[-1], where)
        return self._inner.operand(fn, words)


def foreign(spec: GemmSpec) -> str | None:
    """Why a product is of another kind, as most are."""
    its_own = spec.constant_rhs and not spec.routed and (spec.diagonal[1] or spec.lhs_pieces)
    return None if its_own else "computes windows, and columns in groups"


def why_not(target: Target, spec: GemmSpec, inner: VectorMicro) -> str | None:
    """Why a product that is not `foreign` is none that this is for."""
    found = planned(target, spec, inner)
    if found is None or WORD * 8 * inner.lanes > target.vector_bits:
        return "is for few columns that read whole words, at places whose distances are known"
    made, micro = found
    if int_of(made.k) * micro.nr * spec.rhs.bytes > 2 * target.l1d:
        return "is for weights that stay near"
    groups, each, taps = micro.taps.groups, micro.columns_each, int_of(made.k) // (micro.taps.words * micro.packing.kr)
    lanes = _lanes(target, int_of(spec.n), each, taps)
    if inner.lanes != lanes:
        return f"vectors of {lanes} lanes are faster"
    if taps == 1 and groups < _FEWEST:
        return f"is for windows, or at least {_FEWEST} groups in a vector"
    if groups == 1 and min(micro.mr, int_of(made.m)) * micro.vectors < _INDEPENDENT:
        return "is for longer lines of places"
    filters = groups == 1 and spec.lhs == f32 and winograd.why_not(target, spec) is None
    if filters and not _fills_tiles(target, int_of(made.m), each):
        return "multiplies 36 times for 16 by minimal filtering"
    return None


def _fills_tiles(target: Target, places: int, each: int) -> bool:
    """Whether lines of so many places, and the columns of a group, fill tiles so well that minimal filtering takes longer, with fewer
    products but sums around them. Emerald Rapids, us here and there: 16 channels of each group, 14 x 14: 203 and 272; 20 x 20: 101 and 93;
    28 x 28: 195 and 207; 24 channels, 14 x 14: 286 and 353; 28 x 28: 483 and 419. Not measured where vectors are halved."""
    widest = target.lanes(8 * WORD)
    fits = each <= widest or (places == _TALLEST and each < 2 * widest)
    return fits and places % _TALLEST == 0 and not target.halves_vectors


def _lanes(target: Target, n: int, each: int, taps: int) -> int:
    """Of the vectors: of one group each, for which a broadcast will do, where those are as fast. Zen 4, windows of 3 x 3, 8 channels of
    each group: 256 at 28 x 28 take 208 us in bf16 instead of 241, and 109 instead of 133 in 8 bits, with a stride of 2 260 instead of 442
    and 129 instead of 194. each: columns of a group."""
    widest = target.lanes(8 * WORD)
    of_one = target.halves_vectors and each % widest == widest // 2 and taps > 1
    return widest // 2 if target.has("avx512f") and (n <= widest // 2 or of_one) else widest


def pack(weight: torch.Tensor, inner: VectorMicro) -> torch.Tensor:
    """Returns weight [n, k], the k of each column's own group, packed."""
    return pack_rhs(weight, _packing(inner, weight.shape[0]))


def emit(module: Module, target: Target, spec: GemmSpec, inner: VectorMicro, name: str) -> GemmCode:
    """Adds the functions of a product that `why_not` accepts, and returns what they are."""
    found = planned(target, spec, inner)
    assert found is not None, "refused"
    made, micro = found
    return gemm.emit(module, target, made, (micro,), name)


def _packing(inner: VectorMicro, n: int) -> Packing:
    """One panel of all columns."""
    return replace(inner.packing, nr=up(n, inner.lanes), pad=inner.packing.kr)


@lru_cache(maxsize=1 << 8)
def planned(target: Target, spec: GemmSpec, inner: VectorMicro) -> tuple[GemmSpec, NarrowMicro] | None:
    """The product of each line of places, and its tile; None where places or taps are not as far apart as each other."""
    lines, (groups, run) = _lines(spec), spec.diagonal
    if lines is None or lines.pixel <= 0 or lines.width < 1:
        return None
    if not run:  # all columns read all numbers: those of a pixel, which neighbouring taps have in common with neighbouring rows
        assert spec.lhs_pieces is not None, "refused"
        run = gcd(spec.lhs_pieces.run, lines.pixel)
    places = _places(spec, groups * run)
    if places is None or run * spec.lhs.bytes % WORD or run % inner.packing.kr:
        return None
    size, words, n = spec.lhs.bytes, run * spec.lhs.bytes // WORD, int_of(spec.n)
    each, alike = n // groups, _alike(places)
    packing = _packing(inner, n)
    vectors = packing.nr // inner.lanes
    held = target.registers // vectors - 1  # in vectors of the panel, beside what is read
    rows = min(_TALLEST, held - alike[0])
    if rows < _LOWEST or min(groups, inner.lanes // each + 2) * words > _WORDS:
        return None
    written_out = (taps for taps in alike if rows + taps <= held and taps * words * vectors * rows <= _PRODUCTS)
    count = max(written_out, default=alike[0])
    step = (places[count] - places[0]) * size if count < len(places) else 0
    taps = Taps(tuple(place * size for place in places[:count]), step, lines.pixel * size, groups, words)
    m, images = lines.width, lines.images(spec.m)
    line, weight = floordiv(BATCH, spec.batch), mod(BATCH, spec.batch)  # one line for all weights, as long as it is near
    start = substitute(spec.lhs_strides.batch, {"b": weight})
    batch = start + floordiv(line, lines.height) * lines.step + mod(line, lines.height) * lines.line
    made = replace(
        spec, m=m, k=int_of(spec.k) // groups, batch=product((spec.batch, images, lines.height)),
        lhs_strides=Strides(batch, lines.pixel), lhs_pieces=None, diagonal=(1, 0), first=weight * spec.m + line * m,
    )
    micro = NarrowMicro(rows, 1, packing, inner.lhs, inner.rhs, inner.lanes, inner, taps, each)
    return made, micro


def _lines(spec: GemmSpec) -> Grid | None:
    """Where rows are: places of images, or of lines. None: some are unevenly apart, or it is not known how many there are."""
    if spec.lhs_pieces is None:
        found = line_of(BATCH * spec.lhs_strides.row, spec.m) if spec.lhs_strides.col == 1 else None
    else:
        found = grid_of(spec.lhs_pieces.row, spec.m) or line_of(spec.lhs_pieces.row, spec.m)
    short = found is not None and found.height == 1 and found.width < _LOWEST and found.width != spec.m
    return None if short else found


def _places(spec: GemmSpec, together: int) -> list[int] | None:
    """Where the taps of the first row are, in elements; None where some of the `together` numbers of a tap are apart."""
    k, pieces = int_of(spec.k), spec.lhs_pieces
    if pieces is None:
        return [0] if k == together else None
    if pieces.run % together or {s.name for s in symbols(pieces.piece)} - {"b"}:
        return None
    return [evaluate(pieces.piece, {"b": at // pieces.run}) + at % pieces.run for at in range(0, k, together)]


def _alike(places: Sequence[int]) -> list[int]:
    """Of how many taps, one after the other, steps may be that are alike: of several, if possible, which share what they read."""
    total = len(places)
    found = [
        count for count in range(1, total + 1)
        if total % count == 0 and len({places[n + count] - places[n] for n in range(total - count)}) <= 1
    ]
    return [count for count in found if count > 1] or found
