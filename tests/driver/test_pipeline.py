"""The settings of compilations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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


class Factor(nn.Module):
    """A product with a weight."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.function, self.w = function, nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.w)


FACTORS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...], tuple[int, ...]]] = {
    "heads": (lambda x, w: torch.einsum("btm,mhd->bthd", x, w), (32, 4, 8), (3, 5, 32)),
    "heads first": (lambda x, w: torch.einsum("btm,hmd->bhtd", x, w), (4, 32, 8), (3, 5, 32)),
    "time first": (lambda x, w: torch.einsum("btm,mhd->tbdh", x, w), (32, 4, 8), (3, 5, 32)),
    "weight first": (lambda x, w: torch.einsum("mhd,btm->bthd", w, x), (32, 4, 8), (3, 5, 32)),
    "of heads": (lambda x, w: torch.einsum("bthd,hdm->btm", x, w), (4, 8, 32), (3, 5, 4, 8)),
    "of heads first": (lambda x, w: torch.einsum("bhtd,mdh->btm", x, w), (32, 8, 4), (3, 4, 5, 8)),
    "tensordot": (lambda x, w: torch.tensordot(x, w, ([3, 2], [1, 0])), (4, 8, 32), (3, 5, 4, 8)),
    "inner": (lambda x, w: torch.inner(x, w) + w[:, 0], (32, 8), (3, 5, 8)),
    "batch of one": (lambda x, w: torch.bmm(x.flatten(0, 1)[None], w) + w[0, 0], (1, 8, 32), (3, 5, 8)),
    "vector": (lambda x, w: torch.addmv(w[:, 0], w, x.flatten(), beta=0.5, alpha=2.0), (32, 15), (3, 5)),
    "added": (lambda x, w: torch.addbmm(w[0, 0], x, w, alpha=0.5), (3, 8, 32), (3, 5, 8)),
}


@pytest.mark.parametrize("name", FACTORS)
def test_products_with_weights_are_linear_in_any_spelling(name: str) -> None:
    """So that they are rounded to bf16 where it is asked for, and biases are theirs."""
    function, shape, data = FACTORS[name]
    model, x = Factor(function, *shape).eval(), torch.randn(data)
    exact = function(x.double(), model.w.double())
    for precision in ("fp32", "bf16"):
        compiled = sashiko.compile(model, (x,), precision=precision)
        assert "linear" in compiled.explain() and " matmul" not in compiled.explain().split("rules that")[0]
        error = (compiled(x) - exact).abs().max() / exact.abs().max()
        assert error < (1e-6 if precision == "fp32" else 1e-2) and (error > 1e-4) == (precision == "bf16")
    free = None if name in ("vector", "added") else ({0: torch.export.Dim("batch", min=2, max=9)},)
    model, narrow = model.bfloat16(), torch.randn(7, *data[1:]).bfloat16() if free else x.bfloat16()
    found, expected = sashiko.compile(model, (x.bfloat16(),), dynamic_shapes=free)(narrow), model(narrow)
    assert found.dtype == torch.bfloat16 and (found - expected).abs().max() <= 2e-2 * expected.abs().max()
