"""Running sums, products and extremes, and masks whose places they count: nothing is left to PyTorch, results are those of eager."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.testing import assert_close

import sashiko
from tests.driver.functions import agree


def test_running_sums_of_every_type() -> None:
    torch.manual_seed(0)
    length = Dim("length", max=200)
    fast = agree(lambda m: (m.ne(1).int().cumsum(1).type_as(m) * m) + 1, torch.randint(0, 3, (2, 50)), dynamic_shapes=({1: length},))
    for n in (1, 64, 199):
        ids = torch.randint(0, 3, (2, n))
        assert torch.equal(fast(ids), (ids.ne(1).int().cumsum(1) * ids) + 1)
    x = torch.randn(3, 40)
    x[0, 5], x[1, 7], x[2, 3], x[2, 9] = float("nan"), -0.0, float("inf"), float("-inf")
    agree(lambda x, y, z, k: (x.cumsum(-1), y.cumsum(0), z.cumsum(1), k.cumsum(1), k.cumprod(1)),
          x, x[1:2].bfloat16(), x > 0, torch.randint(-3, 4, (2, 9), dtype=torch.int8))
    agree(lambda x, y: (x.cumsum(1), x.cumprod(1), y.cumsum(0), y.long().cumprod(0)), torch.randn(3, 12, 5, 7), torch.randn(2, 40))
    special = torch.tensor([1.0, math.inf, math.nan])[:, None].expand(3, 30)
    agree(lambda x, y: (x.cumsum(0), y.cumsum(0)), torch.randn(16, 20).bfloat16(), special)
    agree(lambda x: (x.cumsum(0), x.cumsum(1).sum(0)), torch.zeros(0, 5))
    agree(lambda x: x.cumsum(1) + x, torch.zeros(3, 0))
    agree(lambda x: x.cumsum(0), torch.tensor(2.5))
    for n in (16400, 40000):  # more than sums are taken of at a time
        agree(lambda x, y: (x.cumsum(1), (x.cumsum(1) - x).sum(1), y.cumprod(1)), torch.rand(2, n), torch.rand(2, n) + 0.5)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_running_extremes(axis: int) -> None:
    """Of equal elements the last, and NaN from the first on."""
    torch.manual_seed(0)
    inf, nan = float("inf"), float("nan")
    x = torch.randn(3, 37, 5)
    x[0, 3], x[1, :4], x[1, 6:8], x[2, 1:5], x[2, 9, 1], x[2, 10, 1], x[0, 20, 2] = nan, inf, -inf, 0.5, -0.0, 0.0, nan
    both = lambda *given: tuple(f(v, axis) for v in given for f in (torch.cummax, torch.cummin))  # noqa: E731
    agree(both, x, x.bfloat16(), x.double(), x.nan_to_num().mul(3).int(), x > 0)
    agree(lambda x: (x.cummax(axis)[0] + x, x.cummin(axis)[1]), torch.randint(-3, 3, (4, 300, 4)))


def test_running_extremes_of_any_length_and_of_scalars() -> None:
    free = agree(lambda x: (*x.cummax(1), *(-x).cummin(1)), torch.randn(2, 50), dynamic_shapes=({1: Dim("n", max=200)},))
    for n in (1, 17, 200):
        x = torch.randn(2, n)
        assert_close(free(x), (*x.cummax(1), *(-x).cummin(1)))
    agree(lambda x, y: (*x.cummax(0), *y.cummin(0)), torch.tensor(2.5), torch.tensor([True]))


class Inserting(nn.Module):
    """As vision-language models put the features of images in the places of their marks."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.pixels, self.head = nn.Embedding(99, 32), nn.Linear(48, 32), nn.Linear(32, 8)

    def forward(self, ids: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        words, features = self.words(ids), self.pixels(image)
        marks = (ids == 98).unsqueeze(-1).expand_as(words)
        result: torch.Tensor = self.head(words.masked_scatter(marks, features))
        return result


@torch.no_grad()
def test_features_in_the_places_of_marks() -> None:
    torch.manual_seed(0)
    model = Inserting().eval()

    def given(batch: int, length: int, images: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.randint(0, 90, (batch, length))
        ids.view(-1)[torch.randperm(ids.numel())[: images * 4]] = 98
        return ids, torch.randn(images, 4, 48)

    args = given(2, 12, 3)
    free = sashiko.compile(model, args, dynamic_shapes=({0: Dim("b"), 1: Dim("n")}, {0: Dim("i")}), strict=True)
    for other in (args, given(1, 40, 5), given(3, 7, 2)):
        assert_close(free(*other), model(*other))
    ids, image = given(3, 7, 2)
    ids[0] = 0
    assert_close(free(ids, image), model(ids, image))  # more features than marks
    ids[:] = 98
    with pytest.raises(IndexError, match="out of range"):
        free(ids, image)
    fixed, other = sashiko.compile(model, args, strict=True), given(2, 12, 3)
    assert_close(fixed(*other), model(*other))


def test_masks_of_any_shape() -> None:
    torch.manual_seed(0)
    x, mask, source = torch.randn(3, 4, 6), torch.rand(3, 4, 6) > 0.5, torch.randn(80)
    put: Any = torch.Tensor.masked_scatter
    agree(put, x, mask, source)
    agree(put, x, mask[:, :1], source.view(8, 10))
    agree(put, x, mask[..., :1], source.view(80, 1))
    agree(put, x, mask[..., :1], source[:78].view(13, 6).bfloat16().float())
    agree(put, x[0], mask, source)
    agree(put, x.int(), mask[0, 0], torch.arange(90).view(3, 5, 6).int())
    agree(put, x[0, 0, 0], mask[0, 0, 0], source[:1])


def _assigned(x: torch.Tensor, mask: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y[mask] = values
    return y


def test_values_where_a_mask_is_true() -> None:
    torch.manual_seed(0)
    x, mask = torch.randn(3, 8, 5), torch.rand(3, 8) > 0.7
    many = int(mask.sum())
    for values in (torch.randn(many, 5), torch.randn(many, 1), torch.randn(1, 5), torch.randn(5), torch.tensor(2.0)):
        agree(_assigned, x, mask, values)
    agree(_assigned, x, x > 0, torch.randn(int((x > 0).sum())))
    agree(_assigned, x, torch.tensor([True, False, True]), torch.randn(2, 8, 5))
    agree(lambda x, m, v: _assigned(x.transpose(0, 1), m, v), x.transpose(0, 1), mask, torch.randn(5))


@pytest.mark.parametrize("true", [0, 1, 2, 3, 24])
def test_as_many_values_as_a_mask_is_true(true: int) -> None:
    x, values = torch.randn(3, 8, 5), torch.randn(2, 5)
    first, now = torch.arange(24).view(3, 8) < 2, torch.arange(24).view(3, 8) < true
    batch = Dim("batch")
    fast = agree(_assigned, x, first, values, dynamic_shapes=({0: batch}, {0: batch}, {0: Dim("values")}))
    if true == 2:
        assert_close(fast(x, now, values), _assigned(x, now, values))
        return
    with pytest.raises(RuntimeError):
        _assigned(x, now, values)
    with pytest.raises(IndexError, match="out of range"):
        fast(x, now, values)


def test_assertions_of_tensors() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        torch._check_tensor_all(x < 5, lambda: "too large")
        return x.exp() * 2

    fast = agree(forward, torch.rand(3, 4))
    with pytest.raises(RuntimeError):
        fast(torch.full((3, 4), 6.0))
