"""Which axis becomes the columns of a kernel."""

from __future__ import annotations

import pytest
import torch

import sashiko
from sashiko.graph import build as b
from sashiko.graph.dims import Dim, floordiv, mod, symbol
from sashiko.graph.types import f32, i64
from sashiko.stitch.domain import Domain, finish
from sashiko.stitch.loops import BodyBuilder, LoopKernel
from sashiko.stitch.program import LoopItem
from sashiko.stitch.stitcher import stitch
from sashiko.stitch.views import parts


def columns(height: Dim, width: Dim, channels: int, read: tuple[Dim, Dim, Dim]) -> Dim:
    """The extent of the columns of a copy to [height, width, channels] from where the strides `read` of these axes lead."""
    h, w, c = (symbol(name, 0, None, extent) for name, extent in (("h", height), ("w", width), ("ch", channels)))
    body = BodyBuilder()
    x, out = body.buffer(f32), body.buffer(f32)
    at = sum((axis * stride for axis, stride in zip((h, w, c), read)), 0)
    body.store(out, h * (width * channels) + w * channels + c, body.load(x, at))
    return finish(body.finish(), Domain((("h", height), ("w", width), ("ch", channels)))).cols


@pytest.mark.parametrize(("channels", "read", "expected"), [
    (3, (40, 1, 800), 800),  # the planes of an image: along them
    (3, (50, 1, 1000), 40),  # of a part of one: along its lines
    (16, (50, 1, 1000), 16),  # enough channels for whole vectors
    (3, (1, 1000, 5000), 3),  # nothing long is read in sequence
    (3, (120, 3, 1), 3 * 40 * 20),  # in order as it is
])
def test_columns_are_what_is_read_in_sequence_where_there_are_few_others(channels: int, read: tuple[int, int, int], expected: int) -> None:
    assert columns(20 if read[0] != 1 else 4, 40, channels, read) == expected


def test_columns_give_way_to_fewer_than_a_vector_if_these_are_several_times_as_many() -> None:
    assert [columns(20, 15, channels, (17, 1, 400)) for channels in (2, 3, 4)] == [15, 15, 4]


@pytest.mark.parametrize(("along", "expected"), [("h", 40), ("w", 20)])
def test_columns_along_which_each_element_is_looked_up_give_way(along: str, expected: int) -> None:
    """What is looked up for each row is the same for all columns, and no reason to change them."""
    axes = {name: symbol(name, 0, None, extent) for name, extent in (("h", 20), ("w", 40))}
    body = BodyBuilder()
    x, table, index, out = body.buffer(f32), body.buffer(f32), body.buffer(i64), body.buffer(f32)
    row = body.node_index(body.load(index, axes[along]))
    other = axes["w" if along == "h" else "h"]
    total = body.op("add", f32, body.load(table, row * 64 + other), body.load(x, other))
    body.store(out, axes["h"] * 40 + axes["w"], total)
    assert finish(body.finish(), Domain((("h", 20), ("w", 40)))).cols == expected


def test_the_parts_of_an_axis() -> None:
    axis, other = symbol("a", 0, None, 256), symbol("b", 0, None, 256)
    for index, expected in (
        ((floordiv(axis, 32), mod(axis, 32)), [8, 32]),
        ((mod(floordiv(axis, 8), 4), mod(axis, 8), floordiv(axis, 32)), [8, 4, 8]),
        ((floordiv(other, 32), axis), [256]),
        ((floordiv(axis + other, 32),), [256]),
        ((floordiv(axis, 3),), [256]),
    ):
        assert parts(axis, 256, index) == expected


def test_a_width_that_is_not_known_to_be_great_is_left() -> None:
    small, great = symbol("W", 1), symbol("W", 16)
    assert columns(20, small, 3, (small + 5, 1, 1000)) == 3
    assert columns(20, great, 3, (great + 5, 1, 1000)) == great


def channels_last(channels: int, width: int) -> LoopKernel:
    """The copy of an image in torch's order into channels-last order, a pixel wider on each side."""
    x = b.input_(0, f32, (2, channels, 5, width))
    (item,) = stitch((b.pad(b.permute(x, (0, 2, 3, 1)), ((0, 0), (0, 0), (1, 1), (0, 0))),), (x,), ()).items
    assert isinstance(item, LoopItem)
    return item.kernel


@pytest.mark.parametrize(("channels", "width", "columns"), [(3, 40, 42), (3, 6, 3), (16, 40, 16)])
def test_few_channels_are_no_vectors(channels: int, width: int, columns: int) -> None:
    """Neither are short lines of the image better, nor is that done where channels fill vectors."""
    assert channels_last(channels, width).cols == columns


def test_few_neighbours_that_are_read_side_by_side_stay_the_columns() -> None:
    x = b.input_(0, f32, (40, 6, 3))
    (item,) = stitch((b.relu(b.slice_(x, 1, 0, 3, 2)),), (x,), ()).items
    assert isinstance(item, LoopItem) and item.kernel.cols == 3


