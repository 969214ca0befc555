"""What integers leave of rows: beside torch's own operators, and the gradients that pass."""

from __future__ import annotations

import pytest
import torch

from sashiko.graph.rows import ROUNDINGS, rounded_affine_rows, rounded_rows
from sashiko.quant import ops


@pytest.mark.parametrize("affine", [False, True])
def test_rows_are_rounded_as_torch_does(affine: bool) -> None:
    x = torch.cat([torch.randn(40, 33), torch.rand(40, 33), torch.zeros(1, 33), torch.full((1, 33), -2.5), torch.randn(1, 33) * 1e-6])
    choose, low = (ops.choose_per_row_affine, -128) if affine else (ops.choose_per_row, -127)
    parameters = *choose(x, torch.int8), low, 127, torch.int8
    expected = ops.dequantize_per_row(ops.quantize_per_row(x, *parameters), *parameters, torch.float32)
    assert torch.equal((rounded_affine_rows if affine else rounded_rows)(x), expected)
    spread = x.amax(-1, keepdim=True).clamp(min=0) - x.amin(-1, keepdim=True).clamp(max=0)
    step = spread / 255 if affine else x.abs().amax(-1, keepdim=True) / 127
    assert bool(((expected - x).abs() <= step.clamp(min=1e-5 / 127) * 1.0001).all())


@pytest.mark.parametrize("name", ROUNDINGS)
def test_gradients_pass_as_if_nothing_were_rounded(name: str) -> None:
    x, weight = torch.randn(5, 7, requires_grad=True), torch.randn(5, 7)
    (ROUNDINGS[name](x) * weight).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, weight, rtol=2**-8 if name == "bf16" else 0, atol=0)  # bf16's gradients are bf16
