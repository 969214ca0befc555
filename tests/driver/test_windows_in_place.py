"""Convolutions whose windows tiles may read where they lie (`kernels/lines.py`): any size of window, channels, groups, images."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

import sashiko

# One step to a piece of a window and several, whole and not; taps apart; groups of one and of several images; a line; places of every
# other line, which are copied.
LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "few channels": (nn.Conv2d(16, 24, 3, padding=1), (2, 16, 20, 17)),
    "many": (nn.Conv2d(96, 40, 3), (1, 96, 14, 30)),
    "large windows": (nn.Conv2d(32, 16, 7, padding=3), (1, 32, 20, 12)),
    "taps apart": (nn.Conv2d(64, 20, 3, padding=2, dilation=2), (1, 64, 18, 21)),
    "groups": (nn.Conv2d(64, 64, 3, padding=1, groups=4), (1, 64, 15, 22)),
    "groups of images": (nn.Conv2d(96, 48, (3, 5), padding=1, groups=4), (3, 96, 12, 25)),
    "narrow groups": (nn.Conv2d(64, 64, 3, padding=1, groups=16), (2, 64, 16, 20)),
    "a line": (nn.Conv1d(64, 40, 3, padding=1), (1, 64, 75)),
    "lines": (nn.Conv1d(32, 40, 5), (4, 32, 60)),
    "strided": (nn.Conv2d(32, 40, 3, padding=1, stride=2), (2, 32, 24, 26)),
}


def check(layer: nn.Module, shape: tuple[int, ...]) -> None:
    """In bf16, for any number of images too where there are several, and in int8."""
    torch.manual_seed(1)
    model, x = nn.Sequential(layer, nn.ReLU()).eval(), torch.randn(shape)
    expected = model(x)
    for dynamic in (None, ({0: torch.export.Dim("n", min=1, max=16)},)) if shape[0] > 1 else (None,):
        compiled = sashiko.compile(model, (x,), precision="bf16", dynamic_shapes=dynamic, strict=True)
        assert (compiled(x) - expected).norm() <= 2.0**-7 * expected.norm()
    small = sashiko.quantize(model, [(x,)], preset="int8-static", progress=False)
    quantized = sashiko.compile(small, (x,), strict=True)
    assert (quantized(x) - small(x)).norm() <= 1e-3 * small(x).norm()


@torch.no_grad()
@pytest.mark.parametrize("name", LAYERS)
def test_convolutions_in_narrow_types(name: str) -> None:
    check(*LAYERS[name])


@torch.no_grad()
@pytest.mark.sweep
@pytest.mark.parametrize("threads", [1, 2])
def test_convolutions_of_all_kinds(threads: int) -> None:
    """Any sizes of images and windows, numbers of channels, groups and images, strides and distances of taps."""
    draw, before = random.Random(threads), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for _ in range(40):
            groups, apart = draw.choice((1, 1, 1, 2, 4)), draw.choice((1, 1, 1, 2))
            channels, columns = groups * draw.choice((16, 24, 32, 64, 96, 160)), groups * draw.choice((16, 24, 64, 100))
            window = draw.choice(((3, 3), (3, 3), (1, 3), (5, 5), (3, 1), (2, 2), (7, 7)))
            padding, stride = draw.choice((0, 1, window[0] // 2)), draw.choice((1, 1, 1, 1, 2))
            size = tuple(apart * (n - 1) + 1 + draw.randint(2, 36) for n in window)
            layer = nn.Conv2d(channels, columns, window, stride, padding, apart, groups)
            check(layer, (draw.choice((1, 1, 2, 3)), channels, *size))
    finally:
        torch.set_num_threads(before)
