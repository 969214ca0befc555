"""The driver: fixpoint, order, types, use counts, statistics, explanations, and rules that users bring."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sashiko.diagnostics.errors import InvalidGraph
from sashiko.graph import build as b
from sashiko.graph.attrs import CallAttrs
from sashiko.graph.dims import symbol
from sashiko.graph.interpret import run
from sashiko.graph.ir import Graph, Value, reordered
from sashiko.graph.types import boolean, f32, i32
from sashiko.rewrite import Match, Mismatch, Rule, Trace, apply, equation, explain, rule
from sashiko.rewrite.rules import ALL, SIMPLIFY

X = b.input_(0, f32, (2, 3), name="x")
Y = b.input_(1, f32, (2, 3), name="y")
NOT_NOT = equation("neg(neg(x)) -> x", name="double_negation")
ADD_ZERO = equation("add(x, 0) -> x", name="add_zero")


def graph(*outputs: Value) -> Graph:
    return Graph((X, Y), outputs)


def ops(g: Graph) -> list[str]:
    return [v.op for v in g.order if v.op != "input"]


def test_rules_apply_to_the_fixpoint() -> None:
    value = X
    for _ in range(7):
        value = b.neg(value)
    assert ops(apply(graph(value), (NOT_NOT,))) == ["neg"]


def test_a_graph_no_rule_fits_is_returned_itself() -> None:
    g = graph(b.exp(X))
    assert apply(g, ALL) is g


def test_very_deep_graphs_need_no_recursion() -> None:
    value = X
    for _ in range(1500):
        value = b.add(b.exp(value), 0.0)
    assert ops(apply(graph(value), (ADD_ZERO,))) == ["exp"] * 1500


def test_users_of_a_replaced_value_read_the_replacement() -> None:
    twice = b.neg(b.neg(X))
    result = apply(graph(b.exp(twice), b.add(twice, Y), twice), (NOT_NOT,))
    assert ops(result) == ["exp", "add"]
    assert result.outputs[2] is X and result.outputs[0].inputs == (X,)


def test_shared_values_stay_shared() -> None:
    shared = b.exp(b.add(X, 0.0))
    result = apply(graph(b.neg(shared), b.abs_(shared)), (ADD_ZERO,))
    assert ops(result).count("exp") == 1


def test_rules_are_tried_in_order() -> None:
    to_abs = equation("relu(x) -> abs(x)", name="to_abs")
    to_neg = equation("relu(x) -> neg(x)", name="to_neg")
    assert ops(apply(graph(b.relu(X)), (to_abs, to_neg))) == ["abs"]
    assert ops(apply(graph(b.relu(X)), (to_neg, to_abs))) == ["neg"]


def test_single_use_counts_are_exact_while_other_rules_change_them() -> None:
    """exp has two readers until the sum with zero is gone and the second reader with it."""
    fuse = equation("neg(exp!(x)) -> reciprocal(x)", name="fuse")
    inner = b.exp(X)
    dead = b.mul(inner, 0.0)
    drop = equation("add(x, mul(_, 0)) -> x", name="drop")
    g = graph(b.add(b.neg(inner), dead))
    assert ops(apply(g, (fuse,))) == ops(g)
    assert ops(apply(g, (fuse, drop))) == ["reciprocal"]


def test_replacement_of_another_type_is_refused() -> None:
    @rule("neg(x) -> x")
    def widen(m: Match) -> Value | Mismatch:
        return b.reshape(m["x"], (3, 2))

    with pytest.raises(InvalidGraph, match=r"widen replaces neg of type f32\[2, 3\] by reshape of type f32\[3, 2\]"):
        apply(graph(b.neg(X)), (widen,))


def test_rules_without_end_are_named() -> None:
    there, back = equation("relu(x) -> abs(x)", name="there"), equation("abs(x) -> relu(x)", name="back")
    with pytest.raises(InvalidGraph, match=r"without end: (back|there)"):
        apply(graph(b.relu(X)), (there, back))


def test_replacement_that_reads_what_it_replaces_is_refused() -> None:
    @rule("neg(x) -> neg(x)")
    def around(m: Match) -> Value | Mismatch:
        return b.abs_(m.root)

    with pytest.raises(InvalidGraph, match="something that reads it"):
        apply(graph(b.neg(X)), (around,))


def test_equations_hold_up_to_broadcasting_only() -> None:
    small = b.input_(0, f32, (3,))
    wide = Graph((small,), (b.add(small, b.full(0.0, f32, (2, 3))),))
    result = apply(wide, (ADD_ZERO,))
    assert ops(result) == ["expand"] and result.outputs[0].shape == (2, 3)
    number = b.input_(0, i32, (3,))
    widens = equation("add(x, 0) -> cast{dtype=f32}(x)", name="widens")
    assert ops(apply(Graph((number,), (b.add(number, 0),)), (widens,))) == ["full", "add"]


@pytest.mark.parametrize("right", ["where(c, x, 0)", "where(c, 5, 7)", "where(true, x, 0)"])
def test_a_number_beside_a_condition_is_no_bool(right: str) -> None:
    chosen = b.mul(X, b.where(b.gt(Y, 0.0), b.full(1.0, f32), b.full(0.0, f32)))
    result = apply(graph(chosen), (equation(f"mul(x, where(c, 1, 0)) -> {right}", name="choice"),)).outputs[0]
    assert result.type == X.type and [v.dtype for v in result.inputs] == [boolean, f32, f32]


def test_new_values_carry_origin_and_name_of_what_they_replace() -> None:
    with b.at("model.py:7"):
        root = replace(b.reciprocal(b.sqrt(X)), name="norm")
    new = apply(graph(root), SIMPLIFY).outputs[0]
    assert (new.op, new.origin, new.name) == ("rsqrt", "model.py:7", "norm")


def test_values_with_a_physical_order_are_left_alone() -> None:
    turned = reordered(b.add(X, 0.0), (1, 0))
    assert apply(graph(turned), SIMPLIFY).outputs[0] is turned


def test_trace_counts_and_explains() -> None:
    trace = Trace()
    with b.at("model.py:3"):
        value = b.add(b.neg(b.neg(X)), Y)
    apply(graph(value), (NOT_NOT, ADD_ZERO), trace)
    assert trace.fired == {"double_negation": 1}
    assert [near.rule for near in trace.near_misses()] == ["add_zero"]
    assert str(trace.steps[0]) == "double_negation: <neg: f32[2, 3]> -> <input x: f32[2, 3]>  (model.py:3)"
    assert trace.near_misses()[0].reason == "expected the number 0, found input"


def test_explain() -> None:
    with b.at("model.py:5"):
        value = b.neg(b.exp(X))
    assert explain(NOT_NOT, graph(value)) == "double_negation: expected neg, found exp, at <exp: f32[2, 3]>  (model.py:5)"
    assert explain(NOT_NOT, graph(b.exp(X))) == "double_negation: the graph has no neg"
    with b.at("model.py:6"):
        twice = b.neg(b.neg(X))
    assert explain(NOT_NOT, graph(twice)) == "double_negation applies to <neg: f32[2, 3]>  (model.py:6)"


def test_reasons_of_conditions_win_over_structure() -> None:
    @rule("neg(exp(x)) -> neg(x)")
    def never(m: Match) -> Value | Mismatch:
        return m.fail("it is Monday", m["x"])

    assert "it is Monday, at <input x" in explain(never, graph(b.neg(b.exp(X)), b.neg(Y)))


def test_custom_kernel_by_equation() -> None:
    """A user's rule and kernel: the pattern is all that a custom call takes."""
    custom = equation("relu(add(x, y)) -> call{kernel=add_relu}(x, y)", name="custom")
    result = apply(graph(b.exp(b.relu(b.add(X, Y)))), (*ALL, custom))
    call = result.outputs[0].inputs[0]
    assert call.op == "call" and call.attrs == CallAttrs("add_relu") and call.type == X.type
    data = [torch.randn(2, 3), torch.randn(2, 3)]
    found = run(result, data, kernels={"add_relu": lambda x, y: torch.relu(x + y)})[0]
    assert torch.equal(found, torch.relu(data[0] + data[1]).exp())


