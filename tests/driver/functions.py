"""Functions as models, and what compiled ones leave to PyTorch."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import sashiko
from sashiko.driver import backend
from sashiko.driver.model import build_model
from sashiko.runtime.plan import AtenStep


class Apply(nn.Module):
    """A function as a model."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def agree(function: Callable[..., Any], *args: torch.Tensor, dynamic_shapes: Any = None) -> sashiko.CompiledModel:
    """Compiles a function with nothing left to PyTorch, and compares what it gives with what PyTorch gives."""
    model = Apply(function).eval()
    fast = sashiko.compile(model, args, dynamic_shapes=(dynamic_shapes,) if dynamic_shapes else None, strict=True)
    assert_close(fast(*args), model(*args), equal_nan=True)
    return fast


def left(compiled: sashiko.CompiledModel) -> list[str]:
    """The operations left to PyTorch."""
    return [str(s.target) for s in compiled.executable.plan.segments if isinstance(s, AtenStep)]


def compiled_by_the_backend(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[sashiko.CompiledModel]]:
    """What the backend of torch.compile makes from now on, as long as it lives."""
    made: list[weakref.ref[sashiko.CompiledModel]] = []

    def noted(*arguments: Any) -> sashiko.CompiledModel:
        compiled = build_model(*arguments)
        made.append(weakref.ref(compiled))
        return compiled

    monkeypatch.setattr(backend, "build_model", noted)
    return made


def at_most_ten(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    """With assertions of data, as they are where pytest does not rewrite them."""
    assert n.max().item() <= 10, f"too long: {x.shape}"
    assert (n >= 0).all().item(), "less than nothing"
    assert n.sum().item() < 20
    return x * n.max()
