"""A small model with a layer that integers do not suit, searched on times from a table."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

import sashiko
from sashiko.driver.judge import Goal, goal_of
from sashiko.driver.levels import FINE, FLOAT, NARROW, QUANTIZED, Capture, Lab
from sashiko.driver.model import CompiledModel
from sashiko.driver.quantized import find
from sashiko.quant import PRESETS, calibrate

Level = Mapping[str, float]


class Net(nn.Module):
    """Three linears in a row; [B, 32] -> [B, 32]. The inputs of `bad` have one feature a thousand times as large as the others."""

    def __init__(self, outlier: float = 1.0) -> None:
        super().__init__()
        self.first, self.bad, self.last = (nn.Linear(32, 32) for _ in range(3))
        scale = torch.ones(32)
        scale[5] = outlier
        self.register_buffer("scale", scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The large feature is undone by small weights, so that its values matter no more than any other's.
        result: torch.Tensor = self.last(torch.relu(self.bad(torch.relu(self.first(x)) * self.scale)))
        return result


def net(outlier: float = 1.0) -> Net:
    torch.manual_seed(0)
    model = Net(outlier).eval()
    with torch.no_grad():
        model.bad.weight[:, 5] /= outlier
    return model


def data(count: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, 32, generator=generator) for _ in range(count)]


@dataclass
class FakeTimer:
    """Times from a table: seconds for each level, of a product and of a whole model, or of a product by its name."""

    seconds: Level
    own: Mapping[tuple[str, str], float] = field(default_factory=dict)
    whole: Mapping[str, float] = field(default_factory=dict)

    def products(self, models: Mapping[str, CompiledModel]) -> Mapping[str, Mapping[str, float]]:
        names = {level: [p.name for p in model.built.products if p] for level, model in models.items() if model.built}
        return {level: {n: self.own.get((n, level), self.seconds[level]) for n in found} for level, found in names.items()}

    def paired(self, models: Mapping[str, CompiledModel]) -> Mapping[str, float]:
        return {name: self.whole.get(name, {"mix": 1.0, "bf16": 2.0, "fp32": 3.0}[name]) for name in models}


FASTER = {QUANTIZED: 1.0, FINE: 1.5, NARROW: 5.0, FLOAT: 3.0}
SLOWER = {QUANTIZED: 3.0, FINE: 3.0, NARROW: 5.0, FLOAT: 2.0}


def capture(x: torch.Tensor) -> Capture:
    """Compiles for calls like x."""

    def make(module: nn.Module, precision: str, wide: frozenset[str]) -> CompiledModel:
        del wide  # no mix of these tests has both bf16 and fp32
        return sashiko.compile(module, (x,), precision=precision)

    return lambda module: functools.partial(make, module)


@functools.cache
def lab(outlier: float, preset: str = "int8-symmetric") -> Lab:
    """The models of `net(outlier)`, compiled once for all tests."""
    x = data()[0]
    calibration = calibrate(net(outlier), data(), PRESETS[preset])
    return Lab(calibration, capture(x), frozenset(site.name for site in calibration.placement.sites))


def searched(
    timer: FakeTimer, goal: Goal | None = None, *, outlier: float = 1.0, budget: float = math.inf, narrow: bool = True,
    preset: str = "int8-symmetric",
) -> CompiledModel:
    """The search on fake times, with all the real time it wants; without a goal, for an error of 2 %."""
    return find(lab(outlier, preset), net(outlier), replace(goal or goal_of(None, None, 0.02), budget=budget), timer, narrow)


def precisions(fast: CompiledModel) -> dict[str, str]:
    assert fast.search is not None
    return {site.name: site.precision for site in fast.search.sites}


def relative_error(model: nn.Module, fast: Callable[..., Any]) -> float:
    with torch.no_grad():
        pairs = [(model(x).double(), fast(x).double()) for x in data()]
    noise = sum((a - b).square().sum() for a, b in pairs)
    return float(noise / sum(a.square().sum() for a, _ in pairs)) ** 0.5
