"""The settings of compilations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import sashiko
from sashiko.driver.pipeline import fast_bf16
from sashiko.graph import build as b
from sashiko.graph.types import f16, f32
from sashiko.platforms.catalogue import CATALOGUE
from tests.machines import HIDDEN, ZEN4


@pytest.mark.parametrize(("name", "given"), [("precision", "fp7"), ("strict", "False"), ("strict", 1)])
def test_settings_that_mean_nothing(name: str, given: Any) -> None:
    model, x = nn.Linear(8, 8).eval(), torch.randn(3, 8)
    for attempt in (sashiko.compile, sashiko.quantize_and_compile):
        with pytest.raises(sashiko.InputError, match=f"{name} is {given!r}"):
            attempt(model, (x,), **{name: given})


def test_bf16_is_chosen_where_its_products_are_faster() -> None:
    """By instructions for all, or by integers, for attention of some size and for constant weights, of integers only where bytes are
    multiplied."""
    x, y, half = b.input_(0, f32, (1, 2, 60, 64)), b.input_(1, f32, (1, 2, 40, 64)), b.input_(4, f16, (1, 2, 60, 64))
    made, few = b.relu(y), b.relu(b.input_(5, f32, (1, 2, 5, 64)))
    rows, weight = b.input_(2, f32, (40, 64)), torch.randn(100, 64)
    integers = torch.ones(100, 64, dtype=torch.int8)
    products = {
        "attention": b.attention(made, made, made, scale=1.0), "few": b.attention(few, made, made, scale=1.0),
        "stored": b.attention(x, x, x, scale=1.0), "few stored": b.attention(made, y, y, scale=1.0),
        "halves": b.attention(half, half, half, scale=1.0), "linear": b.linear(rows, b.constant(weight)),
        "integers": b.linear(rows, b.constant(integers)),
        "groups": b.group_linear(rows, b.constant(integers), b.constant(torch.ones(100, 2))),
        "activations": b.linear(rows, b.input_(3, f32, (100, 64))),
        "few columns": b.linear(rows, b.constant(weight[:30])), "few k": b.linear(b.input_(6, f32, (40, 32)), b.constant(weight[:, :32])),
    }
    native, words = set(products), {"attention", "stored", "linear"}
    bytes_too = words | {"integers", "groups"}
    wanted = {"x86_64_amx": native, "neoverse_n2": native, "zen4": native, "x86_64_v3": words}
    wanted |= {"x86_64_vnni": bytes_too, HIDDEN.name: bytes_too}
    for target in (*CATALOGUE, HIDDEN, ZEN4):
        assert {name for name, value in products.items() if fast_bf16(target, value)} == wanted.get(target.name, set()), target.name
