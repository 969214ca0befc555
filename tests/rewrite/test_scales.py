"""Scales of quantizations in the constants before them: the same integers but for ties, and only where no more is computed."""

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
from sashiko.graph.ops import make
from sashiko.graph.types import QParams, f32, i8, i32, u8
from sashiko.rewrite.rules.pieces import Rounding, fit
from sashiko.rewrite.rules.scales import scaled_before
from sashiko.stitch.constants import constant_values

X, Y = b.input_(0, f32, (40, 16)), b.input_(1, f32, (16,))
SIGNED, UNSIGNED = QParams((0.05,)), QParams((0.043,), 91, None, 0, 255)


def numbers(seed: int) -> Value:
    return b.constant(torch.randn(16, generator=torch.Generator().manual_seed(seed)), f"c{seed}")


def affine() -> Value:
    return b.add(b.mul(X, numbers(0)), numbers(1))


def shared() -> tuple[Value, ...]:
    x = affine()
    return b.quantize(x, i8, SIGNED), b.quantize(x, u8, UNSIGNED)


def mean(x: Value) -> Value:
    return b.mul(b.reduce(x, "sum", -1, keepdim=True), 1 / 16)


def normalized() -> Value:
    centred = b.sub(X, mean(X))
    return b.mul(centred, b.rsqrt(b.add(mean(b.mul(centred, centred)), 1e-5)))


def norm() -> tuple[Value, ...]:
    """The usual end of a layer: what the next one takes as integers goes around it as it is, too."""
    x = b.add(b.mul(normalized(), numbers(0)), numbers(1))
    return b.quantize(x, u8, UNSIGNED), x, b.relu(x)


MOVED: dict[str, Callable[[], tuple[Value, ...]]] = {
    "sum": lambda: (b.quantize(affine(), i8, SIGNED),),
    "constants first": lambda: (b.quantize(b.add(numbers(1), b.mul(numbers(0), X)), u8, UNSIGNED),),
    "product": lambda: (b.quantize(b.mul(X, numbers(0)), i8, SIGNED),),
    "relu": lambda: (b.quantize(b.relu(affine()), u8, UNSIGNED),),
    "expression": lambda: (b.quantize(b.add(b.mul(X, numbers(0)), b.sub(numbers(1), b.mul(numbers(2), 3.0))), i8, SIGNED),),
    "sum alone": lambda: (b.quantize(b.add(X, numbers(1)), i8, SIGNED),),
    "one after the other": lambda: (b.quantize(b.mul(b.add(b.mul(b.add(affine(), 0.3), numbers(2)), numbers(3)), 2.5), u8, UNSIGNED),),
    "norm": norm,
    "smoothed norm": lambda: (b.quantize(b.mul(x := norm()[1], numbers(2)), u8, UNSIGNED), x),
    "norm without constants to add": lambda: (b.quantize(x := b.mul(normalized(), numbers(0)), i8, SIGNED), x),
    "two": lambda: (b.quantize(b.mul(b.dequantize(b.quantize(affine(), i8, SIGNED)), numbers(2)), u8, UNSIGNED),),
}
KEPT: dict[str, Callable[[], tuple[Value, ...]]] = {
    "read twice": shared,
    "a result": lambda: (b.quantize(x := affine(), i8, SIGNED), x),
    "not constant": lambda: (b.quantize(b.mul(X, Y), i8, SIGNED),),
    "product read twice": lambda: (b.quantize(b.add(x := b.mul(X, numbers(0)), numbers(1)), i8, SIGNED), b.relu(x)),
    "wider": lambda: (b.quantize(b.mul(Y, b.constant(torch.ones(3, 16), "w")), i8, SIGNED),),
    "in steps": lambda: (b.quantize(affine(), i8, QParams((1.0,))),),
}


def moved(outputs: tuple[Value, ...]) -> tuple[Graph, Graph]:
    graph = Graph((X, Y), outputs)
    return graph, scaled_before(graph, constant_values(graph.outputs))


