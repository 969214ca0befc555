"""The settings of compilations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import sashiko
from sashiko.driver.pipeline import fast_bf16
from sashiko.platforms.catalogue import CATALOGUE
from tests.machines import HIDDEN, ZEN4


@pytest.mark.parametrize(("name", "given"), [("precision", "fp7"), ("strict", "False"), ("strict", 1)])
def test_settings_that_mean_nothing(name: str, given: Any) -> None:
    model, x = nn.Linear(8, 8).eval(), torch.randn(3, 8)
    for attempt in (sashiko.compile, sashiko.quantize_and_compile):
        with pytest.raises(sashiko.InputError, match=f"{name} is {given!r}"):
            attempt(model, (x,), **{name: given})


def test_bf16_is_chosen_where_its_products_are_faster() -> None:
    assert [target.name for target in (*CATALOGUE, HIDDEN, ZEN4) if fast_bf16(target)] == ["x86_64_amx", "neoverse_n2", "zen4"]
