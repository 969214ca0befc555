"""Attention with a quantized result in the place of attention and a quantization, and only where nothing else reads what is between."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import sashiko
from sashiko.graph import attrs as A
from sashiko.graph import build as b
from sashiko.graph.interpret import run
from sashiko.graph.ir import Graph, Value
from sashiko.graph.types import DType, QParams, bf16, f16, f32, i8, u8
from sashiko.rewrite.rules.results import quantized_results
from sashiko.stitch.constants import constant_values
from sashiko.stitch.expand import expand_unsupported

HEADS, ROWS, COLUMNS = 3, 10, 8
WIDTH = HEADS * COLUMNS
X = [b.input_(n, f32, (2, ROWS, WIDTH)) for n in range(3)]
SIGNED, UNSIGNED = QParams((0.02,)), QParams((0.015,), 131, None, 0, 255)


def numbers(*shape: int) -> Value:
    return b.constant(torch.rand(shape, generator=torch.Generator().manual_seed(0)) + 0.5)


def heads(x: Value, count: int = HEADS, dtype: DType = f32) -> Value:
    return b.permute(b.reshape(b.cast(x, dtype), (2, ROWS, count, COLUMNS if count == HEADS else 12)), (0, 2, 1, 3))


def attention(dtype: DType = f32) -> Value:
    q, k, v = (heads(x, dtype=dtype) for x in X)
    return b.attention(q, k, v, scale=0.5)


def side_by_side(x: Value, dtype: DType = f32) -> Value:
    return b.cast(b.reshape(b.permute(x, (0, 2, 1, 3)), (2, ROWS, WIDTH)), dtype)


def grouped() -> Value:
    """Two heads of q share keys and values."""
    q, k, v = heads(X[0], 2), heads(b.slice_(X[1], 2, 0, 12), 1), heads(b.slice_(X[2], 2, 0, 12), 1)
    return b.reshape(b.permute(b.attention(q, k, v, scale=0.5), (0, 2, 1, 3)), (2, ROWS, WIDTH))


def single() -> Value:
    """One head of one column."""
    q, k, v = (b.permute(b.reshape(b.slice_(x, 2, 0, 1), (2, ROWS, 1, 1)), (0, 2, 1, 3)) for x in X)
    return b.attention(q, k, v, scale=0.5)


def read_twice() -> tuple[Value, ...]:
    x = side_by_side(attention())
    return b.quantize(x, i8, SIGNED), b.quantize(x, u8, UNSIGNED)


def values_read_twice() -> tuple[Value, ...]:
    q, k, v = (heads(x) for x in X)
    return b.quantize(b.mul(side_by_side(b.attention(q, k, v, scale=0.5)), numbers(WIDTH)), i8, SIGNED), b.relu(v)


MOVED: dict[str, Callable[[], tuple[Value, ...]]] = {
    "side by side": lambda: (b.quantize(side_by_side(attention()), u8, UNSIGNED),),
    "alone": lambda: (b.quantize(attention(), i8, SIGNED),),
    "cast last": lambda: (b.quantize(side_by_side(attention(bf16), f32), u8, UNSIGNED),),
    "short": lambda: (b.quantize(attention(f16), u8, UNSIGNED),),
    "smoothed": lambda: (b.quantize(b.mul(side_by_side(attention()), numbers(WIDTH)), i8, SIGNED),),
    "smoothed first": lambda: (b.quantize(b.mul(b.reciprocal(numbers(1, 1, WIDTH)), side_by_side(attention(bf16), f32)), u8, UNSIGNED),),
    "grouped": lambda: (b.quantize(grouped(), u8, UNSIGNED),),
}
KEPT: dict[str, Callable[[], tuple[Value, ...]]] = {
    "read twice": read_twice,
    "a result": lambda: (b.quantize(x := attention(), i8, SIGNED), x),
    "by channel": lambda: (b.quantize(side_by_side(attention()), i8, QParams((0.1,) * WIDTH, 0, 2)),),
    "narrowed": lambda: (b.quantize(b.cast(attention(), bf16), i8, SIGNED),),
    "by rows": lambda: (b.quantize(b.mul(side_by_side(attention()), numbers(ROWS, 1)), i8, SIGNED),),
    "by heads": lambda: (b.quantize(b.mul(attention(), numbers(COLUMNS)), i8, SIGNED),),
    "grouped and smoothed": lambda: (b.quantize(b.mul(grouped(), numbers(WIDTH)), i8, SIGNED),),
    "values read twice": values_read_twice,
    "multiplied in bf16": lambda: (b.quantize(b.mul(side_by_side(attention(bf16), bf16), b.cast(numbers(WIDTH), bf16)), i8, SIGNED),),
    "spread": lambda: (b.quantize(b.mul(b.reshape(b.permute(single(), (0, 2, 1, 3)), (2, ROWS, 1)), numbers(WIDTH)), i8, SIGNED),),
    "not constant": lambda: (b.quantize(b.mul(side_by_side(attention()), X[0]), i8, SIGNED),),
}


def rewritten(outputs: tuple[Value, ...]) -> tuple[Graph, Graph]:
    graph = Graph(tuple(X), outputs)
    return graph, quantized_results(graph, constant_values(graph.outputs))


@pytest.mark.parametrize("name", MOVED)
def test_the_integers_are_the_same(name: str) -> None:
    graph, found = rewritten(MOVED[name]())
    [inner] = [v for v in found.order if v.op == "attention"]
    assert isinstance(inner.attrs, A.AttentionAttrs) and inner.attrs.dtype == inner.dtype == graph.outputs[0].dtype
    assert not any(v.op == "quantize" for v in found.order) and [v.type for v in found.outputs] == [v.type for v in graph.outputs]
    inputs = list(torch.randn(3, 2, ROWS, WIDTH, generator=torch.Generator().manual_seed(1)))
    [want], [got] = run(graph, inputs), run(found, inputs)
    short = any(v.dtype in (bf16, f16) for v in graph.order)
    # bf16 has a step of 2^-8 for numbers from 1/2 on, which was rounded to before, or is now as a part of the values.
    difference = (want.int() - got.int()).abs()
    assert difference.max() <= 1 and (difference > 0).float().mean() <= (0.4 if short else 0.01)
    assert want.unique().numel() > 20


@pytest.mark.parametrize("name", KEPT)
def test_others_stay(name: str) -> None:
    graph, found = rewritten(KEPT[name]())
    assert found is graph


def test_rows_that_get_a_gap_stay() -> None:
    q = b.input_(0, f32, (1, 2, 4, 512))
    x = b.reshape(b.permute(b.attention(q, q, q, scale=0.1), (0, 2, 1, 3)), (1, 4, 1024))
    graph = Graph((q,), (b.quantize(x, u8, UNSIGNED),))
    assert quantized_results(graph, ()) is graph


def test_spelled_out_it_is_quantized_too() -> None:
    _, found = rewritten(MOVED["side by side"]())
    spelled = expand_unsupported(found, lambda value: value.op != "attention")
    assert not any(v.op == "attention" for v in spelled.order)
    inputs = list(torch.randn(3, 2, ROWS, WIDTH, generator=torch.Generator().manual_seed(1)))
    [want], [got] = run(found, inputs), run(spelled, inputs)
    assert got.dtype == torch.uint8 and (want.int() - got.int()).abs().max() <= 1


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (4, 16)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_quantized_model_stores_integers_alone(precision: str) -> None:
    torch.manual_seed(0)
    model, x = Attention().eval(), torch.randn(3, 40, 64)
    quantized = sashiko.quantize(model, [(x,)], preset="int8-static", progress=False)
    compiled = sashiko.compile(quantized, (x,), precision=precision)
    with torch.no_grad():
        want = quantized(x)
    # A step of each of what goes into products, of ranges of about 6.
    assert (compiled(x) - want).abs().max() <= 0.02 * want.abs().max()
    assert "attention + quantize" in str(sashiko.explain(compiled)) or "attention + cast + quantize" in str(sashiko.explain(compiled))
