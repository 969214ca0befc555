"""Convolutions whose groups, steps and padding come with the call: as eager, in native code where each channel is a group."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F
from torch.testing import assert_close

import sashiko
from tests.driver.functions import Apply, left

Function = Callable[[Tensor, Tensor], Tensor]


def correlated(x: Tensor, w: Tensor) -> Tensor:
    """Each image with filters of its own, channel by channel: x[b, 4, ...], w[b, 16, 3, 3]."""
    bias = w[:, 4:8, 0, 0].reshape(-1)
    return F.conv2d(x.reshape(1, -1, *x.shape[2:]), w[:, :4].reshape(-1, 1, 3, 3), bias, 2, 1, groups=x.shape[0] * x.shape[1])


def multiplied(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(x.reshape(1, -1, *x.shape[2:]), w[:, :8].reshape(-1, 1, 3, 3), groups=x.shape[0] * x.shape[1])


def spread(x: Tensor, w: Tensor) -> Tensor:
    filters, bias = w[:, :4].reshape(-1, 1, 3, 3), w[:, 4:8, 0, 0].reshape(-1)
    return F.conv_transpose2d(x.reshape(1, -1, *x.shape[2:]), filters, bias, 2, 1, groups=x.shape[0] * x.shape[1])


def modulated(x: Tensor, w: Tensor) -> Tensor:
    """Each image with filters of its own, of all channels, as in StyleGAN2."""
    return F.conv2d(x.reshape(1, -1, *x.shape[2:]), w.reshape(-1, 4, 3, 3), padding=1, groups=x.shape[0])


def modulated_spread(x: Tensor, w: Tensor) -> Tensor:
    return F.conv_transpose2d(x.reshape(1, -1, *x.shape[2:]), w.reshape(-1, 4, 3, 3), stride=2, groups=x.shape[0])


GROUPS = "number of groups depends on sizes"


@torch.no_grad()
@pytest.mark.parametrize(("function", "reason"), [
    (correlated, ""), (multiplied, ""), (spread, ""), (modulated, GROUPS), (modulated_spread, GROUPS),
])  # fmt: skip
def test_as_many_groups_as_there_are_images(function: Function, reason: str) -> None:
    b, model = Dim("b", max=16), Apply(function).eval()
    filters = 4 if function is modulated_spread else 16
    cases = [(torch.randn(n, 4, 9, 8), torch.randn(n, filters, *((4, 3, 3) if reason else (3, 3)))) for n in (3, 1, 5)]
    compiled = sashiko.compile(model, cases[0], dynamic_shapes={"args": ({0: b}, {0: b})})
    for case in cases:
        assert_close(compiled(*case), function(*case), rtol=1e-5, atol=1e-5)
    assert len(left(compiled)) == bool(reason) and reason in compiled.explain()


@torch.no_grad()
def test_as_many_groups_as_there_are_images_in_quantized_models_and_graphs_of_dynamo() -> None:
    class Modulated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image, self.filters = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(6, 2 * 4 * 4 * 9)

        def forward(self, x: Tensor, style: Tensor) -> Tensor:
            w = self.filters(style).reshape(-1, 2, 16, 3, 3)
            return correlated(modulated(self.image(x), w[:, 0].reshape(-1, 4, 4, 3, 3)).reshape(-1, 4, *x.shape[2:]), w[:, 1])

    b, model = Dim("b", max=16), Modulated().eval()
    first, second = ((torch.randn(n, 3, 8, 8), torch.randn(n, 6)) for n in (3, 5))
    small = sashiko.quantize(model, [first, second])
    compiled = sashiko.compile(small, first, dynamic_shapes=({0: b}, {0: b}))
    assert_close(compiled(*second), small(*second), rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()
    fast = torch.compile(model, backend="sashiko", dynamic=True)
    for case in (first, second):
        assert_close(fast(*case), model(*case), rtol=1e-5, atol=1e-5)


W = torch.randn(4, 4, 3, 3)
STEPS = "stride or dilation depends on sizes"
SIZES: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "padding": ("", lambda x: F.conv2d(x, W, padding=x.shape[2] // 2)),
    "padding by channel": ("", lambda x: F.conv2d(x, W[:, :1], padding=(1, x.shape[2] // 2), groups=4)),
    "more at the end": ("", lambda x: F.conv_transpose2d(x, W, stride=(9, 1), output_padding=(x.shape[2] // 4, 0))),
    "transposed stride": (STEPS, lambda x: F.conv_transpose2d(x, W, stride=(x.shape[2] // 4, 1))),
    "transposed stride by channel": (STEPS, lambda x: F.conv_transpose2d(x, W[:, :1], stride=(1, x.shape[2] // 4), groups=4)),
    "transposed dilation": (STEPS, lambda x: F.conv_transpose2d(x, W, dilation=x.shape[2] // 4)),
}


@torch.no_grad()
@pytest.mark.parametrize("name", SIZES)
def test_what_is_computed_from_the_size_of_the_image(name: str) -> None:
    reason, function = SIZES[name]
    compiled = sashiko.compile(Apply(function).eval(), (torch.randn(2, 4, 8, 6),), dynamic_shapes={"args": ({2: Dim("h", min=4, max=32)},)})
    for height in (8, 13):
        x = torch.randn(2, 4, height, 6)
        assert_close(compiled(x), function(x), rtol=1e-5, atol=1e-5)
    assert len(left(compiled)) == bool(reason) and reason in compiled.explain()


@torch.no_grad()
@pytest.mark.parametrize("groups", [1, 4])
def test_a_stride_that_dynamo_leaves_free(groups: int) -> None:
    torch._dynamo.reset()

    def function(x: Tensor) -> Tensor:
        return F.conv2d(x, W[:, : 4 // groups], stride=(x.shape[2] // 4, 1), groups=groups)

    fast = torch.compile(function, backend="sashiko", dynamic=True)
    for height in (8, 13):
        x = torch.randn(2, 4, height, 6)
        assert_close(fast(x), function(x), rtol=1e-5, atol=1e-5)
