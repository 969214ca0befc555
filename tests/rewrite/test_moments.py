"""Sums of squared differences in blocks: what is taken apart, what stays, and how exact it is."""

from __future__ import annotations

from math import prod

import pytest
import torch

from sashiko.graph import build as b
from sashiko.graph.interpret import run
from sashiko.graph.ir import Graph, Value
from sashiko.graph.types import f32
from sashiko.rewrite.rules.moments import in_blocks


def moments(x: Value, axes: tuple[int, ...], more: tuple[int, ...] = ()) -> tuple[Value, Value]:
    """The mean over axes, and over `more` of these means; the sum of the squared differences from it over the same axes."""
    total = b.reduce(x, "sum", axes, keepdim=True)
    if more:
        total = b.reduce(total, "sum", more, keepdim=True)
    mean = b.div(total, float(prod(x.shape[axis] for axis in (*axes, *more))))  # type: ignore[arg-type,misc]
    difference = b.sub(x, mean)
    squares = b.reduce(b.mul(difference, difference), "sum", axes, keepdim=True)
    return mean, b.reduce(squares, "sum", more, keepdim=True) if more else squares


@pytest.mark.parametrize(
    ("shape", "axes", "more"),
    [
        ((2, 320, 6), (1,), (2,)),  # a group normalization of pixels
        ((1, 4, 24, 10), (1, 2), (3,)),
        ((2, 4096, 6), (1,), ()),
        ((77, 32, 3), (0, 1), ()),  # a batch normalization
        ((3000, 6), (0,), ()),
    ],
)
def test_what_is_taken_apart(shape: tuple[int, ...], axes: tuple[int, ...], more: tuple[int, ...]) -> None:
    x = b.input_(0, f32, shape)
    graph = Graph((x,), moments(x, axes, more))
    cut = in_blocks(graph)
    longest = max(v.inputs[0].shape[axis] for v in cut.order if v.op == "reduce" for axis in v.attrs.axes[-1:])  # type: ignore
    assert cut is not graph and longest <= 128
    data = torch.randn(shape) + 3
    kept = {"keepdim": True}
    mean = data.double().mean((*axes, *more), **kept)
    exact = (data.double() - mean).square().sum((*axes, *more), **kept)
    got_mean, got = run(cut, [data])
    torch.testing.assert_close(got_mean.double(), mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got.double(), exact, rtol=2e-6, atol=0.0)


def test_numbers_far_from_zero() -> None:
    """Means of blocks are rounded: the error is that of the elements themselves beside their deviation, not its square."""
    x = b.input_(0, f32, (1, 4096, 4))
    data = torch.randn(1, 4096, 4) + 1000
    exact = (data.double() - data.double().mean((1, 2), keepdim=True)).square().sum((1, 2), keepdim=True)
    _, got = run(in_blocks(Graph((x,), moments(x, (1,), (2,)))), [data])
    torch.testing.assert_close(got.double(), exact, rtol=1000 * 2.0**-23, atol=0.0)


def test_what_stays() -> None:
    x, y = b.input_(0, f32, (4, 320, 6)), b.input_(1, f32, (4, 320, 6))
    rest = b.sub(x, b.div(b.reduce(x, "sum", (1, 2), keepdim=True), 1920.0))
    squares = b.reduce(b.mul(rest, rest), "sum", 1, keepdim=True)

    def about(middle: Value) -> tuple[Value, Value]:
        difference = b.sub(x, middle)
        return b.reduce(b.mul(difference, difference), "sum", 1), b.reduce(x, "sum", 1)

    total = b.reduce(b.reduce(x, "sum", 1, keepdim=True), "sum", 2, keepdim=True)
    for name, roots in {
        "rows": moments(x, (2,)),
        "few elements, which one kernel reads for both": moments(x, (1,)),
        "no blocks of a good size": moments(b.reshape(x, (32, 5, 48)), (1,), (2,)),
        "axes that are not neighbours": moments(x, (0, 2)),
        "no sum of the elements": (squares,),
        "differences that are summed, too": (squares, b.reduce(x, "sum", 1, keepdim=True), b.reduce(rest, "sum", 1, keepdim=True)),
        "another tensor": about(y),
        "numbers from elsewhere": about(b.input_(2, f32, (4, 1, 1))),
        "the mean of others": about(moments(y, (1,), (2,))[0]),
        "half the mean": about(b.div(total, 3840.0)),
        "more axes than the elements have": about(b.input_(2, f32, (3, 1, 1, 1))),
    }.items():
        graph = Graph((x, y), roots)
        assert in_blocks(graph) is graph, name
