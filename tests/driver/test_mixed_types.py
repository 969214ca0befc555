"""Operands of several element types: what PyTorch refuses is refused, what it takes is compiled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

import sashiko
from tests.driver.functions import Apply, agree, left

X, W, V = torch.randn(2, 4), torch.randn(3, 4), torch.randn(4)
Function = Callable[..., torch.Tensor]

REFUSED: dict[str, tuple[Function, tuple[torch.Tensor, ...]]] = {
    "linear": (F.linear, (X, W.bfloat16())),
    "linear of f64": (F.linear, (X.double(), W)),
    "bias": (F.linear, (X.bfloat16(), W.bfloat16(), torch.randn(3))),
    "product": (torch.mm, (X, W.t().double())),
    "vector": (torch.mv, (X, V.double())),
    "added": (torch.addmm, (torch.randn(3).double(), X, W.t())),
    "layer_norm": (lambda x, w: F.layer_norm(x, (4,), w, w), (X.double(), V)),
    "narrow parameters": (lambda x, w: F.layer_norm(x, (4,), w, w), (X, V.half())),
    "a narrow bias": (lambda x, w: F.layer_norm(x, (4,), w, w.bfloat16()), (X.bfloat16(), V)),
    "group_norm": (lambda x, w: F.group_norm(x, 2, w, w), (X.double(), V)),
    "index_add": (lambda x, y: x.index_add(0, torch.tensor([1]), y), (X, torch.ones(1, 4).double())),
}


@pytest.mark.parametrize("name", REFUSED)
def test_as_pytorch_refuses(name: str) -> None:
    function, args = REFUSED[name]
    torch._dynamo.reset()
    said = r"dtype|datatype|scalar type|expected.*type"
    for call in (function, torch.compile(function, backend="sashiko")):
        with pytest.raises(RuntimeError, match=said):
            call(*args)
    with pytest.raises(sashiko.InputError, match=f"the model itself fails with this example: RuntimeError: .*({said})"):
        sashiko.compile(Apply(function).eval(), args)


def test_what_pytorch_takes_is_left_to_it() -> None:
    model, args = Apply(torch.special.zeta).eval(), (torch.full((3,), 2.5), torch.rand(3, dtype=torch.float64) + 1)
    compiled = sashiko.compile(model, args)
    assert left(compiled) == ["aten.special_zeta.default"]
    assert torch.equal(compiled(*args), model(*args))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_wide_parameters_of_a_norm(dtype: torch.dtype) -> None:
    agree(lambda x, w: F.layer_norm(x, (4,), w, w), X.to(dtype), V)
    agree(lambda x, w: F.group_norm(x[..., None], 2, w, w), X.to(dtype), V)
