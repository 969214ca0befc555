"""What PyTorch asks of sizes for the strides of results does not bind a program to them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.export import Dim

import sashiko
from sashiko.diagnostics.errors import InputError


class Lines(nn.Module):
    """Recognizes lines of text of any width: [batch, 1, 8, width] to [batch, width / 2 - 1, 30]."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.conv, self.out = nn.MaxPool2d(2), nn.Conv2d(1, 16, (4, 2)), nn.Linear(16, 30)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        columns: torch.Tensor = self.conv(self.pool(x)).squeeze(2)
        return torch.as_tensor(self.out(columns.transpose(1, 2)))


class Reshaped(nn.Module):
    """Rows and columns exchanged, and all of them in one dimension, which copies."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, 1:].transpose(1, 2).reshape(-1) * 2


@torch.no_grad()
def test_sizes_that_reshapes_found_unequal_may_be_equal() -> None:
    torch.manual_seed(0)
    model, sizes = Lines().eval(), {0: Dim("batch", min=1, max=8), 3: Dim("width", min=8, max=128)}
    compiled = sashiko.compile(model, (torch.randn(2, 1, 8, 64),), dynamic_shapes=(sizes,))
    for shape in ((1, 1, 8, 64), (1, 1, 8, 10), (3, 1, 8, 8), (4, 1, 8, 10)):
        x = torch.randn(shape)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_copies_of_equal_sizes() -> None:
    model, sizes = Reshaped().eval(), {axis: Dim(f"n{axis}", min=3 if axis == 1 else 1, max=9) for axis in range(3)}
    compiled = sashiko.compile(model, (torch.randn(3, 7, 5),), dynamic_shapes=(sizes,))
    for shape in ((1, 7, 5), (4, 5, 4), (4, 4, 4), (2, 3, 1), (1, 3, 1), (2, 3, 2)):
        x = torch.randn(shape)
        assert torch.equal(compiled(x), model(x))


@torch.no_grad()
def test_a_quantized_model_takes_any_batch() -> None:
    torch.manual_seed(0)
    model = Lines().eval()
    quantized = sashiko.quantize(model, [torch.randn(2, 1, 8, 64), torch.randn(1, 1, 8, 48)], progress=False)
    x = torch.randn(1, 1, 8, 40)
    for found in (quantized(x), sashiko.compile(quantized, (x,))(x)):
        assert float((found - model(x)).norm() / model(x).norm()) < 0.05


@torch.no_grad()
def test_what_the_model_decides_by_sizes_still_binds() -> None:
    class Square(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.shape[0] != x.shape[1] else x * 3

    sizes = {0: Dim("a", min=1, max=9), 1: Dim("b", min=1, max=9)}
    compiled = sashiko.compile(Square().eval(), (torch.randn(3, 4),), dynamic_shapes=(sizes,))
    with pytest.raises(InputError, match="another way"):
        compiled(torch.randn(4, 4))
