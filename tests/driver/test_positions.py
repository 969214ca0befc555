"""Where elements are read and written: positions that are stored, and were computed in another segment."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import sashiko
from tests.driver.functions import Apply


def by_others(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Left to PyTorch."""
    return torch.zeros(4, 2, 4).scatter_add(2, at, x)


def test_steps_along_two_axes_behind_what_is_left_to_pytorch() -> None:
    """A write may be what another one writes, in another segment than the tensor that is written into."""

    def step(x: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = by_others(x, at)
        corners, third, second = torch.full((6, 6, 4, 2), -1.0), torch.zeros(4, 4, 4), torch.zeros(4, 4, 4)
        corners[::5, ::5] = found.view(2, 2, 2, 4).transpose(-1, -2)
        third[:, ::3] = found
        second[:, ::2] = found  # where these are is stored, and other numbers are
        return corners, third, second

    args = torch.randn(4, 2, 4), torch.randint(0, 4, (4, 2, 4))
    fast = sashiko.compile(Apply(step).eval(), args)
    assert len(fast.executable.plan.segments) == 3
    assert all(map(torch.equal, fast(*args), step(*args)))


WRAPPED: dict[str, Callable[[], torch.Tensor]] = {
    "64 bits": lambda: torch.arange(61) * 6364136223846793005,
    "32 bits": lambda: torch.arange(61, dtype=torch.int32) * 265443577,
    "narrowed": lambda: (torch.arange(61) * (2**31 + 5)).to(torch.int32),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_positions_that_wrap_around(name: str) -> None:
    """Integers that are counted are no larger than their type, where they are read and where they are compared."""
    x, at = torch.randn(5, 61), WRAPPED[name]

    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.index_select(x, 1, at() % 61), torch.where(at() >= 0, x, -x), torch.where(at() < 7 * at(), x, -x)

    assert all(map(torch.equal, sashiko.compile(Apply(step).eval(), (x,))(x), step(x)))


@pytest.mark.parametrize("order", [(True, False), (False, True)])
def test_a_position_is_checked_although_another_model_bounds_it(order: tuple[bool, bool]) -> None:
    def step(clamps: bool) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        def lookup(x: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            at = (x * 8).long().clamp(0, 7) if clamps else (x * 8).long()
            return torch.nn.functional.embedding(at, torch.nextafter(table, table + at.sum())), at  # the middle one is left to PyTorch

        return lookup

    good, bad, table = torch.rand(6), torch.full((6,), 100.0), torch.rand(8, 16)
    for clamps in order:
        fast = sashiko.compile(Apply(step(clamps)).eval(), (good, table))
        assert all(map(torch.equal, fast(good, table), step(clamps)(good, table)))
        if clamps:
            assert torch.equal(fast(bad, table)[1], torch.full((6,), 7))
        else:
            with pytest.raises(IndexError, match="out of range"):
                fast(bad, table)
