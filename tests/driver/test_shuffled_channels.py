"""Networks whose channels are shuffled, each unit of the half of what the last one left (ShuffleNet V2: Ma et al., 2018)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import sashiko
from tests.sweeps import swept


class Unit(nn.Module):
    def __init__(self, half: int) -> None:
        super().__init__()
        self.point, self.deep = nn.Conv2d(half, half, 1), nn.Conv2d(half, half, 3, 1, 1, groups=half)

    def forward(self, x: Tensor) -> Tensor:
        kept, changed = x.chunk(2, 1)
        both = torch.cat([kept, self.deep(self.point(changed).relu())], 1)
        return both.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


class Network(nn.Module):
    def __init__(self, half: int, units: int) -> None:
        super().__init__()
        width = 2 * half
        self.units = nn.Sequential(*[Unit(half) for _ in range(units)])
        self.left = nn.Sequential(nn.Conv2d(width, width, 3, 2, 1, groups=width), nn.Conv2d(width, width, 1), nn.ReLU())
        self.right = nn.Sequential(nn.Conv2d(width, width, 1), nn.ReLU(), nn.Conv2d(width, width, 3, 2, 1, groups=width), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        x = self.units(x)
        return torch.cat([self.left(x), self.right(x)], 1)


@pytest.mark.parametrize(("units", "half"), swept([(1, 8), (4, 8), (1, 29), (4, 29)], [(1, 29)]))
@torch.no_grad()
def test_units_of_halves_of_shuffled_channels(half: int, units: int) -> None:
    torch.manual_seed(0)
    model, x = Network(half, units).eval(), torch.randn(1, 2 * half, 9, 9)
    compiled = sashiko.compile(model, (x,), strict=True)
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)
    quantized = sashiko.quantize(model, [x])
    fast, simulated = sashiko.compile(quantized, (x,), strict=True)(x), quantized(x)
    assert float((fast - simulated).norm() / simulated.norm()) < 1e-2
