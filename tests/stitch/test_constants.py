"""What is computed once, outside the code: expressions over weights, whoever computes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import sashiko
from sashiko.driver.model import CompiledModel
from sashiko.runtime.plan import AtenStep


class Weighted(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.eye(6) + 0.1 * torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


def left(compiled: CompiledModel) -> list[str]:
    return [str(step.target) for step in compiled.executable.plan.segments if isinstance(step, AtenStep)]


@torch.no_grad()
@pytest.mark.parametrize("function", [
    lambda x, w: x * torch.linalg.slogdet(w)[1],  # one of several results
    lambda x, w: x @ torch.linalg.inv(w + 1.0),  # over native operations
    lambda x, w: x + torch.sort(w.double())[0].cumsum(0).float(),
], ids=["an element", "a product", "another type"])
def test_what_pytorch_computes_of_weights_alone_is_computed_once(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, x = Weighted(function).eval(), torch.randn(6, 6)
    compiled = sashiko.compile(model, (x,), strict=True)
    assert left(compiled) == []
    for _ in range(2):
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)
        model.weight.mul_(1.5)


def quantile(x: Tensor) -> Tensor:
    return torch.relu(x - x.std(-1, keepdim=True) * torch.distributions.Normal(0, 1).icdf(torch.tensor(0.95)))


@torch.no_grad()
@pytest.mark.parametrize("function", [
    lambda x, w: x * torch.erfinv(torch.arange(6) / 7),
    lambda x, w: quantile(x),
    lambda x, w: x @ torch.linalg.qr(torch.arange(36).reshape(6, 6).float() + torch.eye(6))[0],
    lambda x, w: (x + 1, torch.erfinv(torch.arange(6) / 7)),
], ids=["of a range", "of a number", "an element", "a result"])
def test_what_pytorch_computes_of_nothing_is_computed_once(function: Callable[[Tensor, Tensor], Tensor], tmp_path: Path) -> None:
    model, x = Weighted(function).eval(), torch.randn(6, 6)
    compiled = sashiko.compile(model, (x,), strict=True)
    assert left(compiled) == []
    compiled.save(tmp_path / "m.sashiko")
    for each in (compiled, sashiko.load(tmp_path / "m.sashiko")):
        for _ in range(2):
            result = each(x)
            torch.testing.assert_close(result, model(x), rtol=1e-5, atol=1e-5)
            for own in result if isinstance(result, tuple) else ():
                own.zero_()


@torch.no_grad()
@pytest.mark.parametrize("draw", [lambda: torch.bernoulli(torch.full((6,), 0.5)), lambda: torch.rand(6)])
def test_numbers_that_are_drawn_of_nothing_are_drawn_in_every_call(draw: Callable[[], Tensor]) -> None:
    x = torch.zeros(64, 6)
    compiled = sashiko.compile(Weighted(lambda x, w: x + draw()).eval(), (x,))
    assert left(compiled) and len({tuple(compiled(x)[0].tolist()) for _ in range(20)}) > 1


@torch.no_grad()
def test_numbers_that_are_drawn_are_drawn_in_every_call() -> None:
    model, x = Weighted(lambda x, w: x + torch.rand_like(w)).eval(), torch.randn(6, 6)
    compiled = sashiko.compile(model, (x,))
    assert left(compiled) and not torch.equal(compiled(x), compiled(x))
