"""Quantize and dequantize pairs meet contractions and one another; what would change numbers stays, with a reason."""

from __future__ import annotations

import pytest
import torch

from sashiko.graph import build as b
from sashiko.graph.interpret import run
from sashiko.graph.ir import Graph, Value
from sashiko.graph.types import QParams, f32, i8, u8
from sashiko.rewrite import apply, explain
from sashiko.rewrite.rules import INTEGER

K, N = 16, 4
X = b.input_(0, f32, (2, 3, K), name="x")
WEIGHT, BIAS = torch.randn(N, K), torch.randn(N)
S8, U8 = QParams((0.04,)), QParams((0.03,), 128, None, 0, 255)
PER_CHANNEL = QParams(tuple(float(s) for s in WEIGHT.abs().amax(1) / 127), axis=0)


def activation(q: QParams = U8) -> Value:
    return b.quantize(X, u8 if q.qmin == 0 else i8, q)


def weight(q: QParams = PER_CHANNEL) -> Value:
    return b.quantize(b.constant(WEIGHT), i8, q)


def rewritten(root: Value) -> Graph:
    return apply(Graph((X,), (root,)), INTEGER)


def ops(graph: Graph) -> list[str]:
    return [v.op for v in graph.order if v.op not in ("input", "constant")]


@pytest.mark.parametrize("spelling", [
    b.linear,
    lambda x, w, c: b.add(b.linear(x, w), c),
    lambda x, w, c: b.add(b.matmul(x, b.permute(w, (1, 0))), c),
    lambda x, w, c: b.reshape(b.linear(b.reshape(x, (6, K)), w, c), (2, 3, N)),
    lambda x, w, c: b.reshape(b.add(b.matmul(b.reshape(x, (6, K)), b.permute(w, (1, 0))), c), (2, 3, N)),
])
@pytest.mark.parametrize("q", [S8, U8], ids=["s8", "u8"])
def test_quantized_layers_become_one_qlinear(spelling: object, q: QParams) -> None:
    assert callable(spelling)
    graph = rewritten(spelling(b.dequantize(activation(q)), b.dequantize(weight()), b.constant(BIAS)))
    assert ops(graph) == ["quantize", "quantize", "qlinear"] and len(graph.outputs[0].inputs) == 3
    # The integer sum is exact: what is left are the roundings of the scales, of their product with the sum, and of the bias.
    x = torch.randn(2, 3, K)
    xq = ((x / q.scale[0]).round() + q.zero_point).clamp(q.qmin, q.qmax).double() - q.zero_point
    scale = torch.tensor(PER_CHANNEL.scale)
    wq = (WEIGHT / scale[:, None]).round().double()
    real = (xq @ wq.t()) * q.scale[0] * torch.tensor(PER_CHANNEL.scale, dtype=torch.float64)
    bound = 4 * torch.finfo(torch.float32).eps * (real.abs() + BIAS.abs())
    assert ((run(graph, [x])[0] - (real + BIAS)).abs() <= bound).all()


def test_layers_in_a_row_exchange_integers() -> None:
    """quantize after dequantize of the same parameters disappears, over views; the other quantize is the weight's."""
    inner = b.permute(b.dequantize(activation()), (1, 0, 2))
    root = b.linear(b.dequantize(b.quantize(b.reshape(inner, (6, K)), u8, U8)), b.dequantize(weight()))
    assert ops(rewritten(root)) == ["quantize", "permute", "quantize", "qlinear", "reshape"]


def test_arithmetic_in_between_stays() -> None:
    root = b.quantize(b.relu(b.dequantize(activation())), u8, U8)
    assert ops(rewritten(root)) == ["quantize", "dequantize", "relu", "quantize"]


def reason(rule_name: str, root: Value) -> str:
    tested = next(r for r in INTEGER if r.name == rule_name)
    graph = Graph((X,), (root,))
    assert apply(graph, (tested,)) is graph
    return explain(tested, graph)


