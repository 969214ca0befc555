"""What is computed once, outside the code: expressions over weights, whoever computes them."""

from __future__ import annotations

from collections.abc import Callable

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


@torch.no_grad()
def test_numbers_that_are_drawn_are_drawn_in_every_call() -> None:
    model, x = Weighted(lambda x, w: x + torch.rand_like(w)).eval(), torch.randn(6, 6)
    compiled = sashiko.compile(model, (x,))
    assert left(compiled) and not torch.equal(compiled(x), compiled(x))
