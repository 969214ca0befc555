"""Tables in registers: every lane finds its number, in whole vectors, tails and single elements."""

from __future__ import annotations

import pytest
import torch

from sashiko.graph.types import f32
from sashiko.stitch.loops import BodyBuilder, LoopKernel, Node, axis, hoist_numbers
from sashiko.stitch.lower import MAGIC
from tests.cpu_codegen.kernels import buffers, empty, run, same
from tests.emulation import Runner, runners

ROWS, SIZE = 3, 67


@pytest.mark.parametrize("runner", runners(needs=("avx2",)))
def test_the_low_bits_choose(runner: Runner) -> None:
    entries = runner.target.lookup_entries
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(entries, generator=generator)
    each = torch.randint(-2 * entries, 2 * entries, (ROWS, SIZE), generator=generator).float()
    one = torch.randint(-2 * entries, 2 * entries, (ROWS,), generator=generator).float()

    builder = BodyBuilder()
    places = buffers(builder, each, one, empty(ROWS, SIZE), empty(ROWS))
    r, c = axis("r", ROWS), axis("c", SIZE)
    for source, target, at in ((places[0], places[2], SIZE * r + c), (places[1], places[3], r)):
        shifted = builder.op("add", f32, builder.load(source, at), builder.const(MAGIC, f32))
        builder.store(target, at, builder.add(Node("lookup", f32, (shifted,), numbers=tuple(numbers.tolist()))))
    body, params = hoist_numbers(builder.finish())
    tensors = [each, one, empty(ROWS, SIZE), empty(ROWS)]
    *_, vectors, scalars = run(runner, LoopKernel("tables", body, ROWS, SIZE, None, params), tensors)
    same(vectors, numbers[each.long() % entries])
    same(scalars, numbers[one.long() % entries])
