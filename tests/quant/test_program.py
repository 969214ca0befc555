"""What torch.export is kept from doing where sizes are free: it would reason about them, and nobody asks for what it finds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes import shape_prop

from sashiko.quant.program import _torch_export, bind, export

MODEL = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), *(nn.ReLU() for _ in range(9))).eval()
CALL = bind(MODEL, (torch.rand(2, 3, 16, 16),), {})


def test_sizes_that_are_quotients_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results that have such are not made again from what torch keeps."""
    again: list[Tensor] = []
    made: Any = FakeTensorMode._output_from_cache_entry

    def make(*args: Any) -> Any:
        result = made(*args)
        if isinstance(result, Tensor) and any("//" in str(size) for size in result.shape):
            again.append(result)
        return result

    monkeypatch.setattr(FakeTensorMode, "_output_from_cache_entry", make)
    assert not export(MODEL, CALL).fixed
    assert len(again) <= 1  # the first such result, before which no size was a quotient


def test_memory_formats_are_not_asked_for_obliviously(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Tensor] = []
    shapes: Any = shape_prop
    ask = shapes.is_contiguous_for_memory_format_or_false

    def format_of(result: Tensor, **kwargs: Any) -> Any:
        asked.append(result)
        return ask(result, **kwargs)

    monkeypatch.setattr(shapes, "is_contiguous_for_memory_format_or_false", format_of)
    for obliviously in (False, True):
        asked.clear()
        _torch_export(MODEL, CALL, range(4), obliviously)
        assert bool(asked) != obliviously
