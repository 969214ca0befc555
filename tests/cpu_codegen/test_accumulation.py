"""Rows that are put together with what is there, one after another, and sums that are taken in blocks, beside running ones, too."""

from __future__ import annotations

import pytest
import torch

from sashiko.cpu_codegen.reduce import BLOCK
from sashiko.graph.dims import Dim, symbol
from sashiko.graph.types import boolean, f32, f64
from sashiko.stitch.loops import Body, BodyBuilder, LoopKernel, Node, axis
from tests.cpu_codegen.kernels import buffers, built, empty, few, reduce, run, same
from tests.emulation import Runner

ROWS, NODES = 60, 7


def put_together(op: str, rows: Dim, columns: int, out: torch.Tensor, index: torch.Tensor, x: torch.Tensor) -> Body:
    """out[index[r], c] = op(out[index[r], c], x[r, c]) where the index is one of NODES."""
    builder = BodyBuilder()
    places = buffers(builder, out, index, x)
    r, c = axis("r", rows), axis("c", columns)
    to = builder.load(places[1], r)
    ok = builder.op("lt", boolean, to, builder.const(NODES, builder.nodes[to].dtype))
    builder.add(Node("check", boolean, (ok,)))
    place = builder.node_index(to) * columns + c
    before = builder.load(places[0], place, ok, builder.const(0, f32))
    builder.store(places[0], place, builder.op(op, f32, before, builder.load(places[2], r * columns + c)), ok)
    return builder.finish()


@pytest.mark.parametrize("columns", [3, 16, 37])
@pytest.mark.parametrize("op", ["add", "maximum"])
@pytest.mark.parametrize("runner", few())
def test_rows_that_meet(runner: Runner, op: str, columns: int) -> None:
    """In the order of the rows, by one thread; a row whose place is not there changes nothing."""
    x, out = torch.randn(ROWS, columns), torch.randn(NODES, columns)
    index = torch.arange(ROWS) * 5 % NODES
    index[10:20] = index[10]
    for wrong in (False, True):
        index[33] = NODES + 2 if wrong else 1
        body = put_together(op, ROWS, columns, out, index, x)
        assert body.accumulates
        kernel = LoopKernel("together", body, ROWS, columns)
        expected = out.clone()
        for to, row in zip(index.tolist(), x):
            if to < NODES:
                expected[to] = torch.maximum(expected[to], row) if op == "maximum" else expected[to] + row
        assert torch.equal(run(runner, kernel, [out, index, x], status=int(wrong))[0], expected)
        code = built(kernel, runner.target)[1]
        assert (code.domain, code.grain) == (1, 1)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("along", ["c", "k"])
@pytest.mark.parametrize("runner", few())
def test_sums_of_blocks(runner: Runner, along: str, known: bool) -> None:
    """Of lengths around those of a block, and of several."""
    lanes = 64
    for length in (1, BLOCK - 1, BLOCK, 2 * BLOCK + 1, 5 * BLOCK + 77):
        count: Dim = length if known else symbol("N")
        count, size = (count * lanes, length * lanes) if along == "c" else (count, length)
        x, out = torch.rand(size, 3), empty(3)
        builder = BodyBuilder()
        places = buffers(builder, x, out)
        row, column = (axis("r", 3), axis("c", count)) if along == "c" else (axis("c", 3), axis("k", count))
        builder.store(places[1], row, reduce(builder, "sum", builder.load(places[0], column * 3 + row), axis=along))
        kernel = LoopKernel("sum", builder.finish(), 3, count) if along == "c" else LoopKernel("sum", builder.finish(), 1, 3, count)
        got = run(runner, kernel, [x, out], {"N": length})[1]
        same(got, x.double().sum(0).float(), rtol=40 * 2.0**-24)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("runner", few())
def test_sums_of_blocks_beside_running_sums(runner: Runner, known: bool) -> None:
    for length in (BLOCK - 1, 40 * BLOCK + 77):
        count: Dim = 16 * length if known else symbol("N") * 16
        x, running, out = torch.full((16 * length,), 0.1), empty(16 * length, dtype=torch.float64), empty(1)
        builder = BodyBuilder()
        places = buffers(builder, x, running, out)
        value = builder.load(places[0], axis("c", count))
        wide = builder.op("cast", f64, value)
        builder.store(places[1], axis("c", count), builder.add(Node("scan", f64, (wide,), kind="sum", axis="c")))
        builder.store(places[2], 0, reduce(builder, "sum", value))
        got = run(runner, LoopKernel("sums", builder.finish(), 1, count), [x, running, out], {"N": length})
        same(got[1], x.double().cumsum(0), rtol=length * 2.0**-50)
        same(got[2], x.double().sum(0, keepdim=True).float(), rtol=BLOCK * 2.0**-24)
