"""What torch.export is kept from doing where sizes are free: it would reason about them, and nobody asks for what it finds."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes import shape_prop

from sashiko.quant.program import _torch_export, bind, export, scratch

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


def test_memory_formats_are_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Tensor] = []
    shapes: Any = shape_prop
    ask = shapes.is_contiguous_for_memory_format_or_false

    def format_of(result: Tensor, **kwargs: Any) -> Any:
        asked.append(result)
        return ask(result, **kwargs)

    monkeypatch.setattr(shapes, "is_contiguous_for_memory_format_or_false", format_of)
    _torch_export(MODEL, CALL, range(4))
    assert not asked


class Sound(nn.Module):
    """Convolutions along samples of any number, and what reads them: each step of all sounds, or each sound."""

    def __init__(self, reads: str) -> None:
        super().__init__()
        self.front = nn.Sequential(*(nn.Conv1d(8 if i else 1, 8, 3, 2) for i in range(5)))
        self.mix, self.attend, self.reads = nn.Linear(8, 8), nn.MultiheadAttention(8, 2, batch_first=True), reads

    def forward(self, x: Tensor) -> Tensor:
        x = self.front(x[:, None]).transpose(1, 2)
        if self.reads == "sounds":
            return torch.as_tensor(self.attend(x, x, x, need_weights=False)[0])
        mixed: Tensor = self.mix(x.contiguous().transpose(0, 1))
        return mixed[:, :1] * 2 if self.reads == "one" and x.shape[0] == 1 else mixed


@torch.no_grad()
@pytest.mark.parametrize(("reads", "first"), [("steps", 2), ("sounds", 1)])
def test_what_decides_how_a_result_lies_in_memory_binds_no_size(reads: str, first: int) -> None:
    model = Sound(reads).eval()
    program = export(model, bind(model, (torch.randn(first, 400),), {}))
    assert not program.fixed
    for sizes in ((1, 400), (1, 200), (3, 500)):
        x = torch.randn(sizes)
        torch.testing.assert_close(scratch(program)(x), model(x), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_what_the_model_decides_by_the_same_sizes_binds() -> None:
    """Of a batch of 1 the length is free all the same, which serves more than a free batch."""
    model = Sound("one").eval()
    program = export(model, bind(model, (torch.randn(1, 400),), {}))
    assert re.search("batch dimension is fixed to 1 .* takes another way", program.fixed)
    x = torch.randn(1, 500)
    torch.testing.assert_close(scratch(program)(x), model(x), rtol=1e-5, atol=1e-5)


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("edges", torch.eye(5).to_sparse())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), self.edges * 2


def test_a_result_may_be_sparse() -> None:
    model, x = Weighted().eval(), torch.randn(3, 4)
    program = export(model, bind(model, (x,), {}))
    assert any(name.endswith("edges") for name in program.attributes)
