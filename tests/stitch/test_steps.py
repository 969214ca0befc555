"""Concatenations of many pieces of one shape: what loops give that are written out step by step."""

from __future__ import annotations

import torch

from sashiko.cpu_codegen.builder import Module
from sashiko.cpu_codegen.loops import emit_loop_kernel
from sashiko.graph import build as b
from sashiko.graph.dims import symbol
from sashiko.graph.ir import Graph, Value
from sashiko.graph.types import f32
from sashiko.platforms.catalogue import X86_64_V4
from sashiko.stitch.program import LoopItem
from sashiko.stitch.steps import by_pieces, together
from tests.stitch.test_stitch import check

S = symbol("S", 1, 256)


def recurrence(steps: int) -> tuple[list[Value], list[Value]]:
    """A loop whose steps hand on two numbers, its results side by side and what it ends with; and its inputs."""
    x, decay = b.input_(0, f32, (2, steps, 8)), b.input_(1, f32, (8,))
    total, most, results = b.slice_(x, 1, 0, 1), b.slice_(x, 1, 0, 1), list[Value]()
    for n in range(steps):
        now = b.slice_(x, 1, n, 1)
        total = b.add(b.mul(total, b.exp(b.mul(now, decay))), now)
        most = b.maximum(b.mul(most, 0.5), b.exp(b.sub(now, most)))
        results.append(b.div(total, most))
    return [b.concat(results, 1), total, most], [x, decay]


def test_the_steps_of_a_loop_are_computed_once() -> None:
    """All in one kernel, whatever their number: its code grows with the steps and not with their square."""
    sizes: list[tuple[int, int]] = []
    for steps in (10, 20, 40):
        outputs, inputs = recurrence(steps)
        p = check(outputs, inputs, [torch.randn(2, steps, 8), -torch.rand(8)], atol=1e-4)
        assert isinstance(p.items[0], LoopItem) and len(p.items) == 1
        module = Module()
        emit_loop_kernel(module, X86_64_V4, p.items[0].kernel)
        sizes.append((len(p.items[0].kernel.body.nodes), module.text().count("\n")))
    (small, few), (middle, some), (large, many) = sizes
    assert large - middle == 2 * (middle - small) and large < 40 * 12
    assert many - some <= 2.2 * (some - few)


def test_many_pieces_of_one_shape_are_read_and_stored_side_by_side() -> None:
    inputs = [b.input_(n, f32, (3, S, 4)) for n in range(12)]
    tensors, env = [torch.randn(3, 5, 4) for _ in inputs], {"S": 5}
    for axis in range(3):
        joined = b.concat(inputs, axis)
        read = [b.mul(b.permute(joined, (2, 1, 0)), 2.0), b.linear(joined, b.constant(torch.ones(6, joined.shape[2])))]
        p = check([joined, *read], inputs, tensors, env)
        assert isinstance(p.items[0], LoopItem)
        loads = [node for node in p.items[0].kernel.body.nodes if node.op == "load"]
        assert len(loads) == 12 and not any(node.args for node in loads)


def test_steps_behind_what_a_loop_begins_with_are_together() -> None:
    (joined, *_), (x, decay) = recurrence(12)
    begin = b.input_(2, f32, (2, 3, 8))
    graph = together(Graph((x, decay, begin), (b.concat([begin, *joined.inputs, begin], 1), b.concat([begin, x], 1))))
    assert [v.op for v in graph.outputs[0].inputs] == ["input", "concat", "input"] and by_pieces(graph.outputs[0].inputs[1])
    p = check(list(graph.outputs), [x, decay, begin], [torch.randn(2, 12, 8), -torch.rand(8), torch.randn(2, 3, 8)], atol=1e-4)
    assert max(len(i.kernel.body.nodes) for i in p.items if isinstance(i, LoopItem)) < 12 * 12
    assert together(graph) is graph
