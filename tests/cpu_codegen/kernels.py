"""Runs loop kernels on torch tensors, through the emulation interface, and compares with eager torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from _pytest.mark import ParameterSet

from sashiko.cpu_codegen.builder import Module
from sashiko.cpu_codegen.contract import KernelCode
from sashiko.cpu_codegen.elf import read_symbols
from sashiko.cpu_codegen.loops import emit_loop_kernel
from sashiko.graph.dims import evaluate, symbol
from sashiko.graph.types import FROM_TORCH, DType, f32
from sashiko.platforms.target import Target
from sashiko.stitch.loops import BodyBuilder, LoopKernel, Node, axis
from tests.emulation import Array, Runner, compiled, runners


def built(kernel: LoopKernel, target: Target, allowed: frozenset[str] = frozenset()) -> tuple[bytes, KernelCode]:
    """The object of a kernel and how it is called. Code that calls any function but the allowed ones fails the test."""
    module = Module()
    code = emit_loop_kernel(module, target, kernel)
    data = compiled(module.text(), target)
    called = set(read_symbols(data).undefined) - allowed
    assert not called, f"{target.name}: {kernel.name} calls {sorted(called)}"
    return data, code


def few() -> list[ParameterSet]:
    """One target of each kind: this machine, 256-bit x86 and 128-bit AArch64. What differs in conversions alone is tested elsewhere."""
    return runners(few=True)


def to_numpy(tensor: torch.Tensor) -> Array:
    tensor = tensor.contiguous()
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy().copy()


def from_numpy(array: Array, like: torch.Tensor) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return (tensor.view(torch.bfloat16) if like.dtype == torch.bfloat16 else tensor).reshape(like.shape)


def run(
    runner: Runner,
    kernel: LoopKernel,
    tensors: Sequence[torch.Tensor],
    dims: Mapping[str, int] | None = None,
    *,
    part: tuple[int, int] | None = None,
    status: int = 0,
    allowed: frozenset[str] = frozenset(),
    align: int = 0,
) -> list[torch.Tensor]:
    """One call over the whole domain, or over `part` of it; gives all tensors afterwards."""
    data, code = built(kernel, runner.target, allowed)
    begin, end = part or (0, evaluate(code.domain, dims or {}))
    arrays = runner.run(
        data, code.symbol, [to_numpy(t) for t in tensors], begin=begin, end=end, order=code.slots, dims=dims, status=status, align=align
    )
    return [from_numpy(array, like) for array, like in zip(arrays, tensors)]


def reduce(builder: BodyBuilder, kind: str, x: int, dtype: DType = f32, axis: str = "c") -> int:
    return builder.add(Node("reduce", dtype, (x,), kind=kind, axis=axis))


def buffers(builder: BodyBuilder, *tensors: torch.Tensor) -> list[int]:
    return [builder.buffer(FROM_TORCH[t.dtype]) for t in tensors]


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What an output holds before: something that no test expects."""
    return torch.full(shape, 77 if dtype != torch.bool else 1, dtype=dtype)


def same(actual: torch.Tensor, expected: torch.Tensor, *, rtol: float = 0.0, atol: float = 0.0) -> None:
    """NaN equals NaN; -0 equals 0."""
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, equal_nan=True)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def softmax(rows: int, cols: int, known: bool) -> LoopKernel:
    """Of the rows of a matrix; known: the columns are."""
    builder = BodyBuilder()
    x, out = builder.buffer(f32), builder.buffer(f32)
    width = cols if known else symbol("S")
    r, c = axis("r", rows), axis("c", width)
    value = builder.load(x, r * width + c)
    e = builder.op("exp", f32, builder.op("sub", f32, value, reduce(builder, "max", value)))
    builder.store(out, r * width + c, builder.op("div", f32, e, reduce(builder, "sum", e)))
    return LoopKernel("softmax", builder.finish(), rows, width)
