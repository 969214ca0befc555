"""Floats times integer weights: every row of the table against f64, with all tails, on every machine that can run it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from _pytest.mark.structures import ParameterSet

from sashiko.cpu_codegen import jit
from sashiko.cpu_codegen.builder import Module
from sashiko.diagnostics.errors import InputError, InvalidGraph
from sashiko.graph.dims import Dim, evaluate, symbol
from sashiko.graph.types import DType, bf16, f32, i4, i8
from sashiko.kernels import amx, table
from sashiko.kernels.blocking import choose
from sashiko.kernels.known_rows import tailored
from sashiko.kernels.packing import pack_grouped, packed_group
from sashiko.kernels.spec import GemmSpec, Packing
from sashiko.kernels.table import Kernel
from sashiko.kernels.weight_digits import DigitMicro, digits_of, step_of
from sashiko.kernels.weight_only import AVX512, AVX512_VNNI, LEAST_GROUP
from sashiko.platforms.catalogue import CATALOGUE, NEOVERSE_N1, NEOVERSE_N2, X86_64_AMX, X86_64_V3, X86_64_V4, X86_64_VNNI
from sashiko.platforms.target import Target
from tests.emulation import Array, Runner, runners, runners_in_turn
from tests.kernels.products import Case, M, Together, array, random, spec_of
from tests.kernels.tile_emulation import EmulatedTiles
from tests.sweeps import left_to_sweep, swept

FEW = symbol("M", 1, 4)
ROWS = tuple(row for row in table.TABLE if row.micros and row.micros[0].lhs.is_float and row.micros[0].rhs in (i4, i8))
GROUPED = tuple(row for row in ROWS if (row.micros[0].lhs, row.micros[0].rhs) == (f32, i4))
_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq")
_AMX = amx.amx(bf16, bf16, EmulatedTiles())[0]
EMULATED = tuple(
    replace(table.weight_only_row(_AMX, small, bf16, rhs, needs, 1), name=f"emulated_amx_{rhs}_{needs[-1]}")
    for rhs in (i8, i4)
    for small, needs in ((AVX512, _AVX512), (AVX512_VNNI, (*_AVX512, "avx512_vnni")))
)


def features(row: Kernel) -> tuple[str, ...]:
    """What the row needs, from its refusal of a machine that has nothing."""
    nothing = replace(X86_64_V3, features=frozenset())
    types = row.micros[0].lhs, row.micros[0].rhs
    reason = row.when(nothing, weight_spec(Case(1, 16, 64), *types, 32, FEW))
    return tuple(reason.split(" lacks ")[1].split(", ")) if reason else ()


def weight_spec(case: Case, lhs: DType, rhs: DType, group: int, m: Dim = M) -> GemmSpec:
    plain = spec_of(case, lhs, f32 if lhs == f32 else bf16, m=m)
    return replace(plain, rhs=rhs, group=packed_group(group) if rhs == i4 else 0)


def pairs(few: bool = False) -> Iterator[ParameterSet]:
    """Every row with every machine that can run it, or with one of each kind."""
    for row in (*ROWS, *EMULATED):
        needs = features(row)
        found = runners(needs=needs, few=True) if few else runners_in_turn(needs)
        if not found:
            yield pytest.param(row, None, id=row.name, marks=pytest.mark.skip(reason=f"no machine here has {', '.join(needs)}"))
        for each in found if not needs or needs[0] in ("neon", "bf16") else found[:1]:
            made = pytest.param(row, each.values[0], id=f"{row.name}-{each.id}", marks=each.marks)
            # Rows of bf16 are cut as those of f32 are, and widened alike on every machine; emulated tiles stand in for tile registers.
            emulated = row in EMULATED and bool(runners(host_only=True, needs=("amx_bf16",)))
            twin = row.name.replace("_bf16_", "_f32_", 1) in {other.name for other in ROWS if other is not row}
            yield left_to_sweep(made) if emulated or twin or (row.micros[0].lhs == bf16 and (few or each is not found[0])) else made


PAIRS = tuple(pairs())


def weight(case: Case, rhs: DType, group: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Integers of the whole range [n, k], and for i4 scales [n, k / group]."""
    integers = random((case.n, case.k), i8, 2)
    if rhs == i8:
        return integers, None
    return integers >> 4, torch.rand((case.n, case.k // group), generator=torch.Generator().manual_seed(3)) + 0.1


def run(runner: Runner, row: Kernel, cases: Sequence[tuple[Case, int]]) -> None:
    """Both kernels of the row for each case and size of groups, against the exact product of what is multiplied."""
    lhs, rhs = row.micros[0].lhs, row.micros[0].rhs
    products = Together(runner)
    for case, group in cases:
        code = row.emit(products.module, case.on(runner.target), weight_spec(case, lhs, rhs, group), products.name())
        assert code.columns is not None
        integers, scales = weight(case, rhs, group)
        packed = row.pack(integers) if scales is None else row.pack(integers, scales)
        sizes = {"M": case.m}
        assert packed.numel() == evaluate(code.packed_bytes, sizes)
        stored, x = case.lhs(lhs)
        real = integers.double() if scales is None else integers.double() * scales.double().repeat_interleave(group, 1)
        check = partial(compare, row=row, case=case, group=group, left=x.double(), real=real)
        out = np.full((case.m, case.n), 77, np.float32)
        products.add((code.rows, code.columns), products.place(array(stored)), products.place(packed.numpy()), out, sizes, check)
    products.run()


def compare(result: Array, row: Kernel, case: Case, group: int, left: torch.Tensor, real: torch.Tensor) -> None:
    """With left [m, k] times real [n, k], f64."""
    lhs, rhs = row.micros[0].lhs, row.micros[0].rhs
    # k + 2 roundings of an f32 sum, one of a scaled weight, one of the sum of a step; where weights become bf16, that rounding.
    narrow = 2.0**-8 if rhs == i4 and lhs == bf16 and _narrows(row) else 0.0
    allowed = ((case.k + 4) * 2.0**-24 + narrow) * (left.abs() @ real.abs().mT)
    if any(isinstance(micro, DigitMicro) for micro in row.micros) and (rhs == i8 or group >= LEAST_GROUP):
        allowed = allowed + digits_bound(left, real, packed_group(group) if rhs == i4 else step_of(case.k), lhs)
    difference = (torch.from_numpy(result).double() - left @ real.mT).abs()
    assert bool((difference <= allowed).all()), f"{case} in groups of {group}: {(difference / allowed).max().item():.3g} of the bound"


def digits_bound(x: torch.Tensor, real: torch.Tensor, step: int, lhs: DType) -> torch.Tensor:
    """What rounding x [m, k], of type lhs, to digits, step by step, may do to its product with real [n, k] at most: see `weight_digits`."""
    pad = -x.shape[1] % step
    steps = [torch.nn.functional.pad(t.double().abs(), (0, pad)).unflatten(1, (-1, step)) for t in (x, real)]
    most, weights = steps[0].amax(2), steps[1].sum(2)
    rounding = 2.0 ** (1 - 8 * digits_of(lhs)) * (1 + 2.0**-6)
    return torch.maximum(rounding * most, torch.tensor(2.0**-127).double()) @ weights.mT


def _narrows(row: Kernel) -> bool:
    return getattr(row.micros[0], "inner", row.micros[0]).rhs == bf16


@pytest.mark.parametrize(("row", "runner"), PAIRS)
def test_products_with_all_tails(row: Kernel, runner: Runner) -> None:
    """One row, few, many; ragged columns and k; sizes that fill tiles exactly; one group and several."""
    if row.micros[0].rhs == i8:
        cases = (Case(1, 1, 1), Case(1, 130, 67), Case(3, 70, 7, 5), Case(8, 65, 64), Case(37, 49, 66, 3), Case(64, 96, 128))
        run(runner, row, [(case, 0) for case in cases])
    else:
        run(runner, row, [(Case(1, 1, 32), 32), (Case(1, 130, 192), 64), (Case(7, 70, 96, 5), 32), (Case(37, 49, 128, 3), 128)])


@pytest.mark.parametrize(("row", "runner"), [pair for pair in pairs(few=True) if isinstance(pair.values[0].micros[-1], DigitMicro)])
def test_rows_that_lie_side_by_side(row: Kernel, runner: Runner) -> None:
    """Steps of which some k are missing, and tiles of which some rows are."""
    run(runner, row, [(replace(Case(*size), across=True), 32) for size in ((1, 90, 32), (7, 70, 96, 5), (37, 49, 160, 3))])


@pytest.mark.parametrize(("row", "runner"), tuple(pairs(few=True)))
def test_products_cut_into_blocks(row: Kernel, runner: Runner) -> None:
    """Pieces of k, packed before and in the loop over panels, and blocks of several tiles of rows."""
    small = (1 << 10, 1 << 12)
    cases = (Case(33, 100, 288, caches=small), Case(70, 90, 256, 5, (1 << 12, 1 << 15)), Case(1, 90, 512, caches=small))
    run(runner, row, [(case, 32) for case in cases])


@pytest.mark.parametrize(("row", "runner"), tuple(p for p in pairs(few=True) if p.values[0] in GROUPED))
def test_rows_that_choose_a_weight(row: Kernel, runner: Runner) -> None:
    """Weights, and the scales of their groups, take turns along the rows."""
    case, count, group = Case(21, 50, 96, 3), 3, 32
    lhs, rhs = row.micros[0].lhs, row.micros[0].rhs
    products, x = Together(runner), random((case.m, case.k + case.pitch), lhs, 1)
    spec = replace(weight_spec(case, lhs, rhs, group), weights=count, routed=True)
    code = row.emit(products.module, case.on(runner.target), spec, products.name())
    integers, scales = weight(replace(case, n=count * case.n), rhs, group)
    real = integers.double() if scales is None else integers.double() * scales.double().repeat_interleave(group, 1)
    each = zip(integers.chunk(count), *(() if scales is None else (scales.chunk(count),)), strict=True)
    packed = products.place(torch.cat([row.pack(*parts) for parts in each]).numpy())
    assert code.columns is not None
    for stops in ((1, 20, case.m), (0, 0, case.m), (case.m, case.m, case.m)):

        def check(result: Array, stops: tuple[int, ...] = stops) -> None:
            for start, stop, matrix in zip((0, *stops), stops, real.chunk(count), strict=False):
                if start < stop:
                    compare(result[start:stop], row, case, group, x[start:stop, : case.k].double(), matrix)

        out, ends = np.full((case.m, case.n), 77, np.float32), products.place(np.array(stops, np.int64))
        products.add((code.rows, code.columns), products.place(array(x)), packed, out, {"M": case.m}, check, ends)
    products.run()


def test_groups_of_any_size_that_words_fill() -> None:
    [runner] = [each.values[0] for each in runners(host_only=True)][:1]
    row = table.select(runner.target, weight_spec(Case(1, 16, 64), f32, i4, 8)).kernel
    run(runner, row, [(Case(3, 20, 24), 8), (Case(20, 40, 160), 40), (Case(1, 50, 1200), 600), (Case(40, 50, 1032), 1032)])


@pytest.mark.parametrize(("group", "packed"), [(64, 64), (256, 256), (4096, 256), (768, 256), (1000, 200), (8 * 37, 8)])
def test_long_groups_are_packed_as_several(group: int, packed: int) -> None:
    assert packed_group(group) == packed and group % packed == 0 and packed % 8 == 0


def test_a_packed_weight_has_half_a_byte_and_a_share_of_a_scale() -> None:
    packing = Packing(16, 8, 64, False, 64)
    packed = pack_grouped(torch.zeros(4096, 4096, dtype=torch.int8), torch.ones(4096, 64), packing)
    assert packed.numel() == 4096 * 4096 // 2 + 4096 * 64 * 4
    row = table.select(X86_64_V4, weight_spec(Case(1, 64, 64), f32, i8, 0)).kernel
    assert row.pack(torch.zeros(64, 64, dtype=torch.int8)).numel() == 64 * 64


def test_integers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match="from 0 to 8"):
        pack_grouped(torch.arange(9, dtype=torch.int8).repeat(8)[None], torch.ones(1, 1), Packing(16, 8, 72, False, 72))


@pytest.mark.parametrize("group", [0, 4, 48])
def test_groups_must_divide_k_and_fill_words(group: int) -> None:
    with pytest.raises(InvalidGraph, match="groups"):
        replace(weight_spec(Case(1, 16, 64), f32, i4, 64), group=group)


@pytest.mark.parametrize(("target", "lhs", "rhs", "m", "name"), [
    (X86_64_V4, f32, i8, M, "gemm_f32_f32_i8_14x32x1_avx512unpack"),
    (X86_64_V4, f32, i8, FEW, "gemm_f32_f32_i8_8x32x1_avx512extend"),
    (X86_64_V4, f32, i4, FEW, "gemm_f32_f32_i4_8x32x8_avx512lookup"),
    (X86_64_V3, f32, i4, FEW, "gemm_f32_f32_i4_1x32x8_avx2digits"),
    (X86_64_V3, f32, i4, M, "gemm_f32_f32_i4_6x16x8_avx2unpackdigits"),
    (X86_64_V3, f32, i8, FEW, "gemm_f32_f32_i8_6x16x1_avx2extend"),
    (X86_64_V3, bf16, i8, M, "gemm_f32_bf16_i8_6x16x1_avx2extend"),
    (X86_64_VNNI, f32, i8, M, "gemm_f32_f32_i8_8x32x4_avx512vnnidigits"),
    (X86_64_VNNI, bf16, i4, M, "gemm_f32_bf16_i4_8x32x8_avx512vnnidigits"),
    (X86_64_AMX, f32, i4, M, "gemm_f32_f32_i4_8x32x8_avx512vnnidigits"),
    (X86_64_AMX, bf16, i4, M, "gemm_f32_bf16_i4_32x32x8_amxbf16unpackdigits"),
    (X86_64_AMX, bf16, i8, FEW, "gemm_f32_bf16_i8_8x32x4_avx512vnnidigits"),
    (NEOVERSE_N1, f32, i8, M, "gemm_f32_f32_i8_8x12x4_fmlaunpackdigits"),
    (NEOVERSE_N1, f32, i4, FEW, "gemm_f32_f32_i4_2x12x8_sdotdigits"),
    (NEOVERSE_N2, bf16, i8, M, "gemm_f32_bf16_i8_8x12x4_bfmmlaunpackdigits"),
])
def test_the_fastest_row_is_selected(target: Target, lhs: DType, rhs: DType, m: Dim, name: str) -> None:
    assert table.select(target, weight_spec(Case(1, 64, 256), lhs, rhs, 64, m)).kernel.name == name


@pytest.mark.parametrize(("rows", "heights"), [(1, [1]), (2, [2]), (4, [4]), (6, [6]), (8, [4]), (18, [6]), (20, [4]), (50, [6, 2])])
def test_a_known_number_of_rows_takes_the_tile_that_is_fastest_with_all_of_them(rows: int, heights: list[int]) -> None:
    """Eight rows are two times four, not six and two."""
    spec = weight_spec(Case(rows, 64, 256), f32, i8, 0, rows)
    row = next(row for row in ROWS if row.name == "gemm_f32_f32_i8_6x16x1_avx2extend")
    assert [variant.micro.mr for variant in choose(X86_64_V3, spec, tailored(X86_64_V3, spec, row.micros)).variants] == heights


@pytest.mark.parametrize("target", swept(CATALOGUE, (X86_64_V3, X86_64_AMX, NEOVERSE_N2)), ids=lambda target: target.name)
def test_every_accepting_row_compiles_for_every_target(target: Target) -> None:
    for lhs in (f32, bf16):
        for rhs in (i8, i4):
            spec = weight_spec(Case(1, 80, 2112), lhs, rhs, 64)
            for row in ROWS:
                if row.when(target, spec) is None:
                    module = Module()
                    row.emit(module, target, spec, "product")
                    assert jit.compile_object(module.text(), target)
