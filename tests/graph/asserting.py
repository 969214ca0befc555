"""What models assert of their inputs: apart from the tests, whose assertions pytest writes anew."""

from __future__ import annotations

import torch


def is_small(x: torch.Tensor) -> None:
    assert x.abs().max().item() <= 5, "too large"


def is_said_to_be_small(x: torch.Tensor) -> None:
    torch._check(2 * x.abs().max().item() + x.min().item() + 1 <= 11)


def is_small_in_whole_numbers(x: torch.Tensor) -> None:
    assert x.abs().max().int().item() <= 5


def is_small_without_a_message(x: torch.Tensor) -> None:
    torch._assert_async((x.abs() <= 5).all())


def is_small_with_a_message(x: torch.Tensor) -> None:
    torch._assert_async((x.abs() <= 5).all(), "too large")
