"""Every result is a tensor of its own: who writes into one changes no argument, no weight, no other result, and none of the next call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import sashiko


class Weighted(nn.Module):
    """A function of a weight, a buffer and an argument."""

    def __init__(self, function: Callable[[Weighted, Tensor], tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.arange(16.0).reshape(4, 4), requires_grad=False)
        self.register_buffer("scale", torch.arange(16.0).reshape(4, 4) * 10)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.function(self, x)


def argument() -> Tensor:
    return torch.arange(16.0).reshape(4, 4) + 100


CASES: dict[str, Callable[[Any, Tensor], tuple[Tensor, ...]]] = {
    "neutral": lambda m, x: (x * 1, m.weight * 1, m.scale + 0, x.clone()),
    "of weights": lambda m, x: (m.weight * 2, (m.weight + 1).view(2, 8), m.weight.t().contiguous(), m.weight + 1),
    "equal": lambda m, x: (x + 1, x + 1, 1 + x, m.weight * 3, m.weight * 3),
    "copies": lambda m, x: (y := x.relu(), y.clone(), y.relu(), y.to(torch.float32, copy=True)),
    "diagonals": lambda m, x: (torch.diag(x), torch.diagonal_copy(x), (x * 1).diagonal(), torch.diag(m.weight), torch.diag(x * 2)),
    "strides": lambda m, x: (torch.as_strided_copy(x, (4,), (5,)), *((y * 1).as_strided((4,), (5,)) for y in (x, m.weight))),
    "complex": lambda m, x: (torch.fft.fft(x), torch.fft.fft(m.weight), torch.fft.fft(m.weight).real, torch.fft.fft(x).imag),
    "read after a write": lambda m, x: (y := x * 2, y.diagonal() + 1, y.index_fill(0, torch.tensor([0]), 0.0), y.diagonal() * 2),
}


@pytest.mark.parametrize("way", ["compile", "backend"])
@pytest.mark.parametrize("name", list(CASES))
def test_results_share_nothing(name: str, way: str) -> None:
    model = Weighted(CASES[name]).eval()
    expected = model(argument())
    if way == "compile":
        fast: Any = sashiko.compile(model, (argument(),))
    else:
        torch._dynamo.reset()
        fast = torch.compile(model, backend="sashiko")
    for _ in range(2):
        x = argument()
        with torch.no_grad():
            results = fast(x)
            for number, result in enumerate(results):
                assert_close(result, expected[number])
                result.fill_(-1)
        assert torch.equal(x, argument())
        assert_close(model(argument()), expected)


def test_one_tensor_returned_twice_is_one() -> None:
    model = Weighted(lambda m, x: (y := x + 1, y)).eval()
    first, second = sashiko.compile(model, (argument(),))(argument())
    assert first is second


def test_views_that_pytorch_makes_of_what_it_made_are_not_copied() -> None:
    model = Weighted(lambda m, x: (torch.fft.fft(x).real, x.as_strided((4,), (5,)))).eval()
    steps = [s for s in sashiko.compile(model, (argument(),)).executable.plan.segments if hasattr(s, "copies")]
    assert {str(s.target): s.copies for s in steps} == {
        "aten._fft_r2c.default": False, "aten.view_as_real.default": False, "aten.as_strided.default": True}


@pytest.mark.parametrize("example", [(4, 4), (2, 5)])
def test_a_view_of_another_result_takes_nothing_of_the_sizes_for_granted(example: tuple[int, int]) -> None:
    """torch 2.15 asks whether the two are alike: those of the example, not those of other sizes."""
    free = ({0: torch.export.Dim("rows", max=9), 1: torch.export.Dim("columns", max=9)},)
    model = Weighted(lambda m, x: (y := (x * 2).relu_(), y.transpose(0, 1))).eval()
    compiled = sashiko.compile(model, (torch.randn(example),), dynamic_shapes=free, strict=True)
    for shape in ((3, 3), (6, 4), (2, 5)):
        x = torch.randn(shape)
        assert_close(compiled(x), model(x))
