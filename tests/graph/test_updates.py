"""`put`: its meaning, its rules, and which of them may write in place."""

from __future__ import annotations

import torch

from sashiko.graph import build as b
from sashiko.graph.dims import floordiv, maximum, minimum, mod, symbol
from sashiko.graph.interpret import run
from sashiko.graph.ir import Graph, Value
from sashiko.graph.simplify import canonical
from sashiko.graph.types import f32, i64
from sashiko.graph.updates import concatenated, in_place, inside, late_puts, memory_of, separated, slice_of

N = symbol("n", 1, 16)
X, PART, AT = b.input_(0, f32, (3, 8, 4)), b.input_(1, f32, (3, 2, 4)), b.input_(2, i64, (2,))
PUT = b.put(X, PART, {1: b.reshape(AT, (1, 2, 1))})


def graph(*outputs: Value) -> Graph:
    return Graph((X, PART, AT), outputs)


def ops(found: Graph) -> list[str]:
    return [v.op for v in found.order]


def tensors() -> tuple[torch.Tensor, ...]:
    return torch.randn(3, 8, 4), torch.randn(3, 2, 4), torch.tensor([6, 1])


def test_put_is_index_copy() -> None:
    x, part, at = tensors()
    assert torch.equal(run(graph(PUT), (x, part, at))[0], x.index_copy(1, at, part))


def test_rules_keep_the_numbers() -> None:
    layer = b.reshape(b.slice_(X, 0, 2, 1), (8, 4))
    inner = b.put(layer, b.reshape(b.slice_(PART, 0, 0, 1), (2, 4)), {0: b.reshape(AT, (2, 1))})
    nested = b.put(X, b.reshape(inner, (1, 8, 4)), {0: b.reshape(b.iota(1, i64, 2), (1, 1, 1))})
    turned = b.permute(b.put(b.permute(X, (1, 0, 2)), b.permute(PART, (1, 0, 2)), {0: b.reshape(AT, (2, 1, 1))}), (1, 0, 2))
    for value in (nested, turned):
        simple = canonical(graph(value))
        assert ops(simple).count("put") == 1 and simple.outputs[0].inputs[0] is X
        given = tensors()
        assert torch.equal(run(simple, given)[0], run(graph(value), given)[0])


def test_positions_known_to_be_inside() -> None:
    assert inside(b.iota(2, i64, 6), 8) and inside(b.iota(N, i64), N) and inside(b.iota(4, i64, 7, -2), 8)
    assert not inside(b.iota(2, i64, 7), 8) and not inside(b.iota(2, i64, N), 16) and not inside(AT, 8)


def test_a_slice_is_of_one_axis() -> None:
    assert slice_of(b.put(X, PART, {1: b.reshape(b.iota(2, i64, 3), (1, 2, 1))})) is not None
    assert slice_of(PUT) is None
    crosswise = b.put(X, b.slice_(PART, 1, 0, 1), {1: b.reshape(b.iota(3, i64), (3, 1, 1))})
    assert slice_of(crosswise) is None, "row i has its element at i"
    assert not inside(b.iota(1, i64), N), "a call may bring no elements"
    half, behind = floordiv(N, 2), floordiv(N - 5, 2)
    assert inside(b.iota(2, i64, half), half + 2) and inside(b.iota(2, i64, mod(N, 3)), mod(N, 3) + 2)
    assert inside(b.iota(2, i64, maximum(behind, 0)), maximum(behind, 0) + 2)
    assert not inside(b.iota(2, i64, behind), behind + 4), "what is negative for small sizes"
    assert not inside(b.iota(2, i64, minimum(N, behind)), minimum(N, behind) + 4)


def test_in_place_where_nothing_reads_what_was_there() -> None:
    assert in_place(graph(PUT, b.exp(PUT)), {0: 0}) == {PUT: 0}
    assert in_place(graph(PUT), {}) == {}
    assert in_place(graph(PUT, b.mul(b.exp(X), PUT)), {0: 0}) == {}, "both are read at once"
    assert in_place(graph(PUT, X), {0: 0}) == {}, "the argument as it was is a result"
    late = graph(PUT, b.exp(X))
    assert in_place(late, {0: 0}) == {PUT: 0} and late_puts(late) == {PUT}


def test_a_product_may_read_what_a_put_waits_for() -> None:
    whole = b.matmul(PART, b.permute(b.mul(X, 2.0), (0, 2, 1)))
    part = b.slice_(whole, 2, 0, 4)
    after = b.put(X, part, {1: b.reshape(AT, (1, 2, 1))})
    assert in_place(graph(after, b.exp(after)), {0: 0}) == {after: 0}
    assert in_place(graph(PUT, b.exp(PUT), whole), {0: 0}) == {}, "this one does not wait"


def test_copies_are_made_for_all_others() -> None:
    kept = separated(graph(PUT, b.exp(PUT)), {0: 0})
    assert "copy" not in ops(kept) and memory_of(kept.outputs[0]) is X
    apart = separated(graph(PUT, b.exp(PUT)), {})
    assert ops(apart).count("copy") == 1 and memory_of(apart.outputs[0]).op == "copy"
    twice = b.put(PUT, PART, {1: b.reshape(AT, (1, 2, 1))})
    assert ops(separated(graph(twice), {})).count("copy") == 1, "the second one writes over the first"
    assert ops(separated(graph(twice, PUT), {})).count("copy") == 2
    given = tensors()
    for one in (kept, apart):
        for got, wanted in zip(run(one, given), run(graph(PUT, b.exp(PUT)), given), strict=True):
            assert torch.equal(got, wanted)


def test_results_beside_an_updated_argument_are_copies() -> None:
    found = separated(graph(PUT, PUT, b.reshape(PUT, (24, 4))), {0: 0})
    assert [v.op for v in found.outputs] == ["put", "copy", "copy"]
    exchanged = separated(Graph((X, b.input_(1, f32, (3, 8, 4))), (X,)), {0: 1})
    assert exchanged.outputs[0].op == "copy"


def test_whole_slices_are_concatenated_unless_in_place() -> None:
    value = b.put(X, PART, {1: b.reshape(b.iota(2, i64, 3), (1, 2, 1))})
    assert ops(concatenated(graph(value), {})).count("concat") == 1
    assert concatenated(graph(value), {0: 0}).outputs[0] is value
    given = tensors()
    assert torch.equal(run(concatenated(graph(value), {}), given)[0], run(graph(value), given)[0])


def test_slices_filled_one_after_another_are_one_concatenation() -> None:
    """As slices of the one before, each would compute all earlier ones twice."""
    x = b.input_(0, f32, (12, 4))
    parts = [b.add(b.slice_(x, 0, t, 1), float(t)) for t in range(12)]
    value = b.full(0.0, f32, (12, 4))
    for t in (*range(0, 12, 2), *range(11, 0, -2), 3):  # evens, odds from behind, one of them again
        value = b.put(value, parts[t], {0: b.reshape(b.iota(1, i64, t), (1, 1))})
    whole = concatenated(Graph((x,), (value,)), {})
    last = whole.outputs[0]
    assert last.op == "concat" and last.inputs == tuple(parts)
    given = torch.randn(12, 4)
    assert torch.equal(run(whole, [given])[0], given + torch.arange(12.0)[:, None])
