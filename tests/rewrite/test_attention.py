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
from sashiko.graph.types import DType, bf16, boolean, f16, f32, f64
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
    assert root.attrs.scale == pytest.approx(scale, rel=1e-6) and root.attrs.after is None
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


def windows() -> Value:
    """As Swin adds the masks of its windows: batches of M / 5 windows, each with a mask."""
    w, batch = b.reshape(ADDED, (1, B, 1, M, S)), (1, B, H, M, S)
    return b.reshape(b.add(b.reshape(b.add(scores(), b.slice_(BIAS, 1, 0, 1)), batch), w), (B, H, M, S))


def merged() -> Value:
    """As Bloom adds its biases: heads are part of the batch before a mask is."""
    def three(x: Value) -> Value:
        return b.reshape(x, (B * H, *x.shape[2:]))

    s = b.add(b.mul(b.matmul(three(heads(Q)), three(b.permute(heads(K), (0, 1, 3, 2)))), SCALE), b.reshape(BIAS, (B * H, 1, S)))
    return b.matmul(b.reshape(softmax(b.add(b.reshape(s, (B, H, M, S)), ADDED)), (B * H, M, S)), three(heads(V)))


BIAS, EACH = b.input_(5, f32, (B, H, 1, S)), b.input_(6, f32, (H, 1, 1))
LOW = -3e38
# How a model computes its scores, and the same of tensors, in f64.
STEPS: dict[str, tuple[Callable[[], Value], Callable[..., torch.Tensor]]] = {
    "a bias, then hidden": (
        lambda: finish(b.where(SEEN, b.add(b.mul(scores(), SCALE), BIAS), LOW)),
        lambda s, seen, added, bias, each: (s * SCALE + bias).masked_fill(~seen, -math.inf),
    ),
    "hidden, then a bias": (
        lambda: finish(b.add(b.where(b.logical_not(SEEN), -math.inf, scores()), BIAS)),
        lambda s, seen, added, bias, each: s.masked_fill(~seen, -math.inf) + bias,
    ),
    "hidden twice": (
        lambda: finish(b.where(SEEN, b.where(b.gt(ADDED, -1.0), scores(), -math.inf), -math.inf)),
        lambda s, seen, added, bias, each: s.masked_fill(~(seen & (added > -1)), -math.inf),
    ),
    "a bias and a mask": (
        lambda: finish(b.add(b.add(scores(), BIAS), ADDED)), lambda s, seen, added, bias, each: s + bias + added,
    ),
    "a bias, times the scale, less a mask": (
        lambda: finish(b.sub(b.mul(b.add(BIAS, scores()), SCALE), ADDED)),
        lambda s, seen, added, bias, each: (s + bias) * SCALE - added,
    ),
    "a factor for each head": (
        lambda: finish(b.add(b.mul(b.mul(scores(), EACH), SCALE), BIAS)), lambda s, seen, added, bias, each: s * each * SCALE + bias,
    ),
    "hidden by a number, divided": (
        lambda: finish(b.div(b.where(SEEN, scores(), -1e9), 8.0)),
        lambda s, seen, added, bias, each: (s / 8).masked_fill(~seen, -math.inf),
    ),
    "capped, then hidden": (
        lambda: finish(b.where(SEEN, b.mul(b.tanh(b.div(b.mul(scores(), SCALE), 0.5)), 0.5), LOW)),
        lambda s, seen, added, bias, each: (0.5 * (s * SCALE / 0.5).tanh()).masked_fill(~seen, -math.inf),
    ),
    "windows": (lambda: finish(windows()), lambda s, seen, added, bias, each: s + bias[:, :1] + added),
    "merged": (merged, lambda s, seen, added, bias, each: s * SCALE + bias + added),
}


@pytest.mark.parametrize("name", STEPS)
def test_scores_in_several_steps(name: str) -> None:
    make, expected = STEPS[name]
    graph = apply(Graph((*INPUTS, BIAS, EACH), (make(),)), CANONICAL)
    assert not {"exp", "matmul", "div"} & {v.op for v in graph.order} and "attention" in {v.op for v in graph.order}
    seen, added = torch.rand(B, 1, 1, S) < 0.6, torch.randn(B, 1, M, S).clamp(min=-0.9)
    seen[..., 0], added[..., 0] = True, 0
    data = [torch.randn(B, n, H, D) for n in (M, S, S)] + [seen, added, torch.randn(B, H, 1, S), torch.rand(H, 1, 1) + 0.5]
    q, k, v = (x.double().transpose(1, 2) for x in data[:3])
    s = expected(q @ k.mT, seen, *(x.double() for x in data[4:]))
    result = (s.softmax(-1) @ v).view(graph.outputs[0].shape)
    torch.testing.assert_close(run(graph, data)[0].double(), result, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [bf16, f16], ids=str)
