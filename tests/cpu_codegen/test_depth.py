"""Sums over k: of several rows at once where these read something alike."""

from __future__ import annotations

import pytest
import torch

from sashiko.cpu_codegen import schedule
from sashiko.cpu_codegen.builder import Module
from sashiko.cpu_codegen.choices import Choices, vector_lanes
from sashiko.cpu_codegen.loops import emit_loop_kernel
from sashiko.graph import build as b
from sashiko.graph.dims import Dim, symbol
from sashiko.graph.types import f32
from sashiko.platforms.catalogue import X86_64_V4
from sashiko.stitch.loops import LoopKernel
from sashiko.stitch.program import LoopItem
from sashiko.stitch.stitcher import stitch
from tests.cpu_codegen.kernels import empty, few, normal, run
from tests.emulation import Runner


def products(batch: int, rows: Dim, depth: int, columns: Dim, bias: bool = False) -> LoopKernel:
    """sums over k of x[batch, rows, k] * y[batch, k, columns]"""
    x, y, z = b.input_(0, f32, (batch, rows, depth)), b.input_(1, f32, (batch, depth, columns)), b.input_(2, f32, (batch, rows, columns))
    total = b.reduce(b.mul(b.unsqueeze(x, 3), b.unsqueeze(y, 1)), "sum", 2)
    (item,) = stitch((b.add(total, z) if bias else total,), (x, y, z) if bias else (x, y), ()).items
    assert isinstance(item, LoopItem)
    return item.kernel


def rows_at_once(kernel: LoopKernel) -> int:
    stores = tuple(range(len(kernel.body.stores)))
    return Choices(X86_64_V4, kernel, schedule.passes(kernel.body, stores), stores, vector_lanes(X86_64_V4, kernel.body)).rows_of_sums()


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("runner", few())
def test_products(runner: Runner, rows: int) -> None:
    for depth, columns in ((70, 16), (100, 33), (65, 100)):
        x, y, z = normal(2, rows, depth, seed=1), normal(2, depth, columns, seed=2), normal(2, rows, columns, seed=3)
        got = run(runner, products(2, rows, depth, columns, True), [x, y, z, empty(2, rows, columns)])[-1]
        exact = x.double() @ y.double() + z
        assert ((got - exact).abs() <= depth * 2.0**-23 * (x.abs() @ y.abs() + z.abs())).all()


@pytest.mark.parametrize("runner", few())
def test_parts_of_the_rows(runner: Runner) -> None:
    x, y = normal(3, 4, 80, seed=1), normal(3, 80, 40, seed=2)
    expected = (x @ y).reshape(12, 40)
    for begin, end in ((0, 4), (4, 12), (8, 8)):
        got = run(runner, products(3, 4, 80, 40), [x, y, empty(3, 4, 40)], part=(begin, end))[-1].reshape(12, 40)
        torch.testing.assert_close(got[begin:end], expected[begin:end], rtol=1e-5, atol=1e-5)
        assert (got[:begin] == 77).all() and (got[end:] == 77).all()


def test_which_rows_share() -> None:
    assert [rows_at_once(products(3, rows, 80, 40)) for rows in (1, 2, 3, 4, 5, 6, 8)] == [1, 2, 3, 4, 1, 3, 4]
    assert rows_at_once(products(3, 4, 20, 40)) == 1, "short sums are written out"
    assert rows_at_once(products(3, 4, 80, symbol("N"))) == 1 == rows_at_once(products(3, symbol("M"), 80, 40))
    x = b.input_(0, f32, (4, 80, 40))
    (item,) = stitch((b.reduce(x, "sum", 1),), (x,), ()).items
    assert isinstance(item, LoopItem) and rows_at_once(item.kernel) == 1, "nothing is read alike"


def test_what_is_alike_is_read_once() -> None:
    """Two vectors of y and four numbers of x for eight products of vectors."""
    module = Module()
    assert emit_loop_kernel(module, X86_64_V4, products(1, 4, 80, 32)).grain == 4
    text = module.text()
    assert text.count("= load float") == 2 * text.count("= load <16 x float>") > 0
