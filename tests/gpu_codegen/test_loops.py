"""Kernels for GPUs on a simulated one: domains with every kind of tail, reductions of every kind, vectors; and PTX for every target."""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Mapping, Sequence

import pytest
import torch

from sashiko.cpu_codegen import jit
from sashiko.cpu_codegen.builder import Module
from sashiko.cpu_codegen.contract import BufferSlot, DimSlot
from sashiko.diagnostics.errors import Unsupported
from sashiko.gpu_codegen.loops import LaunchCode, emit_launch, is_across, refusal, unit_of
from sashiko.graph.dims import Dim, evaluate, symbol
from sashiko.graph.types import DType, bf16, boolean, f32, f64, i64
from sashiko.platforms.gpu import nvidia
from sashiko.stitch.loops import BodyBuilder, LoopKernel, Node, axis
from tests.cpu_codegen.kernels import buffers, empty, normal, reduce, same, softmax
from tests.simulated_gpu import SimulatedGpu

TARGET = nvidia(8, 0)
UNIT = 2.0**-24


def run(kernel: LoopKernel, tensors: Sequence[torch.Tensor], dims: Mapping[str, int] | None = None) -> tuple[list[torch.Tensor], int]:
    """All tensors after a launch over the whole domain, and the status word."""
    module = Module()
    code = emit_launch(module, TARGET, kernel)
    gpu, held, status = SimulatedGpu(module.text()), [t.clone() for t in tensors], ctypes.c_int32(0)
    words = [ctypes.addressof(status)]
    kept = []
    for slot in code.slots:
        if isinstance(slot, BufferSlot):
            words.append(held[slot.index].data_ptr())
        elif isinstance(slot, DimSlot):
            words.append(evaluate(slot.dim, dims or {}))
        else:
            kept.append(ctypes.create_string_buffer(struct.pack(f"{len(slot.values)}f", *slot.values)))
            words.append(ctypes.addressof(kept[-1]))
    slots = (ctypes.c_int64 * len(words))(*words)
    gpu.launch(code.symbol, ctypes.addressof(slots), code.blocks(evaluate(code.domain, dims or {})), code.threads)
    return held, status.value


def flat(width: Dim, dtype: DType = f32) -> LoopKernel:
    builder = BodyBuilder()
    x, out = builder.buffer(dtype), builder.buffer(dtype)
    c = axis("c", width)
    builder.store(out, c, builder.op("add", dtype, builder.load(x, c), builder.const(1.5, dtype)))
    return LoopKernel("flat", builder.finish(), None, width)


@pytest.mark.parametrize("width", [1, 7, 64, 255, 256, 257, 1000, 2048])
def test_elements(width: int) -> None:
    x = normal(width)
    for known in (True, False):
        got, _ = run(flat(width if known else symbol("N")), [x, empty(width)], {"N": width})
        assert torch.equal(got[1], x + 1.5)


@pytest.mark.parametrize("op", ["fmod", "remainder", "floordiv", "truncdiv"])
@pytest.mark.parametrize("ty", [f32, f64, i64], ids=str)
def test_divisions(op: str, ty: DType) -> None:
    """Functions of the module's own are none of the C library."""
    dtype, width, c = ty.torch, 40, axis("c", 40)
    builder = BodyBuilder()
    x, y, out = (builder.buffer(ty) for _ in range(3))
    builder.store(out, c, builder.op(op, ty, builder.load(x, c), builder.load(y, c)))
    values = torch.linspace(-20, 20, width).to(dtype), torch.tensor([3, -3, 7, 2] * 10).to(dtype)
    got, _ = run(LoopKernel("divided", builder.finish(), None, width), [*values, torch.zeros(width, dtype=dtype)])
    rounding = {"floordiv": "floor", "truncdiv": "trunc"}
    want = torch.div(*values, rounding_mode=rounding[op]) if op in rounding else getattr(torch, op)(*values)
    assert torch.equal(got[2], want)
    text = Module()
    emit_launch(text, TARGET, LoopKernel("divided", builder.finish(), None, width))
    assert ".extern" not in jit.assembly(text.text(), TARGET)


