"""Images of other sizes, compiled whole, however they lie: places and weights are known, so that nothing is looked up one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import Dim
from torch.nn import functional as F

import sashiko
from tests.driver.functions import Apply
from tests.sweeps import swept

MODES = ("nearest", "nearest-exact", "bilinear", "bicubic")
WAYS = (*((mode, None) for mode in MODES), *((mode, True) for mode in MODES[2:]))  # points have no corners to align
SIZES: tuple[dict[str, Any], ...] = (
    {"scale_factor": 2}, {"scale_factor": 4}, {"scale_factor": 3}, {"scale_factor": 0.5}, {"scale_factor": 1.5}, {"size": (7, 31)},
)


@torch.no_grad()
@pytest.mark.parametrize(("mode", "aligned"), swept(WAYS, [("nearest", None), ("bilinear", None), ("bicubic", True)]))
def test_eager_agrees(mode: str, aligned: bool | None) -> None:
    for size in SIZES:
        for shape in ((2, 5, 9, 24), (1, 3, 2, 3)):
            x = torch.randn(shape)
            model = Apply(lambda x, size=size: F.interpolate(x, mode=mode, align_corners=aligned, **size)).eval()
            for image in (x, x.to(memory_format=torch.channels_last)):
                torch.testing.assert_close(sashiko.compile(model, (image,), strict=True)(image), model(image), rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("times", [2, 4])
def test_whole_multiples_are_read_by_vectors(times: int, mode: str, last: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SASHIKO_DUMP", str(tmp_path))
    x = torch.randn(2, 16, 20, 24).to(memory_format=torch.channels_last if last else torch.contiguous_format)
    sashiko.compile(Apply(lambda x: F.interpolate(x, scale_factor=times, mode=mode)).eval(), (x,), strict=True)
    assert "gather" not in next(tmp_path.glob("*/90_llvm.txt")).read_text()


@torch.no_grad()
def test_infinities_reach_as_far_as_in_pytorch() -> None:
    x = torch.randn(1, 2, 6, 6)
    x[0, 0, 1, 0], x[0, 1, 3, 5] = torch.inf, torch.nan
    for mode in ("bilinear", "bicubic"):
        model = Apply(lambda x, mode=mode: F.interpolate(x, scale_factor=2, mode=mode)).eval()
        torch.testing.assert_close(sashiko.compile(model, (x,), strict=True)(x), model(x), rtol=1e-5, atol=1e-5, equal_nan=True)


@torch.no_grad()
@pytest.mark.parametrize(("mode", "aligned"), WAYS)
def test_places_are_computed_for_sizes_of_each_call(mode: str, aligned: bool | None) -> None:
    free = {2: Dim("height", min=2, max=500), 3: Dim("width", min=2, max=500)}
    for size in ({"scale_factor": 1.7}, {"size": (7, 31)}):
        model = Apply(lambda x, size=size: F.interpolate(x, mode=mode, align_corners=aligned, **size)).eval()
        compiled = sashiko.compile(model, (torch.randn(2, 5, 9, 24),), dynamic_shapes=((free,),), strict=True)
        for height, width in ((9, 24), (2, 3), (64, 50), (7, 31)):
            for layout in (torch.contiguous_format, torch.channels_last):
                x = torch.randn(2, 5, height, width).to(memory_format=layout)
                torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=2e-5)


@torch.no_grad()
@pytest.mark.parametrize("pool", [F.adaptive_avg_pool2d, F.adaptive_max_pool2d])
def test_regions_are_computed_for_sizes_of_each_call(pool: Any) -> None:
    free = {2: Dim("height", min=4, max=500), 3: Dim("width", min=4, max=500)}
    of_sizes = [None] if pool is F.adaptive_avg_pool2d else []  # None: two thirds of the height, one column fewer; not in torch.export
    for out in (1, (7, 2), *of_sizes):
        model = Apply(lambda x, out=out: pool(x, out or (x.shape[-2] * 2 // 3, x.shape[-1] - 1))).eval()
        compiled = sashiko.compile(model, (torch.randn(2, 5, 9, 24),), dynamic_shapes=((free,),), strict=True)
        for height, width in ((9, 24), (4, 5), (64, 50), (7, 31)):
            x = torch.randn(2, 5, height, width)
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)