@pytest.mark.parametrize(("width", "columns"), [(40, 40), (6, 6), (4, 4), (3, 24)])
def test_sums_over_what_is_read_from_far_apart_go_along_what_is_read_side_by_side(width: int, columns: int) -> None:
    """Each of several elements that a sum reads would be fetched alone: a quarter of a vector side by side is better."""
    x = b.input_(0, f32, (2, 24, 5, width))
    (item,) = stitch((b.reduce(b.permute(x, (0, 2, 3, 1)), "sum", 1),), (x,), ()).items
    assert isinstance(item, LoopItem) and item.kernel.cols == columns


def test_sums_along_another_axis_than_results_are_stored() -> None:
    class Sums(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            image = x.permute(0, 2, 3, 1)
            return image.sum(1), torch.nn.functional.max_pool2d(x.relu(), 3, 2).permute(0, 2, 3, 1).contiguous()

    x = torch.randn(2, 24, 9, 37)
    sums, largest = sashiko.compile(Sums().eval(), (x,), strict=True)(x)
    wanted = Sums()(x.double())
    assert (sums - wanted[0]).abs().max() < 9 * torch.finfo(torch.float32).eps * x.abs().sum(2).max()
    assert torch.equal(largest.double(), wanted[1])


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_images_of_few_channels(channels: int) -> None:
    class Surrounded(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.pad(x, (2, 1, 0, 1), value=0.5).permute(0, 2, 3, 1).contiguous()

    x = torch.randn(2, channels, 7, 37)
    assert torch.equal(sashiko.compile(Surrounded().eval(), (x,), strict=True)(x), Surrounded()(x))


def reduced(shape: tuple[int, ...], order: tuple[int, ...], axes: tuple[int, ...]) -> LoopKernel:
    """The kernel of a sum over axes of a tensor that is seen in another order than it lies in."""
    x = b.input_(0, f32, tuple(shape[axis] for axis in order))
    seen = b.permute(x, tuple(order.index(axis) for axis in range(len(shape))))
    [item] = stitch((b.reduce(seen, "sum", axes),), (x,), ()).items
    assert isinstance(item, LoopItem)
    return item.kernel


@pytest.mark.parametrize(("shape", "order", "axes", "expected"), [
    ((1, 6, 20, 30), (0, 1, 2, 3), (0, 2, 3), (600, None)),  # an axis of one element keeps nothing apart: rows of what is reduced
    ((2, 6, 20), (0, 1, 2), (0, 2), (6, 40)),  # here the images are apart
    ((5, 1), (0, 1), (1,), (1, None)),
    ((256, 8, 96), (2, 0, 1), (0,), (8, 256)),  # half a vector that lies side by side, and not 96 elements that lie apart
    ((256, 3, 96), (2, 0, 1), (0,), (96, 256)),
    ((256, 8, 96), (0, 1, 2), (0,), (768, 256)),
])
def test_what_the_columns_of_a_sum_are(
    shape: tuple[int, ...], order: tuple[int, ...], axes: tuple[int, ...], expected: tuple[int, int | None]
) -> None:
    kernel = reduced(shape, order, axes)
    assert (kernel.cols, kernel.depth) == expected


def _extents(function: object, *shape: int) -> list[tuple[Dim | None, Dim]]:
    """Rows and columns of the kernels of a function of one tensor."""
    x = b.input_(0, f32, shape)
    program = stitch((function(x),), (x,), ())  # type: ignore[operator]
    return [(item.kernel.rows, item.kernel.cols) for item in program.items if isinstance(item, LoopItem)]


def test_few_columns_are_joined_with_the_rows_that_are_asked_about() -> None:
    """The parts of a concatenation, and what lies around a padded one, begin at elements rather than at rows of few elements."""
    for last in (1, 4, 15):
        assert _extents(lambda x: b.concat([x, b.add(x, 1.0)], 1), 30, 50, last) == [(30, 100 * last)]
        assert _extents(lambda x: b.pad(x, [(0, 0), (2, 3), (0, 0)]), 30, 50, last) == [(30, 55 * last)]
    assert _extents(lambda x: b.concat([x, b.add(x, 1.0)], 0), 50, 4) == [(None, 400)]
    assert _extents(lambda x: b.concat([x, b.add(x, 1.0)], 1), 30, 50, 16) == [(3000, 16)], "whole vectors"
    assert _extents(lambda x: b.concat([x, b.iota(50, f32)], 0), 50) == [(None, 100)]


def test_rows_that_are_asked_otherwise_stay_apart() -> None:
    places = b.reshape(b.iota(50, f32), (50, 1))
    lower = b.where(b.lt(b.reshape(b.iota(50, i64), (50, 1)), 20), b.full(1.0, f32), places)
    assert _extents(lambda x: b.add(x, places), 50, 4) == [(50, 4)], "the row is a number"
    assert _extents(lambda x: b.add(x, lower), 50, 4) == [(50, 4)]
