"""Targets as values: queries, LLVM spelling, what may not be built."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sashiko.diagnostics.errors import InputError
from sashiko.platforms.catalogue import CATALOGUE, NEOVERSE_N1, NEOVERSE_N2, X86_64_AMX, X86_64_V3, X86_64_V4, X86_64_VNNI, by_name
from sashiko.platforms.features import FEATURES, closed
from sashiko.platforms.target import Target
from tests.machines import HIDDEN, ZEN4

PARAMETERS = pytest.mark.parametrize("value", CATALOGUE, ids=lambda t: t.name)


def test_queries() -> None:
    assert X86_64_VNNI.has("avx512_vnni") and not X86_64_V4.has("avx512_vnni")
    assert X86_64_AMX.has("amx_int8", "amx_bf16") and not X86_64_AMX.has("amx_int8", "neon")
    assert (X86_64_V3.lanes(32), X86_64_V4.lanes(8), NEOVERSE_N1.lanes(16)) == (8, 64, 8)
    assert [t.masked_memory for t in CATALOGUE] == [False, True, True, True, False, False]
    assert [t.lookup_entries for t in CATALOGUE] == [8, 32, 32, 32, 8, 8]
    assert [t.byte_dots for t in CATALOGUE] == [False, False, True, True, False, True]
    assert [t.vnni for t in CATALOGUE] == [False, False, True, True, False, False]
    assert [t.tiles for t in CATALOGUE] == [0, 0, 0, 8, 0, 0]
    assert [t.arch for t in CATALOGUE] == ["x86_64"] * 4 + ["aarch64"] * 2


def test_cores_are_told_apart_though_tiles_are_hidden() -> None:
    assert [each.golden_cove for each in (X86_64_AMX, HIDDEN, ZEN4, X86_64_VNNI, NEOVERSE_N2)] == [True, True, False, False, False]
    assert [each.bf16_dots for each in (X86_64_AMX, HIDDEN, ZEN4, X86_64_VNNI, NEOVERSE_N2)] == [False, False, True, False, False]
    assert [each.halves_vectors for each in (X86_64_AMX, HIDDEN, ZEN4)] == [False, False, True]


def test_pairs_of_integers_are_fast_where_units_are_enough() -> None:
    machines = (X86_64_V3, X86_64_V4, X86_64_VNNI, X86_64_AMX, HIDDEN, ZEN4, NEOVERSE_N2)
    assert [each.word_pairs for each in machines] == [True, False, True, True, True, True, False]
    assert [replace(X86_64_V3, cpu=cpu).word_pairs for cpu in ("haswell", "skylake", "znver2", "znver3")] == [False, True, False, True]


def test_a_misspelt_feature_is_an_error_and_not_false() -> None:
    with pytest.raises(InputError, match="avx512vnni"):
        X86_64_VNNI.has("avx512vnni")


@PARAMETERS
def test_every_feature_of_the_architecture_is_spelt_for_llvm(value: Target) -> None:
    spelt = value.llvm_features.split(",")
    for row in FEATURES.values():
        expected = f"+{row.llvm}" if row.name in value.features else f"-{row.llvm}"
        assert (expected in spelt) == (row.arch == value.arch)
    signs = [item[0] for item in spelt if item != "-prefer-256-bit"]
    assert signs == sorted(signs, reverse=True), "switching off must come first"


@PARAMETERS
def test_names_find_their_targets(value: Target) -> None:
    assert by_name(value.name) is value


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(InputError, match="neoverse_n2"):
        by_name("pentium")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": frozenset({"mmx"})}, "unknown features"),
        ({"features": frozenset({"neon"})}, "another architecture"),
        ({"features": frozenset({"avx2", "avx512f"})}, "avx512f needs avx2, fma, f16c"),
        ({"triple": "riscv64-unknown-linux-gnu"}, "no support for the architecture"),
    ],
)
def test_impossible_targets_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(X86_64_V3, **changes)  # type: ignore[arg-type]


def test_closed_drops_whatever_lost_its_base() -> None:
    assert closed(frozenset({"sve2", "sve", "neon", "dotprod", "i8mm"})) == {"neon", "dotprod", "i8mm"}
    assert closed(X86_64_AMX.features - {"avx2"}) == frozenset()


def test_keys_tell_targets_apart_but_not_names() -> None:
    assert len({t.key for t in CATALOGUE}) == len(CATALOGUE)
    assert replace(X86_64_V4, name="host").key == X86_64_V4.key
    assert replace(X86_64_V4, l2=2 << 20).key != X86_64_V4.key


def test_why_not_on() -> None:
    assert X86_64_V3.why_not_on(X86_64_AMX) == ""
    assert X86_64_VNNI.why_not_on(X86_64_V4) == "this machine lacks avx512_vnni"
    assert "aarch64" in NEOVERSE_N2.why_not_on(X86_64_V4)


def test_targets_are_hashable_values() -> None:
    assert replace(X86_64_V4) == X86_64_V4 and hash(replace(X86_64_V4)) == hash(X86_64_V4)
