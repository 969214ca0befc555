"""Weights of which several products are added in 16 bits: which ones are added, which weights fit, and the nearest ones that do."""

from __future__ import annotations

import itertools

import pytest
import torch

from sashiko.graph.sums16 import COUNTS, MOST, columns, how_many, largest, limited


def by_sums(weight: torch.Tensor, count: int) -> torch.Tensor:
    """The weight [N, K] as [N, sums, count], with zeros behind its end."""
    whole = -(-weight.shape[1] // 8) * 8
    padded = torch.nn.functional.pad(weight, (0, whole - weight.shape[1]))
    return padded[:, columns(torch.arange(whole // count), count)]


def test_which_are_added() -> None:
    k = torch.arange(16)[None]
    assert by_sums(k, 4)[0].tolist() == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
    assert by_sums(k, 2)[0].tolist() == k.view(-1, 2).tolist()
    assert by_sums(k, 1)[0].tolist() == k.view(-1, 1).tolist()


def test_what_fits_stays_within_16_bits() -> None:
    assert MOST * 255 < 2**15 <= (MOST + 1) * 255


def fits(weight: torch.Tensor, count: int) -> bool:
    """By the least and the greatest sum of products with unsigned bytes."""
    sums = by_sums(weight.long() * 255, count)
    highest, lowest = sums.clamp_min(0).sum(-1), sums.clamp_max(0).sum(-1)
    return bool((highest < 2**15).all() and (lowest >= -(2**15)).all()) and not bool((weight == -128).any())


@pytest.mark.parametrize("k", [1, 6, 24, 37])
def test_how_many_fit(k: int) -> None:
    generator, found = torch.Generator().manual_seed(k), set[int]()
    for size in (20, 33, 45, 65, 80, 129):
        weight = torch.randint(1 - size, size, (5, k), generator=generator).to(torch.int8)
        count = how_many(weight)
        assert count == (4 if fits(weight, 4) else 2 if fits(weight, 2) else 1)
        found.add(count)
    assert found == set(COUNTS) if k > 1 else found == {4}


def test_how_many_fit_at_the_edge() -> None:
    for values, count in (([64, 64], 4), ([65, 64], 1), ([-64, -64], 4), ([-64, -65], 1), ([127, -127], 4), ([-128], 1), ([0, 0, 127], 4)):
        assert how_many(torch.tensor([values], dtype=torch.int8)) == count, values
    assert how_many(torch.tensor([[64, 64, 0, 0, 1]], dtype=torch.int8)) == 2
    assert how_many(torch.tensor([[64, 64, 0, 0, -1, 0, 90]], dtype=torch.int8)) == 4
    assert how_many(torch.zeros(0, 8, dtype=torch.int8)) == how_many(torch.zeros(8, 0, dtype=torch.int8)) == 4
    many = torch.zeros(3000, 130, dtype=torch.int8)  # more than are looked at together
    many[-1, -1] = -128
    assert how_many(many) == 1


@pytest.mark.parametrize("count", COUNTS)
def test_the_largest_sum_of_a_row(count: int) -> None:
    weight = torch.randint(-999, 999, (4, 21), generator=torch.Generator().manual_seed(0)) / 256  # whose sums are exact
    found = largest(weight, count)
    for row, value in zip(weight, found, strict=True):
        sums = by_sums(row[None], count)[0]
        assert value == max(abs(float(part.sum(-1).abs().max())) for part in (sums.clamp_min(0), sums.clamp_max(0)))
    assert torch.equal(largest(torch.zeros(3, 0), count), torch.zeros(3))
    many = torch.zeros(3000, 130)  # more than are looked at together
    many[-1, -1] = -3.0
    assert torch.equal(largest(many, count), torch.tensor([0.0] * 2999 + [3.0]))


@pytest.mark.parametrize("count", [2, 4])
def test_what_is_limited_is_as_near_as_can_be(count: int) -> None:
    """Sums of small excess against every choice of what to take off."""
    generator = torch.Generator().manual_seed(count)
    real = (torch.rand(40, count, generator=generator) * 2 * MOST / count + torch.randn(40, count, generator=generator)).clamp(-127, 127)
    placed = torch.zeros(40, 8)
    at = [0, 1, 4, 5][:count]
    placed[:, at] = real
    found = limited(placed.round(), placed, count)
    assert how_many(found.to(torch.int8)) >= count and bool((placed.round() != found).any())
    for row, nearest, exact in zip(found[:, at], placed[:, at].round(), real, strict=True):
        over = max(0, int(nearest.clamp_min(0).sum()) - MOST)
        if over <= 6:
            less = (nearest - torch.tensor(taken) for taken in itertools.product(range(over + 1), repeat=count) if sum(taken) == over)
            best = min(float((each - exact).square().sum()) for each in less)
            assert float((row - exact).square().sum()) == pytest.approx(best, rel=1e-5)
    small = torch.randint(-30, 30, (5, 19)).double()
    assert torch.equal(limited(small, small, count), small)
