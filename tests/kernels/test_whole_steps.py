"""Narrower steps of tile registers, of which k is a whole number: exact products, and where the steps stay as wide as they can be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sashiko.graph.dims import Dim, symbol
from sashiko.graph.types import DType, bf16, i8
from sashiko.kernels import amx, x86_vector
from sashiko.kernels.alternatives import alternatives
from sashiko.kernels.blocking import choose
from sashiko.kernels.spec import GemmSpec, Strides
from sashiko.kernels.whole_steps import in_whole_steps
from sashiko.platforms.catalogue import X86_64_AMX
from sashiko.platforms.target import Target
from tests.emulation import Native
from tests.kernels.products import Case, run, spec_of
from tests.kernels.tile_emulation import tiles_on
from tests.sweeps import swept

WIDE = [64, 64]


@pytest.mark.parametrize(
    ("lhs", "known_rows"), swept([(i8, False), (i8, True), (bf16, False), (bf16, True)], [(i8, True), (bf16, False)]), ids=str
)
@pytest.mark.isa("avx512_vnni")
def test_products(lhs: DType, known_rows: bool, target: Target) -> None:
    """One step and several; full tiles, lower ones, and few rows; rows that lie apart; pieces of k, and rows that are copied."""
    micros = amx.amx(lhs, i8 if lhs == i8 else bf16, tiles_on(target))
    shapes = [(m, 70, size // lhs.bytes) for size in (16, 24, 96, 144, 240) for m in (3, 49, 64)]
    cases = [Case(*shape, pitch) for shape in shapes for pitch in ((0, 8) if shape[0] == 49 else (0,))]
    for case in cases:
        spec = spec_of(case, lhs, micros[0].rhs)
        assert all(case.k * lhs.bytes % micro.step_bytes == 0 for micro in in_whole_steps(spec, micros[:2]))
    small = (Case(70, 90, 240 // lhs.bytes, 4, (1 << 10, 1 << 13)), Case(96, 260, 1008 // lhs.bytes, 0, (1 << 11, 1 << 14)))
    run(Native(target), micros, [*cases, *small], known_rows)


@pytest.mark.parametrize("lhs", [i8, bf16], ids=str)
@pytest.mark.isa("avx512_vnni")
def test_pieces_that_are_asked_for(lhs: DType, target: Target) -> None:
    """None ends within a step: so short a k has no other piece then, and none is offered."""
    micros = amx.amx(lhs, i8 if lhs == i8 else bf16, tiles_on(target))
    cases = [Case(64, 64, size // lhs.bytes) for size in (96, 120, 240, 360, 900)]
    for pieces in (2, 4):
        run(Native(target), micros, cases, True, pieces)
    offered = [choice for case in cases for choice in alternatives(X86_64_AMX, spec_of(case, lhs, micros[0].rhs, m=64))]
    assert not any(choice.pieces for choice in offered)


def widths(spec: GemmSpec) -> list[int]:
    return [micro.step_bytes for micro in in_whole_steps(spec, amx.amx(i8, i8)[:2])]


@pytest.mark.parametrize(
    ("k", "width"), [(16, 16), (24, 24), (64, 64), (96, 48), (144, 48), (240, 60), (576, 64), (12, 64), (70, 64), (160, 64)]
)
def test_steps_are_no_more_than_there_were(k: int, width: int) -> None:
    """160 would be four of 40 instead of three; no step is narrower than 16, or no whole number of four bytes."""
    assert widths(spec_of(Case(64, 64, k), i8, i8)) == [width] * 2


def test_what_keeps_its_steps() -> None:
    """A k that calls give, rows that lie across, and instructions without steps of bytes."""
    k: Dim = symbol("K", 1)
    spec = spec_of(Case(64, 64, 16), i8, i8)
    given = replace(spec, k=k, rhs_strides=Strides(0, k), constant_rhs=False)
    assert widths(given) == widths(replace(spec, lhs_strides=Strides(0, 1, 64))) == WIDE
    vnni = x86_vector.vnni(i8, 16)
    assert in_whole_steps(spec, vnni) == vnni


def test_copied_rows_have_whole_steps_anyway() -> None:
    (micro, _) = in_whole_steps(spec_of(Case(64, 64, 144), i8, i8), amx.amx(i8, i8)[:2])
    assert micro.step_bytes == 48 and micro.copied.step_bytes == 64 and micro.copied.mode == amx.amx(i8, i8)[0].mode


@pytest.mark.isa("avx512_vnni")
def test_copied_rows_of_a_step_that_is_not_whole(target: Target) -> None:
    """They have as much room as their own steps need, and are packed where one piece is more than a small L2 has room for."""
    micros = amx.amx(i8, i8, tiles_on(target))
    small, smaller = (Case(32, 16, 60, 0, (1024, size)) for size in (8192, 2048))
    for case in (small, smaller):
        spec = spec_of(case, i8, i8)
        found = choose(case.on(target), spec, in_whole_steps(spec, micros))
        assert found.pieces == 1 and not found.pack_late(found.variants[0])
        assert found.variants[0].pitch == 64 and not found.variants[0].direct
    run(Native(target), micros, [small, smaller])
