"""Names of operations whose modules have a number sign in theirs, as the second call of a module has in its name."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from sashiko.quant import quantize, quantize_


def test_a_number_sign_in_a_name_is_part_of_it() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleDict({"a#b": nn.Linear(8, 8), "a": nn.Linear(8, 8), "c": nn.Linear(8, 8)})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in (*self.layers.values(), self.layers["a"]):
                x = layer(x).relu()
            return x

    for exclude, kept in (("layers.a", ["a#b", "c"]), ("layers.a#b", ["a", "c", "a#2"]), ("layers.a#2", ["a#b", "a", "c"])):
        small = quantize(Named().eval(), [torch.randn(3, 8)], exclude=exclude)
        assert [item.site.name.removeprefix("layers.") for item in small.record.sites] == kept


class Repeated(nn.Module):
    """Calls one layer twice, and one of a name that the second call would have."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.add_module("a#2", nn.Linear(8, features))
        with torch.no_grad():
            self.get_parameter("a#2.bias").add_(50)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.a(self.a(x))
        return h, self.get_submodule("a#2")(h)


@pytest.mark.parametrize("features", [8, 16])
def test_a_name_like_that_of_a_second_call_is_not_taken_from_its_module(features: int) -> None:
    model, x = Repeated(features).eval(), torch.randn(64, 8)
    small = quantize(model, [x], preset="int8-static")
    assert [item.site.name for item in small.record.sites] == ["a", "a#3", "a#2"]
    assert {"a.bias", "a#2.bias"} <= small.state_dict().keys()
    with torch.no_grad():
        for found, exact in zip(small(x), model(x), strict=True):
            assert (found - exact).norm() < 0.05 * exact.norm()
    for exclude, kept in (("a", ["a#2"]), ("a#2", ["a", "a#3"])):
        assert [item.site.name for item in quantize(model, [x], exclude=exclude).record.sites] == kept
        in_place = quantize_(copy.deepcopy(model), "int8-weight", exclude=exclude)
        assert [item.site.name for item in in_place.sites] == [name for name in kept if name != "a#3"]