def test_requantization_rounds_and_stays() -> None:
    assert "requantizes" in reason("round_trip", b.quantize(b.dequantize(activation(U8)), i8, S8))
    narrower = QParams((0.04,), 0, None, -7, 7)
    assert "requantizes" in reason("round_trip", b.quantize(b.dequantize(activation(S8)), i8, narrower))


def test_schemes_without_an_integer_kernel() -> None:
    x, w = b.dequantize(activation()), b.dequantize(weight())
    asymmetric = b.dequantize(weight(QParams((0.02,), 3, None, -128, 127)))
    assert "not symmetric s8" in reason("quantized_linear", b.linear(x, asymmetric))
    summed = b.dequantize(weight(QParams((0.02,) * K, axis=1)))
    assert "one scale for each index of axis 1, which is summed over" in reason("quantized_linear", b.linear(x, summed))
    by_channel = b.dequantize(b.quantize(X, i8, QParams((0.02,) * K, axis=2)))
    assert "not 8-bit integers quantized per tensor" in reason("quantized_linear", b.linear(by_channel, w))
    assert "expected dequantize, found constant" in reason("quantized_linear", b.linear(x, b.constant(WEIGHT)))


def test_views_of_channelwise_tensors_stay() -> None:
    by_channel = b.dequantize(b.quantize(X, i8, QParams((0.02,) * K, axis=2)))
    assert "is not quantized per tensor" in reason("dequantize_after_view", b.reshape(by_channel, (6, K)))
    assert "the axis would have to move too" in reason(
        "quantize_before_view", b.quantize(b.permute(X, (2, 0, 1)), i8, QParams((0.02,) * K, axis=0)))


def test_a_transposed_weight_takes_its_channels_along() -> None:
    """x @ w with w[K, N] quantized by column: the permute that makes it a linear moves below the dequantization, axis and all."""
    scales = tuple(float(s) for s in WEIGHT.abs().amax(1) / 127)
    w = b.constant(torch.randint(-127, 128, (K, N), dtype=torch.int8), qparams=QParams(scales, axis=1))
    graph = rewritten(b.matmul(b.dequantize(activation()), b.dequantize(w)))
    assert ops(graph) == ["quantize", "permute", "qlinear"] and graph.outputs[0].inputs[1].tensor.qparams == QParams(scales, axis=0)


def test_slices_are_quantized_after_they_are_taken() -> None:
    text = reason("quantize_before_view", b.quantize(b.slice_(X, 2, 0, 4), i8, S8))
    assert "the slice drops elements" in text


@pytest.mark.parametrize(("bounded", "stays"), [
    (b.relu(X), False),
    (b.minimum(b.relu(X), 6.0), False),
    (b.maximum(X, -1.0), False),
    (b.minimum(X, 4.0), True),
    (b.maximum(X, 0.5), True),
    (b.maximum(X, float("nan")), True),
])
def test_bounds_beyond_the_integers_go(bounded: Value, stays: bool) -> None:
    q = QParams((0.02,), 0, None, 0, 255)
    graph = rewritten(b.quantize(bounded, u8, q))
    assert (bounded.op in ops(graph)) == stays
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 5.09, 5.11, 6.5, 0.4, -0.0]).repeat(2 * 3 * K // 8).reshape(2, 3, K)
    assert torch.equal(run(graph, (x,))[0], run(Graph((X,), (b.quantize(bounded, u8, q),)), (x,))[0])
    both = apply(Graph((X,), (b.quantize(bounded, u8, q), bounded)), INTEGER)
    assert bounded.op in ops(both), "somebody else reads it"


def test_padding_with_another_number_stays() -> None:
    assert "1.0 may have no integer" in reason("dequantize_after_pad", b.pad(b.dequantize(activation()), ((0, 0), (0, 0), (1, 0)), 1.0))


def test_concat_of_different_parameters_stays() -> None:
    parts = [b.dequantize(activation(U8)), b.dequantize(activation(S8))]
    assert "one part is i8" in reason("dequantize_after_concat", b.concat(parts, 0))
    assert "a part is relu, not dequantize" in reason("dequantize_after_concat", b.concat([parts[0], b.relu(X)], 0))
