"""The settings of compilations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import sashiko


@pytest.mark.parametrize(("name", "given"), [("precision", "fp7"), ("strict", "False"), ("strict", 1)])
def test_settings_that_mean_nothing(name: str, given: Any) -> None:
    model, x = nn.Linear(8, 8).eval(), torch.randn(3, 8)
    for attempt in (sashiko.compile, sashiko.quantize_and_compile):
        with pytest.raises(sashiko.InputError, match=f"{name} is {given!r}"):
            attempt(model, (x,), **{name: given})
