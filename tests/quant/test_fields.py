"""Schemes whose fields are not what their annotations say are refused as they are made, and what serves as well is taken."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sashiko
from sashiko.diagnostics.errors import InputError
from sashiko.quant import FP32, ActivationScheme, OpScheme, Override, QuantizedModule, Scheme, SmoothQuant, WeightScheme, quantize


@pytest.mark.parametrize(
    ("kind", "field", "value", "words"),
    [
        (Scheme, "smooth", True, "SmoothQuant(...) or None"),
        (Scheme, "sample", "a", "a whole number"),
        (Scheme, "sample", 1.5, "a whole number"),
        (Scheme, "sample", True, "a whole number"),
        (Scheme, "outliers", "a", "a number or None"),
        (Scheme, "outliers", float("nan"), "a number or None"),
        (Scheme, "correct_bias", "no", "True or False"),
        (Scheme, "default", "int8", "OpScheme(...)"),
        (Scheme, "overrides", Override("a", FP32), "a tuple in which each is Override(...)"),
        (Scheme, "operations", 3, "a tuple in which each is 'linear', 'convolution', 'recurrence', "),
        (Scheme, "operations", ("linear", []), "a tuple in which each is 'linear', 'convolution', 'recurrence', "),
        (ActivationScheme, "percentile", "99", "a number"),
        (ActivationScheme, "percentile", float("nan"), "a number"),
        (ActivationScheme, "bins", 64.0, "a whole number"),
        (ActivationScheme, "observer", [], "'minmax', 'average', 'percentile', 'mse' or 'entropy'"),
        (WeightScheme, "bits", 8.0, "8 or 4"),
        (WeightScheme, "group", 64.0, "a whole number"),
        (WeightScheme, "sums16", True, "'auto', 'most', 1, 2 or 4"),
        (OpScheme, "activation", WeightScheme(), "ActivationScheme(...) or None"),
        (SmoothQuant, "alphas", 0.5, "a tuple in which each is a number"),
        (SmoothQuant, "alphas", (0.5, float("nan")), "a tuple in which each is a number"),
    ],
)
def test_what_a_field_cannot_be(kind: Callable[..., Any], field: str, value: Any, words: str) -> None:
    with pytest.raises(InputError, match=rf"^{field}=.* is not {re.escape(words)}"):
        kind(**{field: value})


def test_an_override_has_a_scheme() -> None:
    with pytest.raises(InputError, match=r"^scheme='fp32' is not OpScheme\(\.\.\.\)"):
        Override("head", "fp32")  # type: ignore[arg-type]


def test_whole_numbers_are_numbers_and_lists_are_tuples() -> None:
    assert ActivationScheme(percentile=99).percentile == SmoothQuant(1).alpha * 99  # type: ignore[operator]
    places = [Override(where, FP32) for where in ("head", re.compile("head"), nn.Conv2d)]
    assert Scheme(overrides=places, operations=["linear"], outliers=30).overrides == tuple(places)  # type: ignore[arg-type]


def test_schemes_of_lists_are_saved_and_copied(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    scheme = Scheme(overrides=[Override("0", FP32)], operations=["linear"], smooth=SmoothQuant(alphas=[0.5]))  # type: ignore[arg-type]
    module = quantize(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)).eval(), [x], preset=scheme)
    module.save(tmp_path / "lists")
    for other in (sashiko.load(tmp_path / "lists"), pickle.loads(pickle.dumps(module))):
        assert isinstance(other, QuantizedModule) and other.record.scheme == scheme
        assert torch.equal(other(x), module(x))
