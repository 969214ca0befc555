"""The measured peaks: which tiles are tried, that their loops multiply what they are given, and that figures are kept."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from sashiko.cpu_codegen import jit
from sashiko.cpu_codegen.builder import Module
from sashiko.cpu_codegen.rate import Bound, Effort, aligned, loaded
from sashiko.graph.types import bf16, f32, i8
from sashiko.kernels import peaks, table, x86_words
from sashiko.platforms.catalogue import CATALOGUE, NEOVERSE_N2, X86_64_AMX, X86_64_V3
from sashiko.platforms.target import Target

SHORT = Effort(1e-4, 1)
SMALL = (("L1", 16 << 10),)
TYPES = [types for kinds in peaks.KINDS.values() for types in kinds]


def test_every_row_that_a_machine_can_run_is_tried() -> None:
    assert [m.isa for m in table.tiles(X86_64_V3, f32, f32)] == ["avx2"]
    assert {"amxint8", "avx512vnni"} <= {m.isa for m in table.tiles(X86_64_AMX, i8, i8)}
    assert {m.isa for m in table.tiles(X86_64_AMX, bf16, bf16)} >= {"amxbf16"}
    assert {"smmla", "sdot"} <= {m.isa for m in table.tiles(NEOVERSE_N2, i8, i8)}
    # Only the largest tile of a family: those of few rows are slower by design.
    found = [m.isa for m in table.tiles(X86_64_AMX, i8, i8)]
    assert len(found) == len(set(found)) and [m.mr for m in table.tiles(X86_64_V3, i8, i8)] == [3, 3, 6]


def test_a_machine_without_any_tile_has_the_reference() -> None:
    plain = Target("plain", "x86_64-unknown-linux-gnu", "x86-64", frozenset(), 128, 16, 32 << 10, 1 << 20, 0)
    (micro,) = table.tiles(plain, f32, f32)
    assert jit.compile_object(peaks.emit(micro, 4).text(), plain)


@pytest.mark.parametrize("machine", CATALOGUE, ids=lambda machine: machine.name)
def test_there_is_code_for_every_machine(machine: Target) -> None:
    for lhs, rhs in TYPES:
        for micro in table.tiles(machine, lhs, rhs):
            steps = peaks.steps_in_l1(machine, micro)
            assert steps >= 1
            assert jit.compile_object(peaks.emit(micro, steps).text(), machine)


def test_operands_fit_into_half_of_l1() -> None:
    (micro, *_) = table.tiles(X86_64_AMX, i8, i8)
    assert peaks.steps_in_l1(X86_64_AMX, micro) * micro.step_k * (micro.mr + micro.nr) <= X86_64_AMX.l1d // 2


@pytest.mark.isa("avx2")
def test_rows_of_integers_are_usual_ones(target: Target) -> None:
    """None has numbers far above all others in a step, which would be multiplied twice."""
    micro = x86_words.family(x86_words.SAMPLE, 8, fused=False)[0]
    steps = peaks.steps_in_l1(target, micro)
    found = peaks.rows(loaded(peaks.emit(micro, steps), target), micro, steps).reshape(micro.mr, -1)[:, : steps * micro.step_bytes]
    scales = found.reshape(-1, micro.step_bytes)[:, :8].copy().view(np.float32)
    assert (scales[:, 0] > 0).all() and not scales[:, 1].any()


def test_each_pass_adds_the_whole_product(target: Target) -> None:
    micro = table.tiles(target, f32, f32)[0]
    steps = 3
    lhs, rhs, out = aligned(1 << 16), aligned(1 << 16), aligned(4 * micro.mr * micro.nr)
    lhs.view(np.float32)[:] = 2
    rhs.view(np.float32)[:] = 0.5
    Bound(loaded(peaks.emit(micro, steps), target), "product", (lhs.ctypes.data, rhs.ctypes.data, out.ctypes.data))(5)
    assert (out.view(np.float32) == 5 * steps * micro.step_k).all()


def test_a_loop_has_the_instructions_of_its_target_alone(monkeypatch: pytest.MonkeyPatch, target: Target) -> None:
    found: list[Target] = []

    def seen(module: Module, machine: Target) -> jit.Library:
        found.append(machine)
        return loaded(module, target)

    monkeypatch.setattr(peaks, "loaded", seen)
    poorer = dataclasses.replace(target, name="poorer")
    peaks.measure_kind(poorer, "fp32", SHORT)
    assert found and all(machine is poorer for machine in found)


@pytest.mark.parametrize("kind", peaks.KINDS)
def test_every_kind_is_measured(target: Target, kind: str) -> None:
    found = peaks.measure_kind(target, kind, SHORT)
    assert found.kind == kind and found.giga > 0 and found.kernel.startswith("gemm_")


def test_operands_are_random_and_finite() -> None:
    floats = peaks._random("f32", 4096).view(np.float32)
    assert np.isfinite(floats).all() and len(np.unique(floats)) > 1000 and np.abs(floats).max() <= 1
    halves = (peaks._random("bf16", 4096).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    assert np.isfinite(halves).all() and np.abs(halves).max() <= 1 and len(np.unique(halves)) > 200
    for values in ("i8", "i16"):
        numbers = peaks._random(values, 4096).view(values.replace("i", "int"))
        assert numbers.min() == -128 and numbers.max() == 127


def test_peaks_are_measured_once(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("SASHIKO_CACHE", str(tmp_path))
    found = peaks.remeasured(SHORT, SMALL)
    monkeypatch.setattr(peaks, "remeasured", lambda: pytest.fail("measured again"))
    assert peaks.peaks() == found


def test_peaks_of_another_processor_are_not_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("SASHIKO_CACHE", str(tmp_path))
    found = peaks.remeasured(SHORT, SMALL)
    monkeypatch.setattr(peaks, "cpu_model", lambda: "another")
    monkeypatch.setattr(peaks, "remeasured", lambda: "measured again")
    assert peaks.peaks() == "measured again"
    assert peaks.from_json(json.loads(json.dumps(dataclasses.asdict(found)))) == found


def test_the_level_that_holds_some_bytes() -> None:
    found = peaks.Peaks("", (), tuple(peaks.Bandwidth(name, size, 1, 1, 1) for name, size in (("L1", 100), ("L2", 1000), ("memory", 9000))))
    assert [found.holding(size).level for size in (1, 100, 101, 5000, 10**9)] == ["L1", "L1", "L2", "memory", "memory"]
