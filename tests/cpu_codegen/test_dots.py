"""Bytes beside one another in elements of 32 bits, and their dot products: the integers that the interpreter gives, on every target."""

from __future__ import annotations

import pytest
import torch

from sashiko.graph import build as b
from sashiko.graph.interpret import run as interpret
from sashiko.graph.ir import Graph
from sashiko.graph.types import i8, i32, u8
from sashiko.stitch.loops import BodyBuilder, LoopKernel, axis
from tests.cpu_codegen.kernels import buffers, empty, run
from tests.emulation import Runner, runners

COLUMNS = 83  # whole vectors and a tail


@pytest.mark.parametrize("runner", runners())
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_dots_of_packed_bytes(runner: Runner, count: int) -> None:
    """The extremes and random numbers, with a sum before them and without one; the bytes of one column, which are the same for all, too."""
    generator = torch.Generator().manual_seed(count)
    image = [torch.randint(0, 256, (COLUMNS,), generator=generator).to(torch.uint8) for _ in range(count)]
    weight = [torch.randint(-128, 128, (COLUMNS,), generator=generator).to(torch.int8) for _ in range(count)]
    for x, w in zip(image, weight):
        x[:4], w[:4] = torch.tensor([0, 255, 255, 128]), torch.tensor([-128, -128, 127, -1])
    before = torch.randint(-(2**31), 2**31 - 1, (COLUMNS,), generator=generator, dtype=torch.int64).to(torch.int32)
    outputs = [empty(COLUMNS, dtype=torch.int32) for _ in range(4)]
    body, c = BodyBuilder(), axis("c", COLUMNS)
    places = buffers(body, *image, *weight, before, *outputs)
    xs, ws = ([body.load(place, c) for place in part] for part in (places[:count], places[count : 2 * count]))
    packed, factors = body.op("pack_bytes", i32, *xs), body.op("pack_bytes", i32, *ws)
    alike = body.op("pack_bytes", i32, *(body.load(place, 1) for place in places[:count]))
    found = (
        packed, body.op("dot_bytes", i32, packed, factors), body.op("dot_bytes", i32, packed, factors, body.load(places[2 * count], c)),
        body.op("dot_bytes", i32, alike, factors),
    )
    for place, node in zip(places[2 * count + 1 :], found):
        body.store(place, c, node)
    got = run(runner, LoopKernel("dots", body.finish(), None, COLUMNS), [*image, *weight, before, *outputs])[-4:]

    inputs = [*(b.input_(n, u8, (COLUMNS,)) for n in range(count)), *(b.input_(count + n, i8, (COLUMNS,)) for n in range(count))]
    both = [b.pack_bytes(inputs[:count]), b.pack_bytes(inputs[count:])]
    graph = Graph(tuple(inputs), (both[0], b.dot_bytes(*both)))
    bytes_, dots = interpret(graph, (*image, *weight))
    assert torch.equal(got[0], bytes_) and torch.equal(got[1], dots)
    assert torch.equal(got[2], dots + before)  # which wraps around
    first = [x[1].expand(COLUMNS).contiguous() for x in image]
    assert torch.equal(got[3], interpret(graph, (*first, *weight))[1])
