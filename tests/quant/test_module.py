"""Models whose attributes are called as the methods and properties of a quantized module are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

import sashiko
from sashiko.quant import QATModule, prepare_qat, quantize

OWN = sorted(set(dir(QATModule)) - set(dir(GraphModule)))


class Named(nn.Module):
    """A layer and a parameter of two names, the second with an underscore behind it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.names = name, f"{name}_"
        setattr(self, self.names[0], nn.Linear(8, 8).requires_grad_(False))
        setattr(self, self.names[1], nn.Parameter(torch.randn(8, 8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layer, weight = (getattr(self, name) for name in self.names)
        result: torch.Tensor = layer(x).relu() @ weight
        return result


@pytest.mark.parametrize("name", [*OWN, "gate", "plan"])
def test_attributes_of_any_name(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Named(name).eval(), torch.randn(16, 8)
    small, trained = quantize(model, [x]), prepare_qat(model, [x])
    expected = model(x).detach()
    small.save(tmp_path / "small.sashiko")
    for module in (small, sashiko.load(tmp_path / "small.sashiko"), trained, trained.convert()):
        torch.testing.assert_close(module(x).detach(), expected, rtol=0, atol=0.03 * expected.abs().max().item())
    kept = name if name not in OWN else f"{name}_"
    assert f"{kept}.weight_int8" in small.state_dict() and f"{kept}__int8" in small.state_dict() and small.report().startswith("2 in int8")
    assert [n for n, p in trained.named_parameters() if not p.requires_grad] == [f"{kept}.weight", f"{kept}.bias"]
