"""Where a product and a sum are rounded once, and where they must not be."""

from __future__ import annotations

import re

import pytest
import torch

from sashiko.cpu_codegen import jit, rounding
from sashiko.cpu_codegen.builder import Module
from sashiko.cpu_codegen.loops import emit_loop_kernel
from sashiko.cpu_codegen.streams import streaming
from sashiko.graph.types import DType, boolean, f32, i8, i32, i64, u8
from sashiko.platforms.catalogue import NEOVERSE_N1
from sashiko.stitch.loops import BodyBuilder, LoopKernel, axis, hoist_numbers
from tests.cpu_codegen.kernels import buffers, empty, few, normal, reduce, run, same
from tests.emulation import Runner

SIZE = 67
NAN, INF = float("nan"), float("inf")
AXIS = axis("c", SIZE)


def combined(runner: Runner, op: str, both_products: bool) -> tuple[torch.Tensor, ...]:
    """x, y, z and x y `op` z, or x y `op` x y z."""
    x, y, z = (normal(SIZE, seed=n) for n in range(3))
    builder = BodyBuilder()
    places = buffers(builder, x, y, z, empty(SIZE))
    a, b, c = (builder.load(place, AXIS) for place in places[:3])
    other = builder.op("mul", f32, builder.op("mul", f32, a, b), c) if both_products else c
    builder.store(places[3], AXIS, builder.op(op, f32, builder.op("mul", f32, a, b), other))
    return run(runner, LoopKernel("combined", builder.finish(), None, SIZE), [x, y, z, empty(SIZE)])


@pytest.mark.parametrize("runner", few())
@pytest.mark.parametrize("op", ["add", "sub"])
def test_a_product_and_a_sum_are_rounded_once(runner: Runner, op: str) -> None:
    x, y, z, got = combined(runner, op, False)
    product = x.double() * y.double()
    exact = product + z.double() if op == "add" else product - z.double()
    same(got, exact.float())
    assert not torch.equal(got, x * y + z if op == "add" else x * y - z), "the data shows no difference"


@pytest.mark.parametrize("runner", few())
@pytest.mark.parametrize("op", ["add", "sub"])
def test_of_two_products_none_is_rounded_less(runner: Runner, op: str) -> None:
    """Else x y - x y would not be 0."""
    x, y, z, got = combined(runner, op, True)
    same(got, x * y + x * y * z if op == "add" else x * y - x * y * z)


@pytest.mark.parametrize("runner", few())
@pytest.mark.parametrize(("dtype", "low", "high", "zero"), [(i8, -127, 127, 0), (i8, -128, 127, -5), (u8, 0, 255, 7), (u8, 0, 255, 0)])
def test_quantization_is_one_conversion(runner: Runner, dtype: DType, low: int, high: int, zero: int) -> None:
    """x > bound ? x : bound gives the bound for NaN, and may come before the rounding that it is written after."""
    special = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.5, 247.5, 248.5, -122.5, -123.5, 1e9, -1e9, INF, -INF, NAN])
    x = torch.cat([special, normal(SIZE - 16) * 90])
    builder = BodyBuilder()
    source, target = buffers(builder, x, empty(SIZE, dtype=dtype.torch))
    value = builder.op("add", f32, builder.op("round", f32, builder.load(source, AXIS)), builder.const(float(zero), f32))
    for op, bound in (("gt", low), ("lt", high)):
        limit = builder.const(float(bound), f32)
        value = builder.op("where", f32, builder.op(op, boolean, value, limit), value, limit)
    builder.store(target, AXIS, builder.cast(value, dtype))
    body, numbers = hoist_numbers(builder.finish())  # as stitching does: what is added is a number of the kernel
    [chain] = rounding.chains(body).values()
    added = body.nodes[chain.zero]
    assert body.nodes[chain.node].op == "load" and [clamp.bound for clamp in chain.clamps] == [low, high]
    assert numbers == ((zero,) if zero else ()) and added.kind == ("natural" if zero > 0 else "whole" if zero else "")
    assert chain.natural == (zero >= 0)
    _, got = run(runner, LoopKernel("quantized", body, None, SIZE, params=numbers), [x, empty(SIZE, dtype=dtype.torch)])
    rounded = torch.where(x.isnan(), torch.tensor(float(low)), (x.round() + zero).clamp(low, high))
    assert torch.equal(got, rounded.to(dtype.torch))


@pytest.mark.parametrize("runner", few())
@pytest.mark.parametrize("below", [False, True])
@pytest.mark.parametrize(("dtype", "zero"), [(i32, -100000.0), (i64, 1.0)])
def test_sums_without_both_bounds_are_rounded_as_floats(runner: Runner, dtype: DType, zero: float, below: bool) -> None:
    """What is rounded may be no integer of the type where the sum is, and the sum is not exact."""
    x = torch.tensor([2147483520.0, 2147483904.0, 2147493632.0, 16777216.0, -16777216.0, 0.5, -0.5, 1.5, 8388609.0] * 5)
    builder = BodyBuilder()
    source, target = buffers(builder, x, empty(len(x), dtype=dtype.torch))
    index = axis("c", len(x))
    value = builder.op("add", f32, builder.op("round", f32, builder.load(source, index)), builder.const(zero, f32))
    if below:
        value = builder.op("maximum", f32, value, builder.const(-1.0, f32))
    builder.store(target, index, builder.cast(value, dtype))
    body, numbers = hoist_numbers(builder.finish())
    _, got = run(runner, LoopKernel("sums", body, None, len(x), params=numbers), [x, empty(len(x), dtype=dtype.torch)])
    expected = (x.round() + zero).clamp(min=-1) if below else x.round() + zero
    assert torch.equal(got, expected.to(dtype.torch))


