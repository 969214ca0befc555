"""Conversions between all element types, as torch's `.to()`; quantizing sequences; bit casts; constants and parameters."""

from __future__ import annotations

import pytest
import torch

from sashiko.cpu_codegen import jit
from sashiko.cpu_codegen.builder import Module
from sashiko.cpu_codegen.loops import emit_loop_kernel
from sashiko.graph.types import FROM_TORCH, DType, bf16, f16, f32, i8, i32, u8
from sashiko.stitch.loops import BodyBuilder, LoopKernel, axis, hoist_numbers
from tests.cpu_codegen.kernels import buffers, empty, few, normal, run, same
from tests.emulation import Runner, not_on_bochs, runners

TYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64),
)


def values(dtype: torch.dtype) -> torch.Tensor:
    """Values that every destination holds, after truncation or modulo 2^n; for floats also those halfway between neighbours."""
    if dtype == torch.bool:
        return torch.tensor([True, False] * 20)
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        ends = torch.tensor([info.min, info.max, info.max // 2 + 1, info.max // 3])
        return torch.cat([torch.arange(-30, 30), ends]).clamp(info.min, info.max).to(dtype)
    generator = torch.Generator().manual_seed(5)
    spread = torch.randn(500, generator=generator, dtype=torch.float64) * 10.0 ** torch.randint(-6, 5, (500,), generator=generator)
    halves = torch.arange(-20, 20, dtype=torch.float64) / 4
    ties = 1 + torch.arange(64, dtype=torch.float64) / 2**9  # halfway between neighbours of bfloat16, a few of float16
    ends = torch.tensor([65519.0, 65520.0, 6e-8, 1e-8, 0.0, -0.0])
    return torch.cat([spread, halves, ties, 1 + torch.arange(64) / 2**12, ends]).to(dtype)


def fits(x: torch.Tensor, to: torch.dtype) -> torch.Tensor:
    """Where torch defines the conversion of a float to an integer. Narrow ones go through int32, as in C."""
    if not x.dtype.is_floating_point or to.is_floating_point or to == torch.bool:
        return torch.ones(x.shape, dtype=torch.bool)
    info = torch.iinfo(torch.int64 if to == torch.int64 else torch.int32)
    return (x.double() > info.min) & (x.double() < info.max)


@pytest.mark.parametrize("source", TYPES, ids=str)
@pytest.mark.parametrize("runner", runners())
def test_every_cast(runner: Runner, source: torch.dtype) -> None:
    if source in (torch.float32, torch.float64, torch.bfloat16):
        not_on_bochs(runner, "rounds ties away from zero in VCVTPS2PH")
    x = values(source)
    targets = [t for t in TYPES if t != source]
    outputs = [empty(x.numel(), dtype=t) for t in targets]
    builder = BodyBuilder()
    first, *places = buffers(builder, x, *outputs)
    c = axis("c", x.numel())
    loaded = builder.load(first, c)
    for to, place in zip(targets, places):
        builder.store(place, c, builder.cast(loaded, FROM_TORCH[to]))
    results = run(runner, LoopKernel("casts", builder.finish(), None, x.numel()), [x, *outputs])[1:]
    for to, actual in zip(targets, results):
        # float64 reaches half types through float32, as in torch.
        expected = x.to(torch.int32).to(to) if x.dtype.is_floating_point and to in (torch.int8, torch.uint8, torch.int16) else x.to(to)
        keep = fits(x, to)
        assert torch.equal(actual[keep], expected[keep]), f"{source} to {to}"


@pytest.mark.parametrize("runner", runners())
def test_nan_and_infinity(runner: Runner) -> None:
    x = torch.tensor([float("nan"), float("inf"), float("-inf"), -float("nan"), 3e38, 1e-45] * 5)
    outputs = [empty(x.numel(), dtype=t) for t in (torch.bfloat16, torch.float16, torch.float64, torch.bool, torch.int32)]
    builder = BodyBuilder()
    first, *places = buffers(builder, x, *outputs)
    c = axis("c", x.numel())
    loaded = builder.load(first, c)
    for out, place in zip(outputs, places):
        builder.store(place, c, builder.cast(loaded, FROM_TORCH[out.dtype]))
    results = run(runner, LoopKernel("casts", builder.finish(), None, x.numel()), [x, *outputs])[1:]
    for actual in results[:4]:
        same(actual, x.to(actual.dtype))
    # Out of range: the machine's answer, but an answer.
    assert results[4][5] == 0


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("runner", runners(host_only=True))
def test_all_half_width_bit_patterns_survive(runner: Runner, narrow: torch.dtype) -> None:
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    x = bits.view(narrow)
    wide, back = empty(x.numel()), empty(x.numel(), dtype=narrow)
    builder = BodyBuilder()
    places = buffers(builder, x, wide, back)
    c = axis("c", x.numel())
    loaded = builder.cast(builder.load(places[0], c), f32)
    builder.store(places[1], c, loaded)
    builder.store(places[2], c, builder.cast(loaded, FROM_TORCH[narrow]))
    _, wide, back = run(runner, LoopKernel("widen", builder.finish(), None, x.numel()), [x, wide, back])
    same(wide, x.float())
    # VCVTNEPS2BF16 takes subnormal numbers for zeros (Intel's manual, volume 2).
    flushed = narrow == torch.bfloat16 and runner.target.has("avx512_bf16")
    subnormal = (bits & 0x7F80) == 0
    expected = torch.where(subnormal, bits & -0x8000, bits) if flushed else bits
    numbers = ~x.isnan()
    assert torch.equal(back.view(torch.int16)[numbers], expected[numbers])
    assert bool(back[~numbers].isnan().all())


def quantizer(size: int, to: DType, zero: float, low: float, high: float, hoist: bool) -> LoopKernel:
    builder = BodyBuilder()
    x, out = builder.buffer(f32), builder.buffer(to)
    c = axis("c", size)
    scaled = builder.op("mul", f32, builder.load(x, c), builder.const(1 / 0.037, f32))
    rounded = builder.op("round", f32, scaled)
    if zero:
        rounded = builder.op("add", f32, rounded, builder.const(zero, f32))
    above = builder.op("maximum", f32, rounded, builder.const(low, f32))
    builder.store(out, c, builder.cast(builder.op("minimum", f32, above, builder.const(high, f32)), to))
    body = builder.finish()
    if not hoist:
        return LoopKernel("quantize", body, None, size)
    body, params = hoist_numbers(body)
    return LoopKernel("quantize", body, None, size, params=params)


SCHEMES = ((i8, 0.0, -127.0, 127.0), (u8, 3.0, 0.0, 255.0), (i8, -7.0, -128.0, 127.0), (i32, 0.0, -9.0, 9.0))


@pytest.mark.parametrize("hoist", [False, True])
@pytest.mark.parametrize(("to", "zero", "low", "high"), SCHEMES)
@pytest.mark.parametrize("runner", few())
def test_quantize(runner: Runner, to: DType, zero: float, low: float, high: float, hoist: bool) -> None:
    x = torch.cat([normal(333) * 4, torch.tensor([float("inf"), float("-inf"), 0.5 * 0.037, 1e30, -1e30])])
    out = empty(x.numel(), dtype=to.torch)
    kernel = quantizer(x.numel(), to, zero, low, high, hoist)
    actual = run(runner, kernel, [x, out])[1]
    scale = torch.tensor(1 / 0.037)
    assert torch.equal(actual, ((x * scale).round() + zero).clamp(low, high).to(to.torch))


@pytest.mark.parametrize("runner", runners(host_only=True, needs=("avx512f",)))
def test_quantizing_is_five_instructions(runner: Runner) -> None:
    module = Module()
    emit_loop_kernel(module, runner.target, quantizer(4096, i8, 0.0, -127.0, 127.0, hoist=False))
    text = jit.assembly(module.text(), runner.target)
    narrowed = "vpermb" if runner.target.has("avx512_vbmi") else "vpmovdb"
    assert "vcvtps2dq" in text and narrowed in text
    assert "vrndscale" not in text and "vcmp" not in text.replace("vpcmp", "") and "vcvttps2dq" not in text


@pytest.mark.parametrize("runner", few())
def test_constants_and_bit_casts(runner: Runner) -> None:
    outs = [empty(19, dtype=t) for t in TYPES]
    builder = BodyBuilder()
    x = normal(19)
    first, *places = buffers(builder, x, *outs, empty(19, dtype=torch.int32))
    c = axis("c", 19)
    numbers = {torch.bool: True, torch.uint8: 200, torch.int64: -(1 << 40)}
    for out, place in zip(outs, places):
        builder.store(place, c, builder.const(numbers.get(out.dtype, -3), FROM_TORCH[out.dtype]))
    builder.store(places[-1], c, builder.op("bitcast", i32, builder.load(first, c)))
    results = run(runner, LoopKernel("constants", builder.finish(), None, 19), [x, *outs, empty(19, dtype=torch.int32)])
    for out in results[1:-1]:
        assert torch.equal(out, torch.full((19,), numbers.get(out.dtype, -3), dtype=out.dtype))
    assert torch.equal(results[-1], x.view(torch.int32))


@pytest.mark.parametrize("narrow", [torch.int8, torch.bfloat16, torch.bool, torch.int16, torch.int64, torch.float64], ids=str)
@pytest.mark.parametrize("runner", few())
def test_tails_of_known_length(runner: Runner, narrow: torch.dtype) -> None:
    """From and to another width in rows whose last vector has one element, or nearly all."""
    for cols in (1, 9, 17, 63):
        x, wide, y, out = (normal(2, cols) * 9).to(narrow), empty(2, cols), normal(2, cols), empty(2, cols, dtype=narrow)
        builder = BodyBuilder()
        places = buffers(builder, x, wide, y, out)
        index = axis("r", 2) * cols + axis("c", cols)
        builder.store(places[1], index, builder.cast(builder.load(places[0], index), f32))
        builder.store(places[3], index, builder.cast(builder.load(places[2], index), FROM_TORCH[narrow]))
        results = run(runner, LoopKernel("tail", builder.finish(), 2, cols), [x, wide, y, out])
        assert torch.equal(results[1], x.float())
        assert torch.equal(results[3], y.to(narrow))


@pytest.mark.parametrize("target_type", [bf16, f16])
def test_native_conversions_are_used_where_there_are_any(target_type: DType) -> None:
    from sashiko.platforms.catalogue import NEOVERSE_N2, X86_64_AMX, X86_64_V3

    builder = BodyBuilder()
    x, out = builder.buffer(f32), builder.buffer(target_type)
    c = axis("c", 4096)
    builder.store(out, c, builder.cast(builder.load(x, c), target_type))
    kernel = LoopKernel("narrow", builder.finish(), None, 4096)
    expected = {bf16: ((X86_64_AMX, "vcvtneps2bf16"), (NEOVERSE_N2, "bfcvtn")), f16: ((X86_64_V3, "vcvtps2ph"), (NEOVERSE_N2, "fcvtn"))}
    for target, instruction in expected[target_type]:
        module = Module()
        emit_loop_kernel(module, target, kernel)
        assert instruction in jit.assembly(module.text(), target)