@pytest.mark.parametrize("name", MOVED)
def test_the_integers_are_the_same(name: str) -> None:
    graph, found = moved(MOVED[name]())
    quantizations = [v for v in found.order if v.op == "quantize"]
    assert quantizations and all(isinstance(v.attrs, A.QuantizeAttrs) and v.attrs.in_steps for v in quantizations)
    assert [v.type for v in found.outputs] == [v.type for v in graph.outputs]
    inputs = [torch.randn(40, 16, generator=torch.Generator().manual_seed(7)) * 3, torch.zeros(16)]
    inputs[0][0, :2] = torch.tensor([torch.inf, torch.nan])
    [want, *others], [got, *same] = run(graph, inputs), run(found, inputs)
    torch.testing.assert_close(same, others, rtol=0, atol=0, equal_nan=True)
    difference = (want.int() - got.int()).abs()
    # A few digits of f32 decide what is rounded where.
    assert difference.max() <= 1 and (difference > 0).float().mean() <= 0.01
    assert torch.equal(want[0, :2], got[0, :2])


def sigmoid_table() -> A.PiecewiseAttrs:
    table = fit(lambda x: torch.sigmoid(x) * 200 + 9, Rounding(u8, None, 0, 255, True), 32)
    assert table is not None and table.density != 1
    return table


def gelu_table() -> A.PiecewiseAttrs:
    """Which has no number at -inf."""
    table = fit(lambda x: torch.nn.functional.gelu(x) * 23 + 4, Rounding(u8, None, 0, 255, True), 32)
    assert table is not None and table.density != 1 and table.low == -torch.inf
    return table


def of_sums(table: A.PiecewiseAttrs) -> Value:
    sums = b.cast(b.cast(X, i32), f32)
    return make("piecewise", b.add(b.mul(sums, b.mul(numbers(0), 1e-4)), numbers(1)), attrs=table)


@pytest.mark.parametrize("positive", [False, True])
def test_tables_have_pieces_of_length_one(positive: bool) -> None:
    """The same integers but for a few, of numbers of all sizes, infinities and none."""
    graph, found = moved((make("piecewise", b.relu(affine()) if positive else affine(), attrs=sigmoid_table()),))
    inputs = [torch.randn(40, 16, generator=torch.Generator().manual_seed(7)) * 3, torch.zeros(16)]
    inputs[0][0, :6] = torch.tensor([torch.inf, -torch.inf, torch.nan, 3e38, -3e38, 1e-30])
    [want], [got] = run(graph, inputs), run(found, inputs)
    assert isinstance(found.outputs[0].attrs, A.PiecewiseAttrs) and found.outputs[0].attrs.density == 1
    difference = (want.int() - got.int()).abs()
    assert difference.max() <= 1 and (difference > 0).float().mean() <= 0.01
    assert torch.equal(want[0, :6], got[0, :6])


def test_tables_that_tell_infinity_have_them_of_integers_alone() -> None:
    graph, found = moved((of_sums(gelu_table()),))
    assert isinstance(found.outputs[0].attrs, A.PiecewiseAttrs) and found.outputs[0].attrs.density == 1
    sums = torch.randint(-(1 << 16), 1 << 16, (40, 16), generator=torch.Generator().manual_seed(7)).float()
    sums[0, :2] = torch.tensor([1 << 30, -(1 << 31)])
    inputs = [sums, torch.zeros(16)]
    [want], [got] = run(graph, inputs), run(found, inputs)
    difference = (want.int() - got.int()).abs()
    assert difference.max() <= 1 and (difference > 0).float().mean() <= 0.01
    graph, found = moved((make("piecewise", affine(), attrs=gelu_table()),))
    assert found is graph


def test_zero_points_are_added_where_something_is() -> None:
    _, found = moved((b.quantize(affine(), u8, UNSIGNED), b.quantize(b.relu(affine()), u8, UNSIGNED)))
    assert [v.attrs.left.zero_point for v in found.outputs if isinstance(v.attrs, A.QuantizeAttrs)] == [0, 91]


@pytest.mark.parametrize("name", KEPT)
def test_others_stay(name: str) -> None:
    graph, found = moved(KEPT[name]())
    assert found is graph


def test_layers_in_a_row() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16), nn.Linear(16, 8)).eval()
    x = torch.randn(64, 32)
    quantized = sashiko.quantize(model, [(x,)], preset="int8-static", progress=False)
    compiled = sashiko.compile(quantized, (x,))
    with torch.no_grad():
        want = quantized(x)
    # One step of the last product's input, of a range of about 4, times its weights.
    assert (compiled(x) - want).abs().max() <= 0.02 * want.abs().max()
