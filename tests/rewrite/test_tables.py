"""Tables stand for whole chains between one number and its rounding to 8 bits, and only where nothing else needs them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sashiko.diagnostics.errors import InputError, InvalidGraph
from sashiko.graph import attrs as A
from sashiko.graph import build as b
from sashiko.graph.interpret import run
from sashiko.graph.ir import Graph, Value
from sashiko.graph.ops import make
from sashiko.graph.parse import parse
from sashiko.graph.text import dump
from sashiko.graph.types import QParams, bf16, f32, i8, i32, u8
from sashiko.graph.verify import verify
from sashiko.rewrite.rules.tables import tabulate

X = b.input_(0, f32, (4, 64))
Y = b.input_(1, f32, (4, 64))
BIAS = b.constant(torch.randn(64, generator=torch.Generator().manual_seed(0)))
DATA = torch.linspace(-9, 9, 253), torch.tensor([float("nan"), float("inf"), float("-inf")])
Unary = Callable[[Value], Value]


def gelu(x: Value) -> Value:
    return b.mul(b.mul(x, 0.5), b.add(b.erf(b.mul(x, 0.5**0.5)), 1.0))


def silu(x: Value) -> Value:
    return b.mul(b.sigmoid(x), x)


def leaky(x: Value) -> Value:
    """A choice that is smooth at its border."""
    return b.where(b.gt(x, 0.0), x, b.expm1(x))


def unsigned(x: Value) -> Value:
    return b.quantize(x, u8, QParams((0.03,), 9, None, 0, 255))


def signed(x: Value) -> Value:
    return b.quantize(x, i8, QParams((0.05,)))


def clamped(x: Value) -> Value:
    return b.cast(b.minimum(b.maximum(b.round_(b.mul(x, 20.0)), -128.0), 127.0), i8)


def rounded_last(x: Value) -> Value:
    return b.cast(b.round_(b.maximum(b.minimum(b.add(b.mul(x, 20.0), 10.0), 255.0), 0.0)), u8)


def tabulated(*roots: Value) -> Graph:
    graph = tabulate(Graph((X, Y), roots), 32)
    verify(graph)
    return graph


def source(root: Value) -> Value | None:
    """What the root is a function of, read from a table; None where it is computed."""
    [new] = tabulated(root).outputs
    return new.inputs[0] if new.op == "piecewise" else None


@pytest.mark.parametrize("end", [unsigned, signed, clamped, rounded_last])
@pytest.mark.parametrize("function", [gelu, silu, leaky, b.tanh, b.sigmoid])
def test_the_meaning_is_the_same(function: Unary, end: Unary) -> None:
    root = end(function(X))
    table = tabulated(root)
    data = torch.cat(DATA).view(4, 64)
    [got], [expected] = run(table, [data, data]), run(Graph((X, Y), (root,)), [data, data])
    assert [v.op for v in table.order if v.op not in ("input", "full")] == ["piecewise"]
    assert table.outputs[0].type == root.type
    nowhere = run(Graph((X,), (function(X),)), [data])[0].isnan()
    if root.op == "cast":
        expected[nowhere] = 0  # torch leaves it to the processor
    difference = (got.int() - expected.int()).abs()
    assert difference.max() <= 1 and difference.float().mean() < 0.1
    assert torch.equal(got[nowhere], expected[nowhere])


def test_the_chain_reaches_as_far_as_it_depends_on_one_number() -> None:
    assert source(unsigned(gelu(X))) is X
    biased = b.add(b.mul(X, Y), BIAS)
    assert source(unsigned(gelu(biased))) is biased
    assert source(unsigned(gelu(b.mul(b.cast(b.cast(X, i32), f32), 0.01)))) is not None
    assert source(unsigned(b.mul(gelu(X), b.add(b.tanh(X), 2.0)))) is X, "two functions of one number"
    inner = b.tanh(b.add(X, Y))
    assert source(unsigned(b.mul(inner, 3.0))) is inner.inputs[0]


def test_only_functions_of_one_number() -> None:
    assert source(unsigned(b.mul(gelu(X), Y))) is None
    assert source(unsigned(b.add(gelu(X), gelu(Y)))) is None


FACTORS = torch.randn(64, generator=torch.Generator().manual_seed(1)).sign() * torch.logspace(-3, 0.5, 64)


@pytest.mark.parametrize("end", [unsigned, signed])
@pytest.mark.parametrize("function", [gelu, silu, b.tanh])
def test_factors_of_channels_come_after_the_table(function: Unary, end: Unary) -> None:
    c, rows = b.constant(FACTORS), b.constant(FACTORS[:4, None])
    y = function(X)
    twice = b.div(b.mul(b.mul(y, b.reshape(c, (1, 64))), 0.5), c)
    for factored in (b.mul(y, c), b.mul(c, y), twice, b.div(b.mul(y, 3.0), rows)):
        root = end(factored)
        table = tabulated(root)
        assert table.outputs[0].op == "piecewise" and table.outputs[0].inputs[0] is X and table.outputs[0].type == root.type
        for data in (torch.cat(DATA).view(4, 64), torch.cat(DATA).view(64, 4).T.contiguous()):
            [got], [expected] = run(table, [data, data]), run(Graph((X, Y), (root,)), [data, data])
            difference = (got.int() - expected.int()).abs()
            assert difference.max() <= 1 and difference.float().mean() < 0.1
            nowhere = run(Graph((X,), (function(X),)), [data])[0].isnan()
            assert torch.equal(got[nowhere], expected[nowhere])


def test_only_factors_that_polynomials_can_serve() -> None:
    y = gelu(X)
    for factors in (FACTORS * 0, FACTORS * 1e6, torch.where(FACTORS > 0, FACTORS, FACTORS * 1e-7), FACTORS / 0):
        assert source(unsigned(b.mul(y, b.constant(factors)))) is None
    c = b.constant(FACTORS)
    assert source(unsigned(b.div(c, b.add(y, 1.0)))) is None, "not divided by it"
    assert source(unsigned(b.mul(b.exp(X), c))) is None, "no line far out"
    assert source(clamped(b.mul(y, c))) is None, "NaN would not stay what it is"
    both = b.mul(y, c)
    assert not any(v.op == "piecewise" for v in tabulated(unsigned(both), both).order)


def test_factors_that_grow_too_large_are_noticed() -> None:
    factors = FACTORS.clone()
    table = tabulated(unsigned(b.mul(gelu(X), b.constant(factors, watched=True))))
    data = [torch.ones(4, 64)] * 2
    run(table, data)
    factors[3] = 16.0
    with pytest.raises(InputError, match="compile the model again"):
        run(table, data)


def test_only_where_it_saves_a_function() -> None:
    assert source(unsigned(b.mul(X, 3.0))) is None
    assert source(unsigned(b.relu(b.mul(X, 3.0)))) is None
    y = gelu(X)
    for roots in ((unsigned(y), y), (unsigned(y), b.add(y, Y))):
        assert not any(v.op == "piecewise" for v in tabulated(*roots).order), "somebody needs all digits too"
    rounds = b.round_(b.mul(y, 20.0))
    both = tabulated(b.cast(b.minimum(b.maximum(rounds, -128.0), 127.0), i8), rounds)
    assert not any(v.op == "piecewise" for v in both.order)


def test_only_where_everything_is_known() -> None:
    y = b.tanh(X)
    channels = QParams(tuple([0.01] * 64), 0, 1)
    assert source(b.quantize(y, i8, channels)) is None, "a scale for each channel"
    scale = b.reduce(y, "max", 1, keepdim=True)
    assert source(signed(b.div(y, scale))) is None, "a scale for each row"
    assert source(b.cast(b.round_(b.mul(y, 100.0)), i8)) is None, "large values wrap around"
    assert source(b.cast(b.minimum(b.maximum(b.round_(y), -3000.0), 3000.0), i8)) is None
    assert source(b.cast(b.minimum(b.maximum(b.mul(y, 100.0), -128.0), 127.0), i8)) is None, "not rounded but cut off"
    assert source(signed(b.mul(b.sin(X), 3.0))) is None, "it never comes to an end"


def rows(x: Value) -> Value:
    """Quantization with a scale of each row."""
    scale = b.div(b.reduce(b.maximum(x, b.neg(x)), "max", 1, keepdim=True), 127.0)
    return b.quantize(b.mul(x, b.reciprocal(scale)), i8, QParams((1.0,)))


def spread(x: Value) -> Value:
    """The same with a zero point."""
    high, low = b.relu(b.reduce(x, "max", 1, keepdim=True)), b.minimum(b.reduce(x, "min", 1, keepdim=True), 0.0)
    scale = b.maximum(b.div(b.sub(high, low), 255.0), 1e-7)
    zero = b.round_(b.minimum(b.maximum(b.sub(-128.0, b.div(low, scale)), -128.0), 127.0))
    return b.quantize(b.add(b.mul(x, b.reciprocal(scale)), zero), i8, QParams((1.0,), 0, None, -128, 127))


@pytest.mark.parametrize("size", [1e-6, 1e-3, 0.1, 1.5])
@pytest.mark.parametrize("function", [gelu, b.tanh])
def test_rows_that_are_quantized_with_their_own_scale(function: Unary, size: float) -> None:
    """Of any size: the table's result is in f32, and right to 12 bits."""
    factor = b.constant(FACTORS)
    for root in (spread(function(X)), spread(b.mul(function(b.add(X, 0.0)), factor))):
        table = tabulated(root)
        [found] = [v for v in table.order if v.op == "piecewise"]
        assert found.dtype == f32 and not any(v.op in ("erf", "tanh") for v in table.order)
        data = torch.randn(4, 64, generator=torch.Generator().manual_seed(2)) * size
        [got], [expected] = run(table, [data, data]), run(Graph((X, Y), (root,)), [data, data])
        difference = (got.int() - expected.int()).abs()
        assert difference.max() <= 1 and difference.float().mean() < 0.05


