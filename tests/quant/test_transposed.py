"""Transposed convolutions are quantized as the convolutions of which their results are made."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import sashiko
from sashiko.quant import load, prepare_qat, quantize
from tests.sweeps import swept

LAYERS = {
    "side by side": (nn.ConvTranspose2d(8, 6, 2, 2), (2, 8, 5, 7)),
    "overlapping": (nn.ConvTranspose2d(8, 6, 4, 2, 1), (2, 8, 5, 7)),
    "with gaps": (nn.ConvTranspose2d(8, 6, 2, 3), (1, 8, 5, 7)),
    "uneven": (nn.ConvTranspose2d(8, 6, (3, 5), (2, 1), (1, 0), (1, 0), bias=False), (2, 8, 5, 7)),
    "more at the end": (nn.ConvTranspose2d(8, 6, 2, 4, 1, 3), (1, 8, 3, 4)),
    "all around dropped": (nn.ConvTranspose2d(8, 6, 3, 1, 2), (1, 8, 5, 7)),
    "dilated": (nn.ConvTranspose2d(8, 6, 3, 2, 2, 1, dilation=(2, 3)), (1, 8, 5, 7)),
    "dilated alone": (nn.ConvTranspose1d(8, 6, 1, dilation=3), (2, 8, 9)),
    "groups": (nn.ConvTranspose2d(8, 12, 3, 2, groups=4), (2, 8, 5, 7)),
    "several of one channel": (nn.ConvTranspose1d(8, 16, 3, 2, groups=8), (2, 8, 9)),
    "line": (nn.ConvTranspose1d(8, 6, 16, 8, 4), (2, 8, 9)),
    "volume": (nn.ConvTranspose3d(4, 3, (2, 3, 1), (2, 2, 1), (0, 1, 0)), (2, 4, 3, 4, 5)),
    "one image": (nn.ConvTranspose2d(8, 6, 3, 2, 1, 1), (8, 5, 7)),
}
COMPILED = ("overlapping", "groups", "volume", "uneven")
KEPT = ("side by side", "overlapping", "more at the end", "dilated", "groups", "volume", "one image")


@pytest.mark.parametrize("name", swept(LAYERS, KEPT))
def test_the_result_is_that_of_the_layer(name: str) -> None:
    """A scheme for weights alone leaves it in floating point; only sums change their order. Bytes are off by half a step, 1/254 of their
    greatest magnitude, in both factors of each of the products of a result."""
    layer, size = LAYERS[name]
    layer, x = layer.eval(), torch.randn(size)
    exact = layer(x)
    left = quantize(nn.Sequential(layer), [x], preset="int8-weight")
    assert left.record.sites == () and left(x).stride() == exact.stride()
    torch.testing.assert_close(left(x), exact)
    small = quantize(nn.Sequential(layer), [x], preset="int8-minmax")
    (item,) = small.record.sites
    assert small.record.left_out == () and (item.site.name, item.site.weight) == ("0", "0.weight")
    terms = item.site.features[0]
    limit = terms * (2 / 254 + 1 / 254**2) * x.abs().max() * layer.weight.abs().max()
    assert (small(x) - exact).abs().max() <= limit
    if name in COMPILED:
        compiled = sashiko.compile(small, (x,))
        assert "_i8_i8_" in str(compiled.explain())
        torch.testing.assert_close(compiled(x), small(x), rtol=0, atol=1e-4)  # sums of integers are exact, and nothing is rounded behind


class Twice(nn.Module):
    """One layer at two scales, whose result is viewed as it lies."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.flat = nn.ConvTranspose2d(8, 8, 4, 2, 1), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.up(x).relu())
        rows: Tensor = self.flat(y.permute(0, 2, 3, 1).view(len(x), -1, 8))
        return rows


def test_images_keep_their_order_in_memory_and_layers_their_weight() -> None:
    model, x = Twice().eval(), torch.randn(2, 8, 6, 6).to(memory_format=torch.channels_last)
    small = quantize(model, [x], preset="int8-minmax")
    assert [r.site.name for r in small.record.sites] == ["up", "up#2", "flat"]
    assert sum(value.dtype == torch.int8 for value in small.state_dict().values()) == 2
    exact, compiled = model(x), sashiko.compile(small, (x,))
    assert (small(x) - exact).abs().max() < 0.05 * exact.abs().max()
    assert (compiled(x) - small(x)).abs().max() < 0.02 * exact.abs().max()
    assert str(compiled.explain()).count("gemm_i32_u8_i8") == 3


def test_sizes_may_be_free() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(8, 6, 3, 2, 1, 1), nn.ReLU(), nn.ConvTranspose2d(6, 4, 2, 2)).eval()
    small = quantize(model, [torch.randn(2, 8, 6, 6), torch.randn(1, 8, 9, 6)], preset="int8-minmax")
    for size in ((2, 8, 6, 6), (3, 8, 11, 4)):
        x = torch.randn(size)
        assert (small(x) - model(x)).abs().max() < 0.05 * model(x).abs().max()


def test_it_is_saved_and_trained(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.ConvTranspose2d(8, 6, 4, 2, 1), nn.ReLU(), nn.Conv2d(6, 3, 1)).eval(), torch.randn(2, 8, 6, 6)
    small = quantize(model, [x])
    small.save(tmp_path / "small")
    torch.testing.assert_close(load(tmp_path / "small")(x), small(x))
    student = prepare_qat(model, [x], preset="int8-minmax").train()
    (student(x) - model(x)).square().mean().backward()
    learned = dict(student.named_parameters())
    assert learned["0.weight"].shape == (8, 6, 4, 4) and bool(learned["0.weight"].grad.any())  # type: ignore[union-attr]