@pytest.mark.parametrize(("clamped", "conversions"), [(True, set()), (False, {"fcvtns"})])
def test_neoverse_converts_once_at_most(clamped: bool, conversions: set[str]) -> None:
    """In LLVM's models its conversions take as long as four sums. Of integers of 8 bits that are clamped, NaN included, there is none."""
    builder = BodyBuilder()
    source, target = buffers(builder, empty(4096), empty(4096, dtype=torch.int8))
    value = builder.op("round", f32, builder.load(source, axis("c", 4096)))
    for op, bound in (("gt", -127.0), ("lt", 127.0)) if clamped else ():
        limit = builder.const(bound, f32)
        value = builder.op("where", f32, builder.op(op, boolean, value, limit), value, limit)
    builder.store(target, axis("c", 4096), builder.cast(value, i8))
    module = Module()
    emit_loop_kernel(module, NEOVERSE_N1, LoopKernel("quantized", builder.finish(), None, 4096))
    vectors = re.findall(r"\n\s+(fcvt\w+|frint\w+|fadd)\s+v\d+\.4s", jit.assembly(module.text(), NEOVERSE_N1))
    found = [name for name in vectors if name[:4] in ("fcvt", "frin")]
    assert set(found) == conversions and ("fadd" in vectors) == clamped


@pytest.mark.parametrize("runner", few())
@pytest.mark.parametrize("dtype", [i8, u8])
@pytest.mark.parametrize("zero", [0, 9, -9])
def test_joined_vectors_hold_what_single_ones_do(runner: Runner, dtype: DType, zero: int) -> None:
    """Every special number comes in whole registers of results, in single vectors and in the tail, whatever becomes of it is the same."""
    halves = (0.5, 1.5, -0.5, 126.5, 127.5, 254.5, 255.5, -127.5, -128.5)
    special = torch.tensor([*halves, 300.0, -300.0, 1e9, -1e9, 3e9, -3e9, INF, -INF, NAN, 7.0])
    x = special.repeat(19)
    low, high = (0, 255) if dtype == u8 else (-128, 127)
    for takes_nan, bounds in ((True, (low, high)), (False, (low, high)), (True, (low + 1, high)), (True, (low, high - 100)), (False, ())):
        builder = BodyBuilder()
        source, target = buffers(builder, x, empty(len(x), dtype=dtype.torch))
        index = axis("c", len(x))
        value = builder.op("add", f32, builder.op("round", f32, builder.load(source, index)), builder.const(float(zero), f32))
        for (op, comparison), bound in zip((("maximum", "gt"), ("minimum", "lt")), bounds, strict=False):
            limit = builder.const(float(bound), f32)
            if takes_nan:
                value = builder.op("where", f32, builder.op(comparison, boolean, value, limit), value, limit)
            else:
                value = builder.op(op, f32, value, limit)
        builder.store(target, index, builder.cast(value, dtype))
        body, numbers = hoist_numbers(builder.finish())
        kernel = streaming(runner.target, LoopKernel("joined", body, None, len(x), params=numbers), {1})
        _, got = run(runner, kernel, [x, empty(len(x), dtype=dtype.torch)], align=64)
        whole = (x.round() + zero).clamp(*bounds) if bounds else x.round() + zero
        assert torch.equal(got.view(19, 19), got[:19].expand(19, 19)), (takes_nan, bounds)
        # Where there is a zero, a NaN that clamps would keep becomes the lower bound.
        inside = (whole >= low) & (whole <= high) | whole.isnan() & (takes_nan or bool(zero and bounds))
        expected = torch.where(whole.isnan(), torch.tensor(float(bounds[0] if bounds else 0)), whole)
        assert torch.equal(got[inside], expected[inside].to(dtype.torch)), (takes_nan, bounds)


@pytest.mark.parametrize("runner", few())
def test_sums_of_products_are_as_exact_as_ever(runner: Runner) -> None:
    x = normal(5, SIZE)
    builder = BodyBuilder()
    source, target = buffers(builder, x, empty(5))
    row = axis("r", 5)
    value = builder.load(source, SIZE * row + AXIS)
    builder.store(target, row, reduce(builder, "sum", builder.op("mul", f32, value, value)))
    _, got = run(runner, LoopKernel("squares", builder.finish(), 5, SIZE), [x, empty(5)])
    exact = (x.double() ** 2).sum(1)
    assert ((got.double() - exact).abs() <= SIZE * 2.0**-24 * exact).all()
