"""What a model asserts of the numbers in its tensors is asserted in each call, and says where."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import sashiko
from tests.graph import asserting


class Checked(nn.Module):
    def __init__(self, check: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self.layer, self.check = nn.Linear(8, 8), check

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.check(x)
        result: torch.Tensor = self.layer(x)
        return result


@pytest.mark.parametrize(("check", "says"), [
    (asserting.is_small, r"Runtime assertion failed.*(test_assertions|asserting)\.py:\d+$"),
    (asserting.is_said_to_be_small, r"Runtime assertion failed.*(test_assertions|asserting)\.py:\d+$"),
    (asserting.is_small_in_whole_numbers, r"Runtime assertion failed.*(test_assertions|asserting)\.py:\d+$"),
    (asserting.is_small_without_a_message, r"an assertion of the model does not hold: (test_assertions|asserting)\.py:\d+$"),
    (asserting.is_small_with_a_message, "too large"),
])  # fmt: skip
@torch.no_grad()
def test_in_each_call(check: Callable[[torch.Tensor], None], says: str) -> None:
    model, x = Checked(check).eval(), torch.rand(4, 8)
    small = sashiko.quantize(model, [x], progress=False)
    for made in (sashiko.compile(model, (x,)), small, sashiko.compile(small, (x,))):
        torch.testing.assert_close(made(2 * x), model(2 * x), rtol=0, atol=0.05)
        with pytest.raises(RuntimeError, match=says):
            made(x + 6)
