"""Permutations sink: they cancel across what lies between them, cost nothing where they do not, and never change a number."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import sashiko
from sashiko.graph import build as b
from sashiko.graph.interpret import run
from sashiko.graph.ir import Graph, Value
from sashiko.graph.types import DType, QParams, bf16, f32, f64, i8, u8
from sashiko.graph.verify import verify
from sashiko.rewrite.query import is_weight
from sashiko.rewrite.rules.permutes import sink_permutes

LAST, FIRST = (0, 2, 3, 1), (0, 3, 1, 2)
X, Y = b.input_(0, f32, (2, 5, 4, 3)), b.input_(1, f32, (2, 5, 4, 3))
IMAGE, OTHER = b.permute(X, FIRST), b.permute(Y, FIRST)  # [2, 3, 5, 4]
PER_CHANNEL = b.constant(torch.randn(3, 1, 1), "scale", True)
WEIGHT = b.constant(torch.randn(3, 5, 4), "weight", True)
UNSIGNED = QParams((0.02,), 120, None, 0, 255)
BY_CHANNEL = QParams((0.01, 0.02, 0.03), 0, 1)


def sunk(*outputs: Value) -> Graph:
    """The graph after the pass, which must be sound and compute the same numbers."""
    graph = Graph((X, Y), outputs)
    result = sink_permutes(graph)
    verify(result)
    inputs = [torch.randn(2, 5, 4, 3), torch.randn(2, 5, 4, 3)]
    for got, want in zip(run(result, inputs), run(graph, inputs), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    return result


def permuted(graph: Graph) -> list[str]:
    """The operations that permutations other than of weights are applied to."""
    return [v.inputs[0].op for v in graph.order if v.op == "permute" and not is_weight(v)]


THROUGH: dict[str, Callable[[], Value]] = {
    "unary": lambda: b.relu(IMAGE),
    "a number": lambda: b.mul(IMAGE, 2.0),
    "one for each channel": lambda: b.add(b.mul(IMAGE, PER_CHANNEL), b.reshape(PER_CHANNEL, (1, 3, 1, 1))),
    "a weight": lambda: b.mul(IMAGE, WEIGHT),
    "one for each sample and channel": lambda: b.mul(IMAGE, b.reduce(IMAGE, "max", (2, 3), True)),
    "two permuted alike": lambda: b.add(IMAGE, b.relu(OTHER)),
    "where": lambda: b.where(b.gt(IMAGE, 0.0), IMAGE, b.mul(OTHER, 0.1)),
    "quantization": lambda: b.dequantize(b.quantize(IMAGE, u8, UNSIGNED)),
    "quantization of channels": lambda: b.dequantize(b.quantize(IMAGE, i8, BY_CHANNEL)),
    "pad": lambda: b.pad(IMAGE, ((0, 0), (0, 0), (1, 2), (0, -1)), 3.0),
    "slice": lambda: b.slice_(IMAGE, 2, 1, 2, 2),
    "concat": lambda: b.concat([IMAGE, OTHER], 1),
    "expand": lambda: b.expand(b.slice_(IMAGE, 1, 0, 1), (2, 7, 5, 4)),
    "what merges and splits what lies together": lambda: b.reshape(b.exp(b.reshape(IMAGE, (2, 1, 3, 20))), (2, 3, 5, 4)),
    "permutation": lambda: b.permute(b.permute(IMAGE, (1, 0, 2, 3)), (1, 0, 2, 3)),
}


@pytest.mark.parametrize("name", THROUGH)
def test_permutations_cancel_across(name: str) -> None:
    assert permuted(sunk(b.permute(THROUGH[name](), LAST))) == []


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("axes", [(1,), (2, 3), (0, 3), (0, 1, 2, 3)])
def test_reductions_take_their_axes_along(axes: tuple[int, ...], keepdim: bool) -> None:
    graph = sunk(b.reduce(b.exp(IMAGE), "sum", axes, keepdim))
    assert "input" not in permuted(graph) and "exp" not in permuted(graph)


@pytest.mark.parametrize("kind", ["sum", "max"])
@pytest.mark.parametrize(("channels", "groups"), [(6, 1), (6, 3), (6, 6), (200, 2)])
def test_group_norms_are_reduced_side_by_side(channels: int, groups: int, kind: str) -> None:
    """Of an image with channels last: over its places first, then over the channels of a group; over these first where they are many."""
    x = b.input_(0, f32, (2, 5, 4, channels))
    grouped = b.reshape(b.permute(x, FIRST), (2, groups, channels // groups, 20))
    graph = Graph((x,), (b.reduce(grouped, kind, (2, 3), True),))
    result = sink_permutes(graph)
    verify(result)
    data = [torch.randn(2, 5, 4, channels)]
    torch.testing.assert_close(run(result, data), run(graph, data), rtol=1e-5, atol=1e-4)
    assert permuted(result) in ([], ["reduce"], ["reshape"])
    reduces = [v for v in result.order if v.op == "reduce"]
    assert len(reduces) == (2 if groups in (2, 3) else 1)
    assert groups != 2 or reduces[0].shape == (2, 20, 2, 1)


@pytest.mark.parametrize("dtype", [f32, bf16])
@pytest.mark.parametrize("kind", ["sum", "max"])
def test_neighbours_are_reduced_first_where_they_are_many(kind: str, dtype: DType) -> None:
    """As of all but the channels of images; in f32 in between."""
    x = b.input_(0, dtype, (4, 3, 10, 10))
    graph = Graph((x,), (b.reduce(x, kind, (0, 2, 3)),))
    result = sink_permutes(graph)
    verify(result)
    assert [v.shape for v in result.order if v.op == "reduce"] == [(4, 3, 1, 1), (1, 3, 1, 1)]
    data = [torch.randn(4, 3, 10, 10, dtype=dtype.torch)]
    [got], wide = run(result, data), data[0].double()
    expected = (wide.sum((0, 2, 3)) if kind == "sum" else wide.amax((0, 2, 3))).to(dtype.torch)
    torch.testing.assert_close(got, expected, rtol=1e-2 if dtype == bf16 else 1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [f32, f64, bf16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("features", "within", "mixed"), [((4, 3), 20, True), ((8, 8), 20, True), ((9, 2), 20, False), ((4, 3), 3, False)])
def test_few_features_are_mixed_where_they_lie(features: tuple[int, int], within: int, mixed: bool, bias: bool, dtype: DType) -> None:
    """As heads of an attention are: [2, K, 5, within] stays as it is. Many are a product, and so are few of few places."""
    k, n = features
    x = b.input_(0, dtype, (2, k, 5, within))
    weight, addend = torch.randn(n, k, dtype=dtype.torch), torch.randn(n, dtype=dtype.torch)
    parts = (b.constant(weight, "w", True), *((b.constant(addend, "b", True),) if bias else ()))
    graph = Graph((x,), (b.permute(b.linear(b.permute(x, LAST), *parts), FIRST),))
    result = sink_permutes(graph)
    verify(result)
    assert (permuted(result) == []) == mixed == all(v.op != "linear" for v in result.order)
    data = [torch.randn(2, k, 5, within, dtype=dtype.torch)]
    bound = 8 * torch.finfo(dtype.torch).eps
    torch.testing.assert_close(run(result, data), run(graph, data), rtol=bound, atol=4 * bound)


def test_neighbours_are_no_mixture() -> None:
    """What a linear sums lies side by side already."""
    graph = Graph((X,), (b.linear(b.permute(X, (1, 2, 0, 3)), b.constant(torch.randn(2, 3))),))
    assert sink_permutes(graph).outputs == graph.outputs


@pytest.mark.parametrize("before", [lambda x: x, b.relu], ids=["input", "computed"])
def test_a_weight_that_is_permuted_moves_nothing_of_what_it_is_multiplied_with(before: Callable[[Value], Value]) -> None:
    x = b.input_(0, f32, (4, 4, 20, 4))
    graph = Graph((x,), (b.linear(before(x), b.permute(b.constant(torch.randn(4, 4), "w", True), (1, 0))),))
    assert sink_permutes(graph).outputs == graph.outputs


def test_what_does_not_lie_together_is_reshaped_after_the_permutation() -> None:
    graph = Graph((X,), (b.reshape(IMAGE, (2, 15, 4)),))
    assert sink_permutes(graph).outputs == graph.outputs


def test_nothing_is_moved_for_a_permutation() -> None:
    """An operand that is no permutation stays as it is, and so does what reads both."""
    plain = b.input_(1, f32, (2, 3, 5, 4))
    graph = Graph((X, plain), (b.add(IMAGE, plain), b.concat([IMAGE, plain], 1)))
    assert sink_permutes(graph).outputs == graph.outputs


def test_a_long_chain_is_one_walk() -> None:
    value = IMAGE
    for _ in range(500):
        value = b.sin(value)
    assert permuted(sunk(b.permute(value, LAST))) == []


@torch.no_grad()
@pytest.mark.parametrize("groups", [1, 4, 32])
def test_group_norms_between_convolutions(groups: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 32, 1), nn.GroupNorm(groups, 32), nn.SiLU(), nn.Conv2d(32, 8, 1)).eval()
    x = torch.randn(2, 3, 6, 7)
    compiled = sashiko.compile(model, (x,), strict=True)
    got, exact = compiled(x), model.double()(x.double())
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-5)
