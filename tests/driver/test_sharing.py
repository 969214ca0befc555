"""Arguments that share memory with others, of models that write into them: refused where it matters, whatever shares it and however."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import sashiko
from tests.driver.functions import Apply

Step = Callable[..., Any]


def added_to(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return y * 2


def slice_written(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    x[1:] = 5.0
    return y * 2


def both_written(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    y.mul_(2)
    return x * 2


def left_to_pytorch(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return torch.linalg.inv(y)


MEMORY: dict[str, Step] = {
    "the same": lambda m: (m[:3, :3].clone(),) * 2,
    "a view": lambda m: ((x := m[0, :9].view(3, 3)), x.t()),
    "partly": lambda m: (m[0, :9].view(3, 3), m[0, 8:17].view(3, 3)),
    "crossing": lambda m: (m[:3, :3], m[2:5, 1:4]),
    "other bytes": lambda m: (m[:3, :3], m[1:4, :3].view(torch.float32)),
}
APART: dict[str, Step] = {
    "one after the other": lambda m: (m[0, :9].view(3, 3), m[0, 9:18].view(3, 3)),
    "between one another": lambda m: (m[:3, ::2][:, :3], m[:3, 1::2][:, :3]),
}


def pair(name: str) -> tuple[torch.Tensor, ...]:
    memory = torch.arange(120, dtype=torch.float32).add(0.5).sin().view(6, 20)
    x, y = {**MEMORY, **APART}[name](memory)
    return x, y, memory


@pytest.mark.parametrize("step", [added_to, slice_written, both_written, left_to_pytorch], ids=lambda f: f.__name__)
def test_arguments_that_share_memory(step: Step) -> None:
    """What reads the one before the other is written, and what reads it after, is the same to the code. What only lies near is not shared,
    and neither is what is not read at all."""
    fast = sashiko.compile(Apply(step).eval(), (torch.eye(3), torch.eye(3), torch.ones(6, 20)))
    for name in MEMORY:
        x, y, memory = pair(name)
        before = memory.clone()
        for arguments in ((x, y), (y, x)):
            with pytest.raises(sashiko.InputError, match=r"argument 0 \('args_0'\) and argument 1 \('args_1'\) share(.|\n)*clone"):
                fast(*arguments, torch.ones(6, 20))
        assert torch.equal(memory, before), "nothing is written"
    for name in APART:
        mine, theirs = pair(name), pair(name)
        assert_close(fast(*mine), step(*theirs))
        assert_close(mine, theirs)


def test_arguments_that_are_only_read_may_share_memory() -> None:
    def step(x: torch.Tensor, y: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        c.add_(x + y)
        return y * 2

    fast = sashiko.compile(Apply(step).eval(), (torch.ones(4), torch.ones(4), torch.ones(4)))
    x, c = torch.randn(4), torch.zeros(4)
    assert_close((fast(x, x, c), c), (x * 2, x * 2))


def test_an_argument_that_is_a_buffer() -> None:
    class Counts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen: torch.Tensor
            self.register_buffer("seen", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.add_(1)
            return x * 2

    model = Counts().eval()
    fast = sashiko.compile(model, (torch.ones(4),))
    with pytest.raises(sashiko.InputError, match=r"'x'.*'seen'.*share memory"):
        fast(model.seen)
    assert_close((fast(model.seen.clone()), model.seen), (torch.zeros(4), torch.ones(4)))


@pytest.mark.parametrize("name", MEMORY)
def test_an_example_may_share_memory(name: str) -> None:
    """It stands for calls whose arguments do not."""
    model = Apply(both_written).eval()
    fast = sashiko.compile(model, pair(name))
    mine, theirs = (tuple(t.clone() for t in pair(name)) for _ in range(2))
    assert_close((fast(*mine), mine), (model(*theirs), theirs))
    with pytest.raises(sashiko.InputError, match="share memory"):
        fast(*pair(name))


@torch.no_grad()
@pytest.mark.parametrize("step", [added_to, both_written], ids=lambda f: f.__name__)
def test_arguments_that_share_memory_through_torch_compile(step: Step) -> None:
    """PyTorch knows what shares memory, and has it compiled for that."""
    torch._dynamo.reset()
    fast = torch.compile(Apply(step).eval(), backend="sashiko")
    for name in ("the same", "a view", "partly"):
        mine, theirs = pair(name), pair(name)
        assert_close(fast(*mine), step(*theirs))
        assert_close(mine, theirs)