@pytest.mark.parametrize("scores_in", ["f32", "narrow"])
def test_narrow_floats(dtype: DType, scores_in: str) -> None:
    """Products are sums in f32, which the model rounds, or not; attention does not."""
    q, k, v = (b.input_(i, dtype, (B, H, n, D)) for i, n in enumerate((M, S, S)))
    wide = [b.cast(x, f32) for x in (q, b.permute(k, (0, 1, 3, 2)))]
    s = b.matmul(*wide) if scores_in == "f32" else b.cast(b.cast(b.matmul(q, b.permute(k, (0, 1, 3, 2))), dtype), f32)
    root = b.cast(b.matmul(b.cast(softmax(b.mul(s, SCALE)), dtype), v), dtype)
    graph = apply(Graph((q, k, v), (root,)), CANONICAL)
    assert graph.outputs[0].op == "attention" and {v.op for v in graph.order} == {"input", "attention"}
    data = [torch.randn(B, H, n, D).to(dtype.torch) for n in (M, S, S)]
    expected = F.scaled_dot_product_attention(*(x.double() for x in data))
    assert (run(graph, data)[0] - expected).abs().max() <= 4 * torch.finfo(dtype.torch).eps * data[2].double().abs().max()


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


def test_a_hidden_score_that_is_scaled_down() -> None:
    assert "masked scores become -2.0, which does not hide them" in refusal(finish(b.mul(b.where(SEEN, scores(), -(2.0**34)), 2.0**-33)))


def test_scores_that_are_hidden_and_turned_around() -> None:
    assert "masked scores are multiplied by -1.0" in refusal(finish(b.mul(b.where(SEEN, scores(), -math.inf), -1.0)))


def test_scores_that_are_hidden_twice_by_numbers_of_which_the_greater_would_count() -> None:
    low = -1e9
    hidden, added = b.where(SEEN, scores(), low), b.add(scores(), ADDED)
    for s in (b.add(hidden, ADDED), b.where(SEEN, added, low), b.where(b.gt(ADDED, 0.0), hidden, low)):
        assert "scores that become -1000000000.0 are masked once more" in refusal(finish(s))


def test_caps_of_what_is_masked_or_capped() -> None:
    for s in (b.add(scores(), ADDED), b.tanh(scores())):
        assert "masked or capped scores are capped" in refusal(finish(b.tanh(s)))
    assert "more than a number for each query" in explain(attention, Graph((*INPUTS, EACH), (finish(b.mul(b.tanh(scores()), EACH)),)))


def test_factors_that_f32_does_not_hold() -> None:
    for s in (b.mul(b.mul(scores(), 1e30), 1e30), b.mul(b.tanh(b.mul(b.mul(scores(), 1e30), 1e30)), 2.0)):
        assert "multiplied by more than f32 holds" in refusal(finish(s))


def test_a_smaller_product_is_added_like_a_mask() -> None:
    less = b.matmul(b.slice_(heads(Q), 0, 0, 1), b.permute(b.slice_(heads(K), 0, 1, 1), (0, 1, 3, 2)))
    graph = apply(Graph(INPUTS, (finish(b.add(less, scores())),)), CANONICAL)
    assert graph.outputs[0].op == "attention"
    data = [torch.randn(B, n, H, D) for n in (M, S, S)]
    q, k, v = (x.double().transpose(1, 2) for x in data)
    result = (q[:1] @ k[1:].mT + q @ k.mT).softmax(-1) @ v
    given = [*data, torch.ones(B, 1, 1, S, dtype=torch.bool), torch.zeros(B, 1, M, S)]
    torch.testing.assert_close(run(graph, given)[0].double(), result, rtol=1e-5, atol=1e-5)


def test_scores_that_something_else_reads() -> None:
    s = b.mul(scores(), SCALE)
    graph = Graph(INPUTS, (finish(b.add(s, ADDED)), b.reduce(s, "sum", -1)))
    assert "attention" not in {v.op for v in apply(graph, CANONICAL).order}
    assert "the scores are used elsewhere, too" in explain(attention, graph)


