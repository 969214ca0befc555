"""Sizes that a model computes in Python's floats, with sizes that differ from call to call."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim
from torch.testing import assert_close

import sashiko
from sashiko.diagnostics.errors import InputError
from tests.driver.functions import Apply

Step = Callable[[torch.Tensor], torch.Tensor]


def _fitted(x: torch.Tensor) -> torch.Tensor:
    """Into 40 x 64, as detectors do it."""
    scale = min(40 / min(x.shape[-2:]), 64 / max(x.shape[-2:]))
    return F.interpolate(x, scale_factor=scale, mode="bilinear", recompute_scale_factor=True)


STEPS: dict[str, Step] = {
    "resized by a fraction": lambda x: F.interpolate(x, scale_factor=1.5, mode="bilinear"),
    "resized by a number without a fraction": lambda x: F.interpolate(x, scale_factor=0.7, mode="nearest") * 2,
    "resized to fit": _fitted,
    "filled up": lambda x: F.pad(x, (0, math.ceil(x.shape[-1] / 32) * 32 - x.shape[-1])) + 1,
    "the first part": lambda x: x[..., : int(x.shape[-1] * 0.7)] * 2,
    "the largest part": lambda x: x.flatten(1).topk(max(1, int(x.shape[-1] * 0.3)), 1).values,
    "a square": lambda x: x[..., : int(math.sqrt(x.shape[-1])) ** 2].unflatten(-1, (int(math.sqrt(x.shape[-1])), -1)).sum(-1),
    "with what is asked of a size": lambda x: x * (x.shape[-1] > 50),
    "counted down by a float": lambda x: x + torch.arange(x.shape[-1] - 1, -1, -1.0),
    "counted down by a fraction": lambda x: x + torch.arange(x.shape[-1], 0, -0.5)[: x.shape[-1]],
    "counted by a size from a fraction": lambda x: x.sum() + torch.arange(0.25, x.shape[-1] * x.shape[-2], x.shape[-1]),
    "with what is asked of two": lambda x: x * ((x.shape[-1] > 50) & (x.shape[-2] < 100)),
}
IMAGES = tuple(torch.randn(2, 3, height, width) for height, width in ((36, 52), (44, 60), (101, 37), (30, 30)))


@torch.no_grad()
@pytest.mark.parametrize("name", STEPS)
def test_dynamo_compiles_them_once(name: str) -> None:
    torch._dynamo.reset()
    step = STEPS[name]
    compiled = torch.compile(step, backend="sashiko", dynamic=True, options={"strict": True})
    for x in IMAGES:
        assert_close(compiled(x), step(x), rtol=1e-5, atol=5e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", ["resized by a fraction", "resized to fit", "filled up", "counted by a size from a fraction"])
def test_declared_sizes(name: str, tmp_path: Path) -> None:
    """As a model for sizes in a range, and once more from a file."""
    model = Apply(STEPS[name]).eval()
    sizes = {2: Dim("height", min=24, max=400), 3: Dim("width", min=24, max=400)}
    compiled = sashiko.compile(model, (IMAGES[0],), dynamic_shapes=((sizes,),), strict=True)
    compiled.save(tmp_path / "model")
    for model_again in (compiled, sashiko.load(tmp_path / "model")):
        for x in IMAGES[:2]:
            assert_close(model_again(x), model(x), rtol=1e-5, atol=5e-5)


@torch.no_grad()
def test_what_tracing_decided_by_floats_is_asked_of_each_call() -> None:
    """The smaller side, or the larger one, says how an image fits."""
    sizes = {2: Dim("height", min=24, max=400), 3: Dim("width", min=24, max=400)}
    compiled = sashiko.compile(Apply(_fitted).eval(), (IMAGES[0],), dynamic_shapes=((sizes,),))
    with pytest.raises(InputError, match="takes another way"):
        compiled(torch.randn(2, 3, 30, 90))


class Resized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        smaller: torch.Tensor = self.conv(F.interpolate(x, scale_factor=0.7, mode="bilinear"))
        return smaller


@torch.no_grad()
def test_quantized() -> None:
    """Data all within the calibrated range: what lies beyond it is cut off, however the sizes were computed."""
    model = Resized().eval()
    images = [torch.rand(x.shape) - 0.5 for x in IMAGES]
    sizes = {2: Dim("height", min=24, max=400), 3: Dim("width", min=24, max=400)}
    compiled = sashiko.quantize_and_compile(model, [(x,) for x in images[:2]], preset="int8", dynamic_shapes=(sizes,))
    for x in images:
        expected = model(x)
        assert_close(compiled(x), expected, rtol=0, atol=0.03 * float(expected.abs().max()))
