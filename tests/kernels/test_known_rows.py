"""Tiles for a number of rows that is known."""

from __future__ import annotations

import pytest

from sashiko.cpu_codegen.builder import Module
from sashiko.graph.types import f32, i8
from sashiko.kernels import amx, gemm, neon, table, x86_vector
from sashiko.kernels.blocking import choose
from sashiko.kernels.known_rows import tailored
from sashiko.platforms.catalogue import CATALOGUE, X86_64_AMX, X86_64_V3
from tests.kernels.products import Case, spec_of
from tests.kernels.tile_emulation import EmulatedTiles


@pytest.mark.parametrize(
    ("shape", "tile", "last"),
    [
        ((1, 320), (1, 4), 0),
        ((9, 320), (9, 2), 0),
        ((14, 320), (14, 2), 0),
        ((20, 320), (10, 2), 0),
        ((64, 320), (14, 2), 8),
        ((128, 320), (13, 2), 11),
        ((394, 320), (14, 2), 2),
        ((64, 16), (28, 1), 8),
        ((394, 48), (9, 3), 7),
    ],
)
def test_tiles_are_few_and_full(shape: tuple[int, int], tile: tuple[int, int], last: int) -> None:
    spec = spec_of(Case(*shape, 64), f32, f32, m=shape[0])
    (variant,) = choose(CATALOGUE[0], spec, tailored(CATALOGUE[0], spec, x86_vector.fma(16))).variants
    assert (variant.micro.mr, variant.micro.panels, variant.last_rows) == (*tile, last)
    assert (variant.lower.micro.mr if variant.lower else 0) == last


@pytest.mark.parametrize("m", [1, 2, 3, 4])
def test_few_rows_read_the_panels_once(m: int) -> None:
    """One tile has them all, as wide as sixteen registers allow."""
    spec = spec_of(Case(m, 320, 64), f32, f32, m=m)
    micros = table.select(X86_64_V3, spec).kernel.micros
    assert [(micro.mr, micro.panels) for micro in tailored(X86_64_V3, spec, micros)] == [(m, {1: 4, 2: 2}.get(m, 1))]


@pytest.mark.parametrize(("m", "heights"), [(100, [8, 4]), (99, [8, 4]), (101, [8]), (12, [8, 4])])
def test_tiles_whose_height_is_part_of_the_packed_form_come_in_turn(m: int, heights: list[int]) -> None:
    spec = spec_of(Case(m, 320, 64), f32, f32, m=m)
    found = choose(CATALOGUE[0], spec, tailored(CATALOGUE[0], spec, neon.fmla())).variants
    assert [variant.micro.mr for variant in found] == heights and all(variant.lower is None for variant in found)


@pytest.mark.parametrize(
    ("m", "n", "heights"),
    [(197, 384, [32, 5]), (197, 4096, [32]), (5, 384, [5]), (12, 4096, [12]), (20, 384, [20]), (50, 384, [32, 18])],
)
def test_tile_registers_have_as_many_rows_as_are_left_while_panels_stay_in_l2(m: int, n: int, heights: list[int]) -> None:
    """Few rows alone have them anyway."""
    spec = spec_of(Case(m, n, 1024), i8, i8, m=m)
    found = choose(X86_64_AMX, spec, tailored(X86_64_AMX, spec, amx.amx(i8, i8))).variants
    assert [variant.micro.mr for variant in found] == heights and not any(variant.last_rows for variant in found)


@pytest.mark.parametrize(("m", "count"), [(64, 2), (20, 2), (50, 4)])
def test_tile_registers_are_configured_again_for_other_rows(m: int, count: int) -> None:
    """Once for each of the two kernels, and for each kind of tiles where there are two."""
    tiles = EmulatedTiles()
    gemm.emit(Module(), X86_64_AMX, spec_of(Case(m, 70, 192), i8, i8, m=m), amx.amx(i8, i8, tiles), "product")
    assert tiles.calls["configure"] == count
