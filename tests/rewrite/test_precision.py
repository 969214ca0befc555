"""Narrow contractions: the right operands are cast, once each, and the error is that of the narrow type."""

from __future__ import annotations

import pytest
import torch

from sashiko.graph import build as b
from sashiko.graph.interpret import run
from sashiko.graph.ir import Graph, Value
from sashiko.graph.types import DType, bf16, f16, f32
from sashiko.rewrite import apply
from sashiko.rewrite.rules import SIMPLIFY
from sashiko.rewrite.rules.precision import lower_precision

X = b.input_(0, f32, (4, 8))
WEIGHT = torch.randn(6, 8)


def ops(graph: Graph) -> list[str]:
    return [v.op for v in graph.order if v.op != "input"]


@pytest.mark.parametrize("dtype", [bf16, f16], ids=str)
def test_linear_multiplies_narrow_and_sums_wide(dtype: DType) -> None:
    bias = torch.randn(6)
    graph = lower_precision(Graph((X,), (b.linear(X, b.constant(WEIGHT), b.constant(bias)),)), dtype)
    root = graph.outputs[0]
    assert root.op == "linear" and [v.dtype for v in root.inputs] == [dtype, dtype, f32] and root.dtype == f32
    x = torch.randn(4, 8)
    exact = x.double() @ WEIGHT.double().t() + bias.double()
    unit = torch.finfo(dtype.torch).eps / 2
    # Two roundings for each product; the sum of 8 in f32 adds little beside them.
    bound = (2 * unit + unit**2 + 16 * torch.finfo(torch.float32).eps) * (x.abs() @ WEIGHT.abs().t() + bias.abs())
    error = (run(graph, [x])[0] - exact).abs()
    assert (error <= bound).all()
    assert error.max() > torch.finfo(torch.float32).eps * 16, "nothing was rounded"


def test_attention_returns_to_f32_and_keeps_its_mask() -> None:
    q, k, v = (b.input_(i, f32, (1, 2, 3, 4)) for i in range(3))
    mask = b.input_(3, f32, (3, 3))
    graph = lower_precision(Graph((q, k, v, mask), (b.attention(q, k, v, mask, scale=0.5),)))
    assert ops(graph) == ["cast", "cast", "cast", "attention", "cast"]
    assert graph.outputs[0].inputs[0].inputs[3] is mask and graph.outputs[0].dtype == f32


def test_f16_becomes_bf16_where_that_is_asked_for_and_not_the_other_way() -> None:
    short, shorter = b.input_(0, f16, (4, 8)), b.input_(1, bf16, (4, 8))
    graph = Graph((short, shorter), (b.linear(short, b.constant(WEIGHT.half())), b.linear(shorter, b.constant(WEIGHT.bfloat16()))))
    for dtype in (bf16, f16):
        assert [[v.dtype for v in root.inputs] for root in lower_precision(graph, dtype).outputs] == [[dtype] * 2, [bf16] * 2]


def test_shared_operands_are_cast_once() -> None:
    w = [b.constant(torch.randn(6, 8)) for _ in range(3)]
    graph = lower_precision(Graph((X,), tuple(b.linear(X, each) for each in w)))
    assert sum(v.op == "cast" and v.inputs[0] is X for v in graph.order) == 1


def test_narrow_values_are_not_cast_there_and_back() -> None:
    q, k, v = (b.input_(i, f32, (1, 2, 3, 4)) for i in range(3))
    attended = b.reshape(b.attention(q, k, v, scale=0.5), (6, 4))
    root = b.linear(attended, b.constant(torch.randn(5, 4)))
    graph = apply(lower_precision(Graph((q, k, v), (root,))), SIMPLIFY)
    assert ops(graph).count("attention") == 1 and graph.outputs[0].dtype == f32


def test_only_selected_contractions_change() -> None:
    def big(value: Value) -> bool:
        return value.inputs[1].shape[0] == 6

    small, large = b.linear(X, b.constant(torch.randn(2, 8))), b.linear(X, b.constant(WEIGHT))
    graph = lower_precision(Graph((X,), (small, large)), select=big)
    assert graph.outputs[0] is small and graph.outputs[1].inputs[0].dtype == bf16


def test_other_types_are_left_alone() -> None:
    w = b.cast(b.constant(WEIGHT), bf16)
    graph = Graph((X,), (b.linear(b.cast(X, bf16), w), b.exp(X)))
    assert ops(lower_precision(graph)) == ops(graph)


def test_a_cast_comes_before_the_views_of_what_it_casts() -> None:
    x = b.input_(0, f32, (2, 3, 8))
    heads = b.permute(b.reshape(b.add(x, x), (2, 3, 2, 4)), (0, 2, 1, 3))
    graph = lower_precision(Graph((x,), (b.attention(heads, heads, heads, scale=0.5),)))
    assert ops(graph) == ["add", "cast", "reshape", "permute", "attention", "cast"], "a part of what computes the value"
    data = torch.randn(2, 3, 8)
    narrow = (data + data).bfloat16().view(2, 3, 2, 4).transpose(1, 2)
    expected = torch.nn.functional.scaled_dot_product_attention(*[narrow.float()] * 3, scale=0.5)
    assert (run(graph, [data])[0] - expected).abs().max() <= 2**-7 * expected.abs().max()


def depthwise(image: Value) -> Value:
    """A sum over windows of 3 x 3 of each channel."""
    windows = b.window(b.window(b.pad(image, ((0, 0), (1, 1), (1, 1), (0, 0)), 0), 1, 3, 1), 3, 3, 1)
    return b.reduce(b.mul(windows, b.constant(torch.randn(3, 1, 3, 8))), "sum", (2, 4))


def test_a_depthwise_convolution_reads_a_narrow_image() -> None:
    x = b.input_(0, f32, (2, 5, 6, 8))
    wide = Graph((x,), (depthwise(b.relu(x)),))
    graph = lower_precision(wide)
    assert ops(graph)[:2] == ["relu", "cast"] and graph.outputs[0].dtype == f32
    data = torch.randn(2, 5, 6, 8)
    assert torch.equal(run(graph, [data])[0], run(wide, [data.bfloat16().float()])[0])
    assert ops(lower_precision(wide, select=lambda value: value.op != "reduce")) == ops(wide)


def test_an_image_that_others_read_stays_wide() -> None:
    x = b.input_(0, f32, (2, 5, 6, 8))
    image = b.relu(x)
    for graph in (Graph((x,), (b.add(depthwise(image), image),)), Graph((x,), (depthwise(x),))):
        assert ops(lower_precision(graph)) == ops(graph), "it would be another pass over memory"
