"""Fitted polynomials keep to their functions over all numbers, and functions that they cannot follow are refused."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch

from sashiko.graph.polynomials import piecewise, polynomials
from sashiko.graph.types import i8, u8
from sashiko.rewrite.rules.pieces import ERROR, SPREAD, Digits, Function, Rounding, fit, of_units

UNSIGNED = Rounding(u8, None, 0, 255, True)
SIGNED = Rounding(i8, None, -127, 127, True)
CLAMPED = Rounding(i8, None, -128, 127, False)


def gelu(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5 * (1 + torch.erf(x * 0.5**0.5))


def tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5 * (1 + torch.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3)))


def silu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


FOLLOWED: dict[str, tuple[Function, Rounding]] = {
    "gelu": (lambda x: gelu(x) * 80 + 14, UNSIGNED),
    "gelu with a coarse step": (lambda x: gelu(x) * 18 + 3, UNSIGNED),
    "gelu cut off at zero": (lambda x: gelu(x) * 80, UNSIGNED),
    "gelu, symmetric": (lambda x: gelu(x) * 40, SIGNED),
    "gelu, clamped": (lambda x: gelu(x) * 20, CLAMPED),
    "tanh gelu": (lambda x: tanh_gelu(x) * 40 + 7, UNSIGNED),
    "silu": (lambda x: silu(x) * 40 + 12, UNSIGNED),
    "sigmoid": (lambda x: torch.sigmoid(x) * 255, UNSIGNED),
    "tanh": (lambda x: torch.tanh(x) * 127, SIGNED),
    "exp": (lambda x: torch.exp(x) * 255, UNSIGNED),
    "softplus": (lambda x: torch.log1p(torch.exp(x)) * 30, UNSIGNED),
    "bell": (lambda x: torch.exp(-x * x) * 255, UNSIGNED),
    # Saturated on one side of zero already: all pieces are on the other side.
    "small sigmoid": (lambda x: torch.sigmoid(x) / 0.0017, UNSIGNED),
    "small exp": (lambda x: torch.exp(x) / 0.0017, UNSIGNED),
    "small softplus": (lambda x: torch.nn.functional.softplus(x) / 0.001, UNSIGNED),
    "small rest": (lambda x: torch.sigmoid(-x) / 0.0017, UNSIGNED),
    "small sum": (lambda x: (1 + torch.tanh(x)) / 0.004, SIGNED),
}
FACTORED: dict[str, Function] = {
    "gelu": gelu,
    "tanh gelu": tanh_gelu,
    "silu": silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": torch.nn.functional.softplus,
    "bell": lambda x: torch.exp(-x * x),
    "gelu, backwards": lambda x: -gelu(-x),
}
REFUSED: dict[str, Function] = {
    "never at an end": lambda x: torch.sin(x) * 100,
    "never anything else": lambda x: torch.sigmoid(x) * 0 + 3,
    "a bend": lambda x: torch.relu(torch.tanh(x)) * 100,
    "stairs": lambda x: torch.round(torch.tanh(x) * 4) * 30,
    "a pole": lambda x: torch.exp(1 / x) * 10,
    "no numbers": lambda x: torch.log(x) * 20,
    "too steep far out": lambda x: torch.exp(x - 3000) * 100,
    "wide": lambda x: gelu(x) * 0.01,
}


def numbers() -> torch.Tensor:
    """From all binades, densely around 0, and what is none."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.rand(20000, generator=generator) * torch.exp2(torch.randint(-148, 128, (20000,), generator=generator).float())
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 2.0**-149, torch.finfo(torch.float32).max])
    return torch.cat([torch.linspace(-40, 40, 80001), sizes, -sizes, special])


@pytest.mark.parametrize("pieces", [8, 32])
@pytest.mark.parametrize("name", FOLLOWED)
def test_followed(name: str, pieces: int) -> None:
    function, rounding = FOLLOWED[name]
    found = fit(function, rounding, pieces)
    if found is None:
        assert pieces == 8 and name == "gelu with a coarse step", "every other one has a table of any size"
        return
    assert len(found.coefficients) == 3 or pieces == 8
    x = numbers()
    real = function(x)
    there = ~real.isnan()
    error = rounding.saturated(polynomials(x[there], found)) - rounding.saturated(function(x[there].double()))
    assert error.abs().max() <= ERROR

    got = piecewise(x, found)
    assert torch.equal(got[~there], torch.full_like(got[~there], rounding.least if rounding.nan else 0))
    expected = real.double().round().clamp(rounding.least, rounding.greatest)[there]
    assert ((got[there].double() - expected).abs() <= 1).all()
    assert (got[there] != expected).double().mean() <= ERROR


@pytest.mark.parametrize("pieces", [8, 32])
@pytest.mark.parametrize("largest", [0.25, 2.0])
@pytest.mark.parametrize("name", ["gelu", "tanh gelu", "silu", "sigmoid", "tanh", "softplus", "bell", "gelu, backwards"])
def test_followed_with_factors(name: str, largest: float, pieces: int) -> None:
    """Of all sizes that they may have, and both signs."""
    function: Function = FACTORED[name]
    rounding = Rounding(u8, None, 0, 255, True, largest, 46)
    found = fit(lambda x: function(x) * 40, rounding, pieces)
    if found is None:
        assert pieces == 8 and name == "silu" and largest == 2.0
        return
    x = numbers()
    real = function(x)
    there = ~real.isnan()
    for factor in (largest, -largest, largest / 3, -largest / 700, largest / SPREAD):
        steps = real.double() * 40 * factor + 46
        got = piecewise(x, found, torch.tensor(factor))
        assert not got[~there].any()
        expected = steps.round().clamp(0, 255)[there]
        assert ((got[there].double() - expected).abs() <= 1).all(), factor
        assert (got[there] != expected).double().mean() <= ERROR
        polynomial = rounding.saturated(polynomials(x[there & x.isfinite()], found).double() * factor + 46)
        exact = rounding.saturated(function(x[there & x.isfinite()].double()) * 40 * factor + 46)
        assert (polynomial - exact).abs().max() <= ERROR * 1.01, factor


