"""Contractions in their barest form: what is split off a product of integers, and products as sums."""

from __future__ import annotations

import math

import pytest
import torch

from sashiko.graph import build as b
from sashiko.graph.attrs import ReduceAttrs
from sashiko.graph.interpret import run
from sashiko.graph.ir import Graph
from sashiko.graph.types import DType, QParams, boolean, f32, f64, i8, u8
from sashiko.stitch.expand import expand_contractions, expand_unsupported

STEP, ZERO, N, K = 0.03, 200, 5, 64
SCALES = tuple(0.01 * (n + 1) for n in range(N))


@pytest.mark.parametrize("biased", [True, False])
def test_the_zero_point_is_a_share_of_the_bias_that_costs_no_accuracy(biased: bool) -> None:
    x = b.input_(0, f32, (3, K))
    q = QParams((STEP,), ZERO, None, 0, 255)
    weight = torch.randint(1, 128, (N, K), dtype=torch.int8)  # of one sign: the share of the zero point is as large as it gets
    bias = torch.randn(N)
    operands = b.quantize(x, u8, q), b.constant(weight, qparams=QParams(SCALES, axis=0)), *([b.constant(bias)] if biased else [])
    graph = expand_contractions(Graph((x,), (b.qlinear(*operands),)))
    assert [v.op for v in graph.order if v.tensor.shape == (3, N)] == ["int_linear", "cast", "mul", "add"]

    real = torch.randn(3, K)
    integers = ((real / STEP).round() + ZERO).clamp(0, 255).double() - ZERO
    weights = weight.double() * torch.tensor(SCALES, dtype=torch.float64)[:, None]
    want = STEP * integers @ weights.t() + (bias.double() if biased else 0)
    # Four roundings of sums below 2^8 steps for each x, and the rounding of the result.
    bound = 4 * 2**-24 * 2**8 * STEP * weights.abs().sum(1) + 2**-23 * want.abs()
    assert ((run(graph, [real])[0] - want).abs() <= bound).all()


def test_operands_without_a_zero_point_have_no_share() -> None:
    x = b.quantize(b.input_(0, f32, (3, K)), i8, QParams((STEP,), 0, None, -127, 127))
    product = b.qlinear(x, b.constant(torch.ones(N, K, dtype=torch.int8), qparams=QParams((0.5,))))
    graph = expand_contractions(Graph((x.inputs[0],), (product,)))
    assert [v.op for v in graph.order if v.tensor.shape == (3, N)] == ["int_linear", "cast", "mul"]


@pytest.mark.parametrize(("order", "axis"), [((0, 2, 3, 1), 2), ((3, 1, 0, 2), 3), ((1, 2, 0, 3), 5)])
def test_lines_are_added_up_where_what_is_summed_lies_across_them(order: tuple[int, ...], axis: int) -> None:
    """Of images by planes: the sum is over the planes, and not over numbers that lie apart."""
    x = b.input_(0, f32, (2, 3, 4, 5))
    rows = b.permute(x, order)
    product = b.linear(rows, b.constant(torch.randn(3, rows.shape[-1])), b.constant(torch.randn(3)))  # type: ignore[arg-type]
    graph = expand_unsupported(Graph((x,), (product,)), lambda value: False)
    [total] = [v for v in graph.order if v.op == "reduce"]
    assert isinstance(total.attrs, ReduceAttrs) and total.attrs.axes == (axis,)
    data = (torch.randn(2, 3, 4, 5),)
    torch.testing.assert_close(run(graph, data), run(Graph((x,), (product,)), data))


def test_attention_with_a_cap() -> None:
    q, k, v = (b.input_(i, f32, (2, 3, 5, 4)) for i in range(3))
    attention = b.attention(q, k, v, scale=0.5, cap=0.3)
    graph = expand_unsupported(Graph((q, k, v), (attention,)), lambda value: value.op != "attention")
    data = [torch.randn(2, 3, 5, 4) for _ in range(3)]
    want = torch.softmax(0.3 * torch.tanh(data[0] @ data[1].mT * 0.5), -1) @ data[2]
    torch.testing.assert_close(run(graph, data)[0], want)


def test_attention_with_sinks() -> None:
    """Also where all keys are hidden, and one that is beyond all scores."""
    q, sink = b.input_(0, f32, (1, 3, 5, 4)), b.input_(1, f32, (1, 3, 1, 1))
    attention = b.attention(q, q, q, b.input_(2, boolean, (1, 1, 5, 5)), sink, scale=0.5)
    graph = expand_unsupported(Graph((q, sink, attention.inputs[3]), (attention,)), lambda value: value.op != "attention")
    data, sinks = torch.randn(1, 3, 5, 4), torch.tensor([0.3, -2.0, 200.0]).reshape(1, 3, 1, 1)
    seen = torch.ones(1, 1, 5, 5, dtype=torch.bool)
    seen[0, 0, 2] = False
    scores = (data @ data.mT * 0.5).masked_fill(~seen, -math.inf)
    want = torch.cat((scores, sinks.expand(1, 3, 5, 1)), -1).softmax(-1)[..., :5] @ data
    torch.testing.assert_close(run(graph, (data, sinks, seen))[0], want)


@pytest.mark.parametrize("dtype", [f32, f64], ids=str)
def test_attention_takes_the_weights_of_a_softmax(dtype: DType) -> None:
    """Those of hidden keys, of rows without any key too; they have fewer digits than f64."""
    q, k, v = (b.input_(i, dtype, (2, 3, n, 4)) for i, n in enumerate((1, 5, 5)))
    attention = b.attention(q, k, v, b.input_(3, boolean, (2, 1, 1, 5)), scale=0.5)
    graph = expand_unsupported(Graph((q, k, v, attention.inputs[3]), (attention,)), lambda value: value.op != "attention")
    assert {"exp", "exp_weight"} & {v.op for v in graph.order} == {"exp_weight" if dtype == f32 else "exp"}
    seen = torch.tensor([[True, False, True, False, True], [False] * 5])[:, None, None]
    data = (*(torch.randn(2, 3, n, 4, dtype=dtype.torch) for n in (1, 5, 5)), seen)
    want = torch.nn.functional.scaled_dot_product_attention(*data[:3], attn_mask=seen, scale=0.5)
    torch.testing.assert_close(run(graph, data)[0], want)
