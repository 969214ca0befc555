"""Compiled tables give what eager PyTorch gives, but for roundings that are nearly as good the other way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sashiko
from sashiko.driver.pipeline import passes
from sashiko.platforms.catalogue import NEOVERSE_N1, X86_64_V3, X86_64_V4
from sashiko.platforms.host import host
from sashiko.platforms.target import Target
from tests.driver.functions import Apply

Unary = Callable[[torch.Tensor], torch.Tensor]
TARGETS = [
    pytest.param(t, id=t.name, marks=pytest.mark.skipif(bool(t.why_not_on(host())), reason="needs another machine"))
    for t in ((NEOVERSE_N1,) if host().has("neon") else (X86_64_V3, X86_64_V4))
]
INF, NAN = float("inf"), float("nan")
FUNCTIONS: dict[str, tuple[Unary, float]] = {
    "gelu": (lambda x: x * 0.5 * (1 + torch.erf(x * 0.5**0.5)), 40.0),  # F.gelu has no number at infinity
    "tanh gelu": (lambda x: F.gelu(x, approximate="tanh"), 40.0),
    "silu": (F.silu, 30.0),
    "sigmoid": (torch.sigmoid, 127.0),
    "tanh": (torch.tanh, 120.0),
    "exp": (torch.exp, 127.0),
    "elu": (F.elu, 90.0),
}


class Rounded(nn.Module):
    """A function of x + bias, as integers from `low`."""

    def __init__(self, function: Unary, scale: float, low: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.function, self.scale, self.low, self.dtype = function, scale, low, dtype
        self.bias = nn.Parameter(torch.randn(83, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        zero = 0 if self.low else 25
        return torch.clamp(torch.round(self.function(x + self.bias) * self.scale) + zero, self.low, self.low + 255).to(self.dtype)


class Quantized(nn.Module):
    """Of nothing but the function: no scale moves into what comes before."""

    def __init__(self, function: Unary, step: float) -> None:
        super().__init__()
        self.function, self.step = function, step

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rounded: torch.Tensor = torch.ops.quantized_decomposed.quantize_per_tensor(self.function(x), self.step, 0, 0, 255, torch.uint8)
        return rounded


class Half(nn.Module):
    """GELU in uint8 with a step of which its least value is `zero` and a half."""

    def __init__(self, zero: int) -> None:
        super().__init__()
        least = float(F.gelu(torch.linspace(-1.0, -0.5, 10001, dtype=torch.float64)).min())
        self.zero, self.step = zero, -least / (zero + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rounded: torch.Tensor = torch.ops.quantized_decomposed.quantize_per_tensor(F.gelu(x), self.step, self.zero, 0, 255, torch.uint8)
        return rounded


class Scaled(nn.Module):
    """Two linear layers, and between them a factor for each channel after GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(40, 83), nn.Linear(83, 24)
        self.factor = nn.Parameter(torch.exp2(torch.randint(-2, 3, (83,)).float()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(F.gelu(self.first(x)) * self.factor)
        return result


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(("low", "dtype"), [(-128, torch.int8), (0, torch.uint8)])
def test_functions(name: str, low: int, dtype: torch.dtype, target: Target) -> None:
    function, scale = FUNCTIONS[name]
    model = Rounded(function, scale, low, dtype).eval()
    x = torch.cat([torch.linspace(-12, 12, 98 * 83), torch.randn(83) * 1e-40, torch.tensor([INF, -INF, NAN, 3e38, -3e38]).repeat(17)[:83]])
    x = x.view(100, 83)
    compiled = sashiko.compile(model, (x,), target=target)
    few = name == "elu" and target.lookup_entries == 8  # its second derivative jumps
    assert few or "piecewise" in str(sashiko.explain(compiled))
    got, real = compiled(x), model.function(x + model.bias)
    difference = (got.int() - model(x).int()).abs()[~real.isnan()]
    assert difference.max() <= 1 and difference.float().mean() < 0.05
    assert not got[real.isnan()].any()


@pytest.mark.parametrize("target", TARGETS)
def test_a_least_value_half_a_step_below_zero(target: Target) -> None:
    """It is 0, and not the 255 that -1 is in eight bits, whatever the roundings on the way are."""
    for zero in (3, 14, 25, 90):
        model = Half(zero).eval()
        x = torch.linspace(-4, 4, 20000)
        got = sashiko.compile(model, (x,), target=target)(x)
        assert (got.int() - model(x).int()).abs().max() <= 1, zero


@pytest.mark.parametrize(("low", "high", "least", "greatest"), [
    (0, INF, None, 255), (-INF, 255, 0, None), (0, 255, -INF, INF), (0, NAN, 0, 255), (NAN, 255, 0, 255),
])
def test_bounds_that_are_no_numbers(low: float, high: float, least: float | None, greatest: float | None) -> None:
    model = Apply(lambda x: torch.round(torch.sigmoid(x) * 255).clamp(low, high).clamp(least, greatest).to(torch.uint8)).eval()
    x = torch.linspace(-8, 8, 1000)
    assert (sashiko.compile(model, (x,))(x).int() - model(x).int()).abs().max() <= 1


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("function", [torch.sigmoid, torch.exp, lambda x: 1 - torch.sigmoid(x)], ids=["sigmoid", "exp", "rest"])
def test_what_is_saturated_on_one_side_of_zero_already(function: Unary, target: Target) -> None:
    """As gates are that were calibrated on small values: the largest integer from there on, not the first entry of the table."""
    for step in (0.0035, 0.0017, 0.0002):
        model = Quantized(function, step).eval()
        x = torch.cat([torch.linspace(-12, 12, 2001), torch.tensor([INF, -INF, 3e38, -3e38])])
        assert (sashiko.compile(model, (x,), target=target)(x).int() - model(x).int()).abs().max() <= 1, step


@pytest.mark.parametrize("target", TARGETS)
def test_into_the_product_of_a_static_model(target: Target) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 83), nn.GELU(), nn.Linear(83, 24)).eval()
    batches = [(torch.randn(19, 40),) for _ in range(3)]
    quantized = sashiko.quantize(model, batches, preset="int8-static", progress=False)
    compiled = sashiko.compile(quantized, batches[0], target=target)
    text = str(sashiko.explain(compiled))
    assert "int_linear + piecewise" in text and "normal_cdf_short" not in text
    expected, exact = quantized(*batches[0]), model(*batches[0])
    error, ours = (expected - exact).norm() / exact.norm(), (compiled(*batches[0]) - exact).norm() / exact.norm()
    assert ours <= error * 1.1