def test_factors_need_a_line_far_out_or_an_end() -> None:
    """Where the exponential saturates depends on the factor."""
    for function in (torch.exp, torch.sin, lambda x: gelu(x) * x):
        assert fit(function, Rounding(u8, None, 0, 255, True, 1.0, 0), 32) is None


@pytest.mark.parametrize("pieces", [8, 32])
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, pieces: int) -> None:
    assert fit(REFUSED[name], UNSIGNED, pieces) is None


def test_saturation_is_part_of_the_polynomials_where_it_can_be() -> None:
    function, rounding = FOLLOWED["gelu"]
    inside = fit(function, rounding, 32)
    assert inside is not None and (inside.least, inside.greatest) == (None, None) and inside.low == -math.inf
    cut = fit(FOLLOWED["gelu cut off at zero"][0], rounding, 32)
    assert cut is not None and (cut.least, cut.greatest) == (0, 255)
    nan = fit(FOLLOWED["tanh"][0], SIGNED, 32)
    assert nan is not None and (nan.least, nan.greatest) == (-127, None), "NaN becomes the least number"
    assert fit(FOLLOWED["gelu cut off at zero"][0], Rounding(u8, None, 0, 255, False), 32) is None, "NaN would not stay what it is"


@pytest.mark.parametrize("beyond", [0.49999, 0.5])
def test_half_a_step_beyond_the_end_is_saturated(beyond: float) -> None:
    """The least value of GELU is that far below 0, give or take what a fused multiply-add makes of it: -1 would be 255."""
    x = torch.linspace(-1.0, -0.5, 10001, dtype=torch.float64)
    least, cut = float(gelu(x).min()), 0
    for zero in range(100):
        found = fit(partial(lambda steps, zero, x: gelu(x) * steps + zero, (zero + beyond) / -least, zero), UNSIGNED, 8)
        if found is not None and found.least is None:
            assert polynomials(x.float(), found).min() > -0.49, "the polynomials are as far off as they may be"
        cut += found is not None and found.least is not None
    assert cut > 20


def test_a_fit_takes_milliseconds() -> None:
    """A millisecond or two is what the function itself takes for as many numbers as f16 has, on any machine."""
    function, rounding = FOLLOWED["gelu"]
    every = torch.linspace(-6.0, 6.0, 1 << 16, dtype=torch.float64)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # waiting for other threads on a busy machine is no work of the fit
    try:
        assert quickest(lambda: fit(function, rounding, 32)) < 10 * quickest(lambda: function(every))
    finally:
        torch.set_num_threads(threads)


def quickest(work: Callable[[], object]) -> float:
    """Seconds of this thread."""
    work()
    times = []
    for _ in range(20):
        start = time.thread_time()
        work()
        times.append(time.thread_time() - start)
    return min(times)


SHORT: dict[str, tuple[Function, float]] = {  # and how far off it may be where it is nearly 0
    "gelu": (gelu, 2**-21),
    "gelu times 3": (lambda x: gelu(x) * 3, 3 * 2**-21),
    "tanh gelu": (tanh_gelu, 2**-21),
    "gelu, backwards": (lambda x: gelu(-x) * -0.5, 2**-22),
    "tanh": (torch.tanh, 0.0),
}
NOT_SHORT: dict[str, Function] = {
    "silu": silu,  # f32 has all its digits however small it is
    "sigmoid": torch.sigmoid,
    "never a line": torch.exp,
    "an end and a line": torch.nn.functional.elu,
    "a bend": lambda x: torch.relu(torch.tanh(x)),
    "no zero": lambda x: gelu(x - 1.0),
}


@pytest.mark.parametrize("name", SHORT)
def test_few_digits_are_right_however_small_the_number(name: str) -> None:
    function, absolute = SHORT[name]
    found = fit(function, Digits(), 32)
    assert found is not None and len(found.coefficients) == 4 and found.line == (name != "tanh")
    x = numbers()
    y, exact = polynomials(x, found), function(x.double())
    torch.testing.assert_close(y[:-7], exact[:-7].float(), rtol=2**-12, atol=absolute)
    assert torch.equal(y.isnan(), function(x).isnan()) and torch.equal(y[y.isinf()], exact.float()[y.isinf()])
    assert torch.equal(piecewise(x, found).nan_to_num(), y.nan_to_num()), "not rounded"


@pytest.mark.parametrize("name", NOT_SHORT)
def test_few_digits_are_not_promised(name: str) -> None:
    assert fit(NOT_SHORT[name], Digits(), 32) is None


@pytest.mark.parametrize("name", FOLLOWED)
def test_pieces_of_length_one(name: str) -> None:
    """The same polynomials, also where the first and the last piece begin and end."""
    function, goal = FOLLOWED[name]
    found = fit(function, goal, 32)
    assert found is not None
    scaled = of_units(found)
    assert scaled.density == 1
    x = torch.linspace(-12, 12, 4001)
    x = torch.cat([x, torch.tensor([found.low, found.high, math.inf, -math.inf, math.nan])])
    units = (x.double() * found.density).float()
    torch.testing.assert_close(polynomials(units, scaled), polynomials(x, found), rtol=2**-18, atol=2**-10, equal_nan=True)
    assert all(math.isinf(end) or found.first <= round(end) <= found.last for end in (scaled.low, scaled.high))
