"""Rows in pieces: windows over an image as the left operand of every family of tiles, against the same rows laid out one after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest

from sashiko.diagnostics.errors import InvalidGraph
from sashiko.graph.dims import evaluate, floordiv, mod
from sashiko.graph.types import f32
from sashiko.kernels import gemm
from sashiko.kernels.packing import pack_rhs
from sashiko.kernels.spec import BATCH, GemmSpec, Pieces, Strides
from tests.emulation import Array, Runner
from tests.kernels.products import Case, M, Micros, Together, acc_of, array, compare, plain_store, random, weight
from tests.kernels.test_gemm import FEW


@dataclass(frozen=True)
class Windows:
    """Windows of size x size over a square image of `side`, `channels` last, one every `step`, their elements `apart`."""

    side: int
    channels: int
    size: int
    step: int = 1
    apart: int = 1

    @property
    def count(self) -> int:
        return (self.side - self.apart * (self.size - 1) - 1) // self.step + 1

    @property
    def pieces(self) -> Pieces:
        row, column = self.side * self.channels, self.channels
        first = floordiv(BATCH, self.count) * (self.step * row) + mod(BATCH, self.count) * (self.step * column)
        if self.apart == 1:
            return Pieces(first, BATCH * row, self.size * self.channels)
        inner = mod(BATCH, self.size) * (self.apart * column)
        return Pieces(first, floordiv(BATCH, self.size) * (self.apart * row) + inner, self.channels)


# Pieces of a few elements and of several vectors; strides; gaps in both directions; one piece; too many to be written out.
CASES = (Windows(9, 3, 3), Windows(7, 37, 2, 2), Windows(11, 5, 3, 2, 2), Windows(6, 66, 1, 2), Windows(17, 3, 7, 2, 2))


def check(runner: Runner, micros: Micros, cases: Sequence[Windows], n: int, caches: tuple[int, int] | None = None) -> None:
    lhs, rhs = micros[0].lhs, micros[0].rhs
    products = Together(runner)
    for case in cases:
        product = Case(case.count**2, n, case.size**2 * case.channels, caches=caches)
        k, m = product.k, product.m
        spec = GemmSpec(lhs, rhs, M, n, k, Strides(0, 0), plain_store(n, acc_of(lhs)), lhs_pieces=case.pieces)
        code = gemm.emit(products.module, product.on(runner.target), spec, micros, products.name())
        assert code.columns is not None and evaluate(code.rows.domain, {"M": m}) == m
        image, w = random((case.side, case.side, case.channels), lhs, 1), weight((n, k), micros, 2)
        span = case.apart * (case.size - 1) + 1
        rows = image.unfold(0, span, case.step).unfold(1, span, case.step)[..., :: case.apart, :: case.apart].permute(0, 1, 3, 4, 2)
        out = np.full((m, n), 77, np.float32 if lhs.is_float else np.int32)
        operands = products.place(array(image)), products.place(pack_rhs(w, micros[0].packing).numpy())
        alike = partial(compare, x=rows.reshape(m, k), w=w, case=product)
        products.add((code.rows, code.columns), *operands, out, {"M": m}, alike)
    products.run()


@pytest.mark.parametrize(("micros", "runner"), FEW)
def test_windows_are_read_in_place(micros: Micros, runner: Runner) -> None:
    check(runner, micros, CASES, 37)


@pytest.mark.parametrize(("micros", "runner"), FEW)
def test_pieces_of_rows_and_pieces_of_k_need_not_agree(micros: Micros, runner: Runner) -> None:
    """With caches so small that k is cut in the middle of a piece."""
    check(runner, micros, [Windows(8, 29, 3)], 70, (1 << 10, 1 << 12))


@pytest.mark.parametrize(("micros", "runner"), FEW)
def test_parts_of_rows_times_weights_in_turn(micros: Micros, runner: Runner) -> None:
    """Windows of 3 x 3 over each third of the channels, with a weight of its own, as of a convolution in groups."""
    groups, width, n, case = 3, 7, 21, Windows(8, 21, 3)
    lhs, rhs, m, k = micros[0].lhs, micros[0].rhs, case.count**2, 9 * width
    row = case.pieces.row
    pieces = Pieces(row, floordiv(BATCH, 3) * (case.side * case.channels) + mod(BATCH, 3) * case.channels, width)
    body = plain_store(n, acc_of(lhs))
    spec = GemmSpec(lhs, rhs, M, n, k, Strides(BATCH * width, 0), body, groups, lhs_pieces=pieces, weights=groups)
    product = Together(runner)
    code = gemm.emit(product.module, runner.target, spec, micros, product.name())
    assert code.columns is not None
    image, w = random((case.side, case.side, case.channels), lhs, 1), weight((groups, n, k), micros, 2)
    packed = np.concatenate([pack_rhs(each, micros[0].packing).numpy() for each in w])
    assert packed.size == evaluate(code.packed_bytes, {"M": m})
    out = np.full((groups, m, n), 77, np.float32 if lhs.is_float else np.int32)

    def alike(result: Array) -> None:
        for g in range(groups):
            part = image[..., g * width : (g + 1) * width].unfold(0, 3, 1).unfold(1, 3, 1).permute(0, 1, 3, 4, 2)
            compare(result[g], part.reshape(m, k), w[g], Case(m, n, k))

    product.add((code.rows, code.columns), product.place(array(image)), product.place(packed), out, {"M": m}, alike)
    product.run()


def test_what_no_product_can_be() -> None:
    with pytest.raises(InvalidGraph, match="pieces"):
        GemmSpec(f32, f32, M, 3, 12, Strides(0, 0), plain_store(3, f32), lhs_pieces=Pieces(BATCH, BATCH, 5))
