"""What a quantized model requires of sizes is asked of an example, too, in its own words."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sashiko
from sashiko.diagnostics.errors import InputError


class Compared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sum() + (y * 2 if x.shape[0] != y.shape[0] else y * 3)


@torch.no_grad()
def test_an_example_that_the_model_takes_another_way_for() -> None:
    def pair(rows: int, others: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(rows, 4), torch.randn(others)

    quantized = sashiko.quantize(Compared().eval(), [pair(3, 5)], progress=False)
    assert sashiko.compile(quantized, pair(4, 2)) is not None
    with pytest.raises(InputError, match=r"captured where .* != 0, and here .* = 4, .* = 4") as refused:
        sashiko.compile(quantized, pair(4, 4))
    assert "quantize the model from a batch of these sizes" in refused.value.hint
