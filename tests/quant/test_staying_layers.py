"""Linear layers that `quantize_` leaves as they are for what was put on them, and those that it takes for all that."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sashiko.quant import QuantizedLinear, experts, quantize_


class Scaled(nn.Linear):
    """Its owner reads the scale."""

    @property
    def scale(self) -> float:
        return 2.0


class Owner(nn.Module):
    """x: [B, 8] -> [B, 4]"""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer, self.last = layer, nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.last(self.layer(x) * getattr(self.layer, "scale", 1.0)))


def with_attribute(name: str, value: object) -> nn.Linear:
    layer = nn.Linear(8, 8)
    setattr(layer, name, value)
    return layer


def with_forward() -> nn.Linear:
    """As accelerate puts its hooks on layers."""
    layer = nn.Linear(8, 8)
    plain = layer.forward

    @functools.wraps(plain)
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return 2 * plain(x)

    layer.forward = doubled  # type: ignore[method-assign, assignment]
    return layer


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (with_forward, "its forward was replaced"),
        (lambda: Scaled(8, 8), "it has scale, which is something else in a quantized layer"),
        (lambda: with_attribute("scale", 2.0), "it has scale,"),
        (lambda: with_attribute("scale", nn.Parameter(torch.tensor(2.0))), "it has scale,"),
        (lambda: with_attribute("integers", 1), "it has integers,"),
    ],
    ids=["forward", "property", "attribute", "parameter", "integers"],
)
def test_layers_with_something_put_on_them_stay(made: Callable[[], nn.Linear], reason: str) -> None:
    torch.manual_seed(0)
    model, x = Owner(made()).eval(), torch.randn(4, 8)
    before = model(x)
    record = quantize_(model, "int8-weight")
    assert [(item.name, item.reason.startswith(reason)) for item in record.left_out] == [("layer", True)]
    assert [item.site.name for item in record.sites] == ["last"]
    assert (model(x) - before).norm() / before.norm() < 0.01


def test_marks_of_libraries_do_not_make_layers_stay() -> None:
    layer = with_attribute("_is_hf_initialized", True)
    layer.register_full_backward_hook(lambda *args: None)
    layer.compile(backend="eager")
    model = Owner(layer).requires_grad_(False)
    assert quantize_(model, "int8-weight").left_out == () and isinstance(model.get_submodule("layer"), QuantizedLinear)


@pytest.mark.parametrize("preset", ["int8-weight", "int8-dynamic", "int4-weight"])
def test_empty_layers_stay(preset: str) -> None:
    last = nn.Linear(0, 8)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 0), last).eval()
    record = quantize_(model, preset)
    assert {item.name: item.reason for item in record.left_out} == {"1": "the weight is empty", "2": "the weight is empty"}
    assert isinstance(model[0], QuantizedLinear)
    assert torch.equal(model(torch.randn(2, 64)), F.linear(torch.empty(2, 0), last.weight, last.bias))


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
