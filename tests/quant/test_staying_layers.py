"""Layers that `quantize_` leaves as they are."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sashiko.quant import QuantizedLinear, experts, quantize_


@pytest.mark.parametrize("preset", ["int8-weight", "int8-dynamic", "int4-weight"])
def test_empty_layers_stay(preset: str) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 0), nn.Linear(0, 8)).eval()
    record = quantize_(model, preset)
    assert {item.name: item.reason for item in record.left_out} == {"1": "the weight is empty", "2": "the weight is empty"}
    assert isinstance(model[0], QuantizedLinear)
    assert torch.equal(model(torch.randn(2, 64)), F.linear(torch.empty(2, 0), model[2].weight, model[2].bias))


def test_empty_matrices_of_experts_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    class Matrices(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.is_transposed = False
            self.gate_up_proj, self.down_proj = nn.Parameter(torch.empty(0, 16, 8)), nn.Parameter(torch.randn(3, 8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    monkeypatch.setattr(experts, "_MAKER", __name__)
    record = quantize_(nn.Sequential(Matrices()), "int8-weight")
    assert [(item.name, item.reason) for item in record.left_out] == [("0.gate_up_proj", "the weight is empty")]
    assert [item.site.name for item in record.sites] == ["0.down_proj"]
