"""The text form reads back to the same graph, and the verifier catches every kind of planted fault."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from sashiko.diagnostics.errors import InvalidGraph
from sashiko.graph import attrs as A
from sashiko.graph import build as b
from sashiko.graph import interpret
from sashiko.graph.dims import mod, symbol
from sashiko.graph.ir import Graph, Value, reordered, with_room
from sashiko.graph.ops import make
from sashiko.graph.parse import parse
from sashiko.graph.text import dump, to_text
from sashiko.graph.types import QParams, TensorType, TupleType, boolean, f32, i8, i64
from sashiko.graph.verify import verify

S, N = symbol("S", 1, 512), symbol("N", 1)


def sample() -> Graph:
    """A graph with every kind of attribute."""
    x = b.input_(0, f32, (S, 8), "x 'quoted'")
    with b.at("model.py:12"):
        w = b.constant(torch.randn(4, 8), "layer.weight", watched=True)
        y = b.add(b.linear(x, w, b.constant(torch.randn(4))), math.inf)
    q = b.quantize(y, i8, QParams((0.5, 0.25, 1.5, 2.0), 0, 1))
    attrs = A.AtenAttrs(torch.ops.aten.sort.stable, (A.Slot(0),), (("stable", True), ("dim", -1)), "no ) : native # form", (0,))
    pair = make("aten", b.dequantize(q), attrs=attrs, type=TupleType((TensorType(f32, (S, 4)), TensorType(i64, (S, 4)))), name="sort")
    other = A.AtenAttrs(torch.ops.aten.full.default, ([S * 2, 3], 1.5), (("dtype", torch.float32), ("device", torch.device("cpu"))), "dims")
    filled = make("aten", attrs=other, type=TensorType(f32, (2 * S, 3)))
    index = b.iota(S, i64, mod(S, 3), 2)
    turned = with_room(reordered(b.permute(y, (1, 0)), (1, 0)), ((0, 16), (0, 0)))
    return Graph((x,), (b.get(pair, 0), filled, index, b.slice_(y, 0, S - 1, S, -1), turned, b.full(True, boolean, (S,))), "demo")


def test_text_reads_back_exactly() -> None:
    graph = sample()
    text, objects = dump(graph)
    again = parse(text, objects)
    assert dump(again)[0] == text
    assert [v.type for v in again.order] == [v.type for v in graph.order]
    assert [(v.op, v.name, v.origin) for v in again.order] == [(v.op, v.name, v.origin) for v in graph.order]
    x = torch.randn(3, 8)
    for got, want in zip(interpret.run(again, [x]), interpret.run(graph, [x]), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_text_is_readable() -> None:
    x = b.input_(0, f32, (S, 256), "x")
    with b.at("model.py:12"):
        graph = Graph((x,), (b.add(x, x),))
    assert to_text(graph) == (
        "graph graph\n  symbol S 1..512\n  inputs %0\n  %0 'x' = input(index=0) : f32[S, 256]\n"
        "  %1 = add(%0, %0) : f32[S, 256]  # model.py:12\n  return %1\n")


def test_the_parser_executes_nothing() -> None:
    text = "graph g\n  inputs\n  %0 = full(value=__import__('os').getpid(), dtype=f32, shape=()) : f32[]\n  return %0\n"
    with pytest.raises(InvalidGraph):
        parse(text)


@pytest.mark.parametrize("line", ["%0 = nonsense() : f32[]", "%0 full", "%0 = full(value=Q, dtype=f32, shape=()) : f32[]"])
def test_broken_text_is_refused(line: str) -> None:
    with pytest.raises(InvalidGraph):
        parse(f"graph g\n  {line}")


def test_a_good_graph_passes() -> None:
    verify(sample())


def _graph(make_output: Callable[[Value], Value]) -> Graph:
    x = b.input_(0, f32, (S, 8), "x")
    return Graph((x,), (make_output(x),))


FAULTS: dict[str, Callable[[], Graph]] = {
    "wrong shape": lambda: _graph(lambda x: replace(b.neg(x), type=TensorType(f32, (S, 9)))),
    "wrong dtype": lambda: _graph(lambda x: replace(b.neg(x), type=TensorType(i64, (S, 8)))),
    "lost qparams": lambda: _graph(lambda x: replace(b.quantize(x, i8, QParams((1.0,))), type=TensorType(i8, (S, 8)))),
    "unknown operation": lambda: _graph(lambda x: replace(b.neg(x), op="negate")),
    "wrong arity": lambda: _graph(lambda x: replace(b.neg(x), inputs=(x, x))),
    "wrong attributes": lambda: _graph(lambda x: replace(b.neg(x), attrs=A.AxisAttrs(0))),
    "integer sine": lambda: _graph(lambda x: replace(b.sin(x), inputs=(b.cast(x, i64),))),
    "undeclared symbol": lambda: _graph(lambda x: b.full(0.0, f32, (N,))),
    "symbol with another range": lambda: _graph(lambda x: b.full(0.0, f32, (symbol("S", 1, 9),))),
    "unlisted input": lambda: _graph(lambda x: b.input_(1, f32, (S, 8))),
    "misnumbered input": lambda: Graph((b.input_(1, f32, (S,)),), ()),
    "tuple output": lambda: _graph(lambda x: make("aten", attrs=A.AtenAttrs(torch.ops.aten.sort.default, (), (), ""), type=TupleType(()))),
    "lost operand": lambda: _graph(lambda x: make("aten", x, attrs=A.AtenAttrs(torch.ops.aten.neg.default, (), (), ""), type=x.type)),
    "constant of another shape": lambda: _graph(lambda x: replace(b.constant(torch.zeros(3)), type=TensorType(f32, (4,)))),
    "bad permutation": lambda: _graph(lambda x: replace(b.permute(x, (1, 0)), attrs=A.PermuteAttrs((0, 0)))),
    "element that is none": lambda: _graph(lambda x: Value("get", (make("aten", attrs=A.AtenAttrs(
        torch.ops.aten.sort.default, (), (), ""), type=TupleType((None,))),), A.GetAttrs(0), x.type)),
}


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_planted_faults_are_found(fault: str) -> None:
    with pytest.raises(InvalidGraph) as caught:
        verify(FAULTS[fault](), where="pass under test")
    assert "pass under test" in str(caught.value) and "%" in str(caught.value)


def test_the_message_shows_the_neighbourhood() -> None:
    x = b.input_(0, f32, (S, 8), "x")
    bad = replace(b.neg(b.abs_(x)), type=TensorType(f32, (1,)), name="broken")
    with pytest.raises(InvalidGraph, match=r"(?s)neg broken: the type is f32\[1\].*abs.*> %2 'broken' = neg") as caught:
        verify(Graph((x,), (b.exp(bad),)))
    assert "exp" in str(caught.value)


def test_declared_symbols_may_come_from_the_call() -> None:
    graph = Graph((), (b.full(0.0, f32, (N,)),))
    verify(graph, [N])
    with pytest.raises(InvalidGraph):
        verify(graph)
