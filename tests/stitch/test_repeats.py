"""What one kernel would compute at several places of an operand is stored where that takes less."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sashiko.graph import build as b
from sashiko.graph.dims import symbol
from sashiko.graph.ir import Value
from sashiko.graph.types import f32, i64
from sashiko.stitch.program import LoopItem, Program
from sashiko.stitch.repeats import typical
from tests.stitch.test_stitch import check, kinds

SIZE, LEVELS = 48, 24


def moved(x: Value, by: int) -> Value:
    """The last axis turned by so many places."""
    size = x.shape[-1]
    assert isinstance(size, int)
    return b.concat([b.slice_(x, -1, size - by, by), b.slice_(x, -1, 0, size - by)], 1)


def turned(x: Value) -> Value:
    return b.add(b.mul(moved(x, 1), 0.5), b.mul(x, 0.5))


def halves(x: Value) -> Value:
    """Sums and differences, side by side: one level of a fast Walsh-Hadamard transform."""
    low, high = b.slice_(x, -1, 0, SIZE // 2), b.slice_(x, -1, SIZE // 2, SIZE // 2)
    return b.mul(b.concat([b.add(low, high), b.sub(low, high)], 1), 0.5)


def neighbours(x: Value) -> Value:
    return b.pad(b.mul(b.add(b.slice_(x, -1, 1, SIZE - 1), b.slice_(x, -1, 0, SIZE - 1)), 0.5), ((0, 0), (0, 1)))


def swapped(x: Value) -> Value:
    """Nothing is computed of two places; but each level would double the pieces."""
    return b.mul(b.add(moved(x, 7), 1.0), 0.5)


def gathered(x: Value) -> Value:
    index = b.constant(torch.arange(SIZE).flip(0))
    return b.add(b.mul(b.take(x, index, 1), 0.5), b.mul(x, 0.5))


def nodes(program: Program) -> int:
    return sum(len(item.kernel.body.nodes) for item in program.items if isinstance(item, LoopItem))


@pytest.mark.parametrize("level", [turned, halves, neighbours, swapped, gathered])
def test_chains_grow_with_their_length(level: Callable[[Value], Value]) -> None:
    """As one kernel each of these would be of exponential size."""
    x = b.input_(0, f32, (6, SIZE))
    size = {}
    for levels in (LEVELS // 2, LEVELS):
        value = x
        for _ in range(levels):
            value = level(value)
        size[levels] = nodes(check([value], [x], [torch.randn(6, SIZE)]))
    assert size[LEVELS] < 2.5 * size[LEVELS // 2] < 1000


@pytest.mark.parametrize("rows", [6, symbol("R", 1, 512)])
def test_little_work_is_repeated(rows: int) -> None:
    x, y = b.input_(0, f32, (rows, SIZE)), b.input_(1, f32, (rows, SIZE))
    data, env = [torch.randn(6, SIZE), torch.randn(6, SIZE)], {"R": 6}
    assert kinds(check([turned(b.mul(x, y))], [x, y], data, env)) == ["loop"]
    assert kinds(check([turned(b.exp(b.mul(x, y)))], [x, y], data, env)) == ["loop", "loop"]


def test_pieces_are_not_reason_enough_to_compute_all() -> None:
    """Of a large value a kernel reads a few elements: two short pieces take less than the whole."""
    x = b.input_(0, f32, (6, 4096))
    wave = b.sin(x)
    both = b.add(b.slice_(wave, 1, 0, 8), b.slice_(wave, 1, 4000, 8))
    assert kinds(check([both], [x], [torch.randn(6, 4096)])) == ["loop"]
    whole = b.add(b.slice_(wave, 1, 0, 4095), b.slice_(wave, 1, 1, 4095))
    assert kinds(check([whole], [x], [torch.randn(6, 4096)])) == ["loop", "loop"]


def test_what_lies_inside_is_not_guarded() -> None:
    """Numbers of the rows are read at the same place for every piece, and no piece's columns decide about them."""
    x, scale, table = b.input_(0, f32, (6, SIZE)), b.input_(1, f32, (6, 1)), b.input_(2, f32, (4, SIZE))
    chosen = b.input_(3, i64, (6,))
    scaled = b.add(b.mul(x, b.rsqrt(scale)), b.take(table, chosen, 0))
    data = [torch.randn(6, SIZE), torch.rand(6, 1) + 1, torch.randn(4, SIZE), torch.tensor([3, 0, 1, 1, 2, 3])]
    program = check([b.concat([b.slice_(scaled, 1, 8, SIZE - 8), x], 1)], [x, scale, table, chosen], data)
    assert kinds(program) == ["loop"]
    (item,) = program.items
    assert isinstance(item, LoopItem)
    guarded = {item.operands[n.buffer] for n in item.kernel.body.nodes if n.op == "load" and n.args}
    assert guarded == {x, table}


def test_an_element_of_a_size_that_may_be_zero_stays_guarded() -> None:
    """Proofs take sizes for 1 at least, but a call may bring none: neither the first nor the last element is there then."""
    rows = symbol("R", 1, 512)
    x, y = b.input_(0, f32, (rows, 1)), b.input_(1, f32, (6, SIZE))
    for start in (0, rows - 1):
        one = b.expand(b.slice_(x, 0, start, 1), (6, 1))
        (item,) = check([b.concat([y, one], 1)], [x, y], [torch.randn(4, 1), torch.randn(6, SIZE)], {"R": 4}).items
        assert isinstance(item, LoopItem)
        assert x in {item.operands[n.buffer] for n in item.kernel.body.nodes if n.op == "load" and n.args}


def test_typical_sizes() -> None:
    assert typical(7) == 7
    assert typical(symbol("N", 1, 16) * 3 + 1) == 49
    assert typical(symbol("M", 2)) == 64 and typical(symbol("L", 100)) == 100
