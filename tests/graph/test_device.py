"""Graphs for GPUs: what is left to PyTorch, what is refused as a whole, and how tensors on other devices are told of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from sashiko.cpu_codegen.math.double import LIBRARY
from sashiko.diagnostics.errors import InputError, Unsupported
from sashiko.graph.capture import from_fx
from sashiko.graph.device import CPU, PERIODIC, WIDE_ELSEWHERE, device_of
from sashiko.graph.randomness import draws
from tests.simulated_gpu import on_gpu

aten = torch.ops.aten


def left(model: Any, *args: torch.Tensor) -> set[str]:
    return {note.op for note in on_gpu(model, *args).leftovers}


def test_products_and_orders_are_pytorchs() -> None:
    x = torch.randn(4, 8, 8)
    assert left(lambda x: F.gelu(x) @ x.softmax(-1), x) == {"aten.bmm.default"}
    assert left(lambda x, w: F.conv2d(F.relu(x), w), x, torch.randn(3, 4, 3, 3)) == {"aten.convolution.default"}
    assert left(lambda x: x.sort(-1).values + x.cumsum(1), torch.randn(2, 300)) == {"aten.sort.default", "aten.cumsum.default"}
    assert not left(lambda x: F.layer_norm(x, (8,)) * x.sum(0) + torch.arange(8, device=x.device), x)


def test_functions_of_the_c_library_are_pytorchs() -> None:
    assert {*WIDE_ELSEWHERE, *PERIODIC} == {*LIBRARY, "sigmoid"}
    x = torch.randn(4)
    assert left(lambda x: x.exp() + x.tanh(), x) == set()
    assert left(lambda x: x.exp() + x.tanh(), x.double()) == {"aten.exp.default", "aten.tanh.default"}
    assert left(lambda x: x.sin(), x) == {"aten.sin.default"}


def test_one_device() -> None:
    assert device_of([1, torch.randn(2), None]) == CPU
    captured = on_gpu(lambda x: x + 1, torch.randn(3))
    assert captured.device.type == "cuda"
    with pytest.raises(InputError, match=r"is on cpu, captured on cuda:0"):
        captured.bind([torch.randn(3)])
    with FakeTensorMode():
        there = torch.empty(3, device="cuda")
    with pytest.raises(Unsupported, match="on cpu"):
        from_fx(torch.fx.symbolic_trace(lambda x, y: (x, y)), [torch.randn(3), there])


def test_who_draws() -> None:
    attention = aten._scaled_dot_product_flash_attention.default
    assert draws(aten.bernoulli.default, (1,), {}) and not draws(aten.add.Tensor, (1, 2), {}) and not draws(len, (), {})
    assert not draws(attention, (1, 2, 3), {}) and not draws(attention, (1, 2, 3, 0.0), {})
    assert draws(attention, (1, 2, 3, 0.1), {}) and draws(attention, (1, 2, 3), {"dropout_p": 0.5})
