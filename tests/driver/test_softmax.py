"""What subtracts the greatest of large numbers that were multiplied: the difference is 0 there, however the product is computed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
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
