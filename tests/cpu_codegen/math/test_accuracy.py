"""Errors of the float32 functions against float64 over all exponents, on every target that runs or is emulated here."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch

from sashiko.cpu_codegen.math import MATH, MATH2
from sashiko.platforms.host import host
from tests.cpu_codegen.math.harness import Array, apply, every, pairs, ulps
from tests.emulation import Emulated, Native, Runner, runners

# The docstrings' bounds, in units in the last place of float32.
BOUNDS = {
    "exp": 1.0, "exp2": 1.0, "expm1": 1.6, "log": 1.0, "log2": 1.0, "log10": 1.0, "log1p": 1.5, "sin": 1.6, "cos": 1.6, "tan": 3.6,
    "tanh": 2.0, "sigmoid": 2.5, "erf": 1.4, "pow": 0.7, "atan2": 2.0,
    "normal_cdf": 0.0, "gelu": 0.5, "exp_weight": 0.0,
    # A relative error of 2^-12 is up to 2^12 units.
    "normal_cdf_short": 4096, "sigmoid_short": 4096,
}
# What a function of x may miss without being measured in units in the last place: a unit of 1 in the smaller half of the normal
# distribution, its far tail, what sigmoid and weights flush to zero, what small weights of a softmax do not have.
MISSED: dict[str, Callable[[Array], Array | float]] = {
    "normal_cdf": lambda x: 1.1 * 2.0**-24,
    "gelu": lambda x: np.abs(x) * 1.5 * 2.0**-24,
    "exp_weight": lambda x: np.exp(x) * (2.0**-22.4 - x * 2.0**-23.6) + 2.0**-126,
    "normal_cdf_short": lambda x: 2.0**-64,
    "sigmoid_short": lambda x: 2.0**-125,
}


def _torch(f: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Array], Array]:
    return lambda x: f(torch.from_numpy(x)).numpy()


REFERENCES: dict[str, Callable[..., Array]] = {
    **{name: getattr(np, name) for name in MATH if hasattr(np, name)},
    "exp_weight": np.exp, "sigmoid": _torch(torch.sigmoid), "erf": _torch(torch.erf), "sigmoid_short": _torch(torch.sigmoid),
    "gelu": _torch(torch.nn.functional.gelu),
    **dict.fromkeys(("normal_cdf", "normal_cdf_short"), _torch(lambda x: torch.special.erfc(x * -(0.5**0.5)) / 2)),
    "pow": np.power, "atan2": np.arctan2,
}


def reference(name: str, *args: Array) -> Array:
    with np.errstate(all="ignore"):
        return REFERENCES[name](*(a.astype(np.float64) for a in args))


def domain(name: str, x: Array) -> Array:
    """The arguments among these that a function is for."""
    return x[~(x > 0)] if name == "exp_weight" else x


@cache
def samples(name: str, emulated: bool) -> tuple[tuple[Array, ...], Array]:
    """Arguments and results in float64. Odd strides visit all exponents and change the last bits from one to the next."""
    if name in MATH2:
        args: tuple[Array, ...] = pairs(3 << 13 if emulated else 3 << 17, name)
    else:
        args = (domain(name, every(60_013 if emulated else 4_003)),)
    return args, reference(name, *args)


def worst(name: str, got: Array, args: tuple[Array, ...], expected: Array) -> str:
    error = ulps(got, expected)
    if name in MISSED:
        with np.errstate(invalid="ignore", over="ignore"):
            missed = MISSED[name](args[0].astype(np.float64))
            error = np.where(np.abs(got - expected) <= missed, 0.0, error)
    at = int(np.argmax(error))
    where = ", ".join(repr(float(a[at])) for a in args)
    return "" if error[at] <= BOUNDS[name] else f"{name}({where}) = {got[at]!r}, not {expected[at]!r}: {error[at]:.2f} ulp"


@pytest.mark.parametrize("runner", runners())
@pytest.mark.parametrize("name", [*MATH, *MATH2])
def test_error_is_within_the_bound(runner: Runner, name: str) -> None:
    args, expected = samples(name, isinstance(runner, Emulated))
    assert worst(name, apply(runner, name, args), args, expected) == ""


@pytest.mark.parametrize("runner", [p for p in runners() if p.id in ("host", "neoverse_n1")])
@pytest.mark.parametrize("name", [*MATH, *MATH2])
def test_every_number_of_lanes_gives_the_same_bits(runner: Runner, name: str) -> None:
    args = pairs(960, "pow")[: 2 if name in MATH2 else 1]
    results = [apply(runner, name, args, lanes) for lanes in (0, 1, 4, 5, 16)]
    assert len({np.where(np.isnan(got), np.float32("nan"), got).tobytes() for got in results}) == 1


@pytest.mark.parametrize("runner", runners())
@pytest.mark.parametrize("name", ["tanh", "erf", "sin"])
def test_odd_functions_are_odd_and_bounded(runner: Runner, name: str) -> None:
    x = np.abs(every(400_009))
    up, down = apply(runner, name, [x]), apply(runner, name, [-x])
    assert np.array_equal(up, -down, equal_nan=True)
    assert np.nanmax(np.abs(up)) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("name", MATH)
def test_every_17th_float(name: str) -> None:
    runner = Native(host())
    for low in range(0, 1 << 32, 1 << 28):
        x = domain(name, every(17, low, low + (1 << 28)))
        assert not len(x) or worst(name, apply(runner, name, [x]), (x,), reference(name, x)) == ""
