"""Products inside of what controls the flow of a model stay as they are, and are named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops import cond, scan, while_loop
from torch._higher_order_ops.map import map as control_map

from sashiko.quant import quantize
from tests.sweeps import swept


class Controlled(nn.Module):
    def __init__(self, control: Callable[[Controlled, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.a, self.b, self.control = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), control

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.control(self, self.first(x))


def branches(m: Controlled, x: torch.Tensor) -> torch.Tensor:
    def otherwise(x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(cond(x.sum() > -1, lambda x: F.linear(x, m.b.weight), lambda x: -x, (x,)))

    return torch.as_tensor(cond(x.sum() > 0, m.a, otherwise, (x,)))


CONTROLS: dict[str, Callable[[Controlled, torch.Tensor], torch.Tensor]] = {
    "cond": branches,
    "while_loop": lambda m, x: while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, m.b(m.a(x))), (torch.tensor(0), x))[1],
    "scan": lambda m, x: scan(lambda c, y: (m.a(c), m.b(y)), torch.zeros(8), x)[1],
    "map": lambda m, x: control_map(lambda y: m.b(m.a(y)), x),
}


@pytest.mark.parametrize("name", swept(list(CONTROLS), ["cond", "while_loop"]))
def test_products_inside_of_control_flow_are_named(name: str) -> None:
    record = quantize(Controlled(CONTROLS[name]).eval(), [torch.randn(3, 8)], exclude="b").record
    assert [item.site.name for item in record.sites] == ["first"]
    assert [item.name for item in record.left_out] == ["a", "b"]
    assert {(item.op, item.reason) for item in record.left_out} == {("linear", f"it is inside of {name}, which stays as it is")}
