"""What is computed once although many results need it."""

from __future__ import annotations

from functools import reduce

import pytest
import torch

from sashiko.graph import build as b
from sashiko.graph.ir import Value
from sashiko.graph.types import f32, i8, i64, u8
from sashiko.stitch.program import LoopItem
from tests.stitch.test_stitch import check, kinds

WHOLE = (3, 5, 8)


@pytest.mark.parametrize(("shape", "kernels"), [((1, 5, 8), 2), ((3, 1, 8), 2), ((8,), 2), ((3, 5, 1), 1), ((3, 1, 1), 1), (WHOLE, 1)])
def test_what_a_loop_around_would_compute_again(shape: tuple[int, ...], kernels: int) -> None:
    """Where the outer axes are missing; what only inner ones would repeat stands in front of their loops."""
    x, y = b.input_(0, f32, shape), b.input_(1, f32, WHOLE)
    data = [torch.randn(shape), torch.randn(WHOLE)]
    assert kinds(check([b.mul(b.exp(x), y)], [x, y], data)) == ["loop"] * kernels
    assert kinds(check([b.mul(b.add(x, 1.0), y)], [x, y], data)) == ["loop"]


def test_ranges_are_counted_again() -> None:
    """A range costs nothing to make; to read it from a buffer does."""
    y, n = b.input_(0, f32, WHOLE), b.iota(8, f32)
    for _ in range(7):
        n = b.add(b.mul(n, 0.5), 1.0)
    assert kinds(check([b.mul(n, y)], [y], [torch.randn(WHOLE)])) == ["loop"]


@pytest.mark.parametrize(("size", "step", "kernels"), [(7, 1, 2), (3, 1, 2), (3, 2, 1), (2, 2, 1)])
def test_what_windows_would_compute_again(size: int, step: int, kernels: int) -> None:
    x, y = b.input_(0, f32, (2, 14, 14, 4)), b.input_(1, f32, (2, 14, 14, 4))
    data = [torch.randn(2, 14, 14, 4), torch.randn(2, 14, 14, 4)]
    windows = b.window(b.window(b.pad(b.add(x, y), ((0, 0), (1, 1), (1, 1), (0, 0))), 1, size, step), 3, size, step)
    assert kinds(check([b.reduce(windows, "max", (2, 4))], [x, y], data)) == ["loop"] * kernels


@pytest.mark.parametrize(("size", "kernels"), [(7, 1), (9, 2)])
def test_an_image_with_its_edge_is_stored_for_large_windows(size: int, kernels: int) -> None:
    """Of 81 elements each would be asked whether it is in the image; 49 are written out, and asked all at once."""
    x, edge = b.input_(0, f32, (1, 14, 14, 4)), (size // 2, size // 2)
    windows = b.window(b.window(b.pad(x, ((0, 0), edge, edge, (0, 0))), 1, size, 1), 3, size, 1)
    assert kinds(check([b.reduce(windows, "sum", (2, 4))], [x], [torch.randn(1, 14, 14, 4)])) == ["loop"] * kernels


def test_an_image_that_several_elements_of_a_window_are_packed_of_needs_no_copy_with_its_edge() -> None:
    x, w = b.input_(0, u8, (1, 28, 28, 40)), b.input_(1, i8, (3, 3, 40))
    windows = b.window(b.window(b.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), 7), 1, 3), 3, 3)
    packed = [b.pack_bytes([b.slice_(v, axis, n, 1) for n in range(3)]) for v, axis in ((windows, 2), (w, 0))]
    weight = b.reshape(packed[1], (1, 1, 1, 1, 3, 40))
    integers = [torch.randint(0, 256, x.shape).to(torch.uint8), torch.randint(-128, 128, w.shape).to(torch.int8)]
    assert kinds(check([b.reduce(b.dot_bytes(packed[0], weight), "sum", (2, 4))], [x, w], integers)) == ["loop"]


