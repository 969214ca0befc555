"""Contractions come out in one spelling, whatever way a model wrote them, and stay as they are where the rules must not reach."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from sashiko.graph import build as b
from sashiko.graph.attrs import PermuteAttrs
from sashiko.graph.interpret import run
from sashiko.graph.ir import Graph, Value
from sashiko.graph.types import bf16, f32, i8
from sashiko.rewrite import apply, explain
from sashiko.rewrite.rules import CANONICAL, contraction

B, S, K, N = 2, 3, 5, 4
WEIGHT, BIAS = torch.randn(N, K), torch.randn(N)
X = b.input_(0, f32, (B, S, K), name="x")
Y = b.input_(1, f32, (N, K), name="y")


def weight() -> Value:
    return b.constant(WEIGHT, watched=True)


def bias() -> Value:
    return b.constant(BIAS, watched=True)


def rewritten(root: Value) -> Graph:
    return apply(Graph((X, Y), (root,)), CANONICAL)


def flat() -> Value:
    return b.reshape(X, (B * S, K))


SPELLINGS = {
    "matmul and add": lambda: b.add(b.matmul(X, b.permute(weight(), (1, 0))), bias()),
    "add first": lambda: b.add(bias(), b.matmul(X, b.permute(weight(), (1, 0)))),
    "flattened": lambda: b.add(b.reshape(b.matmul(flat(), b.permute(weight(), (1, 0))), (B, S, N)), bias()),
    "addmm": lambda: b.reshape(b.add(b.matmul(flat(), b.permute(weight(), (1, 0))), bias()), (B, S, N)),
    "linear": lambda: b.reshape(b.linear(flat(), weight(), bias()), (B, S, N)),
    "bias as matrix": lambda: b.add(b.linear(X, weight()), b.expand(b.reshape(bias(), (1, N)), (B, S, N))),
    "batch of one": lambda: b.add(b.matmul(b.reshape(X, (1, B * S, K)), b.reshape(b.permute(weight(), (1, 0)), (1, K, N))), bias()),
    "weight on the left": lambda: b.add(b.permute(b.matmul(weight(), b.permute(X, (0, 2, 1))), (0, 2, 1)), bias()),
    "transposed constant": lambda: b.add(b.matmul(X, b.constant(WEIGHT.t().contiguous())), bias()),
}


@pytest.mark.parametrize("spelling", SPELLINGS, ids=str)
def test_every_spelling_of_a_layer_becomes_one_linear(spelling: str) -> None:
    graph = rewritten(SPELLINGS[spelling]())
    root = graph.outputs[0]
    root = root.inputs[0] if root.op == "reshape" else root
    assert root.op == "linear" and len(root.inputs) == 3 and root.inputs[0] is X
    x = torch.randn(B, S, K)
    expected = F.linear(x.double(), WEIGHT.double(), BIAS.double())
    bound = K * torch.finfo(torch.float32).eps * (x.abs() @ WEIGHT.abs().t() + BIAS.abs())
    assert ((run(graph, [x, WEIGHT])[0].reshape(expected.shape) - expected).abs() <= bound).all()


def test_products_of_integers_are_spelled_likewise() -> None:
    x, w = b.cast(X, i8), b.constant(torch.randint(-128, 128, (N, K), dtype=torch.int8))
    flat_x = b.reshape(x, (B * S, K))
    for right in (b.permute(w, (1, 0)), b.constant(w.attrs.tensor.t().contiguous())):  # type: ignore[attr-defined]
        root = rewritten(b.reshape(b.int_matmul(flat_x, right), (B, S, N))).outputs[0]
        assert root.op == "int_linear" and root.inputs[0] is x


def test_two_activations_stay_a_matmul() -> None:
    root = b.matmul(X, b.permute(Y, (1, 0)))
    assert rewritten(root).outputs[0].op == "matmul"
    text = explain(contraction.matmul_transposed_weight, Graph((X, Y), (root,)))
    assert "the right operand is no constant, at <input y" in text


def test_a_linear_with_two_readers_keeps_its_sum_outside() -> None:
    layer = b.linear(X, weight())
    graph = apply(Graph((X, Y), (b.add(layer, bias()), layer)), CANONICAL)
    assert [v.op for v in graph.outputs] == ["add", "linear"]
    assert "expected linear with one user, found an output of the graph" in explain(contraction.add_bias, graph)


def test_a_full_matrix_is_no_bias() -> None:
    root = b.add(b.linear(X, weight()), b.input_(1, f32, (B, S, N)))
    assert apply(Graph((X, root.inputs[1]), (root,)), CANONICAL).outputs[0].op == "add"
    assert "is not one row of 4" in explain(contraction.add_bias, Graph((X, root.inputs[1]), (root,)))


def test_a_reshape_through_the_summed_axis_stays() -> None:
    root = b.linear(b.reshape(X, (S, B, K)), weight())
    assert rewritten(root).outputs[0].op == "reshape", "it keeps the last axis"
    through = b.linear(b.reshape(X, (S * K, B)), b.constant(torch.ones(3, B)))
    assert rewritten(through).outputs[0].op == "linear"
    assert "changes the rows" in explain(contraction.linear_of_reshape, Graph((X, Y), (through,)))


def test_without_columns_a_reshape_may_change_the_rows() -> None:
    x, y = b.input_(0, f32, (B, S, N, 0)), b.input_(1, f32, (B, S, 0, N))
    for root in (b.linear(b.reshape(x, (7, 0)), b.constant(torch.ones(N, 0))),
                 b.matmul(b.reshape(x, (7, N, 0)), b.reshape(y, (7, 0, N)))):
        graph = apply(Graph((x, y), (root,)), CANONICAL)
        assert graph.outputs[0].op == root.op
        assert torch.equal(run(graph, [torch.ones(B, S, N, 0), torch.ones(B, S, 0, N)])[0], torch.zeros(root.shape))  # type: ignore[arg-type]


def test_batched_matmul_of_decomposed_torch_matmul() -> None:
    q, k = b.input_(0, f32, (B, 2, S, K)), b.input_(1, f32, (B, 2, K, S))
    left, right = (b.reshape(b.expand(v, v.shape), (B * 2, *v.shape[2:])) for v in (q, k))
    graph = apply(Graph((q, k), (b.reshape(b.matmul(left, right), (B, 2, S, S)),)), CANONICAL)
    assert graph.outputs[0].op == "matmul" and graph.outputs[0].inputs == (q, k)


def test_narrow_weights_keep_their_cast_visible() -> None:
    root = b.matmul(b.cast(X, bf16), b.permute(b.cast(weight(), bf16), (1, 0)))
    result = rewritten(root).outputs[0]
    assert result.op == "linear" and result.inputs[1].op == "cast" and result.dtype == f32


def test_it_is_the_weight_whose_features_are_moved() -> None:
    x, w = b.input_(0, f32, (B, S, 2, K)), b.constant(torch.randn(N, 2 * K), watched=True)
    moved = b.reshape(b.permute(x, (1, 0, 3, 2)), (S, B, 2 * K))
    graph = apply(Graph((x,), (b.linear(moved, w),)), CANONICAL)
    assert [v.op for v in graph.order if v is not x] == ["permute", "reshape", "constant", "reshape", "permute", "reshape", "linear"]
    assert graph.outputs[0].inputs[0].inputs[0].attrs == PermuteAttrs((1, 0, 2, 3))  # which keeps the features in order
    data = torch.randn(B, S, 2, K)
    torch.testing.assert_close(run(graph, [data])[0], run(Graph((x,), (b.linear(moved, w),)), [data])[0])


def test_features_stay_where_rows_lie_side_by_side() -> None:
    """They have to be gathered anyway, by what makes the values or casts them, and kernels want rows that are."""
    x, w = b.input_(0, f32, (B, S, 2, K)), b.constant(torch.randn(N, 2 * S), watched=True)
    root = b.linear(b.reshape(b.permute(x, (0, 3, 2, 1)), (B, K, 2 * S)), w)
    assert apply(Graph((x,), (root,)), CANONICAL).outputs[0].inputs[1] is w


def test_a_weight_stays_on_the_left_of_columns() -> None:
    """Which would have to be moved, or what comes of them."""
    assert rewritten(b.matmul(b.constant(torch.randn(N, S)), X)).outputs[0].op == "matmul"


def test_a_permutation_of_merged_axes_is_one_of_the_axes() -> None:
    x = b.input_(0, f32, (B, S, K))
    swapped = b.permute(b.reshape(x, (1, B * S, K)), (0, 2, 1))
    graph = apply(Graph((x,), (b.permute(b.reshape(swapped, (K, B, S)), (1, 2, 0)),)), CANONICAL)
    assert graph.outputs[0] is x