def test_two_roundings_of_one_function() -> None:
    y = gelu(X)
    table = tabulated(unsigned(y), signed(y))
    assert [v.op for v in table.order if v.op not in ("input", "full")] == ["piecewise", "quantize", "quantize"]


def test_not_where_digits_may_show() -> None:
    y = gelu(X)
    for root in (b.cast(y, bf16), b.reduce(y, "sum", 1), b.mul(y, Y), spread(b.sub(y, Y)), spread(silu(X))):
        assert not any(v.op == "piecewise" for v in tabulated(root).order)
    with pytest.raises(InvalidGraph, match="piecewise"):
        [found] = [v for v in tabulated(spread(y)).order if v.op == "piecewise"]
        make("piecewise", X, b.constant(FACTORS), attrs=found.attrs)


@pytest.mark.parametrize("stretched", [
    lambda x: unsigned(b.add(x, b.full(1.0, f32, (4, 64)))),
    lambda x: b.cast(b.minimum(b.maximum(b.round_(b.mul(x, 20.0)), b.full(-128.0, f32, (4, 1))), b.full(127.0, f32, (4, 1))), i8),
    lambda x: b.cast(b.minimum(b.maximum(b.add(b.round_(b.mul(x, 20.0)), b.full(3.0, f32, (4, 1))), -128.0), 127.0), i8),
])
def test_a_scalar_is_not_broadcast_by_its_table(stretched: Unary) -> None:
    small = b.input_(0, f32, (64,))
    graph = Graph((small,), (stretched(b.tanh(small)),))
    table, data = tabulate(graph, 32), [torch.linspace(-3, 3, 64)]
    verify(table)
    [got], [expected] = run(table, data), run(graph, data)
    assert got.shape == expected.shape == (4, 64) and (got.int() - expected.int()).abs().max() <= 1


def test_text_reads_back_exactly() -> None:
    graph = tabulated(unsigned(gelu(X)))
    text, objects = dump(graph)
    again = parse(text, objects)
    assert dump(again)[0] == text
    assert again.outputs[0].attrs == graph.outputs[0].attrs and isinstance(again.outputs[0].attrs, A.PiecewiseAttrs)
