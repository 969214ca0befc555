"""The emitter as contraction generators use it: accumulators in registers, and tiles of accumulators in a scratch array."""

from __future__ import annotations

import re

import pytest
import torch

from sashiko.cpu_codegen import jit
from sashiko.cpu_codegen.body import BodyEmitter, Point
from sashiko.cpu_codegen.builder import F32, I32, I64, PTR, VOID, Function, Module, Ty, Val, i64
from sashiko.cpu_codegen.choices import vector_lanes
from sashiko.cpu_codegen.epilogue import emit_register_epilogue, emit_tile_epilogue
from sashiko.cpu_codegen.loops import emit_loop_kernel
from sashiko.cpu_codegen.slots import Slots
from sashiko.diagnostics.errors import InvalidGraph
from sashiko.graph.interpret import quantize
from sashiko.graph.types import DType, QParams, f32, i8, i32, u8
from sashiko.platforms.catalogue import CATALOGUE
from sashiko.platforms.target import Target
from sashiko.stitch.elementwise import quantized
from sashiko.stitch.loops import Body, BodyBuilder, LoopKernel, Node, axis
from tests.cpu_codegen.kernels import empty, from_numpy, normal, reduce, same, to_numpy
from tests.emulation import Runner, compiled, runners, runners_in_turn

TILE_ROWS, TILE_COLS = 4, 32
ROWS = 4


def body(cols: int, acc: DType, offset: int = 0) -> Body:
    """out[r, c] = int8(round(relu(acc * scale[c] + bias[c] + residual[r, c]) * 8)), and the residual sum in float32, and r in seen[r]."""
    builder = BodyBuilder()
    scale, bias, residual, out, wide, seen = (builder.buffer(t) for t in (f32, f32, f32, i8, f32, f32))
    r, c = axis("r", ROWS), axis("c", cols)
    value = builder.cast(builder.add(Node("acc", acc)), f32)
    value = builder.op("add", f32, builder.op("mul", f32, value, builder.load(scale, c)), builder.load(bias, c))
    value = builder.op("add", f32, value, builder.load(residual, r * cols + c))
    builder.store(wide, r * cols + c, value)
    rounded = builder.op("round", f32, builder.op("mul", f32, builder.op("relu", f32, value), builder.const(8.0, f32)))
    builder.store(out, r * cols + c, builder.cast(builder.op("minimum", f32, rounded, builder.const(127.0, f32)), i8))
    builder.store(seen, r, builder.cast(builder.add(Node("index", i32, index=r)), f32))
    return builder.finish()


def tile_kernel(module: Module, target: Target, cols: int, acc: DType, known: bool) -> Slots:
    """Adds tiles_<cols>. Accumulators acc[cols / 32 tiles][4][32] as operand 0; then the buffers of the body. known: how many the last
    tile has."""
    fn = Function(module, f"tiles_{cols}", VOID, [PTR, I64, I64])
    slots = Slots(fn)
    emitter = BodyEmitter(fn, target, body(cols, acc), slots, buffer_offset=1)
    ty = F32 if acc == f32 else I32
    base = slots.buffer(0)

    def tile(c: Val, _: list[Val]) -> list[Val]:
        with emitter.scope():
            left = fn.smin(fn.sub(i64(cols), c), i64(TILE_COLS))
            scratch = fn.gep(base, fn.mul(c, i64(TILE_ROWS)), ty)
            last = cols % TILE_COLS if known else None
            emit_tile_epilogue(fn, emitter, scratch, ty, TILE_COLS, i64(ROWS), left, i64(0), c, TILE_COLS, last)
        return []

    fn.loop(i64(0), i64(cols), TILE_COLS, [], tile)
    fn.ret()
    fn.finish()
    return slots


