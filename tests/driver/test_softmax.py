"""What subtracts the greatest of numbers that were multiplied: the difference is 0 there, however the product is computed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import sashiko
from sashiko.platforms.catalogue import CATALOGUE
from sashiko.platforms.host import host
from sashiko.platforms.target import Target
from tests.driver.functions import Apply
from tests.sweeps import swept

FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda x: torch.softmax(x * 0.3, -1),
    "down columns": lambda x: torch.softmax(x * 0.3, 0),
    "log_softmax": lambda x: torch.log_softmax(x * 0.3, -1),
    "logsumexp": lambda x: torch.logsumexp(x * 0.3, -1),
    "written out": lambda x: (x * 0.3 - (x * 0.3).amax(-1, keepdim=True)).exp(),
    "distance to the least": lambda x: x * 0.3 - (x * 0.3).amin(-1, keepdim=True),
}


@pytest.mark.parametrize("target", [t for t in CATALOGUE if not t.why_not_on(host())], ids=lambda t: t.name)
@pytest.mark.parametrize("name", swept(FUNCTIONS, ("softmax", "logsumexp")))
def test_large_numbers(name: str, target: Target) -> None:
    torch.manual_seed(0)
    for columns in (3, 100):
        compiled = sashiko.compile(Apply(FUNCTIONS[name]).eval(), (torch.ones(20, columns),), target=target.name)
        for size in (1e10, -1e12, torch.finfo(torch.float32).min / 4):
            x = (size * (1 + torch.rand(20, 1))).expand(20, columns).clone()
            assert_close(compiled(x), FUNCTIONS[name](x))


@pytest.mark.parametrize("function", [
    lambda y: y - y.amax(), lambda y: y - y.view(-1).max(), lambda y: y[:, ::2] - y.amax(1, keepdim=True),
    lambda y: y[1:] - y.amax(0), lambda y: y.flip(1) - y.amin(0).flip(0), lambda y: y.amax() - y, lambda y: y - y.cummax(0)[0],
    lambda y: y - torch.maximum(y.amax(0), y[:9].amax(1).amin()), lambda y: y - y.amax(0).clamp(min=0), lambda y: y - y.sort(0)[0][-1:],
])
def test_the_greatest_of_products_is_found_by_its_difference(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    class Products(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return function(a * b)

    a, b = torch.randn(2, 33, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(sashiko.compile(Products().eval(), (a, b))(a, b) == 0, function(a * b) == 0)
