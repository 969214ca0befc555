"""Smaller images by weighted means (`antialias=True`), compiled whole, however they lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.export import Dim

import sashiko
from tests.driver.functions import Apply
from tests.sweeps import swept

SIZES: tuple[dict[str, Any], ...] = (
    {"scale_factor": 0.3}, {"size": (90, 20)}, {"size": (33, 4)},  # smaller, larger and smaller, and by more elements than are written out
)


@torch.no_grad()
@pytest.mark.parametrize("dtype", swept((torch.float32, torch.bfloat16, torch.float64), (torch.float32,)))
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_eager_agrees(mode: str, aligned: bool, dtype: torch.dtype) -> None:
    tolerance = {torch.float32: 5e-6, torch.float64: 1e-12, torch.bfloat16: 2.0**-8}[dtype]
    wide = torch.float64 if dtype == torch.float64 else torch.float32  # between its two passes PyTorch rounds to bf16
    for size in SIZES:
        x = torch.randn(2, 3, 33, 80).to(dtype)
        model = Apply(lambda x, size=size: F.interpolate(x, mode=mode, align_corners=aligned, antialias=True, **size)).eval()
        for image in (x, x.to(memory_format=torch.channels_last)):
            compiled = sashiko.compile(model, (image,), strict=True)
            torch.testing.assert_close(compiled(image).to(wide), model(image.to(wide)), rtol=tolerance, atol=tolerance)


@torch.no_grad()
def test_weights_of_unknown_sizes_stay_with_pytorch() -> None:
    model = Apply(lambda x: F.interpolate(x, size=(7, 9), mode="bilinear", antialias=True) * 2).eval()
    free = {2: Dim("height", min=2, max=90)}
    compiled = sashiko.compile(model, (torch.randn(1, 3, 20, 30),), dynamic_shapes=((free,),))
    x = torch.randn(1, 3, 44, 30)
    torch.testing.assert_close(compiled(x), model(x))
    assert "resizing with weights of unknown sizes" in compiled.explain()
