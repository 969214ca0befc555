"""When calls are recorded and what a recorded one does, with a stand-in for CUDA's graphs that repeats the call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sashiko.runtime import replay
from sashiko.runtime.replay import Replays

CPU = torch.device("cpu")
Weights = Any


class Stream:
    cuda_stream = 1

    def wait_stream(self, other: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        waited.append(event)


waited: list[Any] = []


class Call:
    """x + weight, as a model computes it; a graph repeats it in the memory that it was recorded with."""

    def __init__(self) -> None:
        self.weight, self.steps, self.recorded = torch.ones(3), 0, 0

    def __call__(self, x: torch.Tensor, n: int) -> tuple[Any, ...]:
        self.steps += 1
        self.made = (x + self.weight * n, n)
        self.given = x
        return self.made


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Iterator[Call]:
    made = Call()

    class Graph:
        def capture_begin(self, **options: Any) -> None:
            assert options == {"capture_error_mode": "thread_local"}
            made.recorded += 1

        def capture_end(self) -> None:
            self.inside, self.results = made.given, made.made

        def replay(self) -> None:
            result, n = self.results
            result.copy_(self.inside + made.weight * n)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda stream: None))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    waited.clear()
    yield made


def weights(*pointers: int) -> Weights:
    return SimpleNamespace(pointers=pointers)


def called(replays: Replays, call: Callable[..., Any], x: torch.Tensor, n: int = 2, constants: Weights = None) -> tuple[Any, ...]:
    """As an executable calls."""
    recorded = replays.find((x.shape, n), (x, n), constants or weights(1), call)
    result: tuple[Any, ...] = call(x, n) if recorded is None else replays.run(recorded, (x, n))
    return result


def test_the_third_call_is_recorded(call: Call) -> None:
    replays, results = Replays(True, CPU), []
    for number in range(6):
        x = torch.full((3,), float(number))
        results.append((called(replays, call, x), x))
        assert call.recorded == (number >= 2)
    assert call.steps == 3
    for (got, n), x in results:  # each has its own memory
        assert torch.equal(got, x + 2) and n == 2
    called(replays, call, torch.zeros(4)[:3], 5)
    assert call.steps == 4, "another number is another call"


def test_modes(call: Call) -> None:
    replays = Replays(True, CPU)
    for mode in [torch.inference_mode] * 3 + [torch.no_grad, torch.enable_grad, torch.inference_mode]:
        with mode():
            x = torch.randn(3, requires_grad=mode is torch.enable_grad)
            (got, _) = called(replays, call, x)
            assert torch.equal(got, x + 2)
    assert not got.requires_grad and call.steps == 3


def test_weights_elsewhere_are_recorded_again(call: Call) -> None:
    replays, x = Replays(True, CPU), torch.randn(3)
    for _ in range(4):
        called(replays, call, x, constants=weights(1, 2))
    assert call.recorded == 1
    called(replays, call, x, constants=weights(1, 2))
    assert call.steps == 3, "the same places are the same graph"
    call.weight = torch.full((3,), 7.0)
    for count in range(1, 5):
        assert torch.equal(called(replays, call, x, constants=weights(1, 3))[0], x + 14)
        assert call.recorded == (1 if count < 3 else 2), "not at once: they may change in every call"


def test_what_is_not_recorded(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    for replays in (Replays(False, CPU), Replays(True, CPU)):
        if replays._possible:
            monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        for _ in range(5):
            called(replays, call, torch.randn(3))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(replay, "_MOST_BYTES", 8)  # of arguments
    replays = Replays(True, CPU)
    for _ in range(5):
        called(replays, call, torch.randn(3))
    assert call.recorded == 0


def test_a_failure_is_remembered(call: Call) -> None:
    def fails(x: torch.Tensor, n: int) -> tuple[Any, ...]:
        if call.recorded and not torch.is_inference_mode_enabled():
            raise RuntimeError("operation not permitted when stream is capturing")
        return call(x, n)

    replays = Replays(True, CPU)
    for _ in range(2):
        called(replays, fails, torch.randn(3))
    with torch.inference_mode():
        for _ in range(3):
            x = torch.randn(3)
            with pytest.warns(UserWarning, match="could not be recorded") if not call.recorded else nullcontext():
                assert torch.equal(called(replays, fails, x)[0], x + 2)
    assert call.recorded == 1


def test_few_shapes(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_MOST", 2)
    monkeypatch.setattr(replay, "_SHAPES", 3)
    replays = Replays(True, CPU)
    for n in range(6):
        for _ in range(4):
            x = torch.randn(3)
            assert torch.equal(called(replays, call, x, n)[0], x + n)
    assert call.recorded == 2 and len(replays._calls) <= 4


def test_what_is_too_large_takes_no_place(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_MOST", 2)
    replays = Replays(True, CPU)
    with monkeypatch.context() as patch:
        patch.setattr(replay, "_MOST_BYTES", 8)
        for n in range(3):
            for _ in range(4):
                called(replays, call, torch.randn(3), n)
    assert call.recorded == 0
    for _ in range(4):
        called(replays, call, torch.randn(3), 7)
    assert call.recorded == 1
