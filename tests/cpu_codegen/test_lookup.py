"""Tables in registers: every lane finds its number, in whole vectors, tails and single elements."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sashiko.cpu_codegen import lookup
from sashiko.cpu_codegen.builder import F32, I64, PTR, VOID, Function, Module, Val, i64
from sashiko.cpu_codegen.slots import Slots
from sashiko.graph.types import f32
from sashiko.stitch.elementwise import MAGIC
from sashiko.stitch.loops import BodyBuilder, LoopKernel, Node, axis, hoist_numbers
from tests.cpu_codegen.kernels import buffers, empty, run, same
from tests.emulation import Runner, runners

ROWS, SIZE = 3, 67
PARTS = [
    pytest.param(*p.values, lanes, id=f"{p.id}-{lanes}", marks=p.marks)
    for p in runners()
    for lanes in (0, 2, 4, 8)
    if lanes <= p.values[0].target.lanes(32)
]


@pytest.mark.parametrize("runner", runners())
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


@pytest.mark.parametrize(("runner", "lanes"), PARTS)
def test_vectors_that_do_not_fill_a_register(runner: Runner, lanes: int) -> None:
    entries, width = runner.target.lookup_entries, runner.target.lanes(32)
    module = Module()
    fn = Function(module, "narrow", VOID, [PTR, I64, I64])
    slots = Slots(fn)
    source, numbers, result = (slots.buffer(n) for n in range(3))
    table = [fn.load(F32.vec(width), fn.gep(numbers, i64(at), F32)) for at in range(0, entries, width)]

    def body(i: Val, _: list[Val]) -> list[Val]:
        x = fn.load(F32.vec(lanes), fn.gep(source, i, F32))
        fn.store(lookup.emit(fn, runner.target, table, x), fn.gep(result, i, F32))
        return []

    fn.loop(fn.args[1], fn.args[2], max(1, lanes), [], body)
    fn.ret()
    fn.finish()
    each = np.random.default_rng(0).integers(-entries, entries, 64)
    held = np.random.default_rng(1).standard_normal(entries).astype(np.float32)
    *_, got = runner.run(module.text(), "narrow", [(MAGIC + each).astype(np.float32), held, np.zeros(64, np.float32)], end=64)
    np.testing.assert_array_equal(got, held[each % entries])
