"""Rows in u8 instead of i8: the same integers out of every product, and only where nothing else reads them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import sashiko
from sashiko.graph import build as b
from sashiko.graph.interpret import run
from sashiko.graph.ir import Graph, Value
from sashiko.graph.types import QParams, f32, i8
from sashiko.kernels.table import unsigned_step
from sashiko.platforms.catalogue import NEOVERSE_N1, NEOVERSE_N2, X86_64_AMX, X86_64_V3, X86_64_V4, X86_64_VNNI
from sashiko.platforms.host import host
from sashiko.rewrite.rules.unsigned import unsigned_rows

X = b.input_(0, f32, (3, 2, 8))
SYMMETRIC, WHOLE = QParams((0.05,)), QParams((0.04,), -3, None, -128, 127)


def weight(k: int = 8, n: int = 5) -> Value:
    return b.constant(torch.randint(-128, 128, (n, k), generator=torch.Generator().manual_seed(k)).to(torch.int8), "w")


def quantized(q: QParams = WHOLE) -> Value:
    return b.quantize(X, i8, q)


def several() -> tuple[Value, ...]:
    x = quantized()
    return b.int_linear(x, weight()), b.int_linear(x, weight(n=2)), b.int_linear(b.reshape(x, (6, 8)), weight())


def rows() -> tuple[Value, ...]:
    """A scale and a zero point for each row, which the product does not know of."""
    x = b.quantize(b.add(b.mul(X, 20.0), b.reduce(X, "max", 2, keepdim=True)), i8, QParams((1.0,), 0, None, -128, 127))
    return (b.int_linear(x, weight()),)


EQUAL: dict[str, Callable[[], tuple[Value, ...]]] = {
    "several": several,
    "rows": rows,
    "symmetric": lambda: (b.int_linear(quantized(SYMMETRIC), weight()),),
    "reshaped": lambda: (b.int_linear(b.reshape(quantized(), (12, 4)), weight(4)),),
}


@pytest.mark.parametrize("name", EQUAL)
def test_the_integers_are_the_same(name: str) -> None:
    graph = Graph((X,), EQUAL[name]())
    changed = unsigned_rows(graph, 4)
    products = [v for v in changed.order if v.op == "int_linear"]
    assert products and all(v.inputs[0].dtype.name == "u8" for v in products)
    assert sum(v.op == "quantize" for v in changed.order) == 1
    x = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(0)) * 4
    x[0, 0, :4] = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e9])
    for before, after in zip(run(graph, [x]), run(changed, [x]), strict=True):
        assert torch.equal(before, after)


OTHERS: dict[str, Callable[[Value], tuple[Value, ...]]] = {
    "returned": lambda x: (b.int_linear(x, weight()), x),
    "read as numbers": lambda x: (b.int_linear(x, weight()), b.dequantize(x)),
    "both operands": lambda x: (b.int_linear(b.reshape(x, (6, 8)), b.reshape(x, (6, 8))),),
    "weights": lambda x: (b.int_linear(weight(n=4), b.reshape(x, (6, 8))),),
    "other rows": lambda x: (b.int_linear(b.permute(x, (1, 2, 0)), weight(3)),),
    "no whole step": lambda x: (b.int_linear(b.reshape(x, (8, 6)), weight(6)),),
    "nothing reads it": lambda x: (b.dequantize(x),),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_anything_else_reads_stays(name: str) -> None:
    graph = Graph((X,), OTHERS[name](quantized()))
    assert unsigned_rows(graph, 4) is graph


def test_sums_stay_integers_of_32_bits() -> None:
    x = b.input_(0, f32, (1, 1 << 17))
    graph = Graph((x,), (b.int_linear(b.quantize(x, i8, WHOLE), weight(1 << 17, 1)),))
    assert unsigned_rows(graph, 4) is graph


def test_only_processors_that_read_nothing_else_in_place_ask_for_it() -> None:
    steps = {target: unsigned_step(target) for target in (X86_64_V3, X86_64_V4, X86_64_VNNI, X86_64_AMX, NEOVERSE_N1, NEOVERSE_N2)}
    assert {target: step for target, step in steps.items() if step} == {X86_64_V3: 8, X86_64_V4: 8, X86_64_VNNI: 4}


def test_operations_of_several_results_may_follow() -> None:
    class Factored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, r = torch.linalg.qr(self.linear(x))
            product: torch.Tensor = q @ r
            return product

    model, x = Factored().eval(), torch.randn(20, 32)
    small = sashiko.quantize(model, [(x,)], preset="int8", progress=False)
    assert "gemm_i32_u8_i8" in sashiko.compile(small, (x,), target=X86_64_VNNI).explain()


@pytest.mark.parametrize("preset", ["int8", "int8-symmetric", "int8-static"])
def test_quantized_models_have_unsigned_rows(preset: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16)).eval()
    small = sashiko.quantize(model, [(torch.randn(20, 32),)], preset=preset, progress=False)
    x = torch.randn(20, 32)
    compiled = sashiko.compile(small, (x,), target=X86_64_VNNI)
    kernels = [line.strip() for line in compiled.explain().splitlines() if line.strip().startswith("gemm")]
    assert kernels == ["gemm_i32_u8_i8_14x32x4_avx512vnni"] * 2
    if X86_64_VNNI.features <= host().features:
        assert torch.allclose(compiled(x), small(x), atol=0.02 * float(small(x).abs().max()))
