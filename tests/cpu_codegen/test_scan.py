"""Running sums, products and extremes along the columns, against torch: every length of a row and width of a vector, and what is around."""

from __future__ import annotations

import pytest
import torch

from sashiko.graph.dims import Dim, symbol
from sashiko.graph.types import FROM_TORCH, f32, f64
from sashiko.stitch.loops import BodyBuilder, LoopKernel, Node, axis
from tests.cpu_codegen.kernels import empty, few, normal, reduce, run, same
from tests.emulation import Runner
from tests.sweeps import swept

DTYPES = (torch.float32, torch.float64, torch.int64, torch.int32)
SIZES = ((0, 9), (3, 0), (2, 1), (3, 7), (3, 8), (2, 16), (2, 17), (2, 33), (1, 300))
UNIT = 2.0**-24


def running(builder: BodyBuilder, kind: str, x: int) -> int:
    return builder.add(Node("scan", builder.nodes[x].dtype, (x,), kind=kind, axis="c"))


def numbers(dtype: torch.dtype, rows: int, cols: int) -> torch.Tensor:
    """Products of these stay in range; integers wrap around as torch's do."""
    if dtype.is_floating_point:
        return (1 + normal(rows, cols) / 8).to(dtype)
    return torch.randint(-3, 4, (rows, cols), generator=torch.Generator().manual_seed(cols), dtype=dtype) | 1


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("dtype", swept(DTYPES, (torch.float32, torch.int64)), ids=str)
@pytest.mark.parametrize("runner", few())
def test_sums_and_products(runner: Runner, dtype: torch.dtype, known: bool) -> None:
    for rows, cols in SIZES:
        width: Dim = cols if known else symbol("S")
        builder = BodyBuilder()
        x, total, product = (builder.buffer(FROM_TORCH[dtype]) for _ in range(3))
        r, c = axis("r", rows), axis("c", width)
        value = builder.load(x, r * width + c)
        builder.store(total, r * width + c, running(builder, "sum", value))
        builder.store(product, r * width + c, running(builder, "prod", value))
        kernel = LoopKernel("scan", builder.finish(), rows, width)
        given = numbers(dtype, rows, cols)
        out = empty(rows, cols, dtype=dtype)
        got = run(runner, kernel, [given, out, out], {"S": cols})
        # Every result is rounded at most once for each element before it, in either order.
        bound = 2 * cols * torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
        same(got[1], given.cumsum(1, dtype=dtype), rtol=bound, atol=bound)
        same(got[2], given.cumprod(1, dtype=dtype), rtol=bound, atol=bound)


@pytest.mark.parametrize("kind", ["max", "min"])
@pytest.mark.parametrize("dtype", swept(DTYPES, (torch.float32, torch.int64)), ids=str)
@pytest.mark.parametrize("runner", few())
def test_extremes(runner: Runner, dtype: torch.dtype, kind: str) -> None:
    for rows, cols in SIZES:
        width, given = symbol("S"), (normal(rows, cols) * 9).to(dtype)
        if dtype.is_floating_point and cols > 16:
            given[0, 5], given[0, 6], given[1 % rows, 9] = float("inf"), float("-inf"), float("nan")
        builder = BodyBuilder()
        x, out = builder.buffer(FROM_TORCH[dtype]), builder.buffer(FROM_TORCH[dtype])
        at = axis("r", rows) * width + axis("c", width)
        builder.store(out, at, running(builder, kind, builder.load(x, at)))
        kernel = LoopKernel("scan", builder.finish(), rows, width)
        got = run(runner, kernel, [given, empty(rows, cols, dtype=dtype)], {"S": cols})[1]
        want = getattr(given, f"cum{kind}")(1).values if cols else given
        same(got, want, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("runner", few())
def test_infinity_and_nan_reach_what_follows(runner: Runner) -> None:
    x = normal(3, 40)
    x[0, 3], x[0, 19], x[1, 17], x[2, 39] = float("inf"), float("-inf"), float("nan"), float("inf")
    builder = BodyBuilder()
    source, out = builder.buffer(f32), builder.buffer(f32)
    at = axis("r", 3) * 40 + axis("c", 40)
    builder.store(out, at, running(builder, "sum", builder.load(source, at)))
    got = run(runner, LoopKernel("scan", builder.finish(), 3, 40), [x, empty(3, 40)])[1]
    same(got, x.cumsum(1), rtol=80 * UNIT, atol=80 * UNIT)


@pytest.mark.parametrize("runner", few())
def test_products_overflow_where_those_of_all_before_do(runner: Runner) -> None:
    """Not where those of a few in the middle would."""
    x = torch.ones(4, 40)
    x[0, :3], x[1, :4], x[2, 8:12] = torch.tensor([0, 1e30, 1e30]), torch.tensor([1e30, 1e-30, 1e-30, 1e-20]), 1e30
    x[3, 17:20] = torch.tensor([1e-30, 1e30, 1e30])
    builder = BodyBuilder()
    source, out = builder.buffer(f32), builder.buffer(f32)
    at = axis("r", 4) * 40 + axis("c", 40)
    builder.store(out, at, running(builder, "prod", builder.load(source, at)))
    got = run(runner, LoopKernel("scan", builder.finish(), 4, 40), [x, empty(4, 40)])[1]
    want = x.clone()
    for column in range(1, 40):
        want[:, column] *= want[:, column - 1]
    assert torch.equal(got, want)


@pytest.mark.parametrize("cols", [24, 100])
@pytest.mark.parametrize("runner", few())
def test_scans_between_reductions(runner: Runner, cols: int) -> None:
    """softmax, its running sum in f64, the running sum of that, and how far it gets; all in one kernel."""
    x = normal(4, cols) * 3
    builder = BodyBuilder()
    source, first, second = builder.buffer(f32), builder.buffer(f32), builder.buffer(f64)
    at = axis("r", 4) * cols + axis("c", cols)
    value = builder.load(source, at)
    power = builder.op("exp", f32, builder.op("sub", f32, value, reduce(builder, "max", value)))
    share = builder.op("div", f32, power, reduce(builder, "sum", power))
    once = running(builder, "sum", builder.cast(share, f64))
    twice = running(builder, "sum", once)
    builder.store(first, at, builder.cast(once, f32))
    builder.store(second, at, builder.op("div", f64, twice, reduce(builder, "max", twice, f64)))
    got = run(runner, LoopKernel("nucleus", builder.finish(), 4, cols), [x, empty(4, cols), empty(4, cols, dtype=torch.float64)])
    want = x.double().softmax(1).cumsum(1)
    same(got[1], want.float(), rtol=32 * UNIT)
    same(got[2], want.cumsum(1) / want.cumsum(1)[:, -1:], rtol=32 * UNIT)
