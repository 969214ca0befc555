"""Passes: what they must remove, what they must keep, and that results do not change by a bit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sashiko.diagnostics.errors import InvalidGraph
from sashiko.graph import build as b
from sashiko.graph import interpret, passes
from sashiko.graph.dims import symbol
from sashiko.graph.ir import Graph, Value, rebuild, with_inputs
from sashiko.graph.simplify import canonical, cse
from sashiko.graph.types import boolean, f32, i64
from tests.graph.captures import SIMPLIFYING

S = symbol("S", 1, 64)
X = b.input_(0, f32, (S, 6))


def simplified(value: Value) -> Value:
    (result,) = passes.run(Graph((X,), (value,)), SIMPLIFYING).outputs
    return result


def ops(value: Value) -> list[str]:
    return [v.op for v in Graph((X,), (value,)).order if v.op != "input"]


def test_equal_operations_become_one() -> None:
    graph = Graph((X,), (b.exp(b.neg(X)), b.abs_(b.neg(X))))
    assert [v.op for v in cse(graph).order] == ["input", "neg", "exp", "abs"]


def test_numbers_that_compare_equal_are_kept_apart() -> None:
    zeros = b.mul(b.add(X, b.full(0.0, f32)), b.add(X, b.full(-0.0, f32)))
    assert ops(simplified(zeros)).count("add") == 2
    ones = (b.full(1, i64), b.full(True, boolean))
    assert len(cse(Graph((), ones)).order) == 2


def test_watched_constants_are_never_folded() -> None:
    tensor = torch.randn(6)
    assert ops(simplified(b.add(X, b.neg(b.constant(tensor, watched=True))))) == ["constant", "neg", "add"]
    folded = simplified(b.add(X, b.neg(b.constant(tensor))))
    assert ops(folded) == ["constant", "add"]


def test_large_constants_are_not_copied() -> None:
    assert ops(simplified(b.add(X, b.reduce(b.constant(torch.zeros(200, 400, 6)), "sum", (0, 1))))) == ["constant", "add"]
    kept = simplified(b.neg(b.constant(torch.zeros(300, 300))))
    assert kept.op == "neg"


@pytest.mark.parametrize(("value", "left"), [
    (b.permute(b.permute(X, (1, 0)), (1, 0)), []),
    (b.reshape(b.reshape(X, (S * 6,)), (S, 6)), []),
    (b.reshape(b.reshape(X, (S * 6,)), (S, 2, 3)), ["reshape"]),
    (b.permute(b.reshape(X, (S, 1, 6)), (1, 0, 2)), ["reshape"]),
    (b.slice_(b.slice_(X, 1, 1, 4), 1, 2, 2), ["slice"]),
    (b.slice_(b.slice_(X, 1, 5, 6, -1), 1, 5, 6, -1), []),
    (b.mul(X, 1.0), []),
    (b.where(b.full(True, boolean), X, b.neg(X)), []),
    (b.where(b.and_(b.full(True, boolean), b.gt(X, 0.0)), X, 0.0), ["full", "gt", "where"]),
])
def test_what_changes_nothing_disappears(value: Value, left: list[str]) -> None:
    assert ops(simplified(value)) == left
    x = torch.randn(4, 6)
    want, got = interpret.run(Graph((X,), (value,)), [x])[0], interpret.run(Graph((X,), (simplified(value),)), [x])[0]
    assert torch.equal(got, want)


def test_adding_zero_to_floats_is_kept_for_negative_zero() -> None:
    assert ops(simplified(b.add(X, 0.0))) == ["full", "add"]


def test_positions_are_compared_without_running() -> None:
    positions = b.reshape(b.iota(S, i64), (S, 1))
    always, never = (b.ge(positions, 0), b.lt(positions, 64)), (b.lt(positions, 0), b.gt(positions, 63))
    for value, answer in (*((v, True) for v in always), *((v, False) for v in never)):
        got = simplified(value)
        assert got.op == "full" and got.attrs.value is answer  # type: ignore[attr-defined]
    assert simplified(b.lt(positions, 63)).op == "lt"


def test_linear_is_not_flattened() -> None:
    w = b.constant(torch.randn(4, 6), watched=True)
    rows = b.permute(b.reshape(b.concat([X, X], 0), (2, S, 2, 3)), (0, 1, 3, 2))
    value = b.reshape(b.linear(b.reshape(rows, (2 * S, 6)), w), (2, S, 4))
    assert ops(simplified(value)) == ["concat", "reshape", "permute", "reshape", "constant", "linear"]
    assert simplified(value).shape == (2, S, 4)


def test_without_columns_rows_may_be_others_after_a_reshape() -> None:
    empty, w = b.input_(0, f32, (2, 3, 0)), b.constant(torch.randn(4, 0))
    [out] = canonical(Graph((empty,), (b.linear(b.reshape(empty, (12, 0)), w),))).outputs
    assert out.op == "linear" and out.shape == (12, 4)


def test_attention_masks_stay_small() -> None:
    q = b.input_(0, f32, (2, 4, S, 8))
    keep = b.input_(1, boolean, (2, 1, 1, S))
    mask = b.where(b.expand(keep, (2, 1, S, S)), b.full(0.0, f32), -math.inf)
    (out,) = canonical(Graph((q, keep), (b.attention(q, q, q, mask, scale=1.0),))).outputs
    assert out.inputs[3] is keep
    (out,) = canonical(Graph((q,), (b.attention(q, q, q, b.full(True, boolean, (2, 1, S, S)), scale=1.0),))).outputs
    assert len(out.inputs) == 3


def test_a_graph_that_nothing_changed_is_returned_itself() -> None:
    graph = Graph((X,), (b.exp(X), b.add(b.exp(X), 1.0)))
    assert rebuild(graph, with_inputs) is graph and canonical(graph) is graph
    once = cse(graph)
    assert once is not graph and cse(once) is once


def test_a_broken_pass_is_named() -> None:
    def broken(graph: Graph) -> Graph:
        return Graph(graph.inputs, (Value("neg", (X,), b.neg(X).attrs, b.reshape(X, (6 * S,)).type),))

    with pytest.raises(InvalidGraph, match="pass breaks"):
        passes.run(Graph((X,), (X,)), (passes.Pass("breaks", broken),))


def test_reports_tell_time_and_size() -> None:
    reports: list[passes.PassReport] = []
    passes.run(Graph((X,), (b.mul(X, 1.0),)), SIMPLIFYING, reports=reports)
    assert [(r.name, r.before, r.after) for r in reports] == [("canonical", 3, 1), ("cse", 1, 1)]


KINDS = ("permute", "reshape", "slice", "flip", "expand", "mul1", "cast")
VIEWS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 5)), max_size=7)


@settings(max_examples=150, deadline=None)
@given(VIEWS)
def test_chains_of_views_keep_every_element(steps: list[tuple[str, int]]) -> None:
    value: Value = b.input_(0, f32, (2, 3, 4))
    x0 = value
    for kind, n in steps:
        shape = [int(str(d)) for d in value.shape]
        axis = n % len(shape)
        if kind == "permute":
            value = b.permute(value, tuple((i + n) % len(shape) for i in range(len(shape))))
        elif kind == "reshape":
            value = b.reshape(value, (*shape[:axis], math.prod(shape[axis:]))) if n % 2 else b.unsqueeze(value, axis)
        elif kind == "slice" and shape[axis] > 1:
            value = b.slice_(value, axis, 1, shape[axis] - 1)
        elif kind == "flip":
            value = b.slice_(value, axis, shape[axis] - 1, shape[axis], -1)
        elif kind == "expand":
            value = b.expand(value, (2, *shape))
        elif kind == "mul1":
            value = b.mul(value, 1.0)
    x = torch.arange(24.0).reshape(2, 3, 4)
    graph = Graph((x0,), (value,))
    assert torch.equal(interpret.run(passes.run(graph, SIMPLIFYING), [x])[0], interpret.run(graph, [x])[0])
