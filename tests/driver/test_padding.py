"""Padding by elements of the image itself, compiled whole, however the image lies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

import sashiko
from tests.driver.functions import Apply

MODES = ("reflect", "replicate", "circular")
SHAPES = (((2, 3, 9, 11), (3, 2, 1, 4)), ((2, 3, 40, 50), (0, 3, 3, 3)), ((4, 30), (5, 6)), ((2, 3, 4, 5, 6), (1, 2, 3, 2, 1, 0)))


@torch.no_grad()
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("make", "shape"), [
    (lambda mode: nn.Conv2d(4, 4, 2, 2, 1, 2, groups=4, bias=False, padding_mode=mode), (1, 4, 8, 8)),
    (lambda mode: nn.Conv1d(4, 4, 2, 3, 1, 2, 4, bias=False, padding_mode=mode), (1, 4, 5)),
    (lambda mode: nn.Conv2d(32, 32, (2, 1), (3, 1), (1, 0), (2, 1), 32, padding_mode=mode), (1, 32, 5, 16)),
    (lambda mode: Apply(lambda x: F.avg_pool2d(F.pad(x, (0, 0, 1, 1), mode=mode), (2, 1), (3, 1))), (1, 4, 5, 8)),
], ids=["two axes", "one axis", "many channels", "means"])
def test_windows_over_what_is_padded(make: Callable[[str], nn.Module], shape: tuple[int, ...], mode: str) -> None:
    """Indices that are clamped are divided by nothing."""
    model, x = make(mode).eval(), torch.randn(shape)
    torch.testing.assert_close(sashiko.compile(model, (x,))(x), model(x))


@torch.no_grad()
@pytest.mark.parametrize("mode", MODES)
def test_padding_is_exact(mode: str) -> None:
    for shape, amounts in SHAPES:
        x = torch.randn(shape)
        for image in (x, x.transpose(-1, -2).contiguous().transpose(-1, -2)):
            model = Apply(lambda x, amounts=amounts: F.pad(x, amounts, mode=mode)).eval()
            assert torch.equal(sashiko.compile(model, (image,), strict=True)(image), model(image))


@torch.no_grad()
@pytest.mark.parametrize("mode", MODES)
def test_lines_are_read_as_they_lie(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SASHIKO_DUMP", str(tmp_path))
    x = torch.randn(2, 16, 40, 48)
    sashiko.compile(Apply(lambda x: F.pad(x, (3, 3, 3, 3), mode=mode)).eval(), (x,), strict=True)
    assert "gather" not in next(tmp_path.glob("*/90_llvm.txt")).read_text()


@torch.no_grad()
def test_sizes_that_change() -> None:
    width = torch.export.Dim("width", min=4, max=100)
    for mode in MODES:
        model = Apply(lambda x, mode=mode: F.pad(x, (3, 2, 1, 2), mode=mode)).eval()
        compiled = sashiko.compile(model, (torch.randn(1, 2, 6, 20),), dynamic_shapes={"args": ({3: width},)})
        for size in (5, 33):
            x = torch.randn(1, 2, 6, size)
            assert torch.equal(compiled(x), model(x))


class Windows(nn.Module):
    """What shifted windows begin with: patches, padded to whole windows and rolled. Each size is a division of the one before."""

    def __init__(self, flat: bool) -> None:
        super().__init__()
        self.patches, self.flat = nn.Conv2d(3, 20, 2, 2), flat

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image)
        batch, channels, height, width = x.shape
        x = x.flatten(2).transpose(1, 2).view(batch, height, width, channels) if self.flat else x.permute(0, 2, 3, 1)
        return F.pad(x, (0, 0, 0, (4 - width % 4) % 4)).roll(2, 2)


@torch.no_grad()
@pytest.mark.parametrize("flat", [True, False])
def test_padded_to_whole_windows_and_rolled(flat: bool) -> None:
    model = Windows(flat).eval()
    shapes = (dict.fromkeys((0, 2, 3), Dim.AUTO),)
    compiled = sashiko.compile(model, (torch.randn(2, 3, 32, 32),), dynamic_shapes=shapes, strict=True)
    for size in ((2, 3, 32, 32), (3, 3, 14, 30), (1, 3, 9, 48), (2, 3, 20, 7), (4, 3, 6, 131)):
        x = torch.randn(size)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)