@pytest.mark.parametrize("function", [F.gelu, partial(F.gelu, approximate="tanh"), torch.tanh])
def test_before_rows_that_are_quantized(function: Unary) -> None:
    """Each with its own scale: the table's result is in f32. Some rows are large, some small, some all to the left of 0, one is 0."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(40, 83), nn.Linear(83, 24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.second(function(self.first(x) * 4))
            return result

    torch.manual_seed(0)
    model = Model().eval()
    batches = [(torch.randn(19, 40) * torch.logspace(-5, 0.5, 19)[:, None],) for _ in range(3)]
    quantized = sashiko.quantize(model, batches, preset="int8", progress=False)
    compiled = sashiko.compile(quantized, batches[0], target=X86_64_V4 if not X86_64_V4.why_not_on(host()) else None)
    assert host().lookup_entries != 32 or "piecewise" in str(sashiko.explain(compiled))
    expected, exact, got = quantized(*batches[0]), model(*batches[0]), compiled(*batches[0])
    for row in range(19):
        error = (expected[row] - exact[row]).norm()
        assert (got[row] - exact[row]).norm() <= error * 1.2 + 1e-5 * exact[row].norm()


@pytest.mark.parametrize("target", TARGETS)
def test_factors_of_channels(target: Target) -> None:
    """As SmoothQuant leaves them between an activation and its rounding. Weights may change while the polynomials are good for them."""
    torch.manual_seed(0)
    model = Scaled().eval()
    batches = [(torch.randn(19, 40),) for _ in range(3)]
    quantized = sashiko.quantize(model, batches, preset="int8-static", progress=False)
    compiled = sashiko.compile(quantized, batches[0], target=target)
    assert "int_linear + piecewise" in str(sashiko.explain(compiled))

    def same() -> bool:
        error = (quantized(*batches[0]) - model(*batches[0])).norm()
        return bool((compiled(*batches[0]) - quantized(*batches[0])).norm() <= error * 0.5)

    assert same()
    factor = next(p for p in quantized.parameters() if p.shape == (83,) and torch.equal(p, model.factor))
    with torch.no_grad():
        factor[5] *= 0.5
        assert same()
        factor[5] = 1e4
    with pytest.raises(sashiko.InputError, match="compile the model again"):
        compiled(*batches[0])


class Multiplied(nn.Module):
    """A function times a factor for each channel, quantized."""

    def __init__(self) -> None:
        super().__init__()
        self.factor: torch.Tensor
        self.register_buffer("factor", torch.linspace(0.5, 1.5, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rounded: torch.Tensor = torch.ops.quantized_decomposed.quantize_per_tensor(F.gelu(x) * self.factor, 0.05, 3, -128, 127, torch.int8)
        return rounded


@torch.no_grad()
def test_the_backend_compiles_again_for_factors_of_another_size() -> None:
    torch.manual_seed(0)
    model, x = Multiplied().eval(), torch.randn(8, 64)
    compiled = torch.compile(model, backend="sashiko", options={"strict": True})
    for factor in (1.0, 3.0, 1e-7):
        model.factor *= factor
        for _ in range(2):
            assert (compiled(x).int() - model(x).int()).abs().max() <= 1


def test_only_where_one_instruction_looks_up() -> None:
    without = replace(X86_64_V3, name="without", features=X86_64_V3.features - {"fma"})
    targets = {X86_64_V3: True, X86_64_V4: True, NEOVERSE_N1: True, without: False}
    assert {t: any(each.name == "tables" for each in passes("fp32", t)) for t in targets} == targets
