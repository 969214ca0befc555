"""Deviations that are small beside the mean, whose rounding would show in them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.testing import assert_close

import sashiko
from tests.driver.functions import Apply

FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "std": lambda x: x.std(1),
    "last axis": lambda x: x.var(-1, correction=0),
    "two axes": lambda x: x.var((0, 1), keepdim=True),
    "with the mean": lambda x: torch.var_mean(x, 1)[0],
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_mean_is_far(name: str) -> None:
    torch.manual_seed(0)
    function = FUNCTIONS[name]
    compiled = sashiko.compile(Apply(function).eval(), (torch.randn(4, 17, 33),), strict=True)
    for mean, deviation in ((0.0, 1.0), (100.0, 1e-5), (-1e4, 1e-2), (1e6, 0.0)):
        x = torch.randn(4, 17, 33) * deviation + mean
        assert_close(compiled(x).double(), function(x.double()), rtol=1e-5, atol=0)
    huge = torch.full((4, 17, 33), 3e36)
    huge[:, ::2] = -1e36
    assert not compiled(huge).isnan().any()
