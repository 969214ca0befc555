"""The polynomials are what the generator says they are."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from sashiko.cpu_codegen.math import coefficients
from tests.cpu_codegen.math.fits import ERF_LAST, ERF_SPLIT, FITS, NORMAL_CENTER, NORMAL_STEP, PIECES, TANH_SPLIT, Fit, Pieces, error, solve

TEXT = Path(coefficients.__file__).read_text()


@pytest.mark.parametrize("fit", FITS, ids=lambda fit: fit.name)
def test_errors_are_as_stated(fit: Fit) -> None:
    values = getattr(coefficients, fit.name)
    stated = re.search(rf"# error 2\^(-[\d.]+)\n{fit.name} = ", TEXT)
    assert stated is not None
    assert len(values) == fit.count
    assert abs(np.log2(error(fit, values)) - float(stated[1])) < 0.1
    if fit.bits == 24:
        assert all(float(np.float32(v)) == v for v in values)


@pytest.mark.parametrize("pieces", PIECES, ids=lambda pieces: pieces.name)
def test_errors_of_pieces_are_as_stated(pieces: Pieces) -> None:
    table = getattr(coefficients, pieces.name)
    stated = re.search(rf"# error 2\^(-[\d.]+)\n{pieces.name} = ", TEXT)
    assert stated is not None
    assert (len(table), {len(row) for row in table}) == (pieces.degree + 1, {pieces.count})
    assert abs(np.log2(pieces.error(table)) - float(stated[1])) < 0.1
    assert all(float(np.float32(v)) == v for row in table for v in row)


def test_a_fit_can_be_derived_again() -> None:
    fit = next(f for f in FITS if f.name == "SIN")
    assert solve(fit) == pytest.approx(coefficients.SIN, rel=1e-6)


def test_the_splits_agree() -> None:
    assert (coefficients.TANH_SPLIT, coefficients.ERF_SPLIT, coefficients.ERF_LAST) == (TANH_SPLIT, ERF_SPLIT, ERF_LAST)
    assert (coefficients.NORMAL_STEP, coefficients.NORMAL_CENTER) == (NORMAL_STEP, NORMAL_CENTER)