def test_custom_kernel_with_options() -> None:
    @rule("pow(x, $p) -> call(x)")
    def power(m: Match) -> Value | Mismatch:
        return m.call("power", m["x"], options=(("exponent", m.number("p")),))

    result = apply(graph(b.pow_(X, 7.0)), (power,))
    assert result.outputs[0].attrs == CallAttrs("power", (("exponent", 7.0),))


def test_rules_are_plain_data() -> None:
    """A rule may be built without text: from `Equation` values that another reader of patterns produced."""
    copy = Rule("copy", NOT_NOT.equation)
    assert ops(apply(graph(b.neg(b.neg(X))), (copy,))) == []


def test_symbolic_shapes() -> None:
    n = symbol("n", 1, 64)
    x = b.input_(0, f32, (n, 4))
    split = b.reshape(b.reshape(x, (n * 4,)), (n, 2, 2))
    result = apply(Graph((x,), (b.reshape(split, (n, 4)),)), SIMPLIFY)
    assert result.outputs[0] is x


def test_unbound_attributes_need_a_function() -> None:
    with pytest.raises(InvalidGraph, match="nothing says what q is"):
        equation("permute{p}(x) -> permute{q}(x)")


def test_rules_at_rest_are_not_tried_again() -> None:
    """Rules that left a graph apply nowhere in it: the next run begins with the others, and tries all once something has changed."""
    tried: list[str] = []

    @rule("exp(x) -> exp(x)")
    def refuses(m: Match) -> Value | Mismatch:
        tried.append(m["x"].op)
        return m.fail("never")

    trace = Trace()
    left = apply(graph(b.exp(b.neg(b.neg(X)))), (refuses,), trace)
    assert apply(left, (refuses,), trace) is left
    assert tried == ["neg"]
    assert ops(apply(left, (refuses, NOT_NOT), trace)) == ["exp"]
    assert tried == ["neg", "input"]