def fused(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a b + c rounded once, as fused multiply-adds do; the product of two float32 is exact in float64."""
    return (a.double() * b.double() + c.double()).float()


@pytest.mark.parametrize("known", [False, True], ids=["any_columns", "known_columns"])
@pytest.mark.parametrize("acc", [f32, i32], ids=str)
@pytest.mark.parametrize("runner", runners())
def test_tiles(runner: Runner, acc: DType, known: bool) -> None:
    module = Module()
    kernels = {cols: tile_kernel(module, runner.target, cols, acc, known) for cols in (32, 33, 47, 64, 71)}
    code = compiled(module.text(), runner.target)
    for cols, slots in kernels.items():
        tiles = -(-cols // TILE_COLS)
        accumulators = (normal(tiles, TILE_ROWS, TILE_COLS) * 100).to(acc.torch)
        scale, bias, residual = normal(cols, seed=1) * 0.01, normal(cols, seed=2), normal(ROWS, cols, seed=3)
        tensors = [accumulators, scale, bias, residual, empty(ROWS, cols, dtype=torch.int8), empty(ROWS, cols), empty(ROWS)]
        arrays = runner.run(code, f"tiles_{cols}", [to_numpy(t) for t in tensors], order=slots.order)
        out, wide, seen = (from_numpy(array, like) for array, like in zip(arrays[4:], tensors[4:]))
        joined = torch.cat(list(accumulators), 1)[:ROWS, :cols].float()
        expected = fused(joined, scale, bias) + residual
        same(wide, expected)
        assert torch.equal(out, (expected.relu() * 8).round().clamp(max=127).to(torch.int8))
        assert torch.equal(seen, torch.arange(ROWS).float())


@pytest.mark.parametrize("dtype", [u8, i8], ids=str)
@pytest.mark.parametrize("cols", [16, 32, 64])
@pytest.mark.parametrize("runner", runners_in_turn())
def test_bytes_of_some_rows_are_packed_together(runner: Runner, cols: int, dtype: DType) -> None:
    """Where vectors of two or four rows fill a register; rows that are left, NaN and what is too large come out as they do alone."""
    qparams = QParams((0.05,), 91, None, 0, 255) if dtype == u8 else QParams((0.05,))
    builder = BodyBuilder()
    residual, out = builder.buffer(f32), builder.buffer(dtype)
    place = axis("r", 7) * cols + axis("c", cols)
    value = builder.op("add", f32, builder.add(Node("acc", f32)), builder.load(residual, place))
    builder.store(out, place, quantized(builder, value, dtype, qparams))
    module = Module()
    fn = Function(module, "rows", VOID, [PTR, I64, I64])
    slots = Slots(fn)
    emitter = BodyEmitter(fn, runner.target, builder.finish(), slots, buffer_offset=1)
    for _ in range(2):  # the second time after rows that were done alone
        emit_tile_epilogue(fn, emitter, slots.buffer(0), F32, cols, fn.args[2], i64(cols), i64(0), i64(0), cols, 0)
    fn.ret()
    fn.finish()
    code = compiled(module.text(), runner.target)
    accumulators, residual_rows = normal(7, cols) * 9, normal(7, cols, seed=3)
    accumulators[0, :4] = torch.tensor([torch.nan, torch.inf, -torch.inf, 3e9])
    want = quantize(accumulators + residual_rows, dtype.torch, qparams)
    for rows in range(1, 8):
        tensors = [accumulators, residual_rows, empty(7, cols, dtype=dtype.torch)]
        arrays = runner.run(code, "rows", [to_numpy(t) for t in tensors], end=rows, order=slots.order)
        assert torch.equal(from_numpy(arrays[2], tensors[2])[:rows], want[:rows])


@pytest.mark.parametrize("runner", runners())
def test_accumulators_in_registers(runner: Runner) -> None:
    """Rows and vectors written out: each accumulator is provided in turn, and values of the column are computed once."""
    module = Module()
    fn = Function(module, "registers", VOID, [PTR, I64, I64])
    slots = Slots(fn)
    emitter = BodyEmitter(fn, runner.target, body(64, f32), slots, buffer_offset=1)
    lanes = vector_lanes(runner.target, emitter.body)
    places = [[fn.gep(slots.buffer(0), i64(row * 64 + column), F32) for column in range(0, 64, lanes)] for row in range(ROWS)]
    emit_register_epilogue(fn, emitter, [[fn.load(Ty("float", lanes), at) for at in row] for row in places], fn.args[1], i64(0), None)
    fn.ret()
    fn.finish()
    text = module.text()
    # One load of scale and one of bias for each vector of columns, an accumulator and a residual for each vector of each row.
    assert len(re.findall(rf"= load <{lanes} x float>", text)) == (2 + 2 * ROWS) * (64 // lanes)
    accumulators, scale, bias, residual = normal(ROWS, 64) * 9, normal(64, seed=1), normal(64, seed=2), normal(ROWS, 64, seed=3)
    tensors = [accumulators, scale, bias, residual, empty(ROWS, 64, dtype=torch.int8), empty(ROWS, 64), empty(ROWS)]
    arrays = runner.run(text, "registers", [to_numpy(t) for t in tensors], order=[*slots.order])
    same(from_numpy(arrays[5], tensors[5]), fused(accumulators, scale, bias) + residual)


def test_what_is_not_provided_is_an_error() -> None:
    module = Module()
    fn = Function(module, "nothing", VOID, [PTR, I64, I64])
    emitter = BodyEmitter(fn, CATALOGUE[0], body(64, f32), Slots(fn))
    with pytest.raises(InvalidGraph, match="was not provided"):
        emitter.stores(Point(8, {"r": i64(0), "c": i64(0)}))
    builder = BodyBuilder()
    x, out = builder.buffer(f32), builder.buffer(f32)
    builder.store(out, axis("c", 8), builder.load(x, axis("c", 8)))
    without = BodyEmitter(fn, CATALOGUE[0], builder.finish(), Slots(fn))
    with pytest.raises(InvalidGraph, match="one accumulator"):
        emit_tile_epilogue(fn, without, fn.args[0], F32, 32, i64(1), i64(1), i64(0), i64(0), 32)


def hot_loops(text: str) -> list[str]:
    """Basic blocks that branch back to themselves."""
    blocks = re.split(r"^(\.LBB\w+):", text, flags=re.M)
    return [code for name, code in zip(blocks[1::2], blocks[2::2]) if re.search(rf"\b(j\w+|b\.\w+|cbn?z)\s.*{re.escape(name)}\b", code)]


@pytest.mark.parametrize("target", CATALOGUE, ids=lambda t: t.name)
def test_simple_loops_keep_everything_in_registers(target: Target) -> None:
    """No access to the stack in the loops of a layer normalization, a softmax and a bias with activation."""
    builder = BodyBuilder()
    x, bias, out = builder.buffer(f32), builder.buffer(f32), builder.buffer(f32)
    r, c = axis("r", 64), axis("c", 1024)
    value = builder.op("add", f32, builder.load(x, r * 1024 + c), builder.load(bias, c))
    mean = builder.op("div", f32, reduce(builder, "sum", value), builder.const(1024.0, f32))
    centered = builder.op("sub", f32, value, mean)
    square = reduce(builder, "sum", builder.op("mul", f32, centered, centered))
    builder.store(out, r * 1024 + c, builder.op("relu", f32, builder.op("mul", f32, centered, builder.op("rsqrt", f32, square))))
    module = Module()
    emit_loop_kernel(module, target, LoopKernel("norm", builder.finish(), 64, 1024))
    loops = hot_loops(jit.assembly(module.text(), target))
    assert len(loops) >= 3
    for code in loops:
        assert not re.search(r"\(%rsp|\(%rbp\)|\[sp|\bcall|\bbl\b", code), code


def test_work_and_domain() -> None:
    builder = BodyBuilder()
    x, out = builder.buffer(f32), builder.buffer(f32)
    c = axis("c", 1000)
    builder.store(out, c, builder.op("exp", f32, builder.load(x, c)))
    module = Module()
    code = emit_loop_kernel(module, CATALOGUE[1], LoopKernel("work", builder.finish(), None, 1000))
    assert code.domain == 1000 and code.grain % 16 == 0
    assert isinstance(code.work, int) and 5_000 < code.work < 50_000
