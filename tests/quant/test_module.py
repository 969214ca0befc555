"""Models whose attributes are called as what a quantized module has of its own is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

import sashiko
from sashiko.quant import QATModule, prepare_qat, quantize

# Some of those of a GraphModule, and all others.
OWN = ["graph", "code", "meta", "_graph", "recompile", "__copy__", *sorted(set(dir(QATModule)) - set(dir(GraphModule)))]


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


class State(nn.Module):
    """Other attributes than parameters, of names that a GraphModule has: a buffer that it writes into, one that is not saved, a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("graph", torch.zeros(8))
        self.register_buffer("code", torch.randn(8), persistent=False)
        self.meta = torch.randn(8)
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        graph = self.get_buffer("graph")
        graph.add_(1)
        return self.layer(x * self.get_buffer("code") + self.meta) + graph


def test_buffers_and_tensors_of_any_name() -> None:
    torch.manual_seed(0)
    model, x = State().eval(), torch.randn(16, 8)
    small = quantize(model, [x])
    assert small.state_dict()["graph_"].eq(0).all() and {"code_", "meta_"} <= dict(small.named_buffers()).keys()
    for _ in range(2):
        expected = model(x).detach()
        torch.testing.assert_close(small(x), expected, rtol=0, atol=0.03 * expected.abs().max().item())
