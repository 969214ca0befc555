"""Kernels cut at the columns where a condition changes: the parts of a concatenation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from sashiko.cpu_codegen.index import lane_form
from sashiko.cpu_codegen.ranges import column_ranges, is_read_in_pieces
from sashiko.cpu_codegen.schedule import needed
from sashiko.graph.dims import Dim, evaluate, floordiv, maximum, minimum, mod, substitute, symbol
from sashiko.graph.types import boolean, f32, i64
from sashiko.stitch.loops import Body, BodyBuilder, LoopKernel, Node, axis
from tests.cpu_codegen.kernels import empty, few, normal, run
from tests.emulation import Runner

ROWS = 5


def beside(widths: tuple[int, ...], known: bool = True, shown: int | None = None) -> LoopKernel:
    """Tensors of ROWS rows side by side, each behind a relu; the second is absent in rows from `shown` on."""
    builder = BodyBuilder()
    total = sum(widths)
    r, c = axis("r", ROWS), axis("c", total if known else symbol("S"))
    result, start = -1, 0
    zero = builder.const(0.0, f32)
    for n, width in enumerate(widths):
        at = builder.add(Node("index", i64, index=c - start))
        low = builder.op("ge", boolean, at, builder.const(0, i64))
        high = builder.op("lt", boolean, at, builder.add(Node("index", i64, index=width)))
        here = builder.op("and", boolean, low, high)
        if n == 1 and shown is not None:
            row = builder.add(Node("index", i64, index=r))
            here = builder.op("and", boolean, builder.op("lt", boolean, row, builder.const(shown, i64)), here)
        value = builder.op("maximum", f32, builder.load(builder.buffer(f32), r * width + c - start, here, zero), zero)
        result = value if result < 0 else builder.op("where", f32, here, value, result)
        start += width
    builder.store(builder.buffer(f32), r * (total if known else symbol("S")) + c, result)
    return LoopKernel("beside", builder.finish(), ROWS, total if known else symbol("S"))


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("runner", few())
def test_parts_side_by_side(runner: Runner, known: bool) -> None:
    for widths in ((16, 16), (32, 7), (1, 99), (3, 60, 1), (64, 100, 48), (16,) * 9):
        parts = [normal(ROWS, width, seed=n) for n, width in enumerate(widths)]
        out = run(runner, beside(widths, known), [*parts, empty(ROWS, sum(widths))], {"S": sum(widths)})[-1]
        assert torch.equal(out, torch.cat(parts, 1).relu())


@pytest.mark.parametrize("runner", few())
def test_a_condition_on_rows_stays(runner: Runner) -> None:
    parts = [normal(ROWS, 32), normal(ROWS, 48, seed=1)]
    out = run(runner, beside((32, 48), shown=3), [*parts, empty(ROWS, 80)], {})[-1]
    expected = torch.cat(parts, 1).relu()
    # The first part is not read beyond its columns: where no part is, there is the relu of nothing.
    expected[3:, 32:] = 0
    assert torch.equal(out, expected)


def test_each_range_reads_one_part_without_asking() -> None:
    kernels = column_ranges(beside((64, 100, 48)), 16)
    assert [k.cols for k in kernels] == [64, 100, 48]
    for number, kernel in enumerate(kernels):
        nodes = [kernel.body.nodes[n] for n in needed(kernel.body)]
        assert [(n.buffer, n.args) for n in nodes if n.op == "load"] == [(number, ())]
        assert not any(n.op in ("ge", "lt", "and", "where") for n in nodes)


def test_what_stays_whole() -> None:
    for kernel in (beside((8, 8)), beside((5, 20, 5)), beside((64, 64), known=False), beside((16,) * 9)):
        assert column_ranges(kernel, 16) == (kernel,)


def test_a_few_columns_beside_many_are_cut_off() -> None:
    """One column takes as long as a vector of them, which is little beside the others; masks would take time in all vectors."""
    assert [k.cols for k in column_ranges(beside((1, 99)), 16)] == [1, 99]
    assert [k.cols for k in column_ranges(beside((64, 8, 3)), 16)] == [64, 8, 3]


PLACES: dict[str, Callable[[Dim], Dim]] = {
    "clamped": lambda c: minimum(maximum(c - 5, 0), 59),
    "reflected": lambda c: 59 - maximum(59 - maximum(c - 4, 4 - c), maximum(c - 4, 4 - c) - 59),
    "around": lambda c: mod(c + 50, 60),
    "each twice": lambda c: minimum(maximum(floordiv(c + 1, 2) - 1, 0), 30),
    "each four times from the end": lambda c: minimum(59 - floordiv(c + 3, 4), 55),
    "by steps": lambda c: minimum(3 * c + 1, 59),
}


def lookups(name: str, columns: int = 67) -> LoopKernel:
    builder = BodyBuilder()
    r, c = axis("r", ROWS), axis("c", columns)
    x, out = builder.buffer(f32), builder.buffer(f32)
    builder.store(out, r * columns + c, builder.op("relu", f32, builder.load(x, r * 60 + PLACES[name](c))))
    return LoopKernel("lookups", builder.finish(), ROWS, columns)


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("runner", few())
def test_positions_between_two_ends(runner: Runner, name: str) -> None:
    x = normal(ROWS, 60, seed=1)
    at = [evaluate(PLACES[name](symbol("c")), {"c": column}) for column in range(67)]
    assert torch.equal(run(runner, lookups(name), [x, empty(ROWS, 67)])[-1], x[:, at].relu())


@pytest.mark.parametrize("name", PLACES)
def test_each_range_is_read_by_vectors(name: str) -> None:
    kernel = lookups(name)
    assert is_read_in_pieces(kernel, 16)
    pieces = column_ranges(kernel, 16)
    assert len(pieces) > 1 and sum(piece.cols for piece in pieces) == 67  # type: ignore[misc]
    for piece in pieces:
        assert not is_read_in_pieces(piece, 16)
        assert all(lane_form(node.index, 16, lambda s: s == "c") is not None for node in piece.body.nodes if node.op == "load")


def test_too_many_pieces_stay_whole() -> None:
    builder = BodyBuilder()
    c = axis("c", 200)
    builder.store(builder.buffer(f32), c, builder.load(builder.buffer(f32), mod(7 * c, 60)))
    kernel = LoopKernel("far", builder.finish(), ROWS, 200)
    assert column_ranges(kernel, 16) == (kernel,)


@pytest.mark.parametrize("runner", few())
def test_ranges_of_a_flat_kernel(runner: Runner) -> None:
    """Callers cut the columns anywhere, by multiples of the grain; each range begins at its own whole vectors."""
    for widths in ((100, 28), (5, 700, 70), (400, 90, 333)):
        whole = beside(widths)
        kernel = replace(whole, body=replace(whole.body, **_rowless(whole.body)), rows=None)
        assert len(column_ranges(kernel, 16)) == len(widths)
        parts, total = [normal(width, seed=n) for n, width in enumerate(widths)], sum(widths)
        tensors = [*parts, empty(total)]
        for begin in range(0, total, 192):
            tensors = run(runner, kernel, tensors, part=(begin, min(begin + 192, total)))
        assert torch.equal(tensors[-1], torch.cat(parts).relu())


def _rowless(body: Body) -> dict[str, Any]:
    """The nodes and stores of a body for its first row."""
    nodes = tuple(replace(node, index=substitute(node.index, {"r": 0})) for node in body.nodes)
    return {"nodes": nodes, "stores": tuple(replace(store, index=substitute(store.index, {"r": 0})) for store in body.stores)}
