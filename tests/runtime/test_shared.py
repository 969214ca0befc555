"""Packed weights are in memory once, however many compiled models were made of them."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import sashiko
from sashiko.driver.model import CompiledModel
from sashiko.runtime import shared

SIZE = 256


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU(), nn.Linear(SIZE, SIZE)).eval()


def compiled(model: nn.Module, rows: int, precision: str = "fp32") -> CompiledModel:
    return sashiko.compile(model, (torch.randn(rows, SIZE),), precision=precision)


def packed(model: CompiledModel) -> set[int]:
    """Where its large constants are."""
    return {tensor.data_ptr() for tensor in model.executable.constants() if tensor.nbytes >= SIZE * SIZE * 2}


def is_right(compiled_model: CompiledModel, model: nn.Module, rows: int) -> bool:
    x = torch.randn(rows, SIZE)
    with torch.no_grad():
        return torch.allclose(compiled_model(x), model(x), rtol=0, atol=1e-5)


def test_one_and_many_rows_have_their_weights_in_common(model: nn.Module) -> None:
    one, many = compiled(model, 1), compiled(model, 40)
    assert packed(one) == packed(many) and len(packed(one)) == 2
    assert is_right(one, model, 1) and is_right(many, model, 40)


def test_other_forms_are_others(model: nn.Module) -> None:
    assert packed(compiled(model, 8)).isdisjoint(packed(compiled(model, 8, "bf16")))


def test_a_weight_that_was_written_without_a_trace_is_not_in_common(model: nn.Module) -> None:
    before = compiled(model, 8)
    model[0].weight.data.mul_(2)  # PyTorch counts no version, and the first model keeps what it has
    after = compiled(model, 8)
    assert len(packed(before) & packed(after)) == 1
    assert is_right(after, model, 8) and not is_right(before, model, 8)


def test_changed_weights_are_in_common_again(model: nn.Module) -> None:
    one, many = compiled(model, 1), compiled(model, 40)
    old = packed(one)
    with torch.no_grad():
        model[0].weight.mul_(2)
    assert is_right(one, model, 1) and len(packed(one) & old) == 1
    assert is_right(many, model, 40) and packed(one) == packed(many)


@pytest.mark.usefixtures("own_garbage")
def test_what_nobody_uses_is_forgotten(model: nn.Module) -> None:
    gc.collect()
    before = len(shared._known)
    one, many = compiled(model, 1), compiled(model, 40)
    assert len(shared._known) == before + 2
    del one
    gc.collect()
    assert len(shared._known) == before + 2 and is_right(many, model, 40)
    del many
    gc.collect()
    assert len(shared._known) == before
