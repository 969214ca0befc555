"""What is asked for ahead, and that what is read for it is there."""

from __future__ import annotations

import pytest
import torch

from sashiko.cpu_codegen.builder import Module
from sashiko.cpu_codegen.loops import emit_loop_kernel
from sashiko.graph.types import f32
from sashiko.stitch.loops import BodyBuilder, LoopKernel, axis
from tests.cpu_codegen.kernels import buffers, empty, few, reduce, run, softmax
from tests.emulation import Runner


@pytest.mark.parametrize("runner", few())
def test_the_next_row_is_fetched_where_rows_are_visited_twice(runner: Runner) -> None:
    for kernel, fetches in ((softmax(3, 1000, True), True), (softmax(3, 1000, False), True), (softmax(3, 16, True), False)):
        module = Module()
        emit_loop_kernel(module, runner.target, kernel)
        assert ("llvm.prefetch" in module.text()) == fetches
    row, column = axis("r", 3), axis("c", 1000)
    builder = BodyBuilder()
    places = buffers(builder, empty(3, 1000), empty(3))
    builder.store(places[1], row, reduce(builder, "sum", builder.load(places[0], 1000 * row + column)))
    module = Module()
    emit_loop_kernel(module, runner.target, LoopKernel("sums", builder.finish(), 3, 1000))
    assert "llvm.prefetch" not in module.text()


@pytest.mark.parametrize("cols", [16, 100, 1000])
@pytest.mark.parametrize("runner", few())
def test_rows_of_tables_are_fetched_where_rows_are_visited_twice(runner: Runner, cols: int) -> None:
    table, ids = torch.randn(50, cols), torch.randint(0, 50, (7,))
    row, column = axis("r", 7), axis("c", cols)
    builder = BodyBuilder()
    places = buffers(builder, table, ids, empty(7, cols))
    x = builder.load(places[0], cols * builder.node_index(builder.load(places[1], row)) + column)
    builder.store(places[2], cols * row + column, builder.op("sub", f32, x, reduce(builder, "max", x)))
    kernel = LoopKernel("looked_up", builder.finish(), 7, cols)
    module = Module()
    emit_loop_kernel(module, runner.target, kernel)
    assert "llvm.prefetch" in module.text()
    got = run(runner, kernel, [table, ids, empty(7, cols)])[2]
    wanted = table[ids] - table[ids].max(1, keepdim=True).values
    assert torch.equal(got, wanted)
