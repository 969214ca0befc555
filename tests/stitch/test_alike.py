"""Kernels that are alike are lowered once, and nothing else is."""

from __future__ import annotations

import pytest

from sashiko.graph import build as b
from sashiko.graph.dims import symbol
from sashiko.graph.ir import Value
from sashiko.graph.ops import make
from sashiko.graph.types import f32, f64, i8, i64
from sashiko.stitch import alike
from sashiko.stitch.alike import signature
from sashiko.stitch.loops import Body, BodyBuilder
from sashiko.stitch.program import LoopItem, Program
from sashiko.stitch.stitcher import stitch

B = symbol("B", 1, 16)


def rows(n: int) -> Value:
    return b.input_(n, f32, (B, 8))


def layer(x: Value, y: Value, number: float = 1e-5) -> Value:
    centered = b.sub(x, b.mul(b.reduce(x, "sum", -1, True), 1.0 / 8))
    return b.mul(b.add(centered, number), y)


def told(value: Value, *stored: Value) -> alike.Signature:
    return signature([value], {value, *stored})[0]


def test_layers_are_alike_whatever_they_compute_on() -> None:
    x, y, u, v = (rows(n) for n in range(4))
    assert told(layer(x, y), x, y) == told(layer(u, v), u, v)


def test_layers_are_alike_that_hold_nan() -> None:
    """Python finds no NaN equal to another one, so the dynamic scales of each layer were kernels of their own."""
    x = rows(0)

    def marked() -> Value:
        return b.pad(b.where(b.gt(x, 1.0), float("nan"), x), ((0, 0), (1, 1)), -float("nan"))

    assert told(marked(), x) == told(marked(), x)
    first, second = (item.kernel.body for n in range(2) for item in stitch([marked()], [x], ()).items if isinstance(item, LoopItem))
    assert first == second

    def body() -> Body:
        builder = BodyBuilder()
        builder.store(builder.buffer(f32), symbol("c", 0), builder.const(float("nan"), f32))
        return builder.finish()

    assert body() == body()


def test_what_makes_kernels_differ() -> None:
    x, y = rows(0), rows(1)
    same = told(layer(x, y), x, y)
    assert told(layer(x, x), x) != same  # which values are one
    assert told(layer(x, y, 2e-5), x, y) != same  # numbers
    assert told(layer(x, y, 0.0), x, y) != told(layer(x, y, -0.0), x, y)  # and their signs
    middle = layer(x, y)
    assert told(b.relu(middle), x, y) != told(b.relu(middle), x, y, middle)  # what has a buffer
    narrow = b.input_(1, f32, (1, 8))
    assert told(layer(x, narrow), x, narrow) != same  # types
    assert told(b.cast(b.cast(x, i8), f32), x) != told(b.cast(b.cast(x, f64), f32), x)  # attributes


def test_positions_differ_by_how_they_were_computed_wherever_that_is_stored() -> None:
    """Those that lie within bounds are not checked, and those that are counted are not read."""
    table, x = rows(0), b.input_(1, i64, (6,))

    def looked_up(bounded: Value, positions: Value) -> alike.Signature:
        return told(b.take(table, positions, 1), table, bounded, x)

    clamped, double = b.minimum(b.maximum(x, 0), 7), b.mul(x, 2)
    assert looked_up(clamped, clamped) != looked_up(double, double)
    assert looked_up(clamped, b.neg(clamped)) != looked_up(double, b.neg(double))
    other = b.input_(2, i64, (6,))
    assert looked_up(x, x) == told(b.take(table, other, 1), table, other)

    def written(step: int) -> alike.Signature:
        counted = b.iota(2, i64, 0, step)
        return told(b.put(table, b.input_(3, f32, (B, 2)), {1: counted}), table, counted)

    assert written(2) != written(3) and written(3) == written(3)

    def copied(step: int) -> alike.Signature:
        counted = make("copy", b.iota(2, i64, 0, step))
        return looked_up(counted, counted)

    assert copied(2) != copied(3) and copied(3) == copied(3)


def test_differences_differ_by_whether_an_extreme_is_taken_wherever_that_is_stored() -> None:
    """No product goes into those unrounded."""
    x, y = rows(0), rows(1)
    products = b.mul(x, y)

    def difference(other: Value) -> alike.Signature:
        return told(b.sub(products, other), x, y, other)

    extreme = b.reduce(products, "max", 1, True)
    assert difference(extreme) != difference(b.reduce(products, "sum", 1, True)) == difference(b.input_(2, f32, (B, 1)))


def kernels(program: Program) -> list[str]:
    names = {v: n for n, v in enumerate((*program.inputs, *program.stored))}
    return [f"{item.kernel} {[names[v] for v in item.operands]}" for item in program.items if isinstance(item, LoopItem)]


def quantized_three_times() -> tuple[list[Value], list[Value]]:
    """Kernels that could run in several orders, joined in several ways."""
    x, tables = rows(0), [b.input_(n, f32, (8,)) for n in range(1, 7)]
    scaled = [b.mul(x, t) for t in tables]
    outputs = [b.add(b.reduce(s, "max", -1, True), b.exp(b.mul(s, scaled[0]))) for s in scaled]
    total = outputs[0]
    for value in outputs[1:]:
        total = b.add(total, value)
    return [*outputs, b.exp(total)], [x, *tables]


def test_a_lowering_found_again_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs, inputs = quantized_three_times()
    first, again = (kernels(stitch(outputs, inputs, ())) for _ in range(2))
    monkeypatch.setattr(alike, "_known", {})
    assert first == again == kernels(stitch(outputs, inputs, ()))


def test_equal_graphs_give_equal_kernels() -> None:
    """In the same order wherever the values lie in memory: the object cache finds code by its text."""
    kept = [quantized_three_times() for _ in range(6)]
    assert len({tuple(kernels(stitch(outputs, inputs, ()))) for outputs, inputs in kept}) == 1
