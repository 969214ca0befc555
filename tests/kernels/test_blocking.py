"""Which rows are read in place, and which tiles are not whole."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sashiko.graph.dims import Dim
from sashiko.graph.types import bf16, f32, i8
from sashiko.kernels import amx, neon, x86_vector
from sashiko.kernels.blocking import Variant, choose
from sashiko.kernels.known_rows import tailored
from sashiko.kernels.spec import GemmSpec, Strides
from sashiko.platforms.catalogue import CATALOGUE
from tests.kernels.products import Case, M, Micros, plain_store, spec_of

TARGET = replace(CATALOGUE[0], l1d=32 << 10, l2=1 << 20)  # 8 ways of 4096 bytes


def tallest(spec: GemmSpec) -> Variant:
    micros = x86_vector.fma(16) if spec.lhs == f32 else x86_vector.dot_bf16()
    return choose(TARGET, spec, micros).variants[0]


@pytest.mark.parametrize(
    ("k", "direct"),
    [
        (512, True),  # 14 rows in the lines of two sets
        (1024, False),  # all of them in those of one
        (1025, False),
        (1028, True),
        (4084, True),
        (4096, False),
    ],
)
def test_rows_that_crowd_a_set_of_the_cache_are_packed(k: int, direct: bool) -> None:
    variant = tallest(spec_of(Case(490, 80, k), f32, f32))
    assert variant.direct == direct
    assert not direct or variant.pitch == 4 * k


def test_an_odd_number_of_k_is_read_in_place_where_a_step_can_end_early() -> None:
    assert tallest(spec_of(Case(490, 80, 1201), bf16, bf16)).direct


def test_rows_with_gaps_between_their_elements_are_packed() -> None:
    spec = GemmSpec(f32, f32, M, 80, 500, Strides(0, 1, 700), plain_store(80, f32))
    assert not tallest(spec).direct


def test_blocks_in_place_are_as_tall_as_packed_ones() -> None:
    """Only a tile of them may have to be packed."""
    plain, crowded = (tallest(spec_of(Case(490, 2000, k), f32, f32)) for k in (1028, 1025))
    assert plain.direct and not crowded.direct and plain.rows == crowded.rows > plain.micro.mr
    assert plain.packed_bytes == 14 * plain.pitch and crowded.packed_bytes == crowded.rows * crowded.pitch


@pytest.mark.parametrize(("m", "expected"), [(28, [False]), (31, [False, True]), (27, [True]), (M, [True] * 5)])
def test_tiles_that_are_not_whole(m: Dim, expected: list[bool]) -> None:
    found = choose(TARGET, spec_of(Case(100, 80, 500), f32, f32, m=m), x86_vector.fma(16)[:2])
    assert found.variants[0].least == (9 if len(expected) > 1 else 1)
    assert found.partial_tiles(m) == expected


@pytest.mark.parametrize(
    ("m", "heights"),
    [
        (512, [32]), (33, [32, 16, 4, 1]), (36, [32, 16]), (48, [32, 16]), (52, [32]), (32 * M, [32]), (16 * M, [32, 16]), (30, [32]),
        (1, [1]), (M, [32, 16, 4, 1]),
    ],
)
def test_tiles_that_no_row_is_left_to_are_not_written(m: Dim, heights: list[int]) -> None:
    micros = amx.amx(i8, i8)
    found = choose(TARGET, spec_of(Case(100, 80, 500), i8, i8, m=m), micros)
    assert [variant.micro.mr for variant in found.variants] == heights


@pytest.mark.parametrize(("n", "k", "direct"), [(96, 250, True), (400, 250, False), (400, 256, True)])
def test_tile_registers_read_rows_in_place_that_begin_within_lines_for_few_columns(n: int, k: int, direct: bool) -> None:
    variant = choose(TARGET, spec_of(Case(100, n, k), bf16, bf16, m=320), amx.amx(bf16, bf16)).variants[0]
    assert (variant.direct, variant.left(k)) == (direct, k % 32 if direct else 0)
    assert variant.micro.layout.group == (0 if direct else 32)


@pytest.mark.parametrize(("n", "tiles"), [(128, 4), (48, 1), (64, 4)])
def test_tiles_of_rows_share_panels_that_are_read_again(n: int, tiles: int) -> None:
    """The weights stay in L2, and a result of three panels is one tile wide."""
    spec = spec_of(Case(424, n, 626), f32, f32, m=424)
    variant = choose(TARGET, spec, tailored(TARGET, spec, x86_vector.fma(16))).variants[0]
    assert variant.rows == tiles * variant.micro.mr


@pytest.mark.parametrize(
    ("micros", "k", "pieces"),
    [
        (x86_vector.fma(16), 1024, 1), (x86_vector.fma(16), 4608, 1), (x86_vector.fma(16), 4800, 13),
        (x86_vector.fma(8), 3072, 1), (x86_vector.madd(i8, 8), 3072, 1), (x86_vector.maddubs(i8, 4, 8), 4096, 1),
        (neon.fmla(), 4096, 1), (amx.amx(i8, i8), 1024, 1), (amx.amx(i8, i8), 4096, 1),
    ],
    ids=lambda value: value[0].name if isinstance(value, tuple) else str(value),
)
def test_k_is_in_one_piece_where_the_rows_of_a_tile_fit_a_part_of_l2(micros: Micros, k: int, pieces: int) -> None:
    for m in (M, 100, 3000):
        assert choose(TARGET, spec_of(Case(100, 80, k), micros[0].lhs, micros[0].rhs, m=m), micros).pieces == pieces


@pytest.mark.parametrize(("m", "n", "pieces", "tiles"), [
    (105, 2686, 3, 4), (84, 2686, 3, 6), (28, 2686, 1, 2), (M, 2686, 3, 6), (105, 768, 1, 2),
])
def test_weights_from_memory_are_read_for_as_many_rows_as_scratch_has_room_for(m: Dim, n: int, pieces: int, tiles: int) -> None:
    """A tile of 3483 k takes 195 kB of the 512 that blocks have; with pieces of k, blocks have more tiles."""
    far = replace(TARGET, l2=1 << 20, l3=32 << 20)
    found = choose(far, spec_of(Case(100, n, 3483), f32, f32, m=m), x86_vector.fma(16)[:1])
    assert (found.pieces, found.variants[0].rows) == (pieces, 14 * tiles)


@pytest.mark.parametrize("m", [128, 512, M])
def test_tile_registers_stream_weights_that_stay_in_l2_past_one_tile_of_rows(m: Dim) -> None:
    variant = choose(TARGET, spec_of(Case(100, 256, 256), bf16, bf16, m=m), amx.amx(bf16, bf16)[:1]).variants[0]
    assert (variant.rows, variant.direct, variant.shares) == (32, True, 0)


@pytest.mark.parametrize(
    ("m", "n", "k", "rows", "pieces"),
    [
        (128, 3072, 768, 128, 1), (512, 3072, 768, 512, 1), (M, 3072, 768, 512, 1), (5120, 3072, 768, 512, 1),
        (512, 768, 3072, 128, 3), (128, 768, 3072, 128, 3), (32, 768, 3072, 32, 1),
    ],
)
def test_tile_registers_read_weights_from_beyond_l2_for_more_rows(m: Dim, n: int, k: int, rows: int, pieces: int) -> None:
    """The rows of a block, copied, stream past the panels of a tile, which stay in L1: pieces of k where they would not."""
    target = replace(TARGET, l1d=48 << 10)
    found = choose(target, spec_of(Case(100, n, k), i8, i8, m=m), amx.amx(i8, i8)[:1])
    variant = found.variants[0]
    assert (variant.rows, found.pieces) == (rows, pieces)
    assert (variant.direct, variant.micro.layout.group) == ((True, 0) if rows == 32 else (False, 64))
    assert found.packed_bytes(variant) == (variant.packed_bytes if rows == 32 else rows * k)
    if pieces > 1:
        assert found.panel_block == variant.micro.panels, "accumulators of one tile's columns wait"
