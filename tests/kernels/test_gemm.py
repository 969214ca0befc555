"""Every family of tiles, on this machine, smaller x86 targets, emulated AMX, and emulated Neoverse N1 and N2: all tails, exactly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from _pytest.mark.structures import ParameterSet

from sashiko.cpu_codegen.builder import Module
from sashiko.graph import sums16
from sashiko.graph.dims import Dim, evaluate, floordiv, mod, symbol
from sashiko.graph.types import DType, bf16, f16, f32, i8, u8
from sashiko.kernels import amx, gemm, neon, reference, x86_vector, x86_words
from sashiko.kernels.blocking import choose
from sashiko.kernels.pack_across import transposes
from sashiko.kernels.packing import int_of, pack_rhs
from sashiko.kernels.spec import BATCH, GemmSpec, Packing, Strides, dense
from sashiko.kernels.table import TABLE
from sashiko.kernels.tile import BLOCK
from sashiko.kernels.x86_vector import MaddubsMicro
from sashiko.platforms.target import Target
from tests.emulation import Array, Native, Runner, runners, runners_in_turn
from tests.kernels.products import (
    Case,
    M,
    Micros,
    Together,
    array,
    call,
    compare,
    exact,
    packed_of,
    plain_store,
    random,
    run,
    spec_of,
    weight,
)
from tests.kernels.tile_emulation import EmulatedTiles, tiles_on
from tests.sweeps import left_to_sweep, swept

_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq")
_VNNI = ("avx512_vnni",)
FAMILIES: dict[str, tuple[Micros, tuple[str, ...]]] = {
    "fma16": (x86_vector.fma(16), _AVX512),
    "fma8": (x86_vector.fma(8), ("avx2", "fma")),
    "widen16": (x86_vector.widen(16), _AVX512),
    "widen8": (x86_vector.widen(8), ("avx2", "fma")),
    "half16": (x86_vector.half(16), _AVX512),
    "half8": (x86_vector.half(8), ("avx2", "fma", "f16c")),
    "dot_bf16": (x86_vector.dot_bf16(), ("avx512_bf16",)),
    "words16": (x86_words.family(x86_words.SAMPLE, 16, fused=True), _VNNI),
    "words8": (x86_words.family(64, 8, fused=True), _VNNI),
    "wordsmadd8": (x86_words.family(80, 8, fused=False), ("avx2", "fma")),
    **{f"vnni16_{lhs}": (x86_vector.vnni(lhs, 16), _VNNI) for lhs in (i8, u8)},
    **{f"vnni8_{lhs}": (x86_vector.vnni(lhs, 8), _VNNI) for lhs in (i8, u8)},
    **{f"madd16_{lhs}": (x86_vector.madd(lhs, 16), _AVX512) for lhs in (i8, u8)},
    **{f"madd8_{lhs}": (x86_vector.madd(lhs, 8), ("avx2",)) for lhs in (i8, u8)},
    **{f"maddubs{sums}_16_{lhs}": (x86_vector.maddubs(lhs, sums, 16), _AVX512) for lhs in (i8, u8) for sums in (2, 4)},
    **{f"maddubs{sums}_8_{lhs}": (x86_vector.maddubs(lhs, sums, 8), ("avx2",)) for lhs in (i8, u8) for sums in (2, 4)},
    **{f"amx_emulated_{lhs}": (amx.amx(lhs, i8, EmulatedTiles()), _VNNI) for lhs in (i8, u8)},
    "amx_emulated_bf16": (amx.amx(bf16, bf16, EmulatedTiles()), _AVX512),
    **{f"amx_{lhs}": (amx.amx(lhs, i8), ("amx_int8", *_VNNI)) for lhs in (i8, u8)},
    "amx_bf16": (amx.amx(bf16, bf16), ("amx_bf16", *_AVX512)),
    **{f"sdot_{lhs}": (neon.sdot(lhs), ("dotprod",)) for lhs in (i8, u8)},
    **{f"smmla_{lhs}": (neon.smmla(lhs), ("i8mm",)) for lhs in (i8, u8)},
    "bfmmla": (neon.bfmmla(), ("bf16",)),
    "fmla": (neon.fmla(), ("neon",)),
    "fmla_bf16": (neon.fmla_bf16(), ("neon",)),
    "fmla_f16": (neon.fmla_f16(), ("neon",)),
    **{f"plain_{x}": (reference.plain(x, w), ()) for x, w in ((f32, f32), (bf16, bf16), (f16, f16), (i8, i8), (u8, i8))},
}
# One of everything; all tails of rows, columns and k; sizes that fill tiles exactly; a pitch; the few rows of the small tiles.
CASES = (Case(1, 1, 1), Case(3, 70, 7, 5), Case(37, 49, 66, 3), Case(64, 96, 128))
# Are cut and read as maddubs4_16, widen16, fma8, vnni16, fmla_bf16 and the first of their kind are.
LIKE_OTHERS: tuple[str, ...] = ("madd16", "madd8", "maddubs2", "maddubs4_8", "maddubs4_16_u8", "half", "widen8", "vnni8")
LIKE_OTHERS += ("words8", "wordsmadd8", "fmla_f16", "sdot_u8", "smmla_u8", "vnni16_u8", "amx_emulated_u8", "plain_f16", "plain_u8")
# Stand in for tile registers where there are none.
STAND_INS = ("amx_emulated",) if runners(host_only=True, needs=("amx_int8", "amx_bf16")) else ()


def pairs(few: bool = False) -> Iterator[ParameterSet]:
    """Every family with every machine that can run it, or with one of each kind. The widest x86 families run on this machine only."""
    for name, (micros, needs) in FAMILIES.items():
        found = runners(needs=needs, few=True) if few else runners_in_turn(needs)
        if not found:
            skip = pytest.mark.skip(reason=f"no machine here has {', '.join(needs)}")
            yield pytest.param(micros, None, id=name, marks=skip)
        for n, each in enumerate(found if name.startswith("plain") or needs[0] in ("neon", "dotprod") else found[:1]):
            made = pytest.param(micros, each.values[0], id=f"{name}-{each.id}", marks=each.marks)
            rest = (few and (n or name.startswith(LIKE_OTHERS))) or name.startswith(STAND_INS)
            yield left_to_sweep(made) if rest else made


PAIRS = tuple(pairs())
FEW = tuple(pairs(few=True))  # for how products are cut and read, which no feature beyond those of the family changes
ACROSS = tuple(each for each in FEW if each.values[1] and transposes(each.values[1].target, each.values[0][0].copied))
DYNAMIC = tuple(each for each in FEW if not isinstance(each.values[0][0], x86_words.WordMicro))  # whose rhs need be no constant
INTEGERS = tuple(each for each in PAIRS if not each.values[0][0].lhs.is_float)


@pytest.mark.parametrize(("micros", "runner"), PAIRS)
def test_products_with_all_tails(micros: Micros, runner: Runner) -> None:
    run(runner, micros, CASES)


@pytest.mark.parametrize(("micros", "runner"), FEW)
def test_products_cut_into_blocks(micros: Micros, runner: Runner) -> None:
    """Pieces of k packed before and in the loop over panels, blocks of several tiles of rows."""
    cases = (Case(33, 100, 300, caches=(1 << 10, 1 << 12)), Case(70, 90, 260, 5, (1 << 12, 1 << 15)))
    run(runner, micros, cases)


@pytest.mark.parametrize(("micros", "runner"), ACROSS)
def test_products_of_rows_that_lie_side_by_side(micros: Micros, runner: Runner) -> None:
    """Squares of which some rows or some k are missing, and none; blocks of rows, and pieces of k."""
    sizes = (1, 30, 7), (3, 30, 7), (37, 49, 66, 3), (64, 49, 128), (70, 49, 260, 5, (1 << 12, 1 << 15))
    run(runner, micros, [replace(Case(*size), across=True) for size in sizes])


@pytest.mark.parametrize(("micros", "runner"), [pair for pair in FEW if pair.values[0][0].layout.direct])
def test_rows_read_in_place_in_pieces(micros: Micros, runner: Runner) -> None:
    """Blocks of several tiles, the last one not whole; k that ends within a step."""
    rows = micros[0].mr * 1601 * micros[0].lhs.bytes
    run(runner, micros, [Case(45, 50, 1601, caches=(rows // 2, 3 * rows))])


@pytest.mark.parametrize("lhs", [i8, bf16], ids=str)
@pytest.mark.isa("avx512_vnni")
def test_an_epilogue_between_the_steps_of_the_next_tile(lhs: DType, target: Target) -> None:
    """Fewer steps than shares of the rows, as many, and more; tiles of one row; pieces of k."""
    micros = amx.amx(lhs, i8 if lhs == i8 else bf16, tiles_on(target))
    assert micros[0].overlaps
    cases = (Case(96, 64, 64), Case(65, 64, 512), Case(33, 70, 2000))
    small = [replace(case, caches=(1 << 12, 1 << 15)) for case in cases]
    run(Native(target), micros, [*cases, *small])


@pytest.mark.parametrize("lhs", [i8, bf16], ids=str)
@pytest.mark.isa("avx512_vnni")
def test_every_other_tile_goes_back_through_a_k_that_l1_does_not_hold(lhs: DType, target: Target) -> None:
    """Weights in L2 and beyond it; k that ends within a step; rows in place and packed; one tile of rows; a narrower last tile."""
    micros = amx.amx(lhs, i8 if lhs == i8 else bf16, tiles_on(target))
    near, far = (4 << 10, 1 << 20), (8 << 10, 32 << 10)
    cases = [Case(70, 150, k, pitch, near) for k, pitch in ((192, 64), (200, 0), (250, 6))] + [Case(8, 40, 320, 0, near)]
    cases += [Case(70, 150, k // lhs.bytes, pitch, far) for k, pitch in ((192, 64), (250, 6))]
    for case in cases:
        assert choose(case.on(target), spec_of(case, lhs, micros[0].rhs), micros).variants[0].reverses
    run(Native(target), micros, cases)


@pytest.mark.parametrize("lhs", [i8, bf16], ids=str)
@pytest.mark.isa("avx512_vnni")
def test_groups_of_columns_that_are_narrower_for_the_sake_of_more_rows(lhs: DType, target: Target) -> None:
    micros = amx.amx(lhs, i8 if lhs == i8 else bf16, tiles_on(target))
    caches = 3 << 10, lhs.bytes * 80 << 10
    cases = [Case(150, 200, 300, 0, caches), Case(70, 390, 300, 0, caches)]
    for case in cases:
        assert choose(case.on(target), spec_of(case, lhs, micros[0].rhs), micros).panel_block < 256 // 16
    run(Native(target), micros, cases)


@pytest.mark.parametrize(("micros", "runner"), FEW)
def test_tiles_that_fit_a_known_number_of_rows(micros: Micros, runner: Runner) -> None:
    """One tile, several of one height, two heights; one, three and five panels; several tiles of few rows; pieces of k."""
    small = (1 << 10, 1 << 12)
    cases = [Case(9, 10, 7), Case(13, 40, 6), Case(15, 70, 9), Case(31, 47, 10, 2)]
    cases += [Case(5, 200, 331), Case(3, 150, 192, 5), Case(50, 70, 192), Case(69, 100, 331)]
    cases += [Case(30, 80, 300, 0, small), Case(86, 105, 260, 0, small)]
    run(runner, micros, cases, known_rows=True)


@pytest.mark.parametrize(("micros", "runner"), [pair for pair in FEW if pair.values[0][0].lhs == f32])
@pytest.mark.parametrize("caches", [(1 << 12, 1 << 15), (1 << 15, 1 << 23)], ids=["pieces", "one_piece"])
def test_rounding_errors_do_not_grow_with_k(micros: Micros, runner: Runner, caches: tuple[int, int]) -> None:
    """Numbers of which all sums are rounded alike. Whole tiles, few rows, a single one."""
    m, n, k, product = micros[0].mr + 1, 49, 16 * BLOCK + 77, Together(runner)
    target = Case(m, n, k, caches=caches).on(runner.target)
    x, w = torch.full((m, k), 0.1), torch.ones(n, k)
    packed = product.place(pack_rhs(w, micros[0].packing).numpy())

    def check(result: Array) -> None:
        expected = exact(x[:1], w[:1]).item()
        assert np.abs(result / expected - 1).max() < (BLOCK + k / BLOCK) * 2.0**-24

    for rows in (m, 3, 1):
        spec = spec_of(Case(rows, n, k), f32, f32, m=rows)
        code = gemm.emit(product.module, target, spec, micros, product.name())
        assert code.columns is not None
        lhs, out = product.place(array(x[:rows])), np.zeros((rows, n), np.float32)
        product.add((code.rows, code.columns), lhs, packed, out, {}, check)
    product.run()


@pytest.mark.parametrize(("micros", "runner"), INTEGERS)
def test_extreme_integers_do_not_saturate(micros: Micros, runner: Runner) -> None:
    lhs = micros[0].lhs
    low, high = (0, 255) if lhs == u8 else (-128, 127)
    m, n, k = 4, 4, 260
    x = torch.tensor([[low] * k, [high] * k, [low, high] * (k // 2), [high, high, low, low] * (k // 4)]).to(lhs.torch)
    w = torch.tensor([[-128] * k, [127] * k, [-128, 127] * (k // 2), [127, 127, -128, -128] * (k // 4)]).to(torch.int8)
    if isinstance(micros[0], MaddubsMicro):
        w = w.clamp(min=-127).double()
        w = sums16.limited(w, w, micros[0].sums).to(torch.int8)
        assert sums16.how_many(w) == micros[0].sums and sums16.how_many(w[:1] - 1) < micros[0].sums, "as large as may be"
    spec = GemmSpec(lhs, i8, M, n, k, Strides(0, k), plain_store(n, micros[0].acc))
    module = Module()
    code = gemm.emit(module, runner.target, spec, micros, "product")
    arrays = [array(x), pack_rhs(w, micros[0].packing).numpy(), np.zeros((m, n), np.int32)]
    result = runner.run(module.text(), "product", arrays, end=m, order=code.rows.slots, dims={"M": m})
    compare(result[2], x, w, Case(m, n, k))


def batched(micros: Micros, heads: int, transposed: bool) -> tuple[GemmSpec, Strides]:
    """[B, S, H, D] as B * H matrices of the lhs, without a copy; the rhs as [B, H, n, k] or [B, H, k, n]."""
    b, s, t = symbol("B", 1), symbol("S", 1), symbol("T", 1)
    depth = 40
    lhs = Strides(floordiv(BATCH, heads) * (s * heads * depth) + mod(BATCH, heads) * depth, heads * depth)
    rhs = Strides(BATCH * t * depth, 1, t) if transposed else dense(t, depth)
    lhs_type, rhs_type = micros[0].lhs, micros[0].rhs
    spec = GemmSpec(lhs_type, rhs_type, s, t, depth, lhs, plain_store(t, micros[0].acc), b * heads, False, rhs)
    return spec, rhs


@pytest.mark.parametrize(("micros", "runner"), DYNAMIC)
@pytest.mark.parametrize("transposed", [False, True], ids=["n_by_k", "k_by_n"])
def test_batches_with_a_dynamic_rhs(micros: Micros, runner: Runner, transposed: bool) -> None:
    heads, sizes, depth = 3, {"B": 2, "S": 17, "T": 21}, 40
    spec, _ = batched(micros, heads, transposed)
    product = Together(runner)
    code = gemm.emit(product.module, runner.target, spec, micros, product.name())
    assert code.pack is not None and code.columns is not None
    x = random((2, 17, heads, depth), spec.lhs, 3)
    w = weight((2 * heads, 21, depth), micros, 4)
    stored = product.place(array(w.mT if transposed else w))
    packed = product.place(np.zeros(evaluate(code.packed_bytes, sizes), np.int8))
    product.calls.append(call(code.pack, (stored, packed), 0, evaluate(code.pack.domain, sizes), sizes))

    def check(result: Array) -> None:
        for b in range(2 * heads):
            compare(result[b], x[b // heads, :, b % heads], w[b], Case(17, 21, depth))

    out = np.zeros((2 * heads, 17, 21), np.float32 if spec.lhs.is_float else np.int32)
    product.add((code.rows, code.columns), product.place(array(x)), packed, out, sizes, check)
    product.run()


@pytest.mark.parametrize(("micros", "runner"), FEW)
@pytest.mark.parametrize("most", swept((2, 5, 9), (9,)))
def test_columns_are_cut_where_tiles_for_few_rows_end(micros: Micros, runner: Runner, most: int) -> None:
    """The tallest tiles of a family, which may be narrower, are none of a product that never has as many rows."""
    case, product = Case(most, 70, 37, 3), Together(runner)
    x, w = random((case.m, case.k + case.pitch), micros[0].lhs, 1), weight((case.n, case.k), micros, 2)
    spec = spec_of(case, micros[0].lhs, micros[0].rhs, m=symbol("M", 1, most))
    code = gemm.emit(product.module, runner.target, spec, micros, "few")
    out = np.full((case.m, case.n), 77, np.float32 if spec.lhs.is_float else np.int32)
    packed = product.place(packed_of(w, micros[0]).numpy())
    assert code.columns is not None
    check = partial(compare, x=x[:, : case.k], w=w, case=case, micro=micros[0])
    product.add((code.rows, code.columns), product.place(array(x)), packed, out, {"M": most}, check)
    product.run()


@pytest.mark.parametrize(("micros", "runner"), FEW)
@pytest.mark.parametrize("m", [M, 5], ids=["any", "five"])
def test_rows_that_choose_a_weight(micros: Micros, runner: Runner, m: Dim) -> None:
    """Weights take turns along the rows: any number of rows each, none among them, and what is left for the last one."""
    case, count = Case(5 if m == 5 else 40, 49, 37, 3), 4
    spec = replace(spec_of(case, micros[0].lhs, micros[0].rhs, m=m), weights=count, routed=True)
    product = Together(runner)
    code = gemm.emit(product.module, runner.target, spec, micros, product.name())
    assert code.columns is not None
    x, w = random((case.m, case.k + case.pitch), spec.lhs, 1), weight((count, case.n, case.k), micros, 2)
    lhs = product.place(array(x))
    rhs = product.place(np.concatenate([packed_of(each, micros[0]).numpy() for each in w]))
    out = np.full((case.m, case.n), 77, np.float32 if spec.lhs.is_float else np.int32)
    for ends in ((1, 3, 4, case.m), (0, case.m, case.m, case.m), (0, 0, 2, 2), (case.m + 9, 1, -3, 2**40)):
        stops = np.maximum.accumulate(np.clip([*ends[:-1], case.m], 0, case.m))

        def check(result: Array, stops: Array = stops) -> None:
            for start, stop, matrix in ((a, b, c) for a, b, c in zip((0, *stops[:-1]), stops, w, strict=True) if a < b):
                compare(result[start:stop], x[start:stop, : case.k], matrix, Case(int(stop - start), case.n, case.k), micros[0])

        product.add((code.rows, code.columns), lhs, rhs, out, {"M": case.m}, check, product.place(np.array(ends, np.int64)))
    product.run()


def unpack_rhs(packed: torch.Tensor, packing: Packing, n: int, k: int, dtype: DType) -> torch.Tensor:
    """The weight [n, k] that `pack_rhs` packed."""
    panels, depth = int_of(packing.panels(n)), int_of(packing.k_padded(k))
    size = int_of(packing.sums_offset(n, k, dtype))
    groups = packed[:size].view(dtype.torch).view(panels, depth // packing.kr, packing.nr, packing.kr)
    return groups.transpose(1, 2).reshape(panels * packing.nr, depth)[:n, :k].contiguous()


@pytest.mark.parametrize("case", [(1, 1), (16, 64), (33, 130), (7, 3)])
def test_packing_round_trip(case: tuple[int, int]) -> None:
    for packing in {micros[0].packing for micros, _ in FAMILIES.values() if not micros[0].packing.group}:
        for dtype in (f32, bf16, i8):
            w = random(case, dtype, 5)
            packed = pack_rhs(w, packing)
            assert packed.numel() == packing.bytes(*case, dtype) and packed.numel() % 64 == 0
            assert torch.equal(unpack_rhs(packed, packing, *case, dtype), w)


def test_packed_sums_are_those_of_the_columns() -> None:
    packing = Packing(16, 4, 64)
    w = random((20, 70), i8, 6)
    packed = pack_rhs(w, packing)
    at = packing.sums_offset(20, 70, i8)
    assert isinstance(at, int)
    sums = packed[at : at + 4 * 32].view(torch.int32)
    assert torch.equal(sums[:20], w.sum(1, dtype=torch.int32)) and not sums[20:].any()


def test_every_row_of_the_table_has_a_tested_family() -> None:
    """Integer weights times floats have tests of their own, of every row."""
    tested = {micro.name for micros, _ in FAMILIES.values() for micro in micros}
    assert {row.name for row in TABLE if row.micros and row.micros[0].rhs.is_float == row.micros[0].lhs.is_float} <= tested


def test_the_same_integers_on_every_machine() -> None:
    """One packing, one product: vector tiles, emulated matrix tiles and the reference give the same bits."""
    results: list[Array] = []
    natives = [each.values[0] for each in runners(host_only=True, needs=_VNNI)]
    if not natives:
        pytest.skip("this machine lacks avx512_vnni")
    runner = natives[0]
    assert isinstance(runner, Native)
    x, w = random((19, 130), i8, 7), random((50, 130), i8, 8)
    for micros in (x86_vector.vnni(i8, 16), amx.amx(i8, i8, EmulatedTiles()), x86_vector.madd(i8, 8), reference.plain(i8, i8)):
        results.append(product(runner.target, runner, micros, i8, x, w))
    assert all(np.array_equal(results[0], other) for other in results[1:])


def product(target: Target, runner: Runner, micros: Micros, lhs: DType, x: torch.Tensor, w: torch.Tensor) -> Array:
    (m, k), n = x.shape, w.shape[0]
    module = Module()
    code = gemm.emit(module, target, GemmSpec(lhs, i8, M, n, k, Strides(0, k), plain_store(n, micros[0].acc)), micros, "product")
    arrays = [array(x), pack_rhs(w, micros[0].packing).numpy(), np.zeros((m, n), np.int32)]
    return runner.run(module.text(), "product", arrays, end=m, order=code.rows.slots, dims={"M": m})[2]
