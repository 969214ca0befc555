"""Rows in pieces: windows over an image as the left operand of every family of tiles, against the same rows laid out one after another."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest

from sashiko.diagnostics.errors import InvalidGraph
from sashiko.graph.dims import evaluate, floordiv, mod
from sashiko.graph.types import f32
from sashiko.kernels import gemm
from sashiko.kernels.spec import BATCH, GemmSpec, Pieces, Strides
from tests.emulation import Array, Runner
from tests.kernels.images import Images
from tests.kernels.products import Case, M, Micros, Together, acc_of, array, compare, packed_of, plain_store, random, weight
from tests.kernels.test_gemm import FEW


def square(side: int, channels: int, size: int, step: int = 1, apart: int = 1) -> Images:
    return Images(1, side, side, channels, size, size, step, apart)


# Pieces of a few elements and of several vectors; strides; gaps in both directions; one piece; too many to be written out.
CASES = (square(9, 3, 3), square(7, 37, 2, 2), square(11, 5, 3, 2, 2), square(6, 66, 1, 2), square(17, 3, 7, 2, 2))


def check(runner: Runner, micros: Micros, cases: Sequence[Images], n: int, caches: tuple[int, int] | None = None) -> None:
    lhs, rhs = micros[0].lhs, micros[0].rhs
    products = Together(runner)
    for case in cases:
        product = Case(case.rows, n, case.k, caches=caches)
        k, m = product.k, product.m
        spec = GemmSpec(lhs, rhs, M, n, k, Strides(0, 0), plain_store(n, acc_of(lhs)), lhs_pieces=case.pieces)
        code = gemm.emit(products.module, product.on(runner.target), spec, micros, products.name())
        assert code.columns is not None and evaluate(code.rows.domain, {"M": m}) == m
        image, w = random((1, case.height, case.width, case.channels), lhs, 1), weight((n, k), micros, 2)
        out = np.full((m, n), 77, np.float32 if lhs.is_float else np.int32)
        operands = products.place(array(image)), products.place(packed_of(w, micros[0]).numpy())
        alike = partial(compare, x=case.windows(image)[0], w=w, case=product, micro=micros[0])
        products.add((code.rows, code.columns), *operands, out, {"M": m}, alike)
    products.run()


@pytest.mark.parametrize(("micros", "runner"), FEW)
def test_windows_are_read_in_place(micros: Micros, runner: Runner) -> None:
    check(runner, micros, CASES, 37)


@pytest.mark.parametrize(("micros", "runner"), FEW)
def test_pieces_of_rows_and_pieces_of_k_need_not_agree(micros: Micros, runner: Runner) -> None:
    """With caches so small that k is cut in the middle of a piece."""
    check(runner, micros, [square(8, 29, 3)], 70, (1 << 10, 1 << 12))


@pytest.mark.parametrize(("micros", "runner"), FEW)
def test_parts_of_rows_times_weights_in_turn(micros: Micros, runner: Runner) -> None:
    """Windows of 3 x 3 over each third of the channels, with a weight of its own, as of a convolution in groups."""
    groups, width, n, case = 3, 7, 21, square(8, 21, 3)
    lhs, rhs, m, k = micros[0].lhs, micros[0].rhs, case.rows, 9 * width
    row = case.pieces.row
    pieces = Pieces(row, floordiv(BATCH, 3) * (case.width * case.channels) + mod(BATCH, 3) * case.channels, width)
    body = plain_store(n, acc_of(lhs))
    spec = GemmSpec(lhs, rhs, M, n, k, Strides(BATCH * width, 0), body, groups, lhs_pieces=pieces, weights=groups)
    product = Together(runner)
    code = gemm.emit(product.module, runner.target, spec, micros, product.name())
    assert code.columns is not None
    image, w = random((case.height, case.width, case.channels), lhs, 1), weight((groups, n, k), micros, 2)
    packed = np.concatenate([packed_of(each, micros[0]).numpy() for each in w])
    assert packed.size == evaluate(code.packed_bytes, {"M": m})
    out = np.full((groups, m, n), 77, np.float32 if lhs.is_float else np.int32)

    def alike(result: Array) -> None:
        for g in range(groups):
            part = image[..., g * width : (g + 1) * width].unfold(0, 3, 1).unfold(1, 3, 1).permute(0, 1, 3, 4, 2)
            compare(result[g], part.reshape(m, k), w[g], Case(m, n, k), micros[0])

    product.add((code.rows, code.columns), product.place(array(image)), product.place(packed), out, {"M": m}, alike)
    product.run()


def test_what_no_product_can_be() -> None:
    with pytest.raises(InvalidGraph, match="pieces"):
        GemmSpec(f32, f32, M, 3, 12, Strides(0, 0), plain_store(3, f32), lhs_pieces=Pieces(BATCH, BATCH, 5))
