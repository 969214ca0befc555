"""Windows whose rows tile registers read where they lie, counted through the ends of lines: exactly the products of the windows alone."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from sashiko.cpu_codegen.lines import Lines
from sashiko.graph.dims import evaluate
from sashiko.graph.types import DType, bf16, i8
from sashiko.kernels import amx, gemm, x86_vector
from sashiko.kernels.lines import in_lines
from sashiko.kernels.packing import pack_rhs
from sashiko.kernels.spec import BATCH, GemmSpec, Strides
from sashiko.platforms.catalogue import CATALOGUE
from sashiko.stitch.loops import COLUMN, ROW, Body, BodyBuilder, Node
from tests.emulation import Array, Runner
from tests.kernels.images import Images
from tests.kernels.products import Case, M, Micros, Together, acc_of, array, compare, exact, kernels_of, plain_store, random, weight
from tests.kernels.test_gemm import FEW

TILES = tuple(each for each in FEW if each.values[0][0].in_steps(64))

# Lines that tiles end within, that are longer and shorter than a tile, of whole tiles; one line; a last tile of one row and of all;
# several images; windows of other sizes, of one line; places apart; channels that do not fill a step; groups, of one image and of some.
CASES = (
    (Images(1, 9, 30, 64), 48),
    (Images(1, 12, 9, 64), 16),
    (Images(1, 6, 66, 64), 40),
    (Images(1, 6, 10, 64, taps=1), 33),
    (Images(2, 10, 12, 64), 32),
    (Images(3, 7, 11, 64, taps=2, across=4), 70),
    (Images(1, 11, 18, 64, taps=5, across=5), 16),
    (Images(1, 12, 20, 128, apart=2), 32),
    (Images(1, 9, 30, 16), 16),
    (Images(1, 9, 30, 32), 33),
    (Images(1, 10, 12, 48, groups=3), 16),
    (Images(2, 10, 12, 96, groups=3), 20),
)


@pytest.mark.parametrize(("micros", "runner"), TILES)
def test_products_of_windows_in_place(micros: Micros, runner: Runner) -> None:
    dtype, products = micros[0].lhs, Together(runner)
    for case, n in CASES:
        spec = case.spec(dtype, n)
        found, _ = in_lines(runner.target, spec, micros)
        assert found.lines == Lines(case.width, case.places)
        code = gemm.emit(products.module, runner.target, spec, micros, products.name())
        images, w = random((case.count, case.height, case.width, case.channels), dtype, 1), weight((case.groups, n, case.k), micros, 2)
        packed = np.concatenate([pack_rhs(each, micros[0].packing).numpy() for each in w])
        assert code.packing == micros[0].packing and evaluate(code.packed_bytes, {}) == packed.size
        out = np.full((case.groups, case.rows, n), 77, np.float32 if dtype.is_float else np.int32)

        def alike(result: Array, case: Images = case, n: int = n, images: torch.Tensor = images, w: torch.Tensor = w) -> None:
            for part, rows, weights in zip(result, case.windows(images), w, strict=True):
                compare(part, rows, weights, Case(case.rows, n, case.k))

        products.add(kernels_of(code), products.place(array(images)), products.place(packed), out, {}, alike)
    products.run()


@pytest.mark.parametrize(("micros", "runner"), TILES)
def test_windows_along_one_line(micros: Micros, runner: Runner) -> None:
    """Rows that share numbers with the next ones: whole tiles, a last tile that goes back, several matrices."""
    dtype, products = micros[0].lhs, Together(runner)
    for count, m, n in ((1, 64, 32), (1, 49, 70), (3, 33, 16)):
        k, row = 192, 64
        strides = Strides(BATCH * (m * row + 128), row)
        spec = GemmSpec(dtype, bf16 if dtype == bf16 else i8, m, n, k, strides, plain_store(n, acc_of(dtype)), count)
        assert in_lines(runner.target, spec, micros)[0].lines == Lines(m, m)
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
        expected = exact(case.windows(images)[0], w).numpy() + 8
        np.testing.assert_allclose(result, expected, atol=1e-2 if dtype.is_float else 0, rtol=0)

    places = products.place(array(images)), products.place(pack_rhs(w, micros[0].packing).numpy())
    for kernel in kernels_of(code):
        at = len(products._arrays)
        products.add([kernel], *places, begin, {}, alike, at)
    products.run()


TARGET = replace(CATALOGUE[0], l1d=48 << 10, l2=2 << 20)
BF16 = amx.amx(bf16, bf16)
GOOD = Images(1, 16, 16, 64)


def used(spec: GemmSpec, micros: Micros = BF16) -> GemmSpec | None:
    """What is used instead, if anything is."""
    found, tiles = in_lines(TARGET, spec, micros)
    assert (found is spec) == (tiles is micros)
    return None if found is spec else found


@pytest.mark.parametrize(
    ("case", "n"),
    [
        (replace(GOOD, step=2), 256),  # every other line would be thrown away
        (replace(GOOD, height=4, width=8), 64),  # not as many rows as a tile has
        (replace(GOOD, channels=22, across=1), 64),  # 44 bytes are steps of 44, which may be 4 times as many
        (replace(GOOD, channels=3), 64),  # 18 bytes, which no registers have
        (replace(GOOD, channels=2048), 64),  # rows of 4096 bytes share the sets of L1
        (replace(GOOD, across=9, width=20), 512),  # 8 places of a line of 12 more
        (Images(8, 9, 9, 512), 512),  # weights that would be read from afar for each small image
    ],
)
def test_windows_that_are_better_copied(case: Images, n: int) -> None:
    assert used(case.spec(bf16, n)) is None


def test_products_that_have_no_lines() -> None:
    spec = GOOD.spec(bf16, 64)
    found = used(spec)
    assert found is not None and found.lines == Lines(16, 14) and found.ways == ((1, 64), (6, 2048 - 384))
    assert used(spec, x86_vector.widen(16)) is None  # by vectors
    assert used(GOOD.spec(bf16, 64, rows=M)) is None  # of an image of any height
    for strides in (Strides(0, spec.k), Strides(0, 0), Strides(0, 64, 2)):  # rows apart, one for all, with gaps
        assert used(replace(spec, lhs_pieces=None, lhs_strides=strides)) is None
    few = replace(spec, lhs_pieces=None, lhs_strides=Strides(0, 64), m=31)
    one = used(replace(few, m=32))
    assert used(few) is None and one is not None and one.lines == Lines(32, 32) and one.ways == ()
    assert used(replace(few, m=32, n=2048)) is None  # read from afar
    assert used(Images(1, 30, 30, 256).spec(bf16, 512)) is not None
    five = replace(GOOD, taps=5)
    assert used(replace(five.spec(bf16, 64), lhs_pieces=replace(five.pieces, piece=BATCH * BATCH * 1024))) is None


def test_ways_of_the_steps_of_a_row() -> None:
    """Two to a piece, three pieces to a line, which are two places apart."""
    found = used(Images(1, 18, 18, 64, apart=2).spec(bf16, 64))
    assert found is not None and found.ways == ((1, 64), (2, 2 * 128 - 128), (6, 2 * 18 * 128 - 3 * 2 * 128))
    found = used(Images(1, 18, 18, 64, groups=4).spec(bf16, 16))  # one to a piece
    assert found is not None and found.ways == ((1, 128), (3, 18 * 128 - 3 * 128))


def test_any_number_of_images_is_a_batch() -> None:
    found = used(Images(3, 16, 16, 64).spec(bf16, 64, rows=M * (14 * 14)))
    assert found is not None and found.batch == M and found.m == 13 * 16 + 14 and found.first_row == BATCH * (14 * 16)
    assert evaluate(found.lhs_strides.batch, {"b": 2, "M": 3}) == 2 * 16 * 16 * 64
    parts = used(Images(3, 16, 16, 64, groups=4).spec(bf16, 16, rows=M * (14 * 14)))
    assert parts is not None and parts.batch == 4 * M and parts.turn == M
    assert evaluate(parts.lhs_strides.batch, {"b": 7, "M": 3}) == 2 * 16 + 16 * 16 * 64  # image 1 of group 2
