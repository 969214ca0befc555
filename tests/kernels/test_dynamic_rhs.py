"""Right operands that are no constants: read where they lie, packed by groups of panels, or packed before, in either order of memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from sashiko.cpu_codegen.builder import Module
from sashiko.graph.dims import Dim, evaluate
from sashiko.kernels import gemm, x86_vector
from sashiko.kernels.dynamic_rhs import PANELS_BYTES
from sashiko.kernels.spec import BATCH, GemmCode, GemmSpec, Strides
from sashiko.platforms.catalogue import X86_64_V4
from sashiko.platforms.target import Target
from tests.emulation import Array, Native, Runner
from tests.kernels.products import Case, M, Micros, Together, array, call, compare, plain_store, random, weight
from tests.kernels.test_gemm import DYNAMIC

FLOATS = tuple(each for each in DYNAMIC if each.values[0][0].rhs.is_float)
FMA = x86_vector.fma(16)


@dataclass(frozen=True)
class Lying:
    """`batch` matrices of a rhs: [k, n + pitch], or with along [n, k + pitch]."""

    m: int
    n: int
    k: int
    pitch: int = 0
    along: bool = False
    batch: int = 1

    def spec(self, micros: Micros, m: Dim) -> GemmSpec:
        pitch = (self.k if self.along else self.n) + self.pitch
        size = BATCH * pitch * (self.n if self.along else self.k)
        rhs = Strides(size, pitch, 1) if self.along else Strides(size, 1, pitch)
        lhs = Strides(BATCH * self.m * self.k, self.k)
        body = plain_store(self.n, micros[0].acc)
        return GemmSpec(micros[0].lhs, micros[0].rhs, m, self.n, self.k, lhs, body, self.batch, False, rhs)

    def operands(self, micros: Micros) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """lhs, the rhs as it is stored, and [batch, n, k] of it."""
        outer, inner = (self.n, self.k) if self.along else (self.k, self.n)
        stored = weight((self.batch, outer, inner + self.pitch), micros, 4)
        rhs = stored[..., :inner]
        return random((self.batch, self.m, self.k), micros[0].lhs, 3), stored, rhs if self.along else rhs.mT


def check(
    runner: Runner, micros: Micros, cases: tuple[Lying, ...], known_rows: bool = True, target: Target | None = None
) -> list[GemmCode]:
    """target: the machine of the runner, with caches of other sizes perhaps."""
    products, codes = Together(runner), []
    for case in cases:
        x, stored, w = case.operands(micros)
        spec = case.spec(micros, case.m if known_rows else M)
        code = gemm.emit(products.module, target or runner.target, spec, micros, products.name())
        sizes, place = {"M": case.m}, products.place(array(stored))
        assert code.columns is not None
        if code.pack is not None:
            packed = products.place(np.zeros(evaluate(code.packed_bytes, sizes), np.int8))
            middle, end = 1, evaluate(code.pack.domain, sizes)
            products.calls += [call(code.pack, (place, packed), *part, sizes) for part in ((0, middle), (middle, end))]
            place = packed

        def each(result: Array, case: Lying = case, x: torch.Tensor = x, w: torch.Tensor = w) -> None:
            for b in range(case.batch):
                compare(result[b], x[b], w[b], Case(case.m, case.n, case.k))

        out = np.full((case.batch, case.m, case.n), 77, np.float32)
        products.add((code.rows, code.columns), products.place(array(x)), place, out, sizes, each)
        codes.append(code)
    products.run()
    return codes


@pytest.mark.parametrize(("micros", "runner"), FLOATS)
def test_whole_panels_and_others_in_either_order(micros: Micros, runner: Runner) -> None:
    """One row, several tiles; gaps between rows of the rhs; several matrices; a k that is no whole step; a last panel that is not whole."""
    nr = micros[0].packing.nr
    sizes = (Lying(1, 3 * nr, 40), Lying(33, 2 * nr, 37, pitch=5, batch=3), Lying(50, 4 * nr + 3, 70, batch=2), Lying(7, 3, 9))
    check(runner, micros, (*sizes, *(replace(size, along=True) for size in sizes)))


@pytest.mark.parametrize(("micros", "runner"), FLOATS)
def test_pieces_of_k(micros: Micros, runner: Runner) -> None:
    """Caches so small that a k of some hundreds is cut, and so are rows."""
    case = Lying(70, 4 * micros[0].packing.nr, 300, pitch=3, batch=2)
    check(runner, micros, (case, replace(case, n=case.n + 5)), target=replace(runner.target, l1d=1 << 10, l2=1 << 12))


@pytest.mark.parametrize(("micros", "runner"), FLOATS)
@pytest.mark.parametrize("along", [False, True], ids=["k_by_n", "n_by_k"])
def test_any_number_of_rows_packs_before(micros: Micros, runner: Runner, along: bool) -> None:
    """More panels than are packed in a call; some that are packed together, and some that are left."""
    codes = check(runner, micros, (Lying(20, 17 * micros[0].packing.nr + 3, 33, pitch=2, along=along, batch=2),), known_rows=False)
    assert codes[0].pack is not None


@pytest.mark.isa("avx512f")
def test_more_groups_than_one(target: Target) -> None:
    """Of k so long that few panels are a group; columns that are cut within one."""
    cases = (Lying(16, 210, 1000), Lying(30, 100, 1500, along=True), Lying(9, 60, PANELS_BYTES // 128, along=True))
    assert all(code.pack is None for code in check(Native(target), FMA, cases))


def how(case: Lying, micros: Micros = FMA, m: Dim | None = None) -> str:
    code = gemm.emit(Module(), X86_64_V4, case.spec(micros, case.m if m is None else m), micros, "how")
    assert code.packing is not None
    return "before" if code.pack is not None else "in place" if code.packing.pitch else "by groups"


def test_what_becomes_of_a_rhs() -> None:
    assert how(Lying(100, 64, 128)) == how(Lying(2000, 48, 128)) == "in place"
    assert how(Lying(28, 1024, 512)) == "in place", "few tiles read lines that share sets of the caches"
    assert how(Lying(300, 1024, 512)) == "before" and how(Lying(100, 1024, 512)) == "by groups", "many would not find them again"
    assert how(Lying(100, 50, 128)) == how(Lying(100, 64, 128, along=True)) == "by groups"
    assert how(Lying(100, 50, 128), m=M) == how(Lying(300, 50, 128)) == how(Lying(100, 50, 5000)) == "before"
