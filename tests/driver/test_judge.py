"""What is judged and measured finds the model as it was, whatever calls write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import sashiko
from sashiko.driver import measure
from sashiko.driver.judge import Judge, goal_of
from sashiko.driver.measure import Example, HostTimer
from sashiko.quant.program import Call


class Remembers(nn.Module):
    """Puts a row into a table of three, returns what is there, and writes into what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(32, 32), nn.Linear(32, 32)
        self.register_buffer("rows", torch.zeros(3, 32))
        self.register_buffer("at", torch.zeros(1, dtype=torch.int64))
        self.scale = nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.clamp_(-1.0, 1.0)
        self.scale.mul_(3)
        self.rows.index_copy_(0, self.at, self.layer(x))
        self.at.add_(1)
        result: torch.Tensor = self.last(self.rows.sum(0) + self.scale)
        return result


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Remembers().eval()


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_TURN_SECONDS", 0.001)


def held(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in tensors]


def test_each_call_of_the_sample_and_each_evaluation_finds_the_same_state(model: nn.Module) -> None:
    def twice(candidate: Callable[..., Any]) -> float:
        candidate(torch.ones(1, 32))
        return float(candidate(torch.ones(1, 32)).sum())

    x, state = torch.randn(1, 32), held(*model.state_dict().values())
    batches = [x + n for n in range(3)]
    small = sashiko.quantize(model, batches, preset="int8", progress=False)
    own = held(*small.state_dict().values())
    judge = Judge(goal_of(twice, 1.0, 0.1), model, [Call((batch.clone(),), {}) for batch in batches])
    assert judge.verdict(model, "the model").error == 0.0
    first, again = (judge.verdict(small, "a mix") for _ in range(2))
    assert first.meets and first == again and 0.0 < first.error < 0.05
    for call, batch in zip(judge.sample, batches, strict=True):
        assert torch.equal(call.args[0], batch)
    for tensors, before in ((model.state_dict(), state), (small.state_dict(), own)):
        assert all(map(torch.equal, tensors.values(), before))


@pytest.mark.usefixtures("short")
def test_each_call_that_is_timed_finds_the_same_state(model: nn.Module) -> None:
    x = torch.randn(1, 32)
    fast = sashiko.compile(model, (x,))
    state = held(x, *model.state_dict().values())
    timer = HostTimer(Example((x,), {}))
    assert timer.paired({"fp32": fast})["fp32"] > 0.0 and timer.products({"fp32": fast}), "the fourth call has no row"
    assert all(map(torch.equal, (x, *model.state_dict().values()), state))


@pytest.mark.usefixtures("short")
def test_the_search_returns_a_model_in_the_state_of_the_original(model: nn.Module) -> None:
    x, state = torch.randn(1, 32), held(*model.state_dict().values())
    fast = sashiko.quantize_and_compile(model, [x, x], preset="auto", target_error=0.1, budget_s=0.0, progress=False)
    assert all(map(torch.equal, model.state_dict().values(), state))
    for _ in range(3):
        expected = model(x.clone())
        assert (fast(x.clone()) - expected).norm() < 0.1 * expected.norm()
