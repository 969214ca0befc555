"""Whether a model trains."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from sashiko.graph.modes import in_training, to_evaluate


class Named(nn.ModuleDict):
    """A container of somebody else's, which may look at its flag."""


class MadeAnew(nn.Module):
    """A layer that copying puts into training mode."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor, self.act = factor, {"relu": torch.relu}

    def __getstate__(self) -> dict[str, Any]:
        return {"factor": self.factor}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @property
    def doubled(self) -> float:
        return 2 * self.factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(x)

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.doubled


def drop(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.dropout(x, 0.5, layer.training)


def wrapped(method: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def call(*args: Any) -> torch.Tensor:
        return method(*args)

    return call


class Reads(MadeAnew):
    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, 0.5, self.training)


class Encloses(MadeAnew):
    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return (lambda: nn.functional.dropout(x, 0.5, self.training))()


class Wraps(MadeAnew):
    scaled = wrapped(drop)


def test_torchs_own_containers_are_what_their_parts_are() -> None:
    normed = spectral_norm(nn.Linear(2, 2).eval())
    assert normed.parametrizations.training and in_training(normed) == ""
    normed.parametrizations.weight[0].train()
    assert in_training(normed) == "parametrizations.weight.0"
    assert in_training(nn.Sequential(nn.Linear(2, 2).eval())) == ""
    assert in_training(nn.Sequential(nn.Linear(2, 2))) == "0"
    assert in_training(Named({"a": nn.Linear(2, 2).eval()})) == "Named"


def test_a_copied_layer_that_does_not_read_its_mode_has_none() -> None:
    model = copy.deepcopy(nn.Sequential(MadeAnew(2.0), nn.ReLU()).eval())
    assert model[0].training and not model.training and in_training(model) == ""
    model[0].register_forward_hook(lambda layer, args, result: drop(layer, result))
    assert in_training(model) == "0"


@pytest.mark.parametrize("kind", [Reads, Encloses, Wraps])
def test_a_copied_layer_that_may_read_its_mode_trains(kind: type[MadeAnew]) -> None:
    model = copy.deepcopy(nn.Sequential(kind(2.0)).eval())
    assert in_training(model) == "0" and "copying" in to_evaluate(model)
    assert in_training(model.eval()) == ""


@pytest.mark.parametrize("layer", [nn.Dropout(), nn.BatchNorm1d(2, affine=False, track_running_stats=False), nn.RReLU(), nn.Linear(2, 2)])
def test_layers_of_torchs_that_have_modes(layer: nn.Module) -> None:
    assert in_training(nn.Sequential(layer.train())) == "0"
