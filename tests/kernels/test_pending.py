"""How many rows of an epilogue are done at a time between the steps of a tile."""

from __future__ import annotations

import pytest

from sashiko.graph.types import f32, i32
from sashiko.kernels.pending import least_share
from sashiko.platforms.catalogue import X86_64_AMX
from sashiko.stitch.loops import Body, BodyBuilder, Node, axis


def epilogue(operations: int) -> Body:
    """An accumulator as a float, so many additions, and a store."""
    builder = BodyBuilder()
    value = builder.op("cast", f32, builder.add(Node("acc", i32)))
    for _ in range(operations - 1):
        value = builder.op("add", f32, value, builder.const(1.0, f32))
    builder.store(builder.buffer(f32), axis("r", 64) * 64 + axis("c", 64), value)
    return builder.finish()


@pytest.mark.parametrize(("operations", "rows"), [(2, 4), (10, 4), (14, 2), (20, 2), (21, 1), (100, 1)])
def test_as_many_rows_as_take_no_time(operations: int, rows: int) -> None:
    """Two vectors a row, 80 operations a step."""
    assert least_share(X86_64_AMX, epilogue(operations), 32) == rows
