"""float64 functions: the C library's, through vectors of any width, here and emulated."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sashiko.cpu_codegen.math import MATH, MATH2
from tests.cpu_codegen.math.harness import F32_ONLY, apply
from tests.emulation import Runner, runners
from tests.sweeps import swept


@pytest.mark.parametrize("runner", [p for p in runners() if p.id in ("host", "neoverse_n1")])
@pytest.mark.parametrize("lanes", swept((0, 8), (0,)))
@pytest.mark.parametrize("name", [name for name in (*MATH, *MATH2) if name not in F32_ONLY])
def test_against_numpy(runner: Runner, name: str, lanes: int) -> None:
    rng = np.random.default_rng(0)
    args = [np.concatenate([np.exp(rng.uniform(-3, 3, 56)), [0.0, -0.0, np.inf, -np.inf, np.nan, -1.0, 750.0, -750.0]])]
    if name in MATH2:
        args.append(rng.normal(size=64))
    if name in ("sigmoid", "erf"):
        expected = getattr(torch, name)(torch.from_numpy(args[0])).numpy()
    else:
        with np.errstate(all="ignore"):
            expected = {"pow": np.power, "atan2": np.arctan2}.get(name, getattr(np, name, np.exp))(*args)
    got = apply(runner, name, args, lanes)
    # Two libraries, each within 2 ulp; denormal results (of e^-750) lose digits.
    assert np.allclose(got, expected, rtol=4 * 2.0**-52, atol=2 * 2.0**-1074, equal_nan=True)
    assert np.array_equal(np.signbit(got)[~np.isnan(got)], np.signbit(expected)[~np.isnan(got)])
