"""Products measured in their places: what is found is used, kept, told, and never makes a model slower or wrong."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import sashiko
from sashiko.cpu_codegen import cache
from sashiko.diagnostics.errors import InputError
from sashiko.driver import tuning
from sashiko.driver.model import CompiledModel


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(192, 320), nn.GELU(), nn.Linear(320, 192)).eval()


@pytest.fixture
def rigged(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Measuring that always finds the last model the fastest, and the number of models of each measurement."""
    measured: list[int] = []

    def step_times(models: Sequence[CompiledModel], *_: Any) -> list[list[float]]:
        measured.append(len(models))
        return [[1.0 / (1 + number)] * len(model.built.measurable) for number, model in enumerate(models) if model.built]

    monkeypatch.setattr(tuning, "_step_times", step_times)
    monkeypatch.setattr(tuning, "_faster", lambda example, usual, other, deadline: other)
    return measured


def test_what_is_faster_is_used_and_kept(rigged: list[int]) -> None:
    model, x = mlp(), torch.randn(70, 192)
    usual, fast = sashiko.compile(model, (x,)), sashiko.compile(model, (x,), tune=60)
    assert fast.built is not None and usual.built is not None and usual.built.tuning == ()
    assert "products that were measured" in fast.explain() and "of the time" in fast.explain()
    assert "took longer when it was measured" in fast.explain() or "tiles of rows" in fast.explain() or "k in " in fast.explain()
    assert torch.allclose(fast(x), model(x), rtol=0, atol=1e-5)
    again = sashiko.compile(model, (x,), tune=60)
    assert len(rigged) == 1, "it was measured again"
    assert again.built is not None and again.built.tuning == fast.built.tuning


@pytest.mark.usefixtures("private_cache")
def test_a_note_that_says_nothing_of_use_is_made_again(rigged: list[int]) -> None:
    model, x = nn.Linear(64, 48).eval(), torch.randn(70, 64)
    sashiko.compile(model, (x,), tune=60)
    for note in cache.folder().glob("*.json"):
        cache.write(note, note.stem, b"{}")
    for _ in range(2):
        sashiko.compile(model, (x,), tune=60)
    assert len(rigged) == 2


def test_other_sizes_are_measured_for_themselves(rigged: list[int]) -> None:
    model, rows = mlp(), Dim("rows", max=512)
    for count in (16, 300):
        x = torch.randn(count, 192)
        fast = sashiko.compile(model, (x,), dynamic_shapes=({0: rows},), tune=60)
        for other in (x, torch.randn(37, 192)):
            assert torch.allclose(fast(other), model(other), rtol=0, atol=1e-5)
    assert len(rigged) == 2


def test_nothing_is_kept_of_what_there_was_no_time_for(rigged: list[int]) -> None:
    model, x = mlp(), torch.randn(71, 192)
    for _ in range(2):
        fast = sashiko.compile(model, (x,), tune=1e-6)
        assert "as far as there was time" in fast.explain()
    assert rigged == [2, 2], "one way at least is measured, and each time again"


def test_together_they_must_be_faster(rigged: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_faster", lambda example, usual, other, deadline: usual)
    model, x = mlp(), torch.randn(72, 192)
    fast = sashiko.compile(model, (x,), tune=60)
    assert "left as estimated" in fast.explain() and "took longer when it was measured" not in fast.explain()
    again = sashiko.compile(model, (x,), tune=60).explain()
    assert len(rigged) == 1 and again.count("as estimated is the fastest") == 2 and "of the time" not in again


def test_a_real_measurement_keeps_to_its_time() -> None:
    model, x = mlp(), torch.randn(64, 192)
    begin = time.perf_counter()
    fast = sashiko.compile(model, (x,), tune=2)
    assert time.perf_counter() - begin < 20
    assert torch.allclose(fast(x), model(x), rtol=0, atol=1e-5)
    assert fast.explain().count("192 x 320") + fast.explain().count("320 x 192") >= 2


def test_a_quantized_model_can_be_tuned(rigged: list[int]) -> None:
    model, x = mlp(), torch.randn(73, 192)
    small = sashiko.quantize(model, [x], preset="int8-static", progress=False)
    assert torch.equal(sashiko.compile(small, (x,), tune=60)(x), sashiko.compile(small, (x,))(x))


class Counting(nn.Module):
    """Counts its calls."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        result: torch.Tensor = self.inner(x)
        return result


def test_measuring_leaves_the_model_and_the_arguments_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_best", lambda *_: tuning.Finding(tuning.Choice(tiles=2), 0.5))  # both models are timed in the end
    model, x = Counting().eval(), torch.randn(75, 192)
    before = x.clone()
    fast = sashiko.compile(model, (x,), tune=1)
    assert model.calls.item() == 0 and torch.equal(x, before)
    fast(x)
    assert model.calls.item() == 1


@pytest.mark.parametrize("tune", [-1.0, float("nan"), "long"])
def test_seconds_that_mean_nothing(tune: Any) -> None:
    with pytest.raises(InputError, match="tune"):
        sashiko.compile(mlp(), (torch.randn(4, 192),), tune=tune)


def test_only_this_machine_can_be_measured() -> None:
    with pytest.raises(InputError, match="neoverse_n1"):
        sashiko.compile(mlp(), (torch.randn(4, 192),), target="neoverse_n1", tune=True)


def test_a_model_without_products_has_nothing_to_tune() -> None:
    x = torch.randn(8, 8)
    assert torch.equal(sashiko.compile(nn.ReLU().eval(), (x,), tune=True)(x), x.relu())
