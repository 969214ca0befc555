"""Zeros of both signs, infinities, NaN and the largest and smallest numbers, where rules and tables meet them."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import sashiko
from tests.driver.functions import Apply


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("rank", [2, 3])
def test_images_with_infinite_edges_are_sampled(rank: int, padding: str) -> None:
    """What would lie behind the last pixel counts for nothing; an infinity times 0 were NaN."""
    torch.manual_seed(0)
    image = F.pad(torch.randn(2, 3, *(4, 5, 6)[:rank]), (1, 1) * rank, value=float("inf"))
    points = 3 * torch.randn(2, *(7, 8, 9)[:rank], rank)
    model = Apply(lambda x, at: [F.grid_sample(x, at, padding_mode=padding, align_corners=aligned) for aligned in (False, True)]).eval()
    expected = model(image, points)
    assert all(torch.isinf(each).any() for each in expected)
    assert_close(sashiko.compile(model, (image, points), strict=True)(image, points), expected, equal_nan=True)


@pytest.mark.parametrize("side", ["left", "right"])
def test_numbers_in_order_with_nan_behind(side: str) -> None:
    """numpy finds the same among them, and torch where NaN is looked for."""
    ends, x = torch.cat([torch.randn(30).sort()[0], torch.full((5,), float("nan"))]), torch.randn(50)
    fast = sashiko.compile(Apply(partial(torch.searchsorted, side=side)).eval(), (ends, x), strict=True)
    assert fast(ends, x).tolist() == np.searchsorted(ends.numpy(), x.numpy(), side=side).tolist()  # type: ignore[call-overload]
    assert fast(ends, torch.full((50,), float("nan"))).tolist() == [35] * 50


def test_a_choice_between_zeros_of_both_signs() -> None:
    model, x = Apply(lambda x: 1 / torch.where(x > 0, 0.0, -0.0)).eval(), torch.tensor([1.0, -1.0, float("nan")])
    assert sashiko.compile(model, (x,), strict=True)(x).tolist() == model(x).tolist() == [float("inf"), float("-inf"), float("-inf")]
