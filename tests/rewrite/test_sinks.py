"""Attention with sinks, keys whose value is 0, is recognised as models spell it, and compared with torch in fp64."""

from __future__ import annotations

import math

import pytest
import torch

from sashiko.graph import build as b
from sashiko.graph.interpret import run
from sashiko.graph.ir import Graph, Value
from sashiko.graph.types import DType, bf16, boolean, f32
from sashiko.rewrite import apply
from sashiko.rewrite.rules import CANONICAL
from tests.rewrite.test_attention import SCALE, B, D, H, M, S, V, heads, refusal, scores, softmax


def beside_sink(s: Value, sink: Value, *, first: bool, twice: bool) -> Value:
    """The probabilities of scores with a sink; twice: the largest is subtracted, as gpt-oss does, before softmax does."""
    wide = b.expand(sink, (*s.shape[:-1], 1))
    joined = b.concat((wide, s) if first else (s, wide), 3)
    below = b.cast(b.sub(*(b.cast(x, f32) for x in (joined, b.reduce(joined, "max", -1, keepdim=True)))), s.dtype)
    return b.slice_(b.cast(softmax(b.cast(below if twice else joined, f32)), s.dtype), 3, int(first), S)


@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_sinks(first: bool, twice: bool, dtype: DType) -> None:
    q, k, v = (b.input_(i, dtype, (B, H, n, D)) for i, n in enumerate((M, S, S)))
    seen, sink = b.input_(3, boolean, (B, 1, 1, S)), b.input_(4, dtype, (1, H, 1, 1))
    s = b.cast(b.where(seen, b.mul(b.matmul(q, b.permute(k, (0, 1, 3, 2))), SCALE), -3e38), dtype)
    root = b.cast(b.matmul(beside_sink(s, sink, first=first, twice=twice), v), dtype)
    graph = apply(Graph((q, k, v, seen, sink), (root,)), CANONICAL)
    assert "attention" in {x.op for x in graph.order} and not {"exp", "concat", "reduce"} & {x.op for x in graph.order}
    data = [torch.randn(B, H, n, D).to(dtype.torch) for n in (M, S, S)]
    data += [torch.rand(B, 1, 1, S) < 0.6, torch.randn(1, H, 1, 1).to(dtype.torch)]
    data[3][..., 0] = True
    scores = (data[0].double() @ data[1].double().mT * SCALE).masked_fill(~data[3], -math.inf)
    expected = torch.cat((scores, data[4].double().expand(B, H, M, 1)), -1).softmax(-1)[..., :S] @ data[2].double()
    assert (run(graph, data)[0] - expected).abs().max() <= 32 * torch.finfo(dtype.torch).eps * data[2].double().abs().max()


def test_parts_of_probabilities_that_are_not_those_of_scores() -> None:
    sink = b.full(0.5, f32, (1, H, 1, 1))
    joined = b.concat((scores(), b.expand(sink, (B, H, M, 1))), 3)
    assert "is not that of the scores" in refusal(b.matmul(b.slice_(softmax(joined), 3, 1, S), heads(V)))
    p, v = b.slice_(softmax(scores()), 3, 0, S - 1), b.slice_(heads(V), 2, 0, S - 1)
    assert "they are not of scores and a sink" in refusal(b.matmul(p, v))
