"""Loop kernels: domains with every kind of tail, reductions of every kind over columns and depth, and the fused kernels that matter."""

from __future__ import annotations

import pytest
import torch

from sashiko.cpu_codegen.builder import Module
from sashiko.cpu_codegen.loops import emit_loop_kernel
from sashiko.cpu_codegen.streams import holds_up, streaming
from sashiko.graph.dims import Dim, mod, symbol
from sashiko.graph.types import FROM_TORCH, DType, bf16, boolean, f32, i8, i64
from sashiko.platforms.catalogue import NEOVERSE_N1, X86_64_V3, X86_64_V4
from sashiko.stitch.loops import BodyBuilder, LoopKernel, Node, axis
from tests.cpu_codegen.kernels import buffers, empty, few, normal, reduce, run, same, softmax
from tests.emulation import Runner, runners
from tests.sweeps import swept

WIDTHS = (1, 7, 15, 16, 17, 100, 1000)
EPSILON = 1e-5
UNIT = 2.0**-24


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("runner", few())
def test_flat(runner: Runner, known: bool) -> None:
    for width in (*WIDTHS, 0, 64, 256):
        x, out = normal(width), empty(width)
        builder = BodyBuilder()
        places = buffers(builder, x, out)
        c = axis("c", width if known else symbol("N"))
        builder.store(places[1], c, builder.op("add", f32, builder.load(places[0], c), builder.const(1.5, f32)))
        kernel = LoopKernel("flat", builder.finish(), None, width if known else symbol("N"))
        assert torch.equal(run(runner, kernel, [x, out], {"N": width})[1], x + 1.5)
        half = width // 2 // 64 * 64
        parts = run(runner, kernel, [x, out], {"N": width}, part=(half, width))[1]
        assert torch.equal(parts, torch.cat([out[:half], x[half:] + 1.5]))


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("runner", few())
def test_softmax(runner: Runner, known: bool) -> None:
    for rows, cols in ((0, 16), (1, 1), (3, 7), (3, 16), (2, 17), (64, 64), (7, 16), (3, 100), (5, 200), (1, 1000)):
        x = normal(rows, cols) * 5
        if rows == 3:
            x[1, cols // 2] = float("-inf")
            x[2, 0] = float("nan")
        got = run(runner, softmax(rows, cols, known), [x, empty(rows, cols)], {"S": cols})[1]
        same(got, x.double().softmax(-1).float(), rtol=32 * UNIT, atol=1e-12)
    masked = torch.full((1, 40), float("-inf"))
    assert bool(run(runner, softmax(1, 40, known), [masked, empty(1, 40)], {"S": 40})[1].isnan().all())


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("runner", few())
def test_stores_around_the_caches(runner: Runner, known: bool) -> None:
    """Whole aligned registers go around, everything else as ever; the numbers are the same."""
    for rows, cols in ((5, 16), (3, 48), (2, 1024), (3, 100), (4, 9)):
        x, kernel = normal(rows, cols), softmax(rows, cols, known)
        plain = run(runner, kernel, [x, empty(rows, cols)], {"S": cols})[1]
        around = streaming(runner.target, kernel, {1})
        got = run(runner, around, [x, empty(rows, cols)], {"S": cols}, align=64)[1]
        assert torch.equal(got, plain)
        module = Module()
        emit_loop_kernel(module, runner.target, around)
        goes = runner.target.has("avx2") and known and cols % runner.target.lanes(32) == 0
        assert ("!nontemporal" in module.text()) == ("sfence" in module.text()) == goes
    assert streaming(runner.target, kernel, set()) == kernel


def test_short_rows_with_masked_ends_are_not_stored_over_what_they_read() -> None:
    for cols, expected in ((4, True), (16, False), (17, True), (64, False), (200, True), (1000, False)):
        assert holds_up(X86_64_V4, softmax(3, cols, True)) == expected
        assert not holds_up(X86_64_V3, softmax(3, cols, True)) and not holds_up(NEOVERSE_N1, softmax(3, cols, True))
    assert not holds_up(X86_64_V4, softmax(3, 4, False))


@pytest.mark.parametrize("dtype", [i8, bf16])
@pytest.mark.parametrize("runner", few())
def test_narrow_results_fill_registers_together(runner: Runner, dtype: DType) -> None:
    """So they go around the caches, too, where registers of them begin at multiples of their size."""
    for rows, cols in ((1, 64), (3, 192), (2, 1024), (5, 96), (3, 100)):
        x = normal(rows, cols) * 40
        builder = BodyBuilder()
        places = buffers(builder, x, empty(rows, cols, dtype=dtype.torch))
        index = cols * axis("r", rows) + axis("c", cols)
        loaded = builder.load(places[0], index)
        value = builder.op("round", f32, builder.op("sub", f32, loaded, reduce(builder, "max", loaded)))
        limited = builder.op("minimum", f32, builder.op("maximum", f32, value, builder.const(-127.0, f32)), builder.const(127.0, f32))
        builder.store(places[1], index, builder.cast(limited, dtype))
        kernel = streaming(runner.target, LoopKernel("narrow", builder.finish(), rows, cols), {1})
        got = run(runner, kernel, [x, empty(rows, cols, dtype=dtype.torch)], align=64)[1]
        assert torch.equal(got, (x - x.max(1, keepdim=True).values).round().clamp(-127, 127).to(dtype.torch))
        module = Module()
        emit_loop_kernel(module, runner.target, kernel)
        goes = runner.target.has("avx2") and cols % runner.target.lanes(dtype.bits) == 0
        assert ("!nontemporal" in module.text()) == goes, (rows, cols)


def layer_norm(rows: int, cols: int, known: bool, rms: bool) -> LoopKernel:
    """residual + x, normalized, scaled and shifted: float32 and int8 outputs, the sum itself, and the mean of each row."""
    builder = BodyBuilder()
    x, residual, weight, bias, out, small, total, means = (builder.buffer(t) for t in (f32, f32, f32, f32, f32, i8, f32, f32))
    width = cols if known else symbol("S")
    r, c = axis("r", rows), axis("c", width)
    index = r * width + c
    value = builder.op("add", f32, builder.load(x, index), builder.load(residual, index))
    builder.store(total, index, value)
    count = builder.cast(builder.add(Node("index", i64, index=width)), f32)
    mean = builder.const(0.0, f32) if rms else builder.op("div", f32, reduce(builder, "sum", value), count)
    centered = value if rms else builder.op("sub", f32, value, mean)
    square = builder.op("div", f32, reduce(builder, "sum", builder.op("mul", f32, centered, centered)), count)
    scale = builder.op("rsqrt", f32, builder.op("add", f32, square, builder.const(EPSILON, f32)))
    normed = builder.op("mul", f32, builder.op("mul", f32, centered, scale), builder.load(weight, c))
    result = builder.op("add", f32, normed, builder.load(bias, c))
    builder.store(out, index, result)
    q = builder.op("round", f32, builder.op("mul", f32, result, builder.const(32.0, f32)))
    clamped = builder.op("minimum", f32, builder.op("maximum", f32, q, builder.const(-127.0, f32)), builder.const(127.0, f32))
    builder.store(small, index, builder.cast(clamped, i8))
    builder.store(means, r, mean)
    return LoopKernel("layer_norm", builder.finish(), rows, width)


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("runner", few())
def test_layer_norm_and_quantize(runner: Runner, known: bool, rms: bool) -> None:
    for rows, cols in ((1, 1), (3, 7), (1, 17), (3, 100), (64, 256), (2, 1000)):
        x, residual, weight, bias = (normal(*shape, seed=n) for n, shape in enumerate([(rows, cols)] * 2 + [(cols,)] * 2))
        inputs = [x, residual, weight, bias, empty(rows, cols), empty(rows, cols, dtype=torch.int8), empty(rows, cols), empty(rows)]
        out, small, total, means = run(runner, layer_norm(rows, cols, known, rms), inputs, {"S": cols})[4:]
        value = (x + residual).double()
        mean = value.mean(-1, keepdim=True) * (0 if rms else 1)
        scale = ((value - mean).square().mean(-1, keepdim=True) + EPSILON).rsqrt()
        expected = (value - mean) * scale * weight + bias
        assert torch.equal(total, x + residual)
        same(means, mean[:, 0].float(), atol=cols * UNIT)
        # One column leaves nothing but epsilon, whose root magnifies the rounding of the mean.
        same(out, expected.float(), rtol=64 * UNIT, atol=64 * UNIT)
        assert int((small.int() - (out * 32).round().clamp(-127, 127).int()).abs().max()) == 0


@pytest.mark.parametrize("runner", few())
def test_gelu(runner: Runner) -> None:
    x, bias = normal(5, 100) * 3, normal(100, seed=1)
    builder = BodyBuilder()
    out = empty(5, 100)
    places = buffers(builder, x, bias, out)
    c = axis("c", 500)
    value = builder.op("add", f32, builder.load(places[0], c), builder.load(places[1], mod(c, 100)))
    inner = builder.op("erf", f32, builder.op("mul", f32, value, builder.const(0.5**0.5, f32)))
    half = builder.op("mul", f32, value, builder.const(0.5, f32))
    builder.store(places[2], c, builder.op("mul", f32, half, builder.op("add", f32, inner, builder.const(1.0, f32))))
    got = run(runner, LoopKernel("gelu", builder.finish(), None, 500), [x, bias, out])[2]
    same(got, torch.nn.functional.gelu((x + bias).double()).float(), atol=16 * UNIT)


KINDS = ("sum", "prod", "max", "min", "argmax", "argmin")
NUMBERS = (torch.float32, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def reductions(rows: Dim, cols: Dim, dtype: DType, kinds: tuple[str, ...], along: str) -> LoopKernel:
    """Every kind of reduction of x[rows, cols], over the columns of each row (along "c") or over the rows of each column (along "k")."""
    builder = BodyBuilder()
    x = builder.buffer(dtype)
    results = {kind: i64 if kind.startswith("arg") else boolean if kind in ("any", "all") else dtype for kind in kinds}
    places = [builder.buffer(t) for t in results.values()]
    r, c, k = axis("r", rows if along == "c" else 1), axis("c", cols), axis("k", rows)
    value = builder.load(x, r * cols + c if along == "c" else k * cols + c)
    for place, (kind, result) in zip(places, results.items()):
        builder.store(place, r if along == "c" else c, reduce(builder, kind, value, result, along))
    if along == "c":
        return LoopKernel("reduce", builder.finish(), rows, cols)
    return LoopKernel("reduce", builder.finish(), 1, cols, rows)


def expected(kind: str, x: torch.Tensor, dim: int) -> torch.Tensor:
    if kind in ("any", "all", "argmax", "argmin"):
        found: torch.Tensor = getattr(x, kind)(dim)
        return found
    if kind in ("sum", "prod"):
        wide = torch.float64 if x.dtype.is_floating_point else torch.int64
        total: torch.Tensor = getattr(x, kind)(dim, dtype=wide)
        return total.to(x.dtype)
    return x.amax(dim) if kind == "max" else x.amin(dim)


@pytest.mark.parametrize("along", ["c", "k"])
@pytest.mark.parametrize("dtype", swept((*NUMBERS, torch.bool), (torch.float32, torch.int64, torch.uint8, torch.bool)), ids=str)
@pytest.mark.parametrize("runner", few())
def test_reductions(runner: Runner, dtype: torch.dtype, along: str) -> None:
    generator = torch.Generator().manual_seed(7)
    kinds = ("any", "all", "sum", "prod", "max", "min") if dtype == torch.bool else KINDS
    for rows, cols in ((3, 1), (1, 7), (5, 17), (2, 100), (9, 64), (4, 31), (30, 33), (2, 1000)):
        if dtype == torch.bool:
            x = torch.rand(rows, cols, generator=generator) < 0.9
        elif dtype.is_floating_point:
            x = torch.randn(rows, cols, generator=generator, dtype=dtype)
            x[0, cols // 2] = x[0, -1] = float("nan")
            x[-1, 0] = 3.0
            x[-1, cols // 3] = x[-1].amax()  # a tie
        else:
            x = torch.randint(-9 if dtype != torch.uint8 else 0, 9, (rows, cols), generator=generator).to(dtype)
        dim = 1 if along == "c" else 0
        extents: tuple[Dim, Dim] = (rows, cols) if cols in (17, 31, 64) else (symbol("R"), symbol("S"))
        wanted = [expected(kind, x, dim) for kind in kinds]
        outs = [torch.zeros_like(w) for w in wanted]
        got = run(runner, reductions(*extents, FROM_TORCH[dtype], kinds, along), [x, *outs], {"R": rows, "S": cols})[1:]
        for kind, actual, value in zip(kinds, got, wanted):
            if dtype.is_floating_point and kind in ("sum", "prod"):
                count = x.shape[dim]
                scale = x.nan_to_num().abs().double().sum(dim).max() if kind == "sum" else value.nan_to_num().abs().max()
                same(actual, value, atol=float(scale) * count * torch.finfo(dtype).eps)
            else:
                same(actual, value)


@pytest.mark.parametrize("along", ["c", "k"])
@pytest.mark.parametrize("runner", runners(host_only=True))
def test_an_empty_domain_gives_the_identity(runner: Runner, along: str) -> None:
    count = 2
    x = empty(0)
    identities = {"sum": 0.0, "prod": 1.0, "max": float("-inf"), "min": float("inf")}
    outs = [empty(count) for _ in identities]
    kernel = reductions(2 if along == "c" else 0, 0 if along == "c" else 2, f32, tuple(identities), along)
    for out, value in zip(run(runner, kernel, [x, *outs])[1:], identities.values()):
        assert torch.equal(out, torch.full((count,), value))


@pytest.mark.parametrize("runner", few())
def test_half_width_sums_accumulate_in_float32(runner: Runner) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        x, out = normal(3, 333).to(dtype), empty(3)
        builder = BodyBuilder()
        places = buffers(builder, x, out)
        r, c = axis("r", 3), axis("c", 333)
        builder.store(places[1], r, reduce(builder, "sum", builder.cast(builder.load(places[0], r * 333 + c), f32)))
        got = run(runner, LoopKernel("total", builder.finish(), 3, 333), [x, out])[1]
        same(got, x.double().sum(1).float(), atol=333 * UNIT * 4)


@pytest.mark.parametrize("runner", few())
def test_variance_over_depth_and_then_over_columns(runner: Runner) -> None:
    """Two dependent reductions over k, whose result is reduced over c: the largest standard deviation of each group."""
    for depth in (3, 9, 20):
        x, out, widest = normal(4, depth, 37), empty(4, 37), empty(4)
        builder = BodyBuilder()
        places = buffers(builder, x, out, widest)
        r, c, k = axis("r", 4), axis("c", 37), axis("k", depth)
        value = builder.load(places[0], r * (37 * depth) + k * 37 + c)
        count = builder.const(float(depth), f32)
        centered = builder.op("sub", f32, value, builder.op("div", f32, reduce(builder, "sum", value, axis="k"), count))
        square = builder.op("mul", f32, centered, centered)
        deviation = builder.op("sqrt", f32, builder.op("div", f32, reduce(builder, "sum", square, axis="k"), count))
        builder.store(places[1], r * 37 + c, deviation)
        builder.store(places[2], r, reduce(builder, "max", deviation))
        got = run(runner, LoopKernel("deviation", builder.finish(), 4, 37, depth), [x, out, widest])
        wanted = x.double().var(1, correction=0).sqrt()
        same(got[1], wanted.float(), rtol=64 * UNIT)
        same(got[2], wanted.amax(1).float(), rtol=64 * UNIT)


@pytest.mark.parametrize("runner", few())
def test_full_reductions_and_single_numbers(runner: Runner) -> None:
    """A kernel of one row over everything; a flat kernel whose store does not depend on the column; reductions of what is no column's."""
    x, total, double = normal(501), empty(1), empty(1)
    builder = BodyBuilder()
    places = buffers(builder, x, total, double)
    value = reduce(builder, "sum", builder.load(places[0], axis("c", 501)))
    builder.store(places[1], 0, value)
    builder.store(places[2], 0, reduce(builder, "sum", builder.const(2.0, f32)))
    got = run(runner, LoopKernel("total", builder.finish(), 1, 501), [x, total, double])
    same(got[1], x.double().sum()[None].float(), atol=501 * UNIT)
    assert float(got[2]) == 1002.0
    builder = BodyBuilder()
    places = buffers(builder, x, total)
    builder.store(places[1], 0, builder.op("exp", f32, builder.load(places[0], 5)))
    same(run(runner, LoopKernel("one", builder.finish(), None, 1), [x, total])[1], x[5:6].exp(), rtol=8 * UNIT)


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("runner", few())
def test_an_index_that_a_reduction_finds_is_checked_after_it(runner: Runner, bad: bool) -> None:
    """table[argmax(x)] for each row and as one row, where the index does not vary; the table may be too short."""
    for rows in (3, 1):
        x, table = normal(rows, 40, seed=rows), normal(40)
        size = 40 if not bad else int(x.argmax(1).max())
        builder = BodyBuilder()
        places = buffers(builder, x, table, empty(rows))
        r: Dim = axis("r", rows) if rows > 1 else 0
        where = reduce(builder, "argmax", builder.load(places[0], r * 40 + axis("c", 40)), i64)
        builder.add(Node("check", boolean, (builder.op("lt", boolean, where, builder.const(size, i64)),)))
        inside = builder.op("minimum", i64, where, builder.const(39, i64))
        builder.store(places[2], r, builder.load(places[1], builder.node_index(inside)))
        kernel = LoopKernel("found", builder.finish(), rows, 40)
        assert torch.equal(run(runner, kernel, [x, table, empty(rows)], status=int(bad))[2], table[x.argmax(1)])


@pytest.mark.parametrize("runner", few())
def test_a_line_that_a_reduction_finds_is_read_after_it(runner: Runner) -> None:
    """table[argmax(x), :] for each row and for one: the line of the table is known once the row is reduced, not before."""
    for rows in (3, 1):
        x, table = normal(rows, 40, seed=rows), normal(40, 40)
        builder = BodyBuilder()
        places = buffers(builder, x, table, empty(rows, 40))
        r: Dim = axis("r", rows) if rows > 1 else 0
        c = axis("c", 40)
        where = reduce(builder, "argmax", builder.load(places[0], r * 40 + c), i64)
        builder.store(places[2], r * 40 + c, builder.load(places[1], builder.node_index(where) * 40 + c))
        kernel = LoopKernel("line", builder.finish(), rows, 40)
        assert torch.equal(run(runner, kernel, [x, table, empty(rows, 40)])[2], table[x.argmax(1)])


@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize("runner", few())
def test_a_branch_on_entry(runner: Runner, by_rows: bool) -> None:
    """Functions of sizes are computed once, on entry. That of a large angle is a branch, behind which loops begin."""
    rows, cols = (3, symbol("N")) if by_rows else (1, symbol("N"))
    x, out = normal(rows, 100), empty(rows, 100)
    builder = BodyBuilder()
    places = buffers(builder, x, out)
    at = axis("c", cols) + (axis("r", rows) * cols if by_rows else 0)
    size = builder.cast(builder.add(Node("index", i64, index=cols)), f32)
    angles = [size, builder.op("mul", f32, size, builder.const(1e6, f32))]
    moved = builder.load(places[0], at)
    for angle in angles:
        moved = builder.op("add", f32, moved, builder.op("sin", f32, angle))
    builder.store(places[1], at, moved)
    kernel = LoopKernel("branch", builder.finish(), rows if by_rows else None, cols)
    got = run(runner, kernel, [x, out], {"N": 100}, allowed=frozenset({"sinf"}))[1]
    same(got, x + torch.tensor(100.0).sin() + torch.tensor(1e8).sin(), atol=4 * UNIT)
