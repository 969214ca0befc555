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


@pytest.mark.parametrize(("first", "second"), [
    (4.0, 0.25), (0.25, 4.0), (2.0**100, 2.0**-100), (2.0**-100, 2.0**100), (2.0**90, 1e-30), (1e30, 2.0**-90), (3e38, 0.5), (0.5, 3e38),
    (-16.0, 0.3), (1.4, 2.0**40), (2.0**40, 1.4), (4.0, -8.0), (0.25, -0.125), (0.3, 0.5), (-1.0, 3.0), (0.3, -1.0), (2.0**-30, 0.7),
])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_with_two_numbers(dtype: torch.dtype, first: float, second: float) -> None:
    """The product with the first may be infinite, or lose digits below the normal numbers, where that with both would not. One of the
    smallest numbers more or less is all the same where both make them smaller."""
    limits = torch.finfo(dtype)
    x = torch.cat([limits.max * torch.rand(100, dtype=dtype), limits.tiny * torch.rand(100, dtype=dtype), torch.randn(100, dtype=dtype),
                   torch.tensor([limits.max, limits.smallest_normal, 0.0, float("inf"), float("nan")], dtype=dtype)])
    x = torch.cat([x, -x])
    model = Apply(lambda x: x * first * second).eval()
    smallest = limits.tiny * limits.eps if max(abs(first), abs(second)) <= 1 else 0.0
    assert_close(sashiko.compile(model, (x,), strict=True)(x), model(x), rtol=0, atol=smallest, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.float32])
def test_the_size_of_a_negative(dtype: torch.dtype) -> None:
    """In uint8, -1 is 255, and stays so."""
    model, x = Apply(lambda x: abs(-x)).eval(), torch.tensor([0, 1, 2, 100, 127, 200, 255]).to(dtype)
    assert torch.equal(sashiko.compile(model, (x,), strict=True)(x), model(x))


@pytest.mark.parametrize("divisor", [0.0, -0.0, 1e-40, float("inf")])
@pytest.mark.parametrize("place", ["scores", "queries", "keys"])
def test_attention_whose_scale_is_the_inverse_of_zero(place: str, divisor: float) -> None:
    """Among other divisors that leave nothing of the scores."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if place != "scores":
            return torch.softmax((q / divisor) @ k.mT if place == "queries" else q @ (k / divisor).mT, -1) @ v
        return torch.softmax(q @ k.mT / divisor, -1) @ v

    torch.manual_seed(0)
    model, (q, k, v) = Apply(attend).eval(), (torch.randn(2, 2, n, 8) for n in (5, 7, 7))
    q[0, 0, 0] = 0
    assert_close(sashiko.compile(model, (q, k, v))(q, k, v), model(q, k, v), equal_nan=True)
