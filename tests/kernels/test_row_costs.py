"""What rows cost in these tiles or those."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sashiko.graph.types import bf16, i8
from sashiko.kernels import amx, x86_vector
from sashiko.kernels.few_rows import heights
from sashiko.kernels.row_costs import evenly, in_turn, pass_cost
from sashiko.platforms.catalogue import CATALOGUE
from tests.kernels.products import Case, Micros, spec_of

TARGET = replace(CATALOGUE[0], l1d=32 << 10, l2=1 << 20)
FMA = x86_vector.fma(16)


def test_what_rows_cost() -> None:
    """A tile costs its rows and two for reading the panels; another kind of tile reads them once more, for three."""
    least = [12, 2, 1]
    assert [in_turn(rows, FMA, least, 3.0) for rows in (0, 4, 9, 13, 14, 16)] == [0, 6, 6 + 6 + 3 + 3, 16, 16, 16 + 6 + 3]
    assert [evenly(16, micro) for micro in (FMA[0], *heights(FMA))] == [32, 24, 20, 24]


@pytest.mark.parametrize(
    ("micros", "near"), [(FMA, 3.0), (x86_vector.vnni(i8, 16), 3.0), (amx.amx(bf16, bf16), 0.0)], ids=("fma", "vnni", "amx")
)
def test_what_another_pass_over_the_panels_costs(micros: Micros, near: float) -> None:
    """Little where they are in L2, and nothing where they pass each tile of rows anyway; much from beyond it."""
    lhs, rhs = micros[0].lhs, micros[0].rhs
    assert pass_cost(TARGET, spec_of(Case(100, 256, 256), lhs, rhs), micros[0]) == near
    assert pass_cost(TARGET, spec_of(Case(100, 2048, 2048), lhs, rhs), micros[0]) == 10.0
