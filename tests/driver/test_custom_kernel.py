"""A custom call: a pattern of the user's, and a kernel under the kernel contract."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.export import Dim

import sashiko
from sashiko.cpu_codegen.builder import Module
from sashiko.cpu_codegen.contract import KernelCode
from sashiko.cpu_codegen.loops import emit_loop_kernel
from sashiko.graph.dims import product
from sashiko.graph.ir import Value
from sashiko.graph.types import TensorType, f32
from sashiko.kernels.custom import CustomKernel, Options
from sashiko.platforms.target import Target
from sashiko.rewrite import Match, Mismatch, rule
from sashiko.stitch.loops import BodyBuilder, LoopKernel, axis


@rule("add(mul(x, x), y) -> x")
def square_plus(m: Match) -> Value | Mismatch:
    if m["x"].shape != m["y"].shape:
        return m.fail("shapes differ")
    return m.call("square_plus", m["x"], m["y"], options=(("scale", 3.0),))


def emit(module: Module, target: Target, symbol: str, inputs: tuple[TensorType, ...], output: TensorType, options: Options) -> KernelCode:
    """scale * (x * x + y): not what the pattern says, so that the test sees which code ran."""
    b = BodyBuilder()
    x, y, out = (b.buffer(f32) for _ in range(3))
    size = product(output.shape)
    at = axis("c", size)
    total = b.op("add", f32, b.op("mul", f32, b.load(x, at), b.load(x, at)), b.load(y, at))
    b.store(out, at, b.op("mul", f32, total, b.const(float(dict(options)["scale"]), f32)))
    return emit_loop_kernel(module, target, LoopKernel(symbol, b.finish(), None, size))


class Model(nn.Module):
    """Work before, on permuted operands, and after the call."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x, y = torch.exp(x).transpose(0, 1), (y + 1).transpose(0, 1)
        return torch.relu(x * x + y).sum(-1)


@pytest.mark.parametrize("rows", [1, 5])
def test_a_pattern_and_a_kernel(rows: int) -> None:
    batch = Dim("batch", max=64)
    x, y = torch.randn(4, 7), torch.randn(4, 7)
    kernels = (CustomKernel("square_plus", emit),)
    shapes = ({0: batch}, {0: batch})
    fast = sashiko.compile(Model().eval(), (x, y), dynamic_shapes=shapes, rules=(square_plus,), kernels=kernels)
    x, y = torch.randn(rows, 7), torch.randn(rows, 7)
    expected = torch.relu(3 * (torch.exp(x) ** 2 + y + 1).T).sum(-1)
    torch.testing.assert_close(fast(x, y), expected, rtol=1e-5, atol=1e-5)
    assert "square_plus" in fast.explain()


def test_a_call_without_its_kernel_is_named() -> None:
    x = torch.randn(4, 7)
    with pytest.raises(sashiko.Unsupported, match="no kernel 'square_plus'"):
        sashiko.compile(Model().eval(), (x, x), rules=(square_plus,))