def test_factors_of_queries_in_narrow_floats_or_of_few_keys() -> None:
    q, k = (b.cast(heads(x), f16) for x in (Q, K))
    s = b.mul(b.matmul(q, b.permute(k, (0, 1, 3, 2))), EACH)
    text = explain(attention, Graph((*INPUTS, EACH), (b.cast(b.matmul(b.cast(softmax(s), f16), b.cast(heads(V), f16)), f16),)))
    assert "a factor for each query is for f32" in text
    few = b.mul(b.matmul(heads(Q), b.permute(b.slice_(heads(K), 2, 0, D), (0, 1, 3, 2))), EACH)
    text = explain(attention, Graph((*INPUTS, EACH), (b.matmul(softmax(few), b.slice_(heads(V), 2, 0, D)),)))
    assert "for more keys than there is depth" in text


def test_scores_of_no_product() -> None:
    assert "the scores are no product of queries and keys" in refusal(finish(b.add(b.expand(ADDED, (B, H, M, S)), 1.0)))
    doubled = b.expand(ADDED, (B, H, M, S))
    for _ in range(60):
        doubled = b.add(doubled, doubled)  # is not followed along every way through it
    assert "attention" in refusal(finish(doubled))
    squared = b.sin(b.matmul(heads(Q), b.permute(b.slice_(heads(K), 2, 0, 1), (0, 1, 3, 2))))
    for _ in range(60):
        squared = b.mul(squared, squared)
    assert "attention" in refusal(b.matmul(softmax(squared), b.slice_(heads(V), 2, 0, 1)))


def test_rounded_scores_of_values_that_are_not() -> None:
    assert "the scores are rounded to narrow floats" in refusal(finish(b.cast(b.cast(scores(), bf16), f32)))


def test_queries_that_see_no_key_weigh_all_alike() -> None:
    """However large the scores are: these are replaced, not added to."""
    graph = apply(Graph(INPUTS, (finish(b.where(SEEN, scores(), -1e9)),)), CANONICAL)
    assert graph.outputs[0].op == "attention"
    seen = torch.zeros(B, 1, 1, S, dtype=torch.bool)
    q, k, v = 100 * torch.randn(B, M, H, D), 100 * torch.randn(B, S, H, D), torch.randn(B, S, H, D)
    expected = v.transpose(1, 2).mean(-2, keepdim=True).expand(B, H, M, D)
    torch.testing.assert_close(run(graph, [q, k, v, seen, torch.zeros(B, 1, M, S)])[0], expected)


def test_rows_of_which_no_score_is_kept() -> None:
    """They are 0 where the model says so, too."""
    s = b.where(SEEN, scores(), -math.inf)
    hidden = b.reduce(b.eq(s, -math.inf), "all", -1, keepdim=True)
    graph = apply(Graph(INPUTS, (b.matmul(b.where(hidden, 0.0, softmax(s)), heads(V)),)), CANONICAL)
    assert graph.outputs[0].op == "attention" and "reduce" not in {v.op for v in graph.order}
    seen, (q, k, v) = torch.rand(B, 1, 1, S) < 0.6, (torch.randn(B, n, H, D) for n in (M, S, S))
    seen[0], seen[1, ..., 0] = False, True
    expected = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=seen, scale=1.0)
    torch.testing.assert_close(run(graph, [q, k, v, seen, torch.zeros(B, 1, M, S)])[0], expected)
    assert "expected the number 0, found 1.0" in refusal(b.matmul(b.where(hidden, 1.0, softmax(s)), heads(V)))
    for axis in (1, 2):
        other = b.reduce(b.eq(s, -math.inf), "all", axis, keepdim=True)
        assert "not over the keys" in refusal(b.matmul(b.where(other, 0.0, softmax(s)), heads(V)))


def test_keys_hidden_by_the_lowest_number_of_f64() -> None:
    """f32 does not hold it; queries that see no key weigh all alike."""
    q, k, v = (b.input_(i, f64, (B, H, n, D)) for i, n in enumerate((M, S, S)))
    s = b.where(SEEN, b.matmul(q, b.permute(k, (0, 1, 3, 2))), torch.finfo(torch.float64).min)
    graph = apply(Graph((q, k, v, SEEN), (b.matmul(softmax(s), v),)), CANONICAL)
    assert graph.outputs[0].op == "attention"
    data = [torch.randn(B, H, n, D, dtype=torch.float64) for n in (M, S, S)]
    got = run(graph, [*data, torch.zeros(B, 1, 1, S, dtype=torch.bool)])[0]
    torch.testing.assert_close(got, data[2].mean(-2, keepdim=True).expand(B, H, M, D))


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
