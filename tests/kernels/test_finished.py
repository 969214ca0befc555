"""Which epilogues take the accumulators from registers, and that what they store is what others store."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sashiko.cpu_codegen.builder import Module
from sashiko.graph.types import bf16, f32
from sashiko.kernels import amx, gemm, x86_vector
from sashiko.kernels.finished import applies
from sashiko.kernels.packing import pack_rhs
from sashiko.kernels.spec import GemmSpec, Strides
from sashiko.platforms.catalogue import CATALOGUE
from sashiko.stitch.loops import COLUMN, ROW, Body, BodyBuilder, Node
from tests.emulation import Runner, runners
from tests.kernels.products import M, array, bound, exact, random

TARGET = next(target for target in CATALOGUE if target.has("avx512_vnni") and target.tiles == 0)
FAMILIES = [(x86_vector.fma(16), "avx512f"), (x86_vector.fma(8), "avx2")]


def epilogue(n: int, function: str = "relu", row_sums: bool = False) -> Body:
    """out[r, c] = function(acc + bias[c])."""
    b = BodyBuilder()
    bias, out = b.buffer(f32), b.buffer(f32)
    value = b.op(function, f32, b.op("add", f32, b.add(Node("acc", f32)), b.load(bias, COLUMN)))
    b.store(out, ROW * n + COLUMN, value)
    if row_sums:
        b.store(b.buffer(f32), ROW, b.const(1.0, f32))
    return b.finish()


def spec(n: int, k: int, body: Body) -> GemmSpec:
    return GemmSpec(f32, f32, M, n, k, Strides(0, k), body)


def test_short_epilogues_of_elements_apply() -> None:
    tile = x86_vector.fma(16)[0]
    assert applies(TARGET, spec(32, 8, epilogue(32)), tile)
    assert not applies(TARGET, spec(32, 8, epilogue(32, "tanh")), tile), "it is long"
    assert not applies(TARGET, spec(32, 8, epilogue(32, row_sums=True)), tile), "it stores once a row"
    assert not applies(TARGET, spec(32, 8, epilogue(32)), x86_vector.fma(8)[0]), "its vectors have 16 lanes"
    assert not applies(TARGET, spec(32, 8, epilogue(32)), amx.amx(bf16, bf16)[0]), "its accumulators are no vectors"


@pytest.mark.parametrize("columns", [32, 48, 70, 79, 81], ids=str)
@pytest.mark.parametrize("runner", runners(needs=("avx2", "fma")))
def test_whole_tiles_and_parts_of_them(runner: Runner, columns: int) -> None:
    """Rows and columns that fill tiles, and some that do not, of a product whose epilogue is the same for all of them."""
    micros = next(family for family, feature in FAMILIES if runner.target.has(feature))
    m, k = 31, 9
    module = Module()
    code = gemm.emit(module, runner.target, spec(columns, k, epilogue(columns)), micros, "product")
    assert ".finished." in module.text()
    x, w, bias = random((m, k), f32, 1), random((columns, k), f32, 2), random((columns,), f32, 3)
    out = np.full((m, columns), 77, np.float32)
    arrays = [array(x), pack_rhs(w, micros[0].packing).numpy(), array(bias), out]
    result = runner.run(module.text(), "product", arrays, end=m, order=code.rows.slots, dims={"M": m})
    expected = (exact(x, w) + bias.double()).relu()
    allowed = bound(x, w, k + 1) + 2.0**-24 * (exact(x, w).abs() + bias.double().abs())
    assert bool(((torch.from_numpy(result[3]).double() - expected).abs() <= allowed).all())
