"""Short functions stand where their error is rounded off, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sashiko
from sashiko.graph import attrs as A
from sashiko.graph import build as b
from sashiko.graph.interpret import run
from sashiko.graph.ir import Graph, Value
from sashiko.graph.ops import MADE, SHORT, make
from sashiko.graph.types import DType, QParams, TupleType, bf16, f32, f64, i8, i32, u8
from sashiko.rewrite.rules.short import shorten

X = b.input_(0, f32, (4, 64))
Unary = Callable[[Value], Value]
Math = Callable[[torch.Tensor], torch.Tensor]


def gelu(x: Value) -> Value:
    return b.mul(b.mul(x, 0.5), b.add(b.erf(b.mul(x, 0.5**0.5)), 1.0))


def tanh_gelu(x: Value) -> Value:
    return b.mul(b.mul(x, 0.5), b.add(1.0, b.tanh(b.mul(x, 0.8))))


def silu(x: Value) -> Value:
    return b.mul(b.sigmoid(x), x)


FUNCTIONS = pytest.mark.parametrize("function", [gelu, tanh_gelu, silu])


def rows(x: Value) -> Value:
    """Quantization with a scale and a zero point of each row."""
    high, low = b.relu(b.reduce(x, "max", 1, keepdim=True)), b.minimum(b.reduce(x, "min", 1, keepdim=True), 0.0)
    scale = b.maximum(b.div(b.sub(high, low), 255.0), 1e-7)
    zero = b.round_(b.minimum(b.maximum(b.sub(-128.0, b.div(low, scale)), -128.0), 127.0))
    return b.quantize(b.add(b.mul(x, b.reciprocal(scale)), zero), i8, QParams((1.0,), 0, None, -128, 127))


def eight(x: Value) -> Value:
    return b.quantize(b.div(x, 3.0), u8, QParams((0.05,), 3, None, 0, 255))


def clamped(x: Value) -> Value:
    """The same in the operations of a user."""
    return b.cast(b.minimum(b.maximum(b.round_(b.mul(x, 20.0)), -128.0), 127.0), i8)


def shortened(root: Value) -> Graph:
    return shorten(Graph((X,), (root,)))


def count(root: Value) -> int:
    return sum(v.op in SHORT for v in shortened(root).order)


@FUNCTIONS
def test_where_the_result_is_narrow(function: Unary) -> None:
    assert count(b.cast(function(X), bf16)) == 1
    assert count(eight(function(X))) == 1
    assert count(rows(function(X))) == 1
    assert count(clamped(function(X))) == 1
    assert count(b.cast(b.round_(b.maximum(b.minimum(function(X), 255.0), 0.0)), u8)) == 1


@FUNCTIONS
def test_not_where_digits_could_show(function: Unary) -> None:
    y = function(X)
    assert count(y) == 0, "the result is f32"
    assert count(b.cast(b.sub(y, X), bf16)) == 0, "a difference can cancel"
    assert count(b.cast(b.where(b.gt(y, 0.0), X, b.neg(X)), bf16)) == 0, "a decision"
    assert count(b.reduce(y, "max", 1)) == 0
    assert count(b.cast(b.round_(y), i8)) == 0, "large values wrap around"
    assert count(b.cast(b.minimum(b.round_(y), 127.0), i8)) == 0
    assert count(b.cast(b.minimum(b.maximum(b.round_(y), -1e6), 1e6), i8)) == 0
    assert count(b.cast(b.minimum(b.maximum(b.round_(y), -128.0), 127.0), i32)) == 0, "nothing says that more bits are of no interest"
    both = shorten(Graph((X,), (b.cast(y, bf16), y)))
    assert not any(v.op in SHORT for v in both.order), "somebody sees the f32 value too"


@FUNCTIONS
def test_the_meaning_is_the_same(function: Unary) -> None:
    data = torch.linspace(-8, 8, 256).view(4, 64)
    [expected], [got] = run(Graph((X,), (function(X),)), [data]), run(shortened(b.cast(function(X), bf16)), [data])
    # Rounding to bf16, and the cancellation of 1 + erf and 1 + tanh in f32, which the short functions do without.
    torch.testing.assert_close(got.float(), expected, rtol=2**-8, atol=8 * 2**-23)


def test_erf_becomes_the_normal_distribution() -> None:
    def names(root: Value, fast: bool = False) -> set[str]:
        return {v.op for v in shorten(Graph((X,), (root,)), fast).order} & {"erf", *MADE}

    assert names(gelu(X)) == names(b.sub(gelu(X), X)) == {"gelu"}, "to all digits"
    assert names(b.add(1.0, b.erf(b.mul(X, 0.5**0.5)))) == {"normal_cdf"}
    assert names(b.cast(gelu(X), bf16)) == names(b.cast(gelu(X), bf16), fast=True) == {"normal_cdf_short"}
    for narrow in (eight, rows, clamped):
        assert (names(narrow(gelu(X))), names(narrow(gelu(X)), fast=True)) == ({"normal_cdf_short"}, {"gelu"})
    assert names(b.add(b.erf(X), 1.0)) == names(b.add(b.erf(b.mul(X, 0.5**0.5)), 2.0)) == {"erf"}


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
def test_numbers_of_more_axes_stretch_what_is_shorter(place: int, dtype: DType) -> None:
    half, root, one = (b.full(c, f32, (2, 4, 64) if n == place else ()) for n, c in enumerate((0.5, 0.5**0.5, 1.0)))
    graph = Graph((X,), (b.cast(b.mul(b.mul(X, half), b.add(b.erf(b.mul(X, root)), one)), dtype),))
    data = [torch.linspace(-3, 3, 256).view(4, 64)]
    [got], [expected] = run(shorten(graph), data), run(graph, data)
    torch.testing.assert_close(got.float(), expected.float(), rtol=2**-7, atol=2**-20)


def test_beside_operations_of_several_results() -> None:
    attrs = A.AtenAttrs(torch.ops.aten.sort.default, (A.Slot(0),), (), "")
    left = make("aten", X, attrs=attrs, type=TupleType((X.tensor, X.tensor)))
    graph = Graph((X,), (b.sigmoid(X), left))
    assert shorten(graph) is graph


def test_weights_of_a_softmax() -> None:
    def names(root: Value) -> set[str]:
        return {v.op for v in shortened(root).order} & {"exp", "exp_weight"}

    top = b.reduce(X, "max", 1, keepdim=True)
    assert names(b.exp(b.sub(X, top))) == {"exp_weight"}
    assert names(b.exp(b.sub(top, X))) == names(b.exp(X)) == {"exp"}
    assert names(b.exp(b.sub(b.neg(X), top))) == {"exp"}, "the largest of other numbers"
    assert names(b.exp(b.sub(X, b.reduce(X, "min", 1, keepdim=True)))) == {"exp"}
    square = b.input_(0, f32, (4, 4))
    assert names(b.exp(b.sub(square, b.reduce(square, "max", 1)))) == {"exp"}, "the largest of other rows"
    wide = b.input_(0, f64, (4, 64))
    assert names(b.exp(b.sub(wide, b.reduce(wide, "max", 1, keepdim=True)))) == {"exp"}


class Narrow(nn.Module):
    def __init__(self, function: Math) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x).bfloat16()


@pytest.mark.parametrize(
    ("function", "exact"),
    [
        (F.gelu, lambda x: x * torch.special.erfc(-x * 0.5**0.5) / 2),
        (
            lambda x: F.gelu(x, approximate="tanh"),
            lambda x: x * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)),
        ),
        (F.silu, lambda x: x * torch.sigmoid(x)),
    ],
    ids=["gelu", "tanh gelu", "silu"],
)
def test_compiled_results_are_half_a_unit_of_bf16_off(function: Math, exact: Math) -> None:
    x = torch.cat((torch.linspace(-9, 9, 4001), torch.tensor([0.0, -0.0, 30.0, -30.0, 1e9, -1e9, float("inf"), float("nan")])))
    fast = sashiko.compile(Narrow(function).eval(), (x,))
    assert "_short" in str(sashiko.explain(fast))
    # The argument of the tanh form is rounded in f32: its error times its own size, at most 2^6 where the result is not flushed.
    torch.testing.assert_close(fast(x).double(), exact(x.double()), rtol=2**-8 + 2**-12 + 2**-16, atol=2**-60, equal_nan=True)
