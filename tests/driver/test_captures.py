"""What a quantized model requires of sizes is asked of an example, too, in its own words."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.export import Dim

import sashiko
from sashiko.diagnostics.errors import InputError


class Compared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sum() + (y * 2 if x.shape[0] != y.shape[0] else y * 3)


class Counted(Compared):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sum() + (y * 2 if len(x) > 3 else y * 3)  # `len` is a number to PyTorch


def pair(rows: int, others: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 4), torch.randn(others)


@torch.no_grad()
def test_an_example_that_the_model_takes_another_way_for() -> None:
    quantized = sashiko.quantize(Compared().eval(), [pair(3, 5)], progress=False)
    assert sashiko.compile(quantized, pair(4, 2)) is not None
    with pytest.raises(InputError, match=r"where x.shape\[0\] != y.shape\[0\], and here x.shape\[0\] = 4, y.shape\[0\] = 4") as refused:
        sashiko.compile(quantized, pair(4, 4))
    assert "quantize the model from a batch of these sizes" in refused.value.hint


@torch.no_grad()
def test_an_example_of_other_sizes_than_the_program_is_fixed_to() -> None:
    torch.manual_seed(0)
    model = Counted().eval()
    quantized = sashiko.quantize(model, [pair(3, 5)], progress=False)
    x = pair(3, 2)
    torch.testing.assert_close(sashiko.compile(quantized, x)(*x), model(*x), rtol=0.05, atol=0.05)
    with pytest.raises(InputError, match="'x' has size 4 in dimension 0, where the program is fixed to 3"):
        sashiko.compile(quantized, pair(4, 5))
    free = sashiko.compile(quantized, x, dynamic_shapes=({0: Dim.AUTO}, {0: Dim.AUTO}))
    torch.testing.assert_close(free(*x), model(*x), rtol=0.05, atol=0.05)
    with pytest.raises(InputError):
        free(*pair(4, 5))
