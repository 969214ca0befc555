"""Random compositions of operations, compiled whole, against what eager and f64 give."""

from __future__ import annotations

import pytest
import torch

import sashiko
from sashiko.runtime.plan import AtenStep
from tests.driver.compositions import Composition, composed, wrong
from tests.driver.functions import Apply
from tests.driver.mixed_steps import MIXED
from tests.driver.steps import OPERATIONS

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # eager warns of variances of one element


def compiled(made: Composition) -> sashiko.CompiledModel:
    return sashiko.compile(Apply(made).eval(), made.arguments())


def agree(seeds: range, mixed: bool = False) -> int:
    """Compiles a composition for each seed, and gives how many had something left to PyTorch."""
    left = 0
    for seed in seeds:
        made = composed(seed, MIXED, 2 + seed % 5, wild=True) if mixed else composed(seed, OPERATIONS, 3 + seed % 6)
        fast = compiled(made)
        why = wrong(made, fast(*made.arguments()))
        assert why is None, f"seed {seed}: {why}\n{made}"
        left += any(isinstance(segment, AtenStep) for segment in fast.executable.plan.segments)
    return left


def test_a_few() -> None:
    assert agree(range(20)) < 6


def test_a_few_between_types() -> None:
    assert agree(range(16), mixed=True) < 6


@pytest.mark.slow
def test_many() -> None:
    assert agree(range(1000, 4000)) < 300


@pytest.mark.slow
def test_many_between_types() -> None:
    assert agree(range(1000, 4000), mixed=True) < 900


def spoiled(result: torch.Tensor) -> torch.Tensor:
    """One number off by a twentieth of the largest, one integer by one, one bool."""
    other = result.clone().reshape(-1)
    if result.is_floating_point():
        other[0] += other.nan_to_num(1.0, 1.0, 1.0).abs().max() / 20
    else:
        other[0] = ~other[0] if result.dtype == torch.bool else other[0] + 1
    return other.reshape(result.shape)


def test_the_check_itself_finds_what_is_wrong() -> None:
    found = []
    both = [composed(seed, OPERATIONS, 5) for seed in range(100, 120)] + [composed(seed, MIXED, 4, wild=True) for seed in range(100, 110)]
    for made in both:
        right = list(made(*made.arguments()))
        assert wrong(made, right) is None
        found += [wrong(made, [*right[:n], spoiled(result), *right[n + 1 :]]) is not None for n, result in enumerate(right)]
    assert sum(found) > 0.8 * len(found) > 20
