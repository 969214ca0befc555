"""Which axis of elementwise work becomes the vector axis."""

from __future__ import annotations

import pytest
import torch

import sashiko
from sashiko.graph import build as b
from sashiko.graph.types import f32
from sashiko.stitch.loops import LoopKernel
from sashiko.stitch.program import LoopItem
from sashiko.stitch.stitcher import stitch


def channels_last(channels: int, width: int) -> LoopKernel:
    """The copy of an image in torch's order into channels-last order, a pixel wider on each side."""
    x = b.input_(0, f32, (2, channels, 5, width))
    (item,) = stitch((b.pad(b.permute(x, (0, 2, 3, 1)), ((0, 0), (0, 0), (1, 1), (0, 0))),), (x,), ()).items
    assert isinstance(item, LoopItem)
    return item.kernel


@pytest.mark.parametrize(("channels", "width", "columns"), [(3, 40, 42), (3, 6, 3), (16, 40, 16)])
def test_few_channels_are_no_vectors(channels: int, width: int, columns: int) -> None:
    """Neither are short lines of the image better, nor is that done where channels fill vectors."""
    assert channels_last(channels, width).cols == columns


def test_few_neighbours_that_are_read_side_by_side_stay_the_columns() -> None:
    x = b.input_(0, f32, (40, 6, 3))
    (item,) = stitch((b.relu(b.slice_(x, 1, 0, 3, 2)),), (x,), ()).items
    assert isinstance(item, LoopItem) and item.kernel.cols == 3


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_images_of_few_channels(channels: int) -> None:
    class Surrounded(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.pad(x, (2, 1, 0, 1), value=0.5).permute(0, 2, 3, 1).contiguous()

    x = torch.randn(2, channels, 7, 37)
    assert torch.equal(sashiko.compile(Surrounded().eval(), (x,), strict=True)(x), Surrounded()(x))
