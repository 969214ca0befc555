"""Sizes that are computed in Python's floats: as fractions where no rounding shows, else by definitions that say the same as Python."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from sashiko.diagnostics.errors import InputError
from sashiko.graph import dims
from sashiko.graph.capture import from_fx
from sashiko.graph.captured import Captured
from sashiko.graph.floats import Definition
from sashiko.graph.symbols import require

Size = Callable[[Any], Any]
# A size of n rows, and whether it has the form of a fraction.
SIZES: dict[str, tuple[Size, bool]] = {
    "less than none": (lambda n: -math.floor(n / -4.0), True),
    "half": (lambda n: torch.sym_int(n * 0.5), True),
    "one and a half": (lambda n: torch.sym_int(1.5 * n), True),
    "linear": (lambda n: torch.sym_int(0.25 * n + 3), True),
    "whole blocks": (lambda n: math.ceil(n / 32) * 32, True),
    "thirds": (lambda n: math.floor(n / 3), True),
    "seven tenths": (lambda n: torch.sym_int(n * 0.7), False),
    "rounded": (lambda n: round(n * 0.5), False),
    "root": (lambda n: torch.sym_int(torch.sym_sqrt(n * 4)), False),
    "of two": (lambda n: torch.sym_int(n * 0.29) + math.ceil(n * 0.1), False),
    "as large as fits": (lambda n: torch.sym_int(n * torch.sym_min(32 / n, 1.0)), False),
}


def _captured(size: Size) -> Captured:
    """A graph whose result has as many rows as `size` says, of n and more rows."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return x.new_ones(size(x.shape[0]), 2) + x[:1]

    return from_fx(make_fx(function, tracing_mode="symbolic")(torch.ones(50, 2)), [torch.ones(50, 2)])


@pytest.mark.parametrize("name", SIZES)
def test_numbers_are_those_of_python(name: str) -> None:
    size, fraction = SIZES[name]
    captured = _captured(size)
    defined = [each for each in captured.assumed if isinstance(each, Definition)]
    assert bool(defined) is not fraction
    (rows,) = captured.graph.inputs[0].shape[:1]
    for n in range(2, 400):
        env = require(captured.assumed, {str(rows): n})
        assert dims.evaluate(captured.graph.outputs[0].shape[0], env) == size(n), n


def test_definitions_bound_their_numbers() -> None:
    (definition,) = (each for each in _captured(SIZES["seven tenths"][0]).assumed if isinstance(each, Definition))
    rows = definition.tree[1][2][1][1]
    assert definition.low == 1 and str(definition) == f"float0 = TruncToInt(Mul(0.7, ToFloat({rows})))"
    renamed = definition.substituted("other", {str(rows): 10})
    assert (renamed.name, renamed.number({})) == ("other", 7)


def test_sizes_that_have_no_number() -> None:
    captured = _captured(lambda n: torch.sym_int(90.5 / (n - 7)) + 1)
    rows = str(captured.graph.inputs[0].shape[0])
    assert dims.evaluate(captured.graph.outputs[0].shape[0], require(captured.assumed, {rows: 10})) == 31
    with pytest.raises(InputError, match="division by zero"):
        require(captured.assumed, {rows: 7})