@pytest.mark.parametrize(("channels", "step", "kernels"), [(20, 7, 2), (20, 2, 1), (8, 7, 1)])
def test_windows_far_apart_are_of_an_image_put_in_order(channels: int, step: int, kernels: int) -> None:
    """Where neither its lines nor its channels could be read by vectors."""
    x = b.input_(0, f32, (2, channels, 28, 28))
    windows = b.window(b.window(b.permute(x, (0, 2, 3, 1)), 1, step, step), 3, step, step)
    assert kinds(check([b.reduce(windows, "max", (2, 4))], [x], [torch.randn(x.shape)])) == ["loop"] * kernels


def shuffled(x: Value, y: Value) -> Value:
    """Columns of two images in turns, as channels are shuffled."""
    both = b.concat([x, y], -1)
    *outer, width = both.shape
    apart = b.permute(b.reshape(both, (*outer, 2, width // 2)), (*range(len(outer)), len(outer) + 1, len(outer)))
    return b.reshape(apart, both.shape)


def test_parts_that_take_turns_are_put_in_order_before_they_are_parts_again() -> None:
    """Once for both halves, whichever was asked for first, and by those too that had looked through them before."""
    inputs = [b.input_(n, f32, (6, 8)) for n in range(4)]
    data = [torch.randn(6, 8) for _ in inputs]
    each, others = inputs[0], []
    for other in inputs[1:]:
        both = shuffled(each, other)
        each = b.slice_(both, 1, 0, 8)
        others.append(b.exp(b.slice_(both, 1, 8, 8)))
    assert kinds(check([each], inputs, data)) == ["loop"] * 3
    assert kinds(check([b.slice_(shuffled(inputs[0], inputs[1]), 1, 0, 8)], inputs, data)) == ["loop"]
    check([*others, each], inputs, data)


@pytest.mark.parametrize(("size", "step", "kernels"), [(3, 2, 2), (2, 2, 1)])
def test_parts_that_take_turns_are_put_in_order_below_windows_that_overlap(size: int, step: int, kernels: int) -> None:
    inputs = [b.input_(n, f32, (2, 13, 13, 4)) for n in range(2)]
    image = b.pad(shuffled(*inputs), ((0, 0), (1, 1), (1, 1), (0, 0)))
    windows = b.window(b.window(image, 1, size, step), 3, size, step)
    assert kinds(check([b.reduce(windows, "max", (2, 4))], inputs, [torch.randn(2, 13, 13, 4) for _ in inputs])) == ["loop"] * kernels


def test_what_meets_itself_is_looked_at_once() -> None:
    """Each of 40 values is computed from the one before in two ways: 2^40 ways lead to the first."""
    x, y, n = b.input_(0, f32, (2, 14, 4)), b.input_(1, f32, WHOLE), b.iota(8, f32)
    each = x
    for _ in range(40):
        each, n = (b.add(b.mul(value, 0.5), b.mul(b.maximum(value, 0.0), 0.25)) for value in (each, n))
    windows = b.window(b.pad(each, ((0, 0), (1, 1), (0, 0))), 1, 3, 1)
    assert kinds(check([b.reduce(windows, "max", 2)], [x], [torch.randn(2, 14, 4)])) == ["loop", "loop"]
    assert kinds(check([b.mul(b.exp(n), y)], [y], [torch.randn(WHOLE)])) == ["loop"]


@pytest.mark.parametrize(("lookups", "stored", "kernels"), [(1, False, 1), (2, True, 3), (4, True, 3)])
def test_rows_that_lie_apart_are_put_together_where_many_are_read(lookups: int, stored: bool, kernels: int) -> None:
    """Of channels first there are no rows. The result is in that order, too, and is put into it at the end: what reads the rows has the
    channels as columns, which are read and stored by whole vectors."""
    x, index = b.input_(0, f32, (2, 16, 40)), [b.input_(1 + n, i64, (2, 40, 1)) for n in range(lookups)]
    table = b.permute(x, (0, 2, 1))
    rows = [b.gather(table, b.expand(each, (2, 40, 16)), 1) for each in index]
    program = check([b.permute(reduce(b.add, rows), (0, 2, 1))], [x, *index],
                    [torch.randn(2, 16, 40), *(torch.randint(0, 40, (2, 40, 1)) for _ in index)])
    assert (table in program.stored) == stored and kinds(program) == ["loop"] * kernels
    reader = program.items[-2] if stored else program.items[-1]
    assert isinstance(reader, LoopItem) and (reader.kernel.cols == 16) == stored


@pytest.mark.parametrize(("width", "apart", "kernels"), [(16, False, 2), (40, False, 2), (8, False, 1), (16, True, 1)])
def test_rows_that_are_looked_up_are_stored_as_rows(width: int, apart: bool, kernels: int) -> None:
    """And put in another order afterwards; not where they are narrow, or lie apart themselves."""
    x = b.input_(0, f32, (2, width, 50) if apart else (2, 50, width))
    index = b.input_(1, i64, (2, 50, 1))
    rows = b.gather(b.permute(x, (0, 2, 1)) if apart else x, b.expand(index, (2, 50, width)), 1)
    data = [torch.randn(x.shape), torch.randint(0, 50, (2, 50, 1))]
    assert kinds(check([b.permute(b.mul(rows, 2.0), (0, 2, 1))], [x, index], data)) == ["loop"] * kernels


def test_places_that_are_inside_are_not_checked() -> None:
    x, at = b.input_(0, f32, (2, 50, 16)), b.input_(1, f32, (2, 50, 1))
    inside = b.cast(b.minimum(b.where(b.gt(at, 0.0), at, 0.0), 49.0), i64)
    places = torch.randn(2, 50, 1) * 50
    places[0, :3, 0] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    for index, checks in ((inside, 0), (b.cast(at, i64), 1)):
        data = [torch.randn(2, 50, 16), places if not checks else places.abs().nan_to_num(0, 0, 0).clamp(max=49)]
        program = check([b.gather(x, b.expand(index, (2, 50, 16)), 1)], [x, at], data)
        nodes = [node for item in program.items if isinstance(item, LoopItem) for node in item.kernel.body.nodes]
        assert sum(node.op == "check" for node in nodes) == checks


@pytest.mark.parametrize(("each", "around", "kernels"), [(10, 6, 2), (5, 6, 2), (8, 6, 1), (16, 6, 1), (32, 6, 1), (10, 1, 1)])
def test_elements_that_stay_for_some_columns(each: int, around: int, kernels: int) -> None:
    """As the numbers of groups of channels: put together once, unless they fit the lanes of vectors or each is read once."""
    x, y = b.input_(0, f32, (2, 4)), b.input_(1, f32, (2, around, 4 * each))
    columns = b.reshape(b.expand(b.reshape(x, (2, 4, 1)), (2, 4, each)), (2, 1, 4 * each))
    data = [torch.randn(2, 4), torch.randn(2, around, 4 * each)]
    assert kinds(check([b.mul(y, columns)], [x, y], data)) == ["loop"] * kernels


@pytest.mark.parametrize("axis", [0, 2])
def test_what_a_sum_would_compute_again(axis: int) -> None:
    x, y = b.input_(0, f32, (8,)), b.input_(1, f32, WHOLE)
    total = b.reduce(b.mul(b.sigmoid(x), y), "sum", axis)
    assert kinds(check([total], [x, y], [torch.randn(8), torch.randn(WHOLE)])) == ["loop", "loop"]


@pytest.mark.parametrize(("shape", "kernels"), [((1, 5, 8), 1), ((3, 1, 8), 1), ((3, 5, 1), 1), (WHOLE, 0)])
def test_what_an_epilogue_would_compute_again(shape: tuple[int, ...], kernels: int) -> None:
    """Its tiles are narrower than the rows, which it therefore meets more than once."""
    x, y, w = b.input_(0, f32, shape), b.input_(1, f32, (3, 5, 4)), b.constant(torch.randn(8, 4))
    data = [torch.randn(shape), torch.randn(3, 5, 4)]
    p = check([b.mul(b.sigmoid(x), b.linear(y, w))], [x, y], data, atol=1e-4)
    assert kinds(p) == ["loop"] * kernels + ["linear"]
