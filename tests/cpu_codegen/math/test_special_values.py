"""Exact results: zeros and their signs, infinities, NaN, overflow, the least denormal, and everything C says about pow and atan2."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from sashiko.cpu_codegen.math import MATH
from tests.cpu_codegen.math.harness import apply, ulps
from tests.emulation import Runner, runners

INF, NAN = math.inf, math.nan
LEAST, LARGEST = 2.0**-149, float(np.finfo(np.float32).max)
# Arguments and exact results of each function. Every one is asked for NaN too.
EXACT: dict[str, list[tuple[float, float]]] = {
    "exp": [(0.0, 1), (-0.0, 1), (INF, INF), (-INF, 0), (LEAST, 1), (-LEAST, 1), (89, INF), (LARGEST, INF), (-104, 0), (-LARGEST, 0)],
    "exp2": [(0.0, 1), (-0.0, 1), (INF, INF), (-INF, 0), (10, 1024), (-126, 2.0**-126), (-149, LEAST), (-150.5, 0), (128, INF)],
    "exp_weight": [(0.0, 1), (-0.0, 1), (-INF, 0), (-88, 0), (-100, 0), (-104, 0), (-LARGEST, 0)],
    "expm1": [(0.0, 0.0), (-0.0, -0.0), (INF, INF), (-INF, -1), (LEAST, LEAST), (-LEAST, -LEAST), (89, INF), (-20, -1), (-LARGEST, -1)],
    "log": [(1, 0), (0.0, -INF), (-0.0, -INF), (INF, INF), (-INF, NAN), (-1, NAN), (-LEAST, NAN), (-LARGEST, NAN)],
    "log2": [(1, 0), (0.0, -INF), (-0.0, -INF), (INF, INF), (-1, NAN), (LEAST, -149), (2.0**-126, -126), (8, 3), (2.0**127, 127)],
    "log10": [(1, 0), (0.0, -INF), (-0.0, -INF), (INF, INF), (-1, NAN), (10, 1), (100, 2), (1000, 3)],
    "log1p": [(0.0, 0.0), (-0.0, -0.0), (-1, -INF), (INF, INF), (-INF, NAN), (-1.5, NAN), (LEAST, LEAST), (-LEAST, -LEAST)],
    "sin": [(0.0, 0.0), (-0.0, -0.0), (INF, NAN), (-INF, NAN), (LEAST, LEAST), (-LEAST, -LEAST)],
    "cos": [(0.0, 1), (-0.0, 1), (INF, NAN), (-INF, NAN), (LEAST, 1)],
    "tan": [(0.0, 0.0), (-0.0, -0.0), (INF, NAN), (-INF, NAN), (LEAST, LEAST), (-LEAST, -LEAST)],
    "tanh": [(0.0, 0.0), (-0.0, -0.0), (INF, 1), (-INF, -1), (LEAST, LEAST), (-LEAST, -LEAST), (10, 1), (-LARGEST, -1)],
    "sigmoid": [(0.0, 0.5), (-0.0, 0.5), (INF, 1), (-INF, 0), (20, 1), (-104, 0), (LARGEST, 1), (-LARGEST, 0)],
    "erf": [(0.0, 0.0), (-0.0, -0.0), (INF, 1), (-INF, -1), (4, 1), (-5, -1), (LARGEST, 1), (LEAST, LEAST)],
    "normal_cdf": [(0.0, 0.5), (-0.0, 0.5), (INF, 1), (-INF, 0), (LARGEST, 1), (-LARGEST, 0), (6, 1), (-15, 0)],
    "gelu": [(0.0, 0.0), (INF, INF), (-INF, NAN), (LARGEST, LARGEST), (6, 6)],
    "normal_cdf_short": [(INF, 1), (-INF, 0), (LARGEST, 1), (-LARGEST, 0), (1e5, 1), (-1e5, 0)],
    "sigmoid_short": [(0.0, 0.5), (-0.0, 0.5), (INF, 1), (-INF, 0), (20, 1), (-104, 0), (LARGEST, 1), (-LARGEST, 0)],
}
UNUSUAL = [0.0, LEAST, 2.0**-126, 0.5, 1 - 2.0**-24, 1.0, 1.5, 2.0, 3.0, 2.5, 2.0**23 + 1, 2.0**24 - 1, 2.0**24, 2.0**25]
UNUSUAL += [1e30, LARGEST, INF]
SIGNED = [*UNUSUAL, *(-v for v in UNUSUAL), NAN, -NAN]


@pytest.mark.parametrize("runner", runners())
@pytest.mark.parametrize("name", MATH)
def test_exact_values(runner: Runner, name: str) -> None:
    x, expected = np.array([*EXACT[name], (NAN, NAN), (-NAN, NAN)], np.float32).T
    got = apply(runner, name, [x])
    for argument, result, right in zip(x, got, expected):
        same = np.isnan(result) if np.isnan(right) else result == right and np.signbit(result) == np.signbit(right)
        assert same, f"{name}({argument!r}) = {result!r}, not {right!r}"


@pytest.mark.parametrize("runner", runners())
@pytest.mark.parametrize(("name", "library"), [("pow", np.power), ("atan2", np.arctan2)])
def test_all_pairs_of_unusual_values(runner: Runner, name: str, library: np.ufunc) -> None:
    first, second = np.array(list(itertools.product(SIGNED, SIGNED)), np.float32).T
    got = apply(runner, name, [first, second])
    with np.errstate(all="ignore"):
        expected = library(first.astype(np.float64), second.astype(np.float64))
    error = ulps(got, expected)
    wrong_sign = (np.signbit(got) != np.signbit(expected)) & ~np.isnan(expected)
    bad = [f"{name}({first[i]!r}, {second[i]!r}) = {got[i]!r}, not {expected[i]!r}" for i in np.flatnonzero((error > 2) | wrong_sign)]
    assert bad == []


@pytest.mark.parametrize("runner", runners())
@pytest.mark.parametrize("name", ["sin", "cos", "tan"])
def test_hard_arguments_of_the_circle(runner: Runner, name: str) -> None:
    """Multiples of pi / 2, where nearly all digits cancel, on both sides of the bound between reduction and library."""
    n = np.concatenate([np.arange(1, 2000), np.arange(83_300, 83_600), np.geomspace(1e5, 1e9, 500).round(), 2.0 ** np.arange(31, 90)])
    x = (n * (np.pi / 2)).astype(np.float32)
    x = np.concatenate([x, np.nextafter(x, np.float32(0)), -np.nextafter(x, np.float32(INF)), np.float32([131072.0, 131072.02])])
    error = ulps(apply(runner, name, [x]), getattr(np, name)(x.astype(np.float64)))
    assert error.max() <= {"sin": 1.6, "cos": 1.6, "tan": 3.6}[name], f"{name}({x[error.argmax()]!r})"
