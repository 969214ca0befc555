"""GPTQ in place: which layers share the sums of their inputs."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sashiko.quant import OpScheme, Scheme, WeightScheme, quantize_
from sashiko.quant.gptq import Inputs, compensated

_COMPENSATED = Scheme(OpScheme(None, WeightScheme(4, "group", 8, compensate=True)))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_input_that_is_written_to_is_another_one(mode: type[torch.no_grad]) -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            return self.second(F.relu(x, inplace=True)) + y  # type: ignore[no-any-return]

    mixing = torch.randn(16, 16)
    with mode():
        model, data = Writing().eval(), [torch.randn(32, 16) @ mixing for _ in range(4)]
        quantize_(one := copy.deepcopy(model), _COMPENSATED, data)
        rows = torch.cat(data).relu().double()
        expected = compensated(model.second.weight, Inputs.of(rows.t() @ rows), _COMPENSATED.default.weight)
        assert (one.second.integers == expected.values).float().mean() > 0.99  # sums in another order
