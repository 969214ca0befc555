"""Bilinear layers, compiled with nothing left to PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim
from torch.testing import assert_close

import sashiko
from tests.driver.functions import Apply, agree, left


@pytest.mark.parametrize("shape", [(), (5,), (2, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_bilinear_layers(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Bilinear(19, 4, 6).eval().to(dtype)
    x, y = torch.randn(*shape, 19).to(dtype), torch.randn(*shape, 4).to(dtype)
    error = 0.03 if dtype == torch.bfloat16 else 1e-5
    assert_close(sashiko.compile(model, (x, y), strict=True)(x, y), model(x, y), rtol=error, atol=error)


def test_any_number_of_rows() -> None:
    torch.manual_seed(0)
    shapes = ({0: Dim("n")}, {0: Dim("n")}, None)
    fast = agree(F.bilinear, torch.randn(5, 6), torch.randn(5, 7), torch.randn(3, 6, 7), dynamic_shapes=shapes)
    x, y, w = torch.randn(1000, 6), torch.randn(1000, 7), torch.randn(3, 6, 7)
    assert_close(fast(x, y, w), F.bilinear(x, y, w), rtol=1e-5, atol=1e-5)


def test_other_products_of_three_tensors_stay_with_pytorch() -> None:
    x, y, z = torch.randn(3, 4), torch.randn(3, 4), torch.randn(3, 4)
    model = Apply(lambda x, y, z: torch._trilinear(x, y, z, [], [], [], [1])).eval()
    fast = sashiko.compile(model, (x, y, z))
    assert left(fast) == ["aten._trilinear.default"] and "a product of three tensors" in fast.explain()
    assert_close(fast(x, y, z), model(x, y, z))
