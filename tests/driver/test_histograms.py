"""Histograms as PyTorch counts them, to the bin."""

from __future__ import annotations

import math

import pytest
import torch
from torch.export import Dim

import sashiko
from sashiko.diagnostics.errors import Unsupported
from tests.driver.functions import Apply, agree


@pytest.mark.parametrize(("bins", "low", "high"), [(8, 0, 7), (8, -1, 1), (100, -2.5, 2.25), (1, 0, 1), (3, 0.1, 0.7), (33, 0.1, 0.7),
                                                  (128, 0, 127), (300, -2.5, 2.25), (512, 0, 511)])
def test_histograms(bins: int, low: float, high: float) -> None:
    """What lies on a bound counts upwards, at the end downwards; what lies outside, and NaN, not at all."""
    torch.manual_seed(0)
    edges = torch.linspace(low, high, 5 * bins + 1)
    rest = torch.tensor([float("nan"), float("inf"), -float("inf")])
    for x in (torch.cat([edges, rest, torch.randn(300) * 2]), edges.double(), torch.randint(-3, 130, (20, 30)).float(), torch.zeros(0)):
        agree(lambda x: x.histc(bins, low, high), x)


def test_a_histogram_of_as_many_elements_as_it_happens() -> None:
    fast = agree(lambda x: x.histc(256, 0, 255), torch.arange(9.0), dynamic_shapes=({0: Dim("number", min=0, max=5000)},))
    for number in (0, 1, 5000):
        x = torch.randint(0, 256, (number,)).float()
        assert torch.equal(fast(x), x.histc(256, 0, 255))


@pytest.mark.parametrize(("x", "bins", "low", "high", "why"), [
    (torch.arange(9.0), 4, 1, 1, "bins between the smallest and the largest element"),
    (torch.arange(9.0), 4, 0, math.inf, "bins between 0 and inf"),
    (torch.arange(9.0).half(), 4, 0, 9, "a histogram of f16, in which PyTorch counts, too"),
    (torch.zeros(65537), 33, 0, 9, "65537 elements in 33 bins, more than 65536 in more than 32"),
])
def test_histograms_that_are_left_to_pytorch(x: torch.Tensor, bins: int, low: float, high: float, why: str) -> None:
    with pytest.raises(Unsupported, match=why):
        sashiko.compile(Apply(lambda x: x.histc(bins, low, high)).eval(), (x,), strict=True)
