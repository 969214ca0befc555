"""Values that a product rounds are rounded once for all that read them: where products' sums are read as they are, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sashiko.graph import attrs as A
from sashiko.graph import build as b
from sashiko.graph.interpret import run
from sashiko.graph.ir import Graph, Value
from sashiko.graph.ops import make
from sashiko.graph.types import TensorType, TupleType, bf16, f32
from sashiko.rewrite.rules.precision import lower_precision
from sashiko.rewrite.rules.residuals import rounded_once

X = b.input_(0, f32, (2, 6, 6, 8))


def layer(x: Value) -> Value:
    return b.linear(x, b.constant(torch.randn(8, 8) / 3))


def narrowed(*outputs: Value) -> tuple[Graph, Graph]:
    """With products that read bf16, before and after."""
    graph = lower_precision(Graph((X,), outputs))
    return graph, rounded_once(graph, bf16)


def data() -> torch.Tensor:
    return torch.randn(2, 6, 6, 8, generator=torch.Generator().manual_seed(1))


def wide_readers(graph: Graph) -> list[Value]:
    """Values in f32 that are rounded, and read by something else without that."""
    return [
        value for value in graph.order
        if value.dtype == f32 and any(u.dtype == bf16 for u in graph.users[value]) and any(u.dtype != bf16 for u in graph.users[value])
    ]


def pooled(x: Value) -> Value:
    return b.reduce(b.window(b.window(x, 1, 2, 2), 3, 2, 2), "max", (2, 4))


@pytest.mark.parametrize("move", [
    pooled,
    lambda x: b.concat((x, b.exp(layer(X))), 3),
    lambda x: b.permute(b.concat((pooled(x), pooled(b.exp(layer(X)))), 1), (0, 2, 1, 3)),
], ids=["pooled", "side by side", "both, in another order"])  # fmt: skip
def test_what_is_moved_or_compared_is_rounded_before(move: Callable[[Value], Value]) -> None:
    moved = move(b.relu(layer(X)))
    graph = Graph((X,), (b.linear(moved, b.constant(torch.randn(4, moved.shape[-1]))),))
    before = lower_precision(graph)
    after = rounded_once(before, bf16)
    assert torch.equal(run(after, [data()])[0], run(before, [data()])[0])
    assert not [v for v in after.order if v.op in ("reduce", "concat") and v.dtype != bf16]


def blocks(x: Value, norm: bool = False) -> Value:
    x = b.relu(layer(x))
    for _ in range(3):
        x = b.relu(b.add(layer(b.relu(layer(x))), x))
        if norm:
            x = b.sub(x, b.reduce(x, "sum", (3,), keepdim=True))
    return layer(x)


def test_a_residual_is_what_the_product_reads() -> None:
    total = blocks(X)
    before, after = narrowed(total)
    assert len(wide_readers(before)) == 3 and not wide_readers(after)
    values = data()
    exact = run(Graph((X,), (total,)), [values])[0]
    errors = [(run(graph, [values])[0] - exact).norm() / exact.norm() for graph in (before, after)]
    # One rounding more to the residual in each of three blocks, of a unit roundoff of 2^-9 at most.
    assert errors[0] < errors[1] < errors[0] + 3 * 2**-9


def test_normalized_values_and_residuals_between_norms_stay_wide() -> None:
    before, after = narrowed(blocks(X, norm=True))
    assert len(wide_readers(before)) == 3 and len(wide_readers(after)) == 2, "but for that before the first norm"


@pytest.mark.parametrize("function", [b.exp, lambda x: b.cast(b.reduce(x, "argmax", (3,), keepdim=True), f32)], ids=["exp", "argmax"])
def test_functions_that_make_errors_larger_read_all_digits(function: Callable[[Value], Value]) -> None:
    shared = b.relu(layer(X))
    before, after = narrowed(layer(b.mul(layer(shared), function(shared))))
    assert after is before
    assert torch.equal(run(after, [data()])[0], run(before, [data()])[0])


def test_results_and_operands_of_wide_products_stay_wide() -> None:
    shared = b.relu(layer(X))
    before, after = narrowed(shared, layer(b.add(layer(shared), shared)))
    assert len(wide_readers(after)) == len(wide_readers(before)) and after.outputs[0].dtype == f32
    assert torch.equal(run(after, [data()])[0], run(before, [data()])[0])

    wide = b.constant(torch.randn(5, 8))
    graph = Graph((X,), (b.linear(shared, wide), layer(b.relu(b.add(layer(shared), shared)))))
    kept = lower_precision(graph, select=lambda value: value.inputs[1] is not wide)
    assert torch.equal(run(rounded_once(kept, bf16), [data()])[0], run(kept, [data()])[0])


def test_operations_of_several_results_are_left_alone() -> None:
    shared = b.relu(layer(X))
    attrs = A.AtenAttrs(torch.ops.aten.linalg_qr.default, (A.Slot(0),), (), "no native form")
    both = make("aten", layer(shared), attrs=attrs, type=TupleType((TensorType(f32, (2, 6, 6, 6)), TensorType(f32, (2, 6, 6, 8)))))
    again = b.matmul(b.get(both, 0), b.get(both, 1))
    before, after = narrowed(layer(b.relu(b.add(layer(again), again))), layer(b.add(layer(shared), shared)))
    (kept,) = [v for v in after.order if v.op == "aten"]
    assert kept.inputs[0].dtype == f32 and kept.type == both.type
    exact = run(before, [data()])
    for got, expected in zip(run(after, [data()]), exact, strict=True):
        assert (got - expected).norm() <= 2**-8 * expected.norm()


def test_of_two_products_that_are_added_the_first_is_rounded() -> None:
    first, second = layer(b.exp(X)), layer(X)
    total = layer(b.relu(b.add(second, first)))
    _, after = narrowed(total)
    (added,) = [v for v in after.order if v.op == "add"]
    widened = [v for v in added.inputs if v.op == "cast" and v.inputs[0].dtype == bf16]
    assert len(widened) == 1, "the one that is stored, not the one that the sum is computed with"
    earlier = min((v for v in after.order if v.op == "linear"), key=after.order.index)
    assert widened[0].inputs[0].inputs[0] is earlier
    _, unrounded = narrowed(b.add(layer(b.exp(X)), layer(X)))
    assert unrounded.outputs[0].inputs[0].op == "linear" == unrounded.outputs[0].inputs[1].op, "what reads the sum wants all digits"
