"""Attention is recognised as models spell it, compared with torch in fp64, and refused with a reason where it is something else."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from sashiko.graph import attrs as A
from sashiko.graph import build as b
from sashiko.graph.interpret import run
from sashiko.graph.ir import Graph, Value
from sashiko.graph.types import boolean, f32
from sashiko.rewrite import apply, explain
from sashiko.rewrite.rules import CANONICAL
from sashiko.rewrite.rules.attention import attention

B, H, M, S, D = 2, 3, 5, 7, 4
SCALE = D**-0.5
Q, K, V = b.input_(0, f32, (B, M, H, D)), b.input_(1, f32, (B, S, H, D)), b.input_(2, f32, (B, S, H, D))
SEEN, ADDED = b.input_(3, boolean, (B, 1, 1, S)), b.input_(4, f32, (B, 1, M, S))
INPUTS = (Q, K, V, SEEN, ADDED)


def heads(x: Value) -> Value:
    return b.permute(x, (0, 2, 1, 3))


def scores(q: Value | None = None) -> Value:
    return b.matmul(heads(Q) if q is None else q, b.permute(heads(K), (0, 1, 3, 2)))


def softmax(s: Value, axis: int = -1) -> Value:
    e = b.exp(b.sub(s, b.reduce(s, "max", axis, keepdim=True)))
    return b.div(e, b.reduce(e, "sum", axis, keepdim=True))


def finish(s: Value) -> Value:
    return b.matmul(softmax(s), heads(V))


def flattened() -> Value:
    """As torch.matmul decomposes: three-dimensional products between reshapes."""
    def three(x: Value) -> Value:
        return b.reshape(b.expand(x, x.shape), (B * H, *x.shape[2:]))

    s = b.mul(b.reshape(b.matmul(three(heads(Q)), three(b.permute(heads(K), (0, 1, 3, 2)))), (B, H, M, S)), SCALE)
    return b.reshape(b.matmul(three(softmax(s)), three(heads(V))), (B, H, M, D))


SPELLINGS: dict[str, tuple[Callable[[], Value], str, float]] = {
    "plain": (lambda: finish(scores()), "", 1.0),
    "scaled scores": (lambda: finish(b.mul(scores(), SCALE)), "", SCALE),
    "divided scores": (lambda: finish(b.div(scores(), D**0.5)), "", SCALE),
    "scaled query": (lambda: finish(scores(b.mul(heads(Q), SCALE))), "", SCALE),
    "scaled query before permute": (lambda: finish(scores(heads(b.mul(Q, SCALE)))), "", SCALE),
    "flattened": (flattened, "", SCALE),
    "added mask": (lambda: finish(b.add(b.mul(scores(), SCALE), ADDED)), "added", SCALE),
    "mask added in front": (lambda: finish(b.add(ADDED, b.mul(scores(), SCALE))), "added", SCALE),
    "chosen": (lambda: finish(b.where(SEEN, b.mul(scores(), SCALE), -math.inf)), "seen", SCALE),
    "chosen, expanded": (lambda: finish(b.where(b.expand(SEEN, (B, H, M, S)), b.mul(scores(), SCALE), -math.inf)), "seen", SCALE),
    "masked_fill": (lambda: finish(b.where(b.logical_not(SEEN), -math.inf, b.mul(scores(), SCALE))), "seen", SCALE),
    "masked_fill with a number": (lambda: finish(b.where(b.logical_not(SEEN), -1e9, b.mul(scores(), SCALE))), "seen", SCALE),
    "times reciprocal": (lambda: _times_reciprocal(b.mul(scores(), SCALE)), "", SCALE),
}


def _times_reciprocal(s: Value) -> Value:
    e = b.exp(b.sub(s, b.reduce(s, "max", -1, keepdim=True)))
    return b.matmul(b.mul(e, b.reciprocal(b.reduce(e, "sum", -1, keepdim=True))), heads(V))


@pytest.mark.parametrize("spelling", SPELLINGS, ids=str)
def test_spellings_become_attention(spelling: str) -> None:
    make, mask, scale = SPELLINGS[spelling]
    graph = apply(Graph(INPUTS, (make(),)), CANONICAL)
    root = graph.outputs[0]
    assert root.op == "attention" and isinstance(root.attrs, A.AttentionAttrs)
    assert root.attrs.scale == pytest.approx(scale, rel=1e-6) and not root.attrs.causal
    assert len(root.inputs) == (4 if mask else 3)
    assert [v.op for v in root.inputs[:3]] == ["permute"] * 3, "views of the inputs, no transposed copy of k"
    assert not {"exp", "matmul", "reduce"} & {v.op for v in graph.order}

    seen = torch.rand(B, 1, 1, S) < 0.6
    seen[..., 0] = True
    data = [torch.randn(B, M, H, D), torch.randn(B, S, H, D), torch.randn(B, S, H, D), seen, torch.randn(B, 1, M, S)]
    q, k, v = (x.double().transpose(1, 2) for x in data[:3])
    operand = {"": None, "seen": seen, "added": data[4].double()}[mask]
    expected = F.scaled_dot_product_attention(q, k, v, operand, scale=scale)
    # Scores have an error of about D roundings of their size, and so have, relatively, the probabilities and their sums.
    size = float((q.abs() @ k.abs().transpose(-1, -2)).max()) * scale
    bound = torch.finfo(torch.float32).eps * (D * size + S + 4) * float(v.abs().max())
    assert (run(graph, data)[0] - expected).abs().max() <= bound


@pytest.mark.parametrize("rank", [2, 3])
def test_fewer_axes(rank: int) -> None:
    q, k, v = (b.input_(i, f32, ((3,) if rank == 3 else ()) + size) for i, size in enumerate(((M, D), (S, D), (S, D))))
    order = (*range(rank - 2), rank - 1, rank - 2)
    graph = apply(Graph((q, k, v), (b.matmul(softmax(b.matmul(q, b.permute(k, order))), v),)), CANONICAL)
    assert {v.op for v in graph.order} == {"input", "reshape", "attention"}
    assert graph.outputs[0].shape == (*q.shape[:-2], M, D)


def refusal(root: Value) -> str:
    graph = Graph(INPUTS, (root,))
    assert "attention" not in {v.op for v in apply(graph, (attention,)).order}
    return explain(attention, graph)


def test_softmax_over_another_axis() -> None:
    assert "softmax over axes (2,) of 4, not over the keys" in refusal(b.matmul(softmax(scores(), axis=2), heads(V)))


def test_maximum_of_something_else() -> None:
    s = scores()
    e = b.exp(b.sub(s, b.reduce(b.neg(s), "max", -1, keepdim=True)))
    root = b.matmul(b.div(e, b.reduce(e, "sum", -1, keepdim=True)), heads(V))
    assert "expected the same value as the other s, found another neg" in refusal(root)


def test_probabilities_that_are_returned() -> None:
    p = softmax(scores())
    text = explain(attention, Graph(INPUTS, (b.matmul(p, heads(V)), p)))
    assert "expected div with one user, found an output of the graph" in text


def test_a_mask_that_does_not_hide() -> None:
    assert "masked scores become -100.0, which does not hide them" in refusal(finish(b.where(SEEN, scores(), -100.0)))


def test_queries_that_see_no_key_weigh_all_alike() -> None:
    """However large the scores are: these are replaced, not added to."""
    graph = apply(Graph(INPUTS, (finish(b.where(SEEN, scores(), -1e9)),)), CANONICAL)
    assert graph.outputs[0].op == "attention"
    seen = torch.zeros(B, 1, 1, S, dtype=torch.bool)
    q, k, v = 100 * torch.randn(B, M, H, D), 100 * torch.randn(B, S, H, D), torch.randn(B, S, H, D)
    expected = v.transpose(1, 2).mean(-2, keepdim=True).expand(B, H, M, D)
    torch.testing.assert_close(run(graph, [q, k, v, seen, torch.zeros(B, 1, M, S)])[0], expected)


def test_a_mask_that_adds_heads() -> None:
    q, k, v = (b.input_(i, f32, (1, n, D)) for i, n in enumerate((M, S, S)))
    mask = b.input_(3, f32, (3, M, S))
    root = b.matmul(softmax(b.add(b.matmul(q, b.permute(k, (0, 2, 1))), mask)), v)
    assert "the mask stretches the scores" in explain(attention, Graph((q, k, v, mask), (root,)))


def test_shared_keys() -> None:
    q, k, v = b.input_(0, f32, (B, H, M, D)), b.input_(1, f32, (B, 1, S, D)), b.input_(2, f32, (B, 1, S, D))
    root = b.matmul(softmax(b.matmul(q, b.permute(k, (0, 1, 3, 2)))), v)
    assert "differ in batch or heads" in explain(attention, Graph((q, k, v), (root,)))


def test_repeated_heads_are_read_in_place() -> None:
    q, k, v = b.input_(0, f32, (B, 6, M, D)), b.input_(1, f32, (B, 2, S, D)), b.input_(2, f32, (B, 2, S, D))

    def repeated(x: Value) -> Value:
        return b.reshape(b.expand(b.unsqueeze(x, 2), (B, 2, 3, S, D)), (B, 6, S, D))

    root = b.matmul(softmax(b.matmul(q, b.permute(repeated(k), (0, 1, 3, 2)))), repeated(v))
    graph = apply(Graph((q, k, v), (root,)), CANONICAL)
    assert graph.outputs[0].op == "attention" and graph.outputs[0].inputs == (q, k, v)
