"""Depthwise convolutions of quantized models, end to end: what eager computes, in integers where this machine adds products of bytes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.export import Dim

import sashiko
from sashiko.platforms.host import host
from tests.sweeps import swept


@dataclass(frozen=True)
class Layer:
    """A depthwise convolution between two by 1 x 1, of which the first gives it images of integers, padded by half of the window."""

    size: tuple[int, ...]
    channels: int = 40
    side: int = 12
    stride: int = 1
    dilation: int = 1
    images: int = 2

    def model(self, activation: nn.Module) -> nn.Module:
        torch.manual_seed(0)
        conv = nn.Conv3d if len(self.size) == 3 else nn.Conv2d
        edges = tuple(self.dilation * (n // 2) for n in self.size)
        depthwise = conv(self.channels, self.channels, self.size, self.stride, edges, self.dilation, groups=self.channels)  # type: ignore[arg-type]
        return nn.Sequential(conv(6, self.channels, 1), activation, depthwise, nn.ReLU(), conv(self.channels, 8, 1)).eval()

    def image(self) -> torch.Tensor:
        return torch.randn(self.images, 6, *[self.side] * len(self.size), generator=torch.Generator().manual_seed(1))


LAYERS = (
    Layer((3, 3)), Layer((5, 5), side=14), Layer((7, 7), 33), Layer((3, 3), 24, 15, stride=2), Layer((3, 3), dilation=2), Layer((2, 4), 17),
    Layer((9, 9), 16, 20), Layer((13, 13), 8, 20), Layer((1, 5)), Layer((5, 1)), Layer((3, 3, 3), 16, 8), Layer((1, 3, 3), 16, 8),
)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """But for integers that are halfway between two: a step of one of them changes a result by little, and few of them."""
    apart = (got - expected).abs() / expected.abs().max()
    assert apart.max() < 2e-2 and (apart > 1e-5).float().mean() < 2e-2


def name(value: Layer | str) -> str:
    return value if isinstance(value, str) else "x".join(map(str, value.size)) + f"s{value.stride}d{value.dilation}"


@pytest.mark.parametrize(("layer", "preset"), swept(
    [(layer, preset) for layer in LAYERS for preset in ("int8", "int8-symmetric")],
    [*((layer, "int8") for layer in LAYERS), *((layer, "int8-symmetric") for layer in LAYERS[:4])],
), ids=name)
def test_depthwise_convolutions_of_integers(layer: Layer, preset: str) -> None:
    """With a zero point in the middle, so that the edges of images are no zeros; and signed."""
    x = layer.image()
    quantized = sashiko.quantize(layer.model(nn.Hardtanh(-1.0, 2.0)), [(x,)], preset=preset, progress=False)
    compiled = sashiko.compile(quantized, (x,))
    with torch.no_grad():
        close(compiled(x), quantized(x))
    assert ("dot_bytes" in str(sashiko.explain(compiled))) == (host().byte_dots and sum(n > 1 for n in layer.size) > 1)


def test_images_of_any_number_and_size() -> None:
    layer = Layer((3, 3), 20)
    quantized = sashiko.quantize(layer.model(nn.ReLU6()), [(layer.image(),)], progress=False)
    sizes = ({0: Dim("images", min=1, max=8), 2: Dim("height", min=4, max=40), 3: Dim("width", min=4, max=40)},)
    compiled = sashiko.compile(quantized, (layer.image(),), dynamic_shapes=sizes)
    for shape in ((1, 6, 12, 12), (3, 6, 7, 9), (2, 6, 33, 4)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
        with torch.no_grad():
            close(compiled(x), quantized(x))
