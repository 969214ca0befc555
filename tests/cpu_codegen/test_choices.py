"""How many rows at a time."""

from __future__ import annotations

import pytest

from sashiko.cpu_codegen import schedule
from sashiko.cpu_codegen.choices import Choices
from sashiko.cpu_codegen.streams import streaming
from sashiko.graph.dims import symbol
from sashiko.graph.types import f32
from sashiko.platforms.catalogue import X86_64_V3, X86_64_V4
from sashiko.platforms.target import Target
from sashiko.stitch.loops import BodyBuilder, LoopKernel, axis
from tests.cpu_codegen.kernels import reduce


def centered(rows: int, cols: int, known: bool = True, arrays: int = 1) -> LoopKernel:
    """The sum of so many arrays without its mean."""
    builder = BodyBuilder()
    places = [builder.buffer(f32) for _ in range(arrays + 1)]
    width = cols if known else symbol("S", 1, cols)
    index = axis("r", rows) * width + axis("c", width)
    value = builder.load(places[0], index)
    for place in places[1:-1]:
        value = builder.op("add", f32, value, builder.load(place, index))
    builder.store(places[-1], index, builder.op("sub", f32, value, reduce(builder, "sum", value)))
    return LoopKernel("centered", builder.finish(), rows, width)


def rows_of(target: Target, kernel: LoopKernel) -> tuple[int, bool]:
    stores = tuple(range(len(kernel.body.stores)))
    return Choices(target, kernel, schedule.passes(kernel.body, stores), stores, target.lanes(32)).rows()


@pytest.mark.parametrize(
    ("target", "kernel", "rows"),
    [
        (X86_64_V4, centered(64, 64), (4, True)),  # 4 x 4 vectors in 32 registers
        (X86_64_V4, centered(64, 128), (2, True)),
        (X86_64_V4, centered(64, 256), (4, False)),  # read again
        (X86_64_V4, centered(64, 272), (2, False)),
        (X86_64_V4, centered(64, 256, arrays=2), (1, True)),  # twice as much to read
        (X86_64_V4, centered(64, 1024, arrays=2), (2, False)),  # more than is seen ahead
        (X86_64_V4, centered(64, 128, arrays=2), (2, True)),
        (X86_64_V4, centered(64, 256, known=False), (4, False)),
        (X86_64_V4, centered(64, 4096), (1, False)),
        (X86_64_V4, centered(1 << 16, 256), (1, False)),  # 64 MB
        (X86_64_V4, streaming(X86_64_V4, centered(64, 256), {1}), (1, False)),
        (X86_64_V3, centered(64, 16), (4, True)),
        (X86_64_V3, centered(64, 256), (2, False)),
    ],
)
def test_rows(target: Target, kernel: LoopKernel, rows: tuple[int, bool]) -> None:
    assert rows_of(target, kernel) == rows


def test_a_single_pass_waits_for_nothing() -> None:
    builder = BodyBuilder()
    x, out = builder.buffer(f32), builder.buffer(f32)
    index = axis("r", 64) * 64 + axis("c", 64)
    builder.store(out, index, builder.op("neg", f32, builder.load(x, index)))
    assert rows_of(X86_64_V4, LoopKernel("single", builder.finish(), 64, 64)) == (1, False)
