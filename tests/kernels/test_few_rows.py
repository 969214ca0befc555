"""Rows whose number is known when they come are cut evenly where that costs less than tall tiles and a rest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sashiko.graph.types import bf16, f32, i8
from sashiko.kernels import amx, neon, x86_vector
from sashiko.kernels.blocking import Blocking, choose
from sashiko.kernels.few_rows import heights, takers
from sashiko.platforms.catalogue import CATALOGUE
from tests.emulation import Runner
from tests.kernels.products import Case, M, Micros, run, spec_of
from tests.kernels.test_gemm import FEW

TARGET = replace(CATALOGUE[0], l1d=32 << 10, l2=1 << 20)
FMA = x86_vector.fma(16)


def blocking(rows: int = 100) -> Blocking:
    return choose(TARGET, spec_of(Case(rows, 80, 500), f32, f32), FMA)


def height(found: Blocking, rows: int) -> int | None:
    """Rows of the tiles that take all rows; None where several kinds of tiles take them in turn."""
    taker = found.takers[rows] if rows < len(found.takers) else len(found.variants)
    return None if taker == len(found.variants) else found.variants[taker].micro.mr


def test_heights_between_those_of_the_family() -> None:
    assert [micro.mr for micro in heights(FMA)] == [10, 8, 6]
    assert {micro.panels for micro in heights(FMA)} == {FMA[0].panels}
    assert [micro.mr for micro in heights(x86_vector.fma(8))] == [4]
    assert not heights(FMA[1:]), "tiles of few rows only"
    assert not heights(amx.amx(bf16, bf16)), "as tall as tile registers are"
    assert not heights(neon.bfmmla()), "rows are packed in pairs"


def test_the_height_that_wastes_least_takes_all_rows() -> None:
    found = blocking()
    assert [height(found, rows) for rows in (5, 6, 7, 8, 9, 10, 15, 16, 20, 29)] == [6, 6, 8, 8, 10, 10, 8, 8, 10, 10]
    assert [height(found, rows) for rows in (0, 1, 4, 12, 14, 28, 42, 500)] == [None] * 8, "tall tiles, or one low one"


def test_rows_of_unknown_number_avoid_a_pass_from_beyond_l2() -> None:
    near, far = (choose(TARGET, spec_of(Case(100, n, 500), f32, f32), FMA) for n in (80, 4000))
    assert (height(near, 43), height(far, 43)) == (None, 10)


def test_few_rows_are_wasted() -> None:
    """By tiles of one height: three rows of fourteen at most, for eleven rows."""
    found = takers(None, FMA, [12, 2, 1], 3.0, heights(FMA))
    computed = {rows: -(-rows // micro.mr) * micro.mr for rows, micro in enumerate(found) if micro is not None}
    assert len(computed) > 20
    assert all((total - rows) / total <= 3 / 14 for rows, total in computed.items())


def test_heights_that_so_few_rows_do_not_need_are_left_out() -> None:
    assert {micro.mr for micro in takers(7, FMA, [12, 2, 1], 3.0, heights(FMA)) if micro is not None} == {6, 8}


def test_other_heights_take_all_rows_or_none() -> None:
    found = blocking()
    assert [(v.micro.mr, v.alone) for v in found.variants] == [(14, False), (10, True), (8, True), (6, True), (4, False), (1, False)]


def test_a_known_number_of_rows_needs_no_choice() -> None:
    assert not choose(TARGET, spec_of(Case(16, 80, 500), f32, f32, m=16), FMA).takers


def test_tile_registers_are_not_left_for_lower_tiles() -> None:
    found = choose(TARGET, spec_of(Case(100, 80, 500), i8, i8, m=M), amx.amx(i8, i8))
    assert {height(found, rows) for rows in range(200)} <= {None, 32}


@pytest.mark.parametrize(("micros", "runner"), FEW)
def test_any_number_of_rows(micros: Micros, runner: Runner) -> None:
    """Up to two tiles of each height and beyond, in one piece of k and in several; with rows read in place, packed, and a few at a time."""
    counts = (2, 5, 6, 7, 9, 10, 11, 13, 15, 16, 17, 20, 23, 29, 33)
    cases = [Case(rows, 21, 20) for rows in counts] + [Case(rows, 40, 300, 2, (1 << 10, 1 << 12)) for rows in (9, 16, 29)]
    run(runner, micros, cases)
