"""Loads across: transposes against torch, whole and in parts, and that nothing is gathered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from sashiko.cpu_codegen import schedule
from sashiko.cpu_codegen.builder import Module
from sashiko.cpu_codegen.loops import emit_loop_kernel
from sashiko.cpu_codegen.squares import Across, loads_across
from sashiko.graph import build as b
from sashiko.graph.aten.windows import channels_last, surrounded
from sashiko.graph.dims import Dim, symbol
from sashiko.graph.ir import Value
from sashiko.graph.types import FROM_TORCH
from sashiko.platforms.catalogue import CATALOGUE
from sashiko.stitch.loops import LoopKernel
from sashiko.stitch.program import LoopItem
from sashiko.stitch.stitcher import stitch
from tests.cpu_codegen.kernels import empty, few, normal, run
from tests.emulation import Runner
from tests.sweeps import swept

TARGET = CATALOGUE[0]
N, M = symbol("N", 1), symbol("M", 1)
DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.float64, torch.int64)
IMAGES = ((2, 20, 9, 16), (1, 16, 7, 40), (3, 33, 5, 17), (2, 64, 3, 21), (1, 12, 2, 100))


def kernel_of(make: Callable[..., Value], *shapes: tuple[Dim, ...], dtype: torch.dtype = torch.float32) -> LoopKernel:
    inputs = [b.input_(n, FROM_TORCH[dtype], shape) for n, shape in enumerate(shapes)]
    (item,) = stitch((make(*inputs),), tuple(inputs), ()).items
    assert isinstance(item, LoopItem)
    return replace(item.kernel, name="squares")


def across(kernel: LoopKernel, lanes: int = 16) -> Across | None:
    return loads_across(TARGET, kernel, schedule.passes(kernel.body, range(len(kernel.body.stores))), lanes)


@pytest.mark.parametrize("dtype", swept(DTYPES, (torch.float32, torch.bfloat16, torch.int8)))
@pytest.mark.parametrize("runner", few())
def test_transposes(runner: Runner, dtype: torch.dtype) -> None:
    for rows, columns in ((16, 16), (64, 48), (37, 100), (17, 16), (16, 9), (100, 31)):
        x = (torch.randn(2, rows, columns) * 20).to(dtype)
        kernel = kernel_of(lambda x: b.neg(b.permute(x, (0, 2, 1))), x.shape, dtype=dtype)
        got = run(runner, kernel, [x, empty(2, columns, rows, dtype=dtype)])[-1]
        assert torch.equal(got, -x.transpose(1, 2))


@pytest.mark.parametrize("runner", few())
def test_other_operands_are_read_as_they_lie(runner: Runner) -> None:
    x, y, bias = normal(3, 40, 50, seed=1), normal(3, 50, 40, seed=2), normal(40, seed=3)
    kernel = kernel_of(lambda x, y, c: b.add(b.mul(b.permute(x, (0, 2, 1)), y), c), x.shape, y.shape, bias.shape)
    found = across(kernel)
    assert found is not None and len(found.loads) == 1 and not found.alone
    got = run(runner, kernel, [x, y, bias, empty(3, 50, 40)])[-1]
    torch.testing.assert_close(got, x.transpose(1, 2) * y + bias, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("runner", few())
def test_images_with_padding(runner: Runner) -> None:
    """Rows of padding read nothing; each line of the image is a run of its own, whose last rows are computed with others again."""
    for shape in IMAGES:
        x = normal(*shape)
        kernel = kernel_of(lambda x: surrounded(channels_last(x), (1, 1), (2, 1)), x.shape)
        found = across(kernel)
        assert found is not None and found.alone and found.run == shape[3] + 2
        n, c, h, w = shape
        expected = torch.nn.functional.pad(x, (1, 1, 1, 2)).permute(0, 2, 3, 1)
        assert expected.shape == (n, h + 3, w + 2, c)
        assert torch.equal(run(runner, kernel, [x, empty(*expected.shape)])[-1], expected)


@pytest.mark.parametrize("runner", few())
def test_parts_of_the_rows(runner: Runner) -> None:
    """Threads cut rows anywhere but where squares fill every run; each row is stored by the part it is in, or with equal numbers."""
    x = normal(2, 24, 50)
    kernel = kernel_of(lambda x: b.permute(x, (0, 2, 1)), x.shape)
    expected = x.transpose(1, 2).reshape(100, 24)
    for begin, end in ((0, 100), (0, 7), (3, 40), (45, 55), (60, 100), (99, 100), (5, 5)):
        got = run(runner, kernel, [x, empty(2, 50, 24)], part=(begin, end))[-1].reshape(100, 24)
        assert torch.equal(got[begin:end], expected[begin:end])
        assert (got[:begin] == 77).all() and (got[end:] == 77).all()


@pytest.mark.parametrize("runner", few())
def test_sizes_that_change(runner: Runner) -> None:
    kernel = kernel_of(lambda x: b.permute(x, (0, 2, 1)), (2, N, M))
    assert across(kernel) is not None
    for rows, columns in ((5, 16), (16, 33), (40, 100), (40, 3), (1, 1)):
        x = normal(2, rows, columns)
        got = run(runner, kernel, [x, empty(2, columns, rows)], {"N": rows, "M": columns})[-1]
        assert torch.equal(got, x.transpose(1, 2))


@pytest.mark.parametrize("count", [2, 3, 5, 8])
@pytest.mark.parametrize("runner", few())
def test_many_at_a_time(runner: Runner, count: int) -> None:
    """More than the registers hold: each in its turn."""
    x = normal(37, count, 50, seed=1)

    def product(x: Value) -> Value:
        total = b.reshape(b.slice_(x, 1, 0, 1), (37, 50))
        for n in range(1, count):
            total = b.add(b.mul(total, 2.0), b.reshape(b.slice_(x, 1, n, 1), (37, 50)))
        return b.permute(total, (1, 0))

    kernel = kernel_of(product, x.shape)
    found = across(kernel)
    assert found is not None and len(found.loads) == count
    expected = x[:, 0]
    for n in range(1, count):
        expected = expected * 2 + x[:, n]
    got = run(runner, kernel, [x, empty(50, 37)])[-1]
    torch.testing.assert_close(got, expected.t(), rtol=1e-5, atol=1e-5)


def test_nothing_is_gathered() -> None:
    for make, shape in (
        (lambda x: b.permute(x, (0, 2, 1)), (2, 64, 48)),
        (lambda x: b.permute(x, (2, 1, 0)), (32, 30, 48)),
        (lambda x: b.permute(x, (0, 2, 3, 1)), (2, 64, 10, 32)),
        (lambda x: b.permute(x, (0, 3, 1, 2)), (2, 10, 32, 64)),
    ):
        module = Module()
        code = emit_loop_kernel(module, TARGET, kernel_of(make, shape))
        assert code.grain == TARGET.lanes(32) and "gather" not in module.text()


def test_what_has_no_squares() -> None:
    same = kernel_of(b.neg, (30, 40, 50))
    reduced = kernel_of(lambda x: b.reduce(b.permute(x, (0, 2, 1)), "sum", (2,)), (4, 40, 50))
    short = kernel_of(lambda x: b.permute(x, (0, 2, 1)), (2, 64, 9))
    assert across(same) is None and across(reduced) is None and across(short) is None


def test_f32_alone_is_masked_by_avx2() -> None:
    """Where rows cannot be left out of a load, padding is read row by row."""
    avx2 = next(t for t in CATALOGUE if t.has("avx2") and not t.has("avx512f"))
    for dtype, expected in ((torch.float32, True), (torch.int8, False)):
        kernel = kernel_of(lambda x: surrounded(channels_last(x), (1, 1), (1, 1)), (2, 64, 9, 30), dtype=dtype)
        plan = schedule.passes(kernel.body, range(len(kernel.body.stores)))
        assert (loads_across(avx2, kernel, plan, avx2.lanes(32)) is not None) == expected


@pytest.mark.parametrize("runner", few())
def test_columns_that_are_divided_beside_rows(runner: Runner) -> None:
    """Another operand has several columns to an element: its place is no affair of the rows alone."""
    x, y = normal(3, 40, 50, seed=1), normal(3, 50, 20, seed=2)
    kernel = kernel_of(lambda x, y: b.mul(b.permute(x, (0, 2, 1)), _each_twice(y)), x.shape, y.shape)
    assert across(kernel) is not None
    got = run(runner, kernel, [x, y, empty(3, 50, 40)])[-1]
    assert torch.equal(got, x.transpose(1, 2) * y.repeat_interleave(2, 2))


def _each_twice(y: Value) -> Value:
    pairs = b.expand(b.reshape(y, (*y.shape, 1)), (*y.shape, 2))
    return b.reshape(pairs, (*y.shape[:-1], y.shape[-1] * 2))