def test_units() -> None:
    """As many columns as 16 bytes hold, where rows begin at multiples of them and everything lies side by side."""
    assert [unit_of(flat(width)) for width in (64, 66, 63)] == [4, 1, 1]
    assert unit_of(flat(64, bf16)) == 8 and unit_of(flat(64, f64)) == 2 and unit_of(flat(symbol("N"))) == 1
    builder = BodyBuilder()
    x, out = builder.buffer(f32), builder.buffer(f32)
    r, c = axis("r", 8), axis("c", 8)
    builder.store(out, 8 * r + c, builder.load(x, 8 * c + r))
    assert unit_of(LoopKernel("transposed", builder.finish(), 8, 8)) == 1


@pytest.mark.parametrize("known", [True, False])
def test_softmax(known: bool) -> None:
    # Where the columns are not known, 256 threads share a row.
    for rows, cols in ((1, 1), (3, 7), (5, 16), (2, 17), (3, 100), (2, 200), (9, 32)) if known else ((3, 7), (1, 300)):
        x = normal(rows, cols) * 5
        if rows == 3:
            x[1, cols // 2] = float("-inf")
            x[2, 0] = float("nan")
        (_, got), _ = run(softmax(rows, cols, known), [x, empty(rows, cols)], {"S": cols})
        same(got, x.double().softmax(-1).float(), rtol=32 * UNIT, atol=1e-12)


def test_long_rows_are_read_again() -> None:
    x = normal(1, 34000)
    (_, got), _ = run(softmax(1, 34000, True), [x, empty(1, 34000)])
    same(got, x.double().softmax(-1).float(), rtol=64 * UNIT, atol=1e-12)


@pytest.mark.parametrize("cols", [1, 5, 64, 72, 260])
def test_every_reduction(cols: int) -> None:
    x = normal(3, cols)
    x[1, cols // 2] = float("nan")
    kinds = {"sum": f32, "max": f32, "min": f32, "argmax": i64, "argmin": i64, "any": boolean, "all": boolean}
    builder = BodyBuilder()
    source = builder.buffer(f32)
    r, c = axis("r", 3), axis("c", cols)
    value = builder.load(source, cols * r + c)
    positive = builder.op("gt", boolean, value, builder.const(0.0, f32))
    for kind, dtype in kinds.items():
        found = reduce(builder, kind, positive if dtype == boolean else value, dtype)
        builder.store(builder.buffer(dtype), r, found)
    outs = [empty(3, dtype=dtype.torch) for dtype in kinds.values()]
    got, _ = run(LoopKernel("all", builder.finish(), 3, cols), [x, *outs])
    same(got[1], x.sum(1), rtol=64 * UNIT, atol=64 * UNIT * cols)
    same(got[2], x.amax(1))
    same(got[3], x.amin(1))
    assert torch.equal(got[4], x.argmax(1)) and torch.equal(got[5], x.argmin(1))
    assert torch.equal(got[6], (x > 0).any(1)) and torch.equal(got[7], (x > 0).all(1))


def test_sums_over_another_axis() -> None:
    x = normal(33, 20)
    builder = BodyBuilder()
    source, out = buffers(builder, x, empty(20))
    c, k = axis("c", 20), axis("k", 33)
    builder.store(out, c, reduce(builder, "sum", builder.load(source, 20 * k + c), axis="k"))
    (_, got), _ = run(LoopKernel("columns", builder.finish(), 1, 20, 33), [x, empty(20)])
    same(got, x.sum(0), rtol=64 * UNIT, atol=1e-5)


def test_a_bad_index_is_told() -> None:
    builder = BodyBuilder()
    table, places, out = builder.buffer(f32), builder.buffer(i64), builder.buffer(f32)
    c = axis("c", 5)
    place = builder.load(places, c)
    inside = builder.op("lt", boolean, place, builder.const(4, i64))
    builder.add(Node("check", boolean, (inside,)))
    at = builder.op("minimum", i64, place, builder.const(3, i64))
    builder.store(out, c, builder.load(table, builder.node_index(at)))
    kernel, x = LoopKernel("take", builder.finish(), None, 5), normal(4)
    for last, expected in ((3, 0), (9, 1)):
        at_ = torch.tensor([0, 1, 2, 3, last])
        got, status = run(kernel, [x, at_, empty(5)])
        assert status == expected and torch.equal(got[2], x[at_.clamp(max=3)])


def test_what_has_no_code() -> None:
    builder = BodyBuilder()
    x, out = builder.buffer(f32), builder.buffer(f32)
    r, c = axis("r", 2), axis("c", 8)
    builder.store(out, 8 * r + c, builder.add(Node("scan", f32, (builder.load(x, 8 * r + c),), kind="sum", axis="c")))
    kernel = LoopKernel("scan", builder.finish(), 2, 8)
    assert "sums up along a row" in refusal(kernel)
    with pytest.raises(Unsupported, match="has no code for GPUs"):
        emit_launch(Module(), TARGET, kernel)
    builder = BodyBuilder()
    x, out = builder.buffer(f64), builder.buffer(f64)
    builder.store(out, c, builder.op("exp", f64, builder.load(x, c)))
    with pytest.raises(Unsupported, match="calls exp of the C library"):
        emit_launch(Module(), TARGET, LoopKernel("wide", builder.finish(), None, 8))
    builder = BodyBuilder()
    out, *many = [builder.buffer(f32) for _ in range(520)]
    for x in many:
        builder.store(out, c, builder.load(x, c))
    with pytest.raises(Unsupported, match="520 operands and sizes, and a launch takes 511"):
        emit_launch(Module(), TARGET, LoopKernel("many", builder.finish(), None, 8))


@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (13, 1)])
def test_ptx(capability: tuple[int, int]) -> None:
    """Code for a GPU is that of the latest one before it that LLVM knows; rows are read and written by vectors."""
    module, target = Module(), nvidia(*capability)
    code = emit_launch(module, target, softmax(4, 64, True))
    assert isinstance(code, LaunchCode) and code.threads % 32 == 0
    text = jit.assembly(module.text(), target)
    assert f".target {target.cpu}" in text and ".visible .entry softmax(" in text
    for access in ("ld", "st"):
        assert re.search(access + r"\.global\.(v4\.b32|v2\.b64)", text)
    assert "shfl.sync.bfly" in text
    with pytest.raises(Unsupported, match=r"compute capability 6\.1"):
        nvidia(6, 1)


@pytest.mark.parametrize(("rows", "cols", "known"), [(32, 64, True), (50, 33, True), (50, 33, False), (1, 40, False)])
def test_what_is_read_along_the_rows(rows: int, cols: int, known: bool) -> None:
    x, y = normal(cols, rows), normal(rows)
    m, n = (rows, cols) if known else (symbol("M"), symbol("N"))
    builder = BodyBuilder()
    source, each, out, sums = buffers(builder, x, y, empty(rows, cols), empty(rows))
    r, c = axis("r", m), axis("c", n)
    scale = builder.load(each, r)
    builder.store(out, n * r + c, builder.op("mul", f32, builder.load(source, m * c + r), scale))
    builder.store(sums, r, builder.op("add", f32, scale, scale))
    kernel = LoopKernel("transposed", builder.finish(), m, n)
    assert is_across(kernel)
    got, _ = run(kernel, [x, y, empty(rows, cols), empty(rows)], {"M": rows, "N": cols})
    assert torch.equal(got[2], x.T * y[:, None]) and torch.equal(got[3], y + y)
