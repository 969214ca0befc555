"""Floats of modules under `torch.compile(..., dynamic=True)`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.nn import functional as F

from sashiko.driver import backend


class Model(torch.nn.Module):
    """Settings of layers, and a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = torch.nn.Embedding(8, 16), torch.nn.LayerNorm(16)
        self.scaling, self.factor = 0.3, 1.5

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embedding(ids)).unsqueeze(1)
        return F.scaled_dot_product_attention(x, x, x, scale=self.scaling) * self.factor


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """An entry for each time that AOTAutograd traces a graph."""
    seen: list[str] = []
    traced = backend._traced

    def counted(module: torch.fx.GraphModule, *rest: object) -> object:
        seen.append(type(module).__name__)
        return traced(module, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(backend, "_traced", counted)
    torch._dynamo.reset()
    yield seen
    torch._dynamo.reset()


@torch.no_grad()
def test_settings_of_layers_are_constants_before_a_graph_is_traced(traces: list[str]) -> None:
    model, ids = Model().eval(), torch.randint(0, 8, (2, 5))
    model.forward = torch.compile(model.forward, backend="sashiko", dynamic=True)  # type: ignore[method-assign]

    def check(ids: torch.Tensor) -> None:
        torch.testing.assert_close(model(ids), Model.forward(model, ids))

    check(ids)
    check(torch.randint(0, 8, (3, 7)))
    assert len(traces) == 1
    model.factor = 0.2
    check(ids)
    assert len(traces) == 1, "a factor is a number of the call"
    model.scaling = 0.9
    check(ids)
    assert len(traces) == 2


class Slope(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slope = torch.nn.Buffer(torch.tensor(0.2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.leaky_relu(x, self.slope.item())


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:sashiko leaves a graph")  # what takes such a number is PyTorch's
def test_numbers_of_tensors_are_no_settings(traces: list[str]) -> None:
    x = torch.randn(4, 8)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        torch.testing.assert_close(torch.compile(Slope(), backend="sashiko")(x), Slope()(x))
    assert len(traces) == 1


@torch.no_grad()
@pytest.mark.parametrize("layer", [F.softshrink, F.celu], ids=lambda layer: layer.__name__)
def test_a_number_that_layers_compute_with_may_be_another_in_each_call(traces: list[str], layer: Callable[..., torch.Tensor]) -> None:
    def call(x: torch.Tensor, number: float) -> torch.Tensor:
        return layer(x, number)

    x, compiled = torch.randn(4, 8), torch.compile(call, backend="sashiko", dynamic=True)
    for number in (0.2, 0.3, 0.4):
        torch.testing.assert_close(compiled(x, number), layer(x, number))
    assert len(traces) == 1
