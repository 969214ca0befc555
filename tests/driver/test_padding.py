"""Padding by elements of the image itself, compiled whole, however the image lies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import sashiko
from tests.driver.functions import Apply

MODES = ("reflect", "replicate", "circular")
SHAPES = (((2, 3, 9, 11), (3, 2, 1, 4)), ((2, 3, 40, 50), (0, 3, 3, 3)), ((4, 30), (5, 6)), ((2, 3, 4, 5, 6), (1, 2, 3, 2, 1, 0)))


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
