"""Quantized weights under activations that are not: which products become mixed ones, and what keeps others from it."""

from __future__ import annotations

import pytest
import torch

from sashiko.graph import build as b
from sashiko.graph.ir import Graph, Value
from sashiko.graph.types import DType, QParams, bf16, f16, f32, f64, i8, i16
from sashiko.rewrite import Trace, apply
from sashiko.rewrite.rules import INTEGER, WEIGHTS
from sashiko.rewrite.rules.precision import lower_precision

N, K = 4, 16
X = b.input_(0, f32, (2, K))
INTEGERS = torch.randint(-8, 8, (N, K), dtype=torch.int8)
CHANNELS = QParams(tuple(0.01 * (n + 1) for n in range(N)), axis=0)


def int8(q: QParams = CHANNELS) -> Value:
    return b.dequantize(b.constant(INTEGERS, qparams=q))


def int4() -> Value:
    return b.dequantize_groups(b.constant(INTEGERS), b.constant(torch.rand(N, 2)))


def spelled(dtype: DType, *scales: int) -> Value:
    """Integers times their scales in a type; of several for each row, those of groups."""
    values = b.constant((torch.rand(N, *scales) * 300 + 1).to(dtype.torch))
    return b.mul(b.cast(b.reshape(b.constant(INTEGERS), (N, *scales[:-1], K // scales[0])), dtype), values)


def ops(graph: Graph) -> list[str]:
    return [v.op for v in graph.order if v.op not in ("input", "constant", "full", "expand")]


def test_scale_and_bias_stay_outside_of_the_product() -> None:
    bias = b.constant(torch.randn(N))
    assert ops(apply(Graph((X,), (b.linear(X, int8(), bias),)), WEIGHTS)) == ["linear", "mul", "add"]
    assert ops(apply(Graph((X,), (b.linear(X, int4(), bias),)), WEIGHTS)) == ["group_linear", "add"]


def test_weights_of_a_narrow_model_are_not_rounded() -> None:
    x, bias = b.cast(X, bf16), b.cast(b.constant(torch.randn(N)), bf16)
    for weight, product in ((int8(), "linear"), (int4(), "group_linear")):
        graph = apply(Graph((X,), (b.linear(x, b.cast(weight, bf16), bias),)), WEIGHTS)
        made = next(v for v in graph.order if v.op == product)
        assert made.inputs[0].dtype == bf16 and made.inputs[1].op == "constant" and made.inputs[1].dtype == i8


@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
def test_integers_are_multiplied_as_numbers(dtype: DType) -> None:
    """What scales them comes behind the product already."""
    weight = b.cast(b.constant(INTEGERS), dtype)
    graph = apply(Graph((X,), (b.linear(b.cast(X, dtype), weight, b.constant(torch.randn(N))),)), WEIGHTS)
    made = next(v for v in graph.order if v.op == "linear")
    assert made.inputs[0].dtype == dtype and made.inputs[1].dtype == i8 and graph.outputs[0].op == "add"


def test_quantized_activations_come_first() -> None:
    x = b.dequantize(b.quantize(X, i8, QParams((0.05,))))
    graph = apply(apply(Graph((X,), (b.linear(x, int8()),)), INTEGER), WEIGHTS)
    assert ops(graph) == ["quantize", "qlinear"]


@pytest.mark.parametrize(("root", "reason"), [
    (b.linear(X, int8(QParams((0.1,), 3, None, -128, 127))), "not a constant of symmetric s8"),
    (b.linear(X, int8(QParams(tuple([0.1] * K), axis=1))), "which is summed over"),
    (b.linear(b.cast(X, f16), int8()), "products with integer weights are of f32 or bf16"),
    (b.linear(b.cast(X, f16), int4()), "products with integer weights are of f32 or bf16"),
    (b.linear(b.cast(X, f16), b.cast(int8(), f16)), "products with integer weights are of f32 or bf16"),
    (b.linear(b.cast(X, bf16), b.cast(int8(QParams((0.1,), 3, None, -128, 127)), bf16)), "not a constant of symmetric s8"),
    (b.linear(b.cast(X, f16), b.cast(b.constant(INTEGERS), f16)), "not f32 or bf16 and a constant of s8"),
    (b.linear(X, b.cast(b.cast(b.input_(0, f32, (N, K)), i8), f32)), "not f32 or bf16 and a constant of s8"),
    *((b.linear(X, b.cast(spelled(dtype, 1), f32)), "not in f32 or narrower") for dtype in (f64, i16)),
    *((b.cast(b.reshape(spelled(dtype, 2, 1), (N, K)), f32), "not in f32 or narrower") for dtype in (f64, i16)),
    (b.reshape(b.cast(spelled(f32, 2, 1), f64), (N, K)), "not in f32 or narrower"),
])
def test_what_is_refused_says_why(root: Value, reason: str) -> None:
    trace, graph = Trace(), Graph((X,), (root,))
    assert apply(graph, WEIGHTS, trace) is graph
    assert any(reason in str(miss) for miss in trace.near_misses())


def test_a_lower_precision_rounds_activations_and_keeps_integers() -> None:
    for weight in (int8(), int4()):
        graph = lower_precision(apply(Graph((X,), (b.linear(X, weight),)), WEIGHTS))
        product = next(v for v in graph.order if v.op in ("linear", "group_linear"))
        assert product.inputs[0].dtype == bf16 and product.inputs[1].op == "constant" and product.dtype == f32
        assert sum(v.op == "cast" for v in graph.order) == 1
