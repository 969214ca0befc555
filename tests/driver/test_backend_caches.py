"""Caches that a graph of `torch.compile(backend="sashiko")` only reads, marked as static as those of transformers are."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from sashiko.driver import backend
from sashiko.driver.model import build_model
from sashiko.runtime.plan import InputTensor


class Cache:
    def __init__(self, length: int, batch: int = 2) -> None:
        self.keys = torch.randn(batch, length, 16)
        torch._dynamo.mark_static_address(self.keys)


class Reading(nn.Module):
    """Attention to what a cache has, as a decoder's to what its encoder made, and to a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.cache = nn.Linear(16, 16), Cache(5)
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.randn(16))
        self.shift = torch.randn(16)

    def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:
        for keys in (cache.keys, self.cache.keys):
            x = x + (self.project(x) @ keys.transpose(1, 2)).softmax(-1) @ keys
        return x * self.scale + self.shift


@pytest.mark.usefixtures("own_garbage")
def test_static_tensors_that_are_no_weights_are_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any cache of any length, in code that keeps none alive; parameters, buffers and other attributes stay part of it."""
    built: list[Any] = []
    monkeypatch.setattr(backend, "build_model", lambda *a: built.append(build_model(*a)) or built[-1])  # type: ignore[func-returns-value]
    torch._dynamo.reset()
    model, seen = Reading().eval(), []
    compiled = torch.compile(model, backend="sashiko", options={"strict": True}, dynamic=True)
    with torch.no_grad():
        for length in (5, 5, 7, 9):
            cache, model.cache, x = Cache(length), Cache(length + 1), torch.randn(2, 1, 16)
            seen += [weakref.ref(cache.keys), weakref.ref(model.cache.keys)]
            assert_close(compiled(x, cache), model(x, cache))
    assert len(built) == 1
    assert sum(isinstance(item, InputTensor) for item in built[0].executable.plan.inputs) == 3
    del cache
    gc.collect()
    assert [keys() is not None for keys in seen] == [False] * 7 + [True]
