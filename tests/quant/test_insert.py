"""The graph of a quantized model runs as the model's own does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import sashiko
from sashiko.quant import prepare_qat


class Masked(nn.Module):
    """A mask for each source of a mixture: what `view` joins lies as the results of convolutions do."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.mask = nn.Conv1d(1, 32, 16, 8, bias=False), nn.Conv1d(32, 64, 1)
        self.decoder = nn.ConvTranspose1d(32, 1, 16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.encoder(x)
        mask = self.mask(features).sigmoid().view(len(x), 2, 32, -1)
        return torch.as_tensor(self.decoder((mask * features.unsqueeze(1)).view(len(x) * 2, 32, -1)))


class Digits(nn.Module):
    """As tutorials have it for digits."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(channels, 8, kernel), nn.Linear(8 * (17 - kernel) ** 2, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.last(self.conv(x).relu().view(len(x), -1)))


@pytest.mark.parametrize(("channels", "kernel"), [(1, 3), (3, 1), (1, 1)])
@torch.no_grad()
def test_one_channel_and_kernels_of_one(channels: int, kernel: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Digits(channels, kernel).eval(), torch.randn(2, channels, 16, 16)
    quantized = sashiko.quantize(model, [x], progress=False)
    quantized.save(tmp_path / "saved")
    for made in (quantized, sashiko.load(tmp_path / "saved"), sashiko.compile(quantized, (x,)), sashiko.quantize_and_compile(model, [x])):
        assert float((made(x) - model(x)).norm() / model(x).norm()) < 0.03


@pytest.mark.parametrize("make", [sashiko.quantize, prepare_qat])
@pytest.mark.parametrize("preset", ["int8-minmax", "int8-static"])
def test_ranges_in_the_record_are_what_the_integers_cover(preset: str, make: Callable[..., nn.Module]) -> None:
    """Those of signed integers are symmetric, whatever was seen."""
    found = make(nn.Linear(4, 4).eval(), [torch.tensor([[8.0, 0, 0, 0], [-10, 0, 0, 0]])], preset=preset)
    (limits,) = found.record.sites[0].ranges
    scale, zero, ends = (10 / 127, 0, (-127, 127)) if preset == "int8-minmax" else (18 / 255, 142, (-142, 113))
    assert (limits.scale, limits.zero_point) == (pytest.approx(scale), zero)
    assert (limits.low, limits.high) == pytest.approx(tuple(scale * end for end in ends))


@pytest.mark.parametrize("preset", ["int8", "int8-dynamic", "int8-weight"])
@torch.no_grad()
def test_views_of_quantized_convolutions(preset: str) -> None:
    torch.manual_seed(0)
    model, x = Masked().eval(), torch.randn(2, 1, 800)
    quantized = sashiko.quantize(model, [x], preset=preset, progress=False)
    simulated = quantized(x)
    assert float((simulated - model(x)).norm() / model(x).norm()) < 0.02
    assert float((sashiko.compile(quantized, (x,))(x) - simulated).norm() / simulated.norm()) < 0.01
