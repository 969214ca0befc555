"""Rows in order: every element type, on every kind of target, beside numpy's stable sort of keys in higher precision."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sashiko.cpu_codegen.builder import Module
from sashiko.graph.dims import evaluate, symbol
from sashiko.graph.types import DType, bf16, boolean, f16, f32, f64, i8, i16, i32, i64, u8
from sashiko.kernels.sorting import SortSpec, emit
from tests.emulation import Array, Runner, runners
from tests.sweeps import swept

TYPES = (f32, f64, f16, bf16, i64, i32, i16, i8, u8, boolean)
N, ROWS = symbol("n", 0), symbol("rows", 1)
RUNNERS = runners(few=True)


def elements(dtype: DType, rows: int, length: int) -> torch.Tensor:
    """With what is special about the type, and much that is equal."""
    torch.manual_seed(length)
    x = torch.randn(rows, length, dtype=torch.float64) * 10
    if not dtype.is_float:
        return (x * 20).long().to(dtype.torch)
    x[0, ::5], x[0, ::7] = 0.0, -0.0
    if rows > 2:
        x[1, ::3], x[1, 1::9], x[2, ::4], x[2, 1::4] = np.nan, -np.nan, np.inf, -np.inf
    return x.to(dtype.torch)


def order(x: torch.Tensor, descending: bool) -> Array:
    return x.argsort(dim=-1, stable=True, descending=descending).numpy()


def memory(x: torch.Tensor) -> Array:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]).numpy()


def places(runner: Runner, spec: SortSpec, x: torch.Tensor, n: int = 0) -> Array:
    module = Module()
    code = emit(module, runner.target, spec, "sort")
    dims = {"n": n, "rows": x.shape[0]}
    out = np.full((x.shape[0], evaluate(spec.count, dims)), -1, np.int64)
    room = np.zeros(evaluate(spec.workspace_bytes, dims), np.uint8)
    parts = evaluate(code.domain, dims)
    arrays = [memory(x), out, room]
    arrays = runner.run(module.text(), "sort", arrays, end=parts // 2, order=code.slots, dims=dims, align=64)
    return runner.run(module.text(), "sort", arrays, begin=parts // 2, end=parts, order=code.slots, dims=dims, align=64)[1]


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("dtype", swept(TYPES, (f32, f64, bf16, i64, u8)), ids=str)
def test_whole_rows(runner: Runner, dtype: DType) -> None:
    for descending, lengths in ((False, (13, 100, 300)), (True, (1, 65, 200))):
        for length in lengths:
            x = elements(dtype, 3, length)
            np.testing.assert_array_equal(places(runner, SortSpec(dtype, 3, N, N, descending), x, length), order(x, descending))


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("dtype", swept(TYPES, (f32, i32, bf16, u8)), ids=str)
def test_the_first_of_a_row(runner: Runner, dtype: DType) -> None:
    x = elements(dtype, 3, 1001)
    for count, descending in ((1, True), (70, False)):
        spec = SortSpec(dtype, 3, 1001, count, descending)
        assert spec.selects
        np.testing.assert_array_equal(places(runner, spec, x), order(x, descending)[:, :count])


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("dtype", swept(TYPES, (f32, bf16, u8)), ids=str)
def test_rows_that_may_be_longer_than_32_bits_can_number(runner: Runner, dtype: DType) -> None:
    long = symbol("n", 0, (1 << 32) + 1)
    x = elements(dtype, 3, 333)
    np.testing.assert_array_equal(places(runner, SortSpec(dtype, 3, long, long, False), x, 333), order(x, False))
    np.testing.assert_array_equal(places(runner, SortSpec(dtype, 3, long, 5, True), x, 333), order(x, True)[:, :5])


@pytest.mark.parametrize("runner", RUNNERS)
def test_rows_whose_order_is_the_worst(runner: Runner) -> None:
    """Every element comes before all that were seen, or is equal to the last that counts."""
    falling = torch.arange(900.0).flip(0)
    x = torch.stack([falling, torch.zeros(900), (falling / 50).floor()])
    for count in (5, 60):
        spec = SortSpec(f32, 3, 900, count, False)
        np.testing.assert_array_equal(places(runner, spec, x), order(x, False)[:, :count])


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("rows", swept((1, 16, 37), (37,)))
def test_sizes_of_the_call(runner: Runner, rows: int) -> None:
    """Rows that are cut into parts, however many there are, and lengths from none to many."""
    for length in (0, 3, 500):
        x = elements(i32, rows, length)
        for number in (rows, ROWS):
            for count in (N, 3) if length >= 3 else (N,):
                found = places(runner, SortSpec(i32, number, N, count, False), x, length)
                np.testing.assert_array_equal(found, order(x, False)[:, : length if count is N else 3])
