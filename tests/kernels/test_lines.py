"""Windows whose rows tile registers read where they lie, counted through the ends of lines: exactly the products of the windows alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch

from sashiko.cpu_codegen.lines import Lines
from sashiko.graph.dims import Dim, evaluate, floordiv, mod
from sashiko.graph.types import DType, bf16, i8
from sashiko.kernels import amx, gemm, x86_vector
from sashiko.kernels.lines import in_lines
from sashiko.kernels.packing import pack_rhs
from sashiko.kernels.spec import BATCH, GemmSpec, Pieces, Strides
from sashiko.kernels.windows import strided
from sashiko.platforms.catalogue import CATALOGUE
from sashiko.stitch.loops import COLUMN, ROW, Body, BodyBuilder, Node
from tests.emulation import Array, Runner
from tests.kernels.products import Case, M, Micros, Together, acc_of, array, compare, exact, kernels_of, plain_store, random, weight
from tests.kernels.test_gemm import FEW

TILES = tuple(each for each in FEW if each.values[0][0].in_pieces)


@dataclass(frozen=True)
class Images:
    """Windows of `taps` lines of `across` places, one every `step`, over images of height x width, channels last."""

    count: int
    height: int
    width: int
    channels: int
    taps: int = 3
    across: int = 3
    step: int = 1

    @property
    def lines(self) -> int:
        return (self.height - self.taps) // self.step + 1

    @property
    def places(self) -> int:
        return (self.width - self.across) // self.step + 1

    @property
    def rows(self) -> int:
        return self.count * self.lines * self.places

    @property
    def k(self) -> int:
        return self.taps * self.across * self.channels

    @property
    def pieces(self) -> Pieces:
        pixel, line = self.channels, self.width * self.channels
        shape, steps = (self.count, self.lines, self.places), (self.height * line, self.step * line, self.step * pixel)
        first = self.count == 1
        return Pieces(strided(shape[first:], steps[first:]), BATCH * line, self.across * pixel)

    def spec(self, dtype: DType, n: int, epilogue: Body | None = None, rows: Dim | None = None) -> GemmSpec:
        body = plain_store(n, acc_of(dtype)) if epilogue is None else epilogue
        m = self.rows if rows is None else rows
        return GemmSpec(dtype, bf16 if dtype == bf16 else i8, m, n, self.k, Strides(0, 0), body, lhs_pieces=self.pieces)

    def windows(self, images: torch.Tensor) -> torch.Tensor:
        found = images.unfold(1, self.taps, self.step).unfold(2, self.across, self.step).permute(0, 1, 2, 4, 5, 3)
        return found.reshape(self.rows, self.k)


# Lines that tiles end within, that are longer and shorter than a tile, of whole tiles; one line; a last tile of one row and of all;
# several images; windows of other sizes, of one line.
CASES = (
    (Images(1, 9, 30, 64), 48),
    (Images(1, 12, 9, 64), 16),
    (Images(1, 6, 66, 64), 40),
    (Images(1, 6, 10, 64, taps=1), 33),
    (Images(2, 10, 12, 64), 32),
    (Images(3, 7, 11, 64, taps=2, across=4), 70),
    (Images(1, 11, 18, 64, taps=5, across=5), 16),
)


@pytest.mark.parametrize(("micros", "runner"), TILES)
def test_products_of_windows_in_place(micros: Micros, runner: Runner) -> None:
    dtype, products = micros[0].lhs, Together(runner)
    for case, n in CASES:
        spec = case.spec(dtype, n)
        used = in_lines(runner.target, spec, micros)
        assert used.lines == Lines(case.width, case.places)
        code = gemm.emit(products.module, runner.target, spec, micros, products.name())
        images, w = random((case.count, case.height, case.width, case.channels), dtype, 1), weight((n, case.k), micros, 2)
        out = np.full((case.rows, n), 77, np.float32 if dtype.is_float else np.int32)
        alike = partial(compare, x=case.windows(images), w=w, case=Case(case.rows, n, case.k))
        places = products.place(array(images)), products.place(pack_rhs(w, micros[0].packing).numpy())
        products.add(kernels_of(code), *places, out, {}, alike)
    products.run()


@pytest.mark.parametrize(("micros", "runner"), TILES)
def test_windows_along_one_line(micros: Micros, runner: Runner) -> None:
    """Rows that share numbers with the next ones: whole tiles, a last tile that goes back, several matrices."""
    dtype, products = micros[0].lhs, Together(runner)
    for count, m, n in ((1, 64, 32), (1, 49, 70), (3, 33, 16)):
        k, row = 192, 64
        strides = Strides(BATCH * (m * row + 128), row)
        spec = GemmSpec(dtype, bf16 if dtype == bf16 else i8, m, n, k, strides, plain_store(n, acc_of(dtype)), count)
        assert in_lines(runner.target, spec, micros).lines == Lines(m, m)
        code = gemm.emit(products.module, runner.target, spec, micros, products.name())
        lines, w = random((count, m * row + 128), dtype, 1), weight((n, k), micros, 2)
        out = np.full((count * m, n), 77, np.float32 if dtype.is_float else np.int32)
        alike = partial(compare, x=lines.unfold(1, k, row).reshape(-1, k), w=w, case=Case(m, n, k))
        places = products.place(array(lines)), products.place(pack_rhs(w, micros[0].packing).numpy())
        products.add(kernels_of(code), *places, out, {}, alike)
    products.run()


def _added(n: int, acc: DType) -> Body:
    """out[r, c] = acc + out[r, c]: every row must be done once."""
    builder = BodyBuilder()
    out, before = builder.buffer(acc), builder.buffer(acc)
    total = builder.add(Node("add", acc, (builder.add(Node("acc", acc)), builder.load(before, ROW * n + COLUMN))))
    builder.store(out, ROW * n + COLUMN, total)
    return builder.finish()


@pytest.mark.parametrize(("micros", "runner"), TILES)
def test_rows_that_are_computed_twice_count_once(micros: Micros, runner: Runner) -> None:
    """An epilogue that reads what it overwrites. The last tile goes back over rows of the one before."""
    dtype, products, (case, n) = micros[0].lhs, Together(runner), CASES[0]
    spec = case.spec(dtype, n, _added(n, acc_of(dtype)))
    code = gemm.emit(products.module, runner.target, spec, micros, products.name())
    images, w = random((case.count, case.height, case.width, case.channels), dtype, 1), weight((n, case.k), micros, 2)
    begin = np.full((case.rows, n), 8, np.float32 if dtype.is_float else np.int32)

    def alike(result: Array) -> None:
        expected = exact(case.windows(images), w).numpy() + 8
        np.testing.assert_allclose(result, expected, atol=1e-2 if dtype.is_float else 0, rtol=0)

    places = products.place(array(images)), products.place(pack_rhs(w, micros[0].packing).numpy())
    for kernel in kernels_of(code):
        at = len(products._arrays)
        products.add([kernel], *places, begin, {}, alike, at)
    products.run()


TARGET = replace(CATALOGUE[0], l1d=48 << 10, l2=2 << 20)
GOOD = Images(1, 16, 16, 64)


@pytest.mark.parametrize(
    ("case", "n"),
    [
        (replace(GOOD, step=2), 64),  # every other line would be thrown away
        (replace(GOOD, height=4, width=8), 64),  # not as many rows as a tile has
        (replace(GOOD, channels=24), 64),  # steps would reach from piece to piece
        (replace(GOOD, channels=2048), 64),  # rows of 4096 bytes share the sets of L1
        (replace(GOOD, across=9, width=20), 64),  # 8 places of a line of 12 more
        (Images(1, 16, 16, 256), 2048),  # weights that are read from afar for the rows of several tiles
    ],
)
def test_windows_that_are_better_copied(case: Images, n: int) -> None:
    spec = case.spec(bf16, n)
    assert in_lines(TARGET, spec, amx.amx(bf16, bf16)) is spec


def test_products_that_have_no_lines() -> None:
    tiles, spec = amx.amx(bf16, bf16), GOOD.spec(bf16, 64)
    assert in_lines(TARGET, spec, tiles).lines == Lines(16, 14)
    assert in_lines(TARGET, spec, x86_vector.widen(16)) is spec  # by vectors
    unknown = GOOD.spec(bf16, 64, rows=M)
    assert in_lines(TARGET, unknown, tiles) is unknown  # of an image of any height
    for strides in (Strides(0, spec.k), Strides(0, 0), Strides(0, 64, 2)):  # rows apart, one for all, with gaps
        rows = replace(spec, lhs_pieces=None, lhs_strides=strides)
        assert in_lines(TARGET, rows, tiles) is rows
    few = replace(spec, lhs_pieces=None, lhs_strides=Strides(0, 64), m=31)
    assert in_lines(TARGET, few, tiles) is few and in_lines(TARGET, replace(few, m=32), tiles).lines == Lines(32, 32)
    taps = Pieces(GOOD.pieces.row, floordiv(BATCH, 3) * 1024 + mod(BATCH, 3) * 128, 64)
    apart = replace(spec, lhs_pieces=taps)
    assert in_lines(TARGET, apart, tiles) is apart  # pieces that are not equally far apart


def test_any_number_of_images_is_a_batch() -> None:
    spec = Images(3, 16, 16, 64).spec(bf16, 64, rows=M * (14 * 14))
    found = in_lines(TARGET, spec, amx.amx(bf16, bf16))
    assert found.batch == M and found.m == 13 * 16 + 14 and found.apart == 14 * 16
    assert evaluate(found.lhs_strides.batch, {"b": 2}) == 2 * 16 * 16 * 64
