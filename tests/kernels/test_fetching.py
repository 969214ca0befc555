"""Panels that follow are fetched while others are multiplied."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from sashiko.cpu_codegen.builder import Module
from sashiko.graph.types import f32
from sashiko.kernels import gemm, x86_vector
from sashiko.kernels.micro import shares_of
from sashiko.kernels.packing import pack_rhs
from sashiko.kernels.spec import Strides
from sashiko.platforms.catalogue import X86_64_V3, X86_64_V4
from sashiko.platforms.target import Target
from tests.emulation import Runner, runners
from tests.kernels.products import Case, array, call, random, spec_of

_TO_L2 = re.compile(r"call void @llvm.prefetch.p0\(ptr (%\w+), i32 0, i32 2, i32 1\)")


@pytest.mark.parametrize("runner", [p for p in runners() if not p.values[0].target.has("neon")])  # the tiles of NEON fetch nothing
def test_every_line_of_the_panels_that_follow(runner: Runner) -> None:
    """Fetches into L2 as stores beside the weight: those of four tiles are all of the next panel, whatever other tiles fetch."""
    micros = x86_vector.fma(runner.target.lanes(32))
    case = Case(6 * micros[0].mr, 4 * micros[0].nr, 256, caches=(32 << 10, 128 << 10))  # blocks of four tiles and of two
    code = gemm.emit(module := Module(), case.on(runner.target), spec_of(case, f32, f32, m=case.m), micros, "product")
    packed = pack_rhs(random((case.n, case.k), f32, 2), micros[0].packing).numpy().view(np.uint8)
    shadow, tile = len(packed), micros[0].nr * case.k * 4
    text = _TO_L2.sub(rf"\1.mark = getelementptr i8, ptr \1, i64 {shadow}\n  store i8 1, ptr \1.mark", module.text())
    assert text != module.text()
    beside = np.append(packed, np.zeros(shadow + 2 * tile, np.uint8))
    arrays = [array(random((case.m, case.k), f32, 1)), beside, np.empty((case.m, case.n), np.float32)]
    after = runner.run_calls(text, arrays, [call(code.rows, (0, 1, 2), 0, case.m, {})])
    lines = after[1][shadow : 2 * shadow].reshape(-1, 64).max(1)
    assert lines[tile // 64 :].all() and not lines[tile // 128 : tile // 64].all()


def test_as_many_shares_as_tiles() -> None:
    assert [shares_of(tiles) for tiles in (1, 2, 3, 4, 5, 16)] == [0, 2, 2, 4, 4, 4]


@pytest.mark.parametrize("target", [X86_64_V3, X86_64_V4], ids=lambda target: target.name)
@pytest.mark.parametrize(("tiles", "fetches"), [(1, False), (2, True)])
def test_a_tile_that_is_alone_fetches_nothing(target: Target, tiles: int, fetches: bool) -> None:
    """However many rows a block could have."""
    micros = x86_vector.fma(target.lanes(32))
    case = Case(tiles * micros[0].mr, 1024, 1024)
    gemm.emit(module := Module(), target, spec_of(case, f32, f32, m=case.m), micros, "product")
    assert bool(_TO_L2.search(module.text())) == fetches


def test_a_rhs_in_place_is_fetched_no_further_than_l1_has_ways() -> None:
    """Rows of 4096 bytes all share the sets of a line: of 32 rows ahead the first would be gone when its turn comes."""
    case = Case(4, 1024, 512)
    spec = replace(spec_of(case, f32, f32, m=case.m), constant_rhs=False, rhs_strides=Strides(0, 1, case.n))
    gemm.emit(module := Module(), X86_64_V4, spec, x86_vector.fma(16), "product")
    found = re.findall(r"(%\w+) = getelementptr i8, ptr %\w+, i64 (\d+)\n.*llvm\.prefetch\.p0\(ptr \1, i32 0, i32 3", module.text())
    assert {int(far) // (4 * case.n) for _, far in found if int(far) >= 4 * case.n} == {8}
