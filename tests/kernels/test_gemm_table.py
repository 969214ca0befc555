"""The selection table: which row wins on which target, the reasons of the others, fused epilogues, and the vendor row."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from sashiko.cpu_codegen import jit, symbols
from sashiko.cpu_codegen.builder import Module
from sashiko.diagnostics.errors import InvalidGraph, Outdated, Unsupported
from sashiko.graph.dims import Dim, evaluate, symbol
from sashiko.graph.types import DType, bf16, f16, f32, i8, i32, u8
from sashiko.kernels import mkl, table
from sashiko.kernels.amx import amx
from sashiko.kernels.pending import Epilogue
from sashiko.kernels.spec import GemmSpec, Strides
from sashiko.platforms.catalogue import CATALOGUE, NEOVERSE_N1, NEOVERSE_N2, X86_64_AMX, X86_64_V3, X86_64_V4, X86_64_VNNI
from sashiko.platforms.target import Target
from sashiko.stitch.loops import COLUMN, ROW, Body, BodyBuilder, Node
from tests.emulation import Runner, runners
from tests.kernels.products import Case, M, array, compare, exact, plain_store, random, spec_of
from tests.machines import HIDDEN, ZEN4
from tests.sweeps import swept

FEW = symbol("M", 1, 4)
WINNERS: tuple[tuple[Target, DType, DType, Dim, str], ...] = (
    (X86_64_AMX, i8, i8, M, "gemm_i32_i8_i8_32x32x4_amxint8"),
    (X86_64_AMX, i8, i8, FEW, "gemm_i32_i8_i8_4x64x4_avx512vnni"),
    (X86_64_AMX, bf16, bf16, M, "gemm_f32_bf16_bf16_32x32x2_amxbf16"),
    (X86_64_AMX, bf16, bf16, FEW, "gemm_f32_bf16_bf16_32x32x2_amxbf16"),
    (HIDDEN, bf16, bf16, M, "gemm_f32_bf16_bf16_14x32x2_avx512vnni"),
    (HIDDEN, bf16, bf16, FEW, "gemm_f32_bf16_bf16_14x32x2_avx512vnni"),
    (X86_64_V4, bf16, bf16, FEW, "gemm_f32_bf16_bf16_4x64x2_avx512widen"),
    (HIDDEN, u8, i8, M, "gemm_i32_u8_i8_14x32x4_avx512vnni"),
    (ZEN4, bf16, bf16, M, "gemm_f32_bf16_bf16_14x32x2_avx512bf16"),
    (ZEN4, bf16, bf16, FEW, "gemm_f32_bf16_bf16_4x64x2_avx512bf16"),
    (X86_64_VNNI, u8, i8, M, "gemm_i32_u8_i8_14x32x4_avx512vnni"),
    (X86_64_VNNI, bf16, bf16, M, "gemm_f32_bf16_bf16_14x32x2_avx512vnni"),
    (X86_64_V4, bf16, bf16, M, "gemm_f32_bf16_bf16_12x32x2_avx512widen"),
    (X86_64_V4, i8, i8, M, "gemm_i32_i8_i8_14x32x2_avx512madd"),
    (X86_64_V4, f32, f32, M, "gemm_f32_f32_f32_14x32x1_avx512"),
    (X86_64_V3, i8, i8, M, "gemm_i32_i8_i8_6x16x2_avx2madd"),
    (X86_64_V3, bf16, bf16, M, "gemm_f32_bf16_bf16_5x16x2_avx2widen"),
    (X86_64_V3, f32, f32, M, "gemm_f32_f32_f32_6x16x1_avx2"),
    (NEOVERSE_N1, i8, i8, M, "gemm_i32_i8_i8_8x12x4_sdot"),
    (NEOVERSE_N1, bf16, bf16, M, "gemm_f32_bf16_bf16_8x12x1_fmlabf16"),
    (NEOVERSE_N2, i8, i8, M, "gemm_i32_i8_i8_8x12x8_smmla"),
    (NEOVERSE_N2, bf16, bf16, M, "gemm_f32_bf16_bf16_8x12x4_bfmmla"),
    (NEOVERSE_N2, f32, f32, M, "gemm_f32_f32_f32_8x12x1_fmla"),
    (NEOVERSE_N2, f16, f16, M, "gemm_f32_f16_f16_8x12x1_fmlaf16"),
    (X86_64_AMX, f16, f16, M, "gemm_f32_f16_f16_14x32x1_avx512half"),
    (X86_64_V3, f16, f16, FEW, "gemm_f32_f16_f16_6x16x1_avx2half"),
)


@pytest.mark.parametrize(("target", "lhs", "rhs", "m", "name"), WINNERS)
def test_the_fastest_row_is_selected(target: Target, lhs: DType, rhs: DType, m: Dim, name: str) -> None:
    selection = table.select(target, spec_of(Case(1, 64, 256), lhs, rhs, m=m))
    assert selection.kernel.name == name
    names = [row.name for row in table.TABLE]
    assert [refused for refused, _ in selection.refusals] == names[: names.index(name)]
    assert all(reason for _, reason in selection.refusals)


def test_integers_stand_for_bf16_where_weights_are_large_enough() -> None:
    for target, n, k, isa in ((X86_64_V3, 96, 64, "avx2madd"), (X86_64_VNNI, 63, 64, "avx512widen"), (X86_64_VNNI, 64, 48, "avx512widen")):
        assert table.select(target, spec_of(Case(1, n, k), bf16, bf16)).kernel.name.endswith(f"x2_{isa}")
    for target, row, isa in ((X86_64_VNNI, 1, "avx512vnni"), (X86_64_VNNI, 2, "avx512widen"), (X86_64_V3, 1, "avx2widen")):
        apart = replace(spec_of(Case(1, 96, 64), bf16, bf16), lhs_strides=Strides(0, row, 200))
        selection = table.select(target, apart)
        assert selection.kernel.name.endswith(isa) and ("lie apart" in str(selection.refusals)) is (isa != "avx512vnni")


def test_few_rows_of_bf16_take_vectors_where_weights_come_from_beyond_l2() -> None:
    spec = spec_of(Case(1, 4096, 4096), bf16, bf16, m=FEW)
    assert table.select(X86_64_AMX, spec).kernel.name == "gemm_f32_bf16_bf16_4x64x2_avx512widen"


SMALL: tuple[tuple[Target, Dim, int, str], ...] = (
    (X86_64_V3, M, 4, "gemm_i32_u8_i8_3x16x4_avx2maddubs4"),
    (X86_64_V3, FEW, 4, "gemm_i32_u8_i8_3x16x4_avx2maddubs4"),
    (X86_64_V3, M, 2, "gemm_i32_u8_i8_3x16x4_avx2maddubs2"),
    (X86_64_V3, M, 1, "gemm_i32_u8_i8_6x16x2_avx2madd"),
    (X86_64_V4, M, 4, "gemm_i32_u8_i8_12x32x4_avx512maddubs4"),
    (X86_64_V4, M, 2, "gemm_i32_u8_i8_12x32x4_avx512maddubs2"),
    (X86_64_VNNI, M, 4, "gemm_i32_u8_i8_14x32x4_avx512vnni"),
)


@pytest.mark.parametrize(("target", "m", "count", "name"), SMALL)
def test_small_weights_have_rows_of_their_own(target: Target, m: Dim, count: int, name: str) -> None:
    spec = replace(spec_of(Case(1, 64, 256), u8, i8, m=m), sums16=count)
    selection = table.select(target, spec)
    assert selection.kernel.name == name
    if count == 1:
        assert dict(selection.refusals)["gemm_i32_u8_i8_3x16x4_avx2maddubs2"] == "2 of its products do not fit 16 bits"
    dynamic = replace(spec, constant_rhs=False, rhs_strides=Strides(0, 256), sums16=1)
    assert dict(table.select(target, dynamic).refusals).get("gemm_i32_u8_i8_3x16x4_avx2maddubs4") in (None, "is for constant weights")


def test_small_weights_that_have_become_larger_are_refused() -> None:
    kernel = table.select(X86_64_V3, replace(spec_of(Case(1, 64, 256), u8, i8), sums16=4)).kernel
    kernel.pack(torch.ones(64, 256, dtype=torch.int8))
    with pytest.raises(Outdated, match="has become larger"):
        kernel.pack(torch.full((64, 256), 127, dtype=torch.int8))


@pytest.mark.parametrize("target", CATALOGUE, ids=lambda target: target.name)
def test_who_asks_for_small_weights(target: Target) -> None:
    """What the quantizer goes by says the same of a target as the table does."""
    for lhs in (i8, u8):
        assert table.asks_sums16(target, spec_of(Case(1, 64, 256), lhs, i8)) == target.sums16
    assert not table.asks_sums16(target, spec_of(Case(1, 64, 256), f32, f32))


def test_refusals_say_what_is_missing() -> None:
    refusals = dict(table.select(X86_64_V3, spec_of(Case(1, 64, 256), i8, i8)).refusals)
    assert refusals["gemm_i32_i8_i8_32x32x4_amxint8"] == "x86_64_v3 lacks amx_int8, avx512_vnni"
    refusals = dict(table.select(X86_64_AMX, spec_of(Case(1, 64, 256), bf16, bf16)).refusals)
    assert refusals["gemm_i32_u8_i8_6x16x4_avxvnni"] == "computes u8 x i8, not bf16 x bf16"
    assert "at most 4 rows" in refusals["gemm_f32_bf16_bf16_4x64x2_avx512widen"]


def test_names_follow_the_grammar_and_are_unique() -> None:
    names = [row.name for row in table.TABLE]
    assert len(names) == len(set(names)) and names[-1] == "reference"
    grammar = re.compile(r"gemm_(i32|f32)_(i8|u8|bf16|f16|f32)_(i4|i8|bf16|f16|f32)_\d+x\d+x\d+_[a-z0-9]+")
    assert all(grammar.fullmatch(row.name) for row in table.TABLE if row.micros)


def test_specifications_that_make_no_sense_are_refused() -> None:
    with pytest.raises(Unsupported, match="no matrix product of i8 and f32"):
        spec_of(Case(1, 8, 8), i8, f32)
    with pytest.raises(InvalidGraph, match="no fixed size"):
        GemmSpec(f32, f32, M, symbol("N"), 8, Strides(0, 8), plain_store(8, f32))
    with pytest.raises(InvalidGraph, match="strides"):
        GemmSpec(f32, f32, M, 8, 8, Strides(0, 8), plain_store(8, f32), constant_rhs=False)


@pytest.mark.parametrize("target", swept(CATALOGUE, (X86_64_V3, X86_64_AMX, NEOVERSE_N2)), ids=lambda target: target.name)
def test_every_accepting_row_compiles_for_every_target(target: Target) -> None:
    for lhs, rhs in ((i8, i8), (u8, i8), (bf16, bf16), (f32, f32), (f16, f16)):
        spec = replace(spec_of(Case(1, 80, 2100), lhs, rhs), sums16=4)
        for row in table.TABLE:
            if row.when(target, spec) is None:
                module = Module()
                row.emit(module, target, spec, "product")
                assert jit.compile_object(module.text(), target)


def test_amx_uses_its_instructions() -> None:
    for lhs, rhs, product in ((i8, i8, "tdpbssd"), (u8, i8, "tdpbusd"), (bf16, bf16, "tdpbf16ps")):
        spec = spec_of(Case(1, 256, 256, 64), lhs, rhs, m=32 * M)
        module = Module()
        table.select(X86_64_AMX, spec).kernel.emit(module, X86_64_AMX, spec, "product")
        text = jit.assembly(module.text(), X86_64_AMX)
        counts = {name: len(re.findall(rf"\t{name}\t", text)) for name in ("tileloadd", "tileloaddt1", "tilezero", "tilestored", product)}
        # Three times: in the first step with the tile before, in those after it, and after the epilogue of a tile that is not whole. The
        # tile before is stored in the first two of these, and the last one of all at the end.
        assert 11 <= counts.pop(product) <= 12, "two copies may share their end"
        assert counts == {"tileloadd": 6, "tileloaddt1": 6, "tilezero": 8, "tilestored": 12}
        tile = text[text.index(".with.product.epilogue:") :]
        assert re.search(r"\tvmovups\t%zmm\d+, ", tile[tile.index(product) : tile.index("callq")]), "stores between the steps"
        order = "".join("s" if name == "tilestored" else "p" for name in re.findall(rf"\t(tilestored|{product})\t", tile))
        assert "spspsps" in order, "a product after each store of the tile before"
        assert text.count("ldtilecfg") == text.count("tilerelease") == 2, "once for each of the two kernels"


def gelu_body(n: int) -> Body:
    """out = int8(clamp(round(gelu(acc * scale[c] + bias[c]) * 16))): what a quantized feed-forward layer does."""
    builder = BodyBuilder()
    scale, bias, out = builder.buffer(f32), builder.buffer(f32), builder.buffer(i8)
    value = builder.cast(builder.add(Node("acc", i32)), f32)
    value = builder.op("add", f32, builder.op("mul", f32, value, builder.load(scale, COLUMN)), builder.load(bias, COLUMN))
    half = builder.op("mul", f32, value, builder.const(0.5, f32))
    erf = builder.op("erf", f32, builder.op("mul", f32, value, builder.const(0.5**0.5, f32)))
    value = builder.op("mul", f32, half, builder.op("add", f32, erf, builder.const(1.0, f32)))
    value = builder.op("round", f32, builder.op("mul", f32, value, builder.const(16.0, f32)))
    value = builder.op("minimum", f32, builder.op("maximum", f32, value, builder.const(-127.0, f32)), builder.const(127.0, f32))
    builder.store(out, ROW * n + COLUMN, builder.cast(value, i8))
    return builder.finish()


@pytest.mark.parametrize(("n", "k", "long"), [(64, 64, True), (64, 4096, False)])
def test_long_epilogues_are_done_between_the_products_of_a_step(n: int, k: int, long: bool) -> None:
    spec = GemmSpec(i8, i8, M, n, k, Strides(0, k), gelu_body(n))
    micro, module = amx(i8, i8)[0], Module()
    assert Epilogue("e", X86_64_AMX, spec, (), micro.nr).places(micro) == (micro.turns if long else 1)
    table.select(X86_64_AMX, spec).kernel.emit(module, X86_64_AMX, spec, "product")
    text = jit.assembly(module.text(), X86_64_AMX)
    tile = text[text.index(".with.product.epilogue:") :]
    products = re.findall(r"\t(tdpbssd|j[a-z]+)\t", tile[: tile.index("callq")])
    together = "tdpbssd " * micro.turns in " ".join([*products, ""])
    assert together != long, "rows come after each product, or after all of a step"


@pytest.mark.parametrize(("m", "n", "k"), [(37, 81, 96), (70, 96, 64), (96, 64, 256)])
@pytest.mark.parametrize("runner", runners())
def test_epilogue_with_bias_gelu_and_quantization(runner: Runner, m: int, n: int, k: int) -> None:
    spec = GemmSpec(i8, i8, M, n, k, Strides(0, k), gelu_body(n))
    row = table.select(runner.target, spec).kernel
    module = Module()
    code = row.emit(module, runner.target, spec, "product")
    x, w = random((m, k), i8, 1), random((n, k), i8, 2)
    scale, bias = torch.rand(n) * 1e-4, torch.randn(n)
    arrays = [array(x), row.pack(w).numpy(), scale.numpy(), bias.numpy(), np.zeros((m, n), np.int8)]
    got = runner.run(module.text(), "product", arrays, end=m, order=code.rows.slots, dims={"M": m})[4]
    wide = torch.nn.functional.gelu(exact(x, w) * scale.double() + bias.double()) * 16
    difference = np.abs(got.astype(np.float64) - wide.clamp(-127, 127).numpy())
    # Half a step of rounding, and what f32 makes of 16 * gelu(8).
    assert difference.max() <= 0.5 + 128 * 2.0**-20


@pytest.mark.parametrize("epilogue", [False, True], ids=["stores", "adds"])
def test_vendor_row(epilogue: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = symbols.reasons(("sgemm_", "MKL_Set_Num_Threads_Local", "mkl_serv_intel_cpu_true"))
    if absent:
        pytest.skip(f"not available: {absent}")
    case = Case(45, 100, 400, 3)
    builder = BodyBuilder()
    bias = builder.buffer(f32) if epilogue else -1
    out, acc = builder.buffer(f32), builder.add(Node("acc", f32))
    value = builder.op("add", f32, acc, builder.load(bias, COLUMN)) if epilogue else acc
    builder.store(out, ROW * case.n + COLUMN, value)
    many = symbol("M", 1024)
    spec = spec_of(case, f32, f32, builder.finish(), many)
    [runner] = [each.values[0] for each in runners(host_only=True)][:1]
    monkeypatch.setattr(mkl, "full_speed", lambda: False)
    assert "not Intel's" in (mkl.when(X86_64_V4, spec) or "")
    monkeypatch.setattr(mkl, "full_speed", lambda: True)
    assert mkl.when(X86_64_V4, spec) is None
    assert "Sapphire Rapids" in (mkl.when(X86_64_AMX, spec) or "")
    module = Module()
    code = mkl.emit(module, runner.target, spec, "product")
    x, w, added = random((case.m, case.k + 3), f32, 1), random((case.n, case.k), f32, 2), torch.ones(case.n)
    result = np.zeros((case.m, case.n), np.float32)
    workspace = np.zeros(evaluate(code.workspace_bytes, {"M": case.m}), np.int8)
    arrays = [array(x), mkl.pack(w).numpy(), *([added.numpy(), result, workspace] if epilogue else [result])]
    arrays = runner.run(module.text(), "product", arrays, end=case.m, order=code.rows.slots, dims={"M": case.m}, align=4)
    compare(arrays[3 if epilogue else 2] - (1 if epilogue else 0), x[:, : case.k], w, Case(case.m, case.n, 2 * case.k))
    assert (code.workspace_bytes == 0) != epilogue


def test_vendor_row_is_for_many_rows() -> None:
    reason = mkl.when(X86_64_V4, spec_of(Case(1, 768, 768), f32, f32))
    assert reason is not None and "1024 rows" in reason
    assert "has no MKL" in (mkl.when(NEOVERSE_N1, spec_of(Case(1, 768, 768), f32, f32)) or "")
