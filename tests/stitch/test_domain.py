"""Which axis becomes the columns of a kernel."""

from __future__ import annotations

import pytest

from sashiko.graph.dims import Dim, symbol
from sashiko.graph.types import f32
from sashiko.stitch.domain import Domain, finish
from sashiko.stitch.loops import BodyBuilder


def columns(height: Dim, width: Dim, channels: int, read: tuple[Dim, Dim, Dim]) -> Dim:
    """The extent of the columns of a copy to [height, width, channels] from where the strides `read` of these axes lead."""
    h, w, c = (symbol(name, 0, None, extent) for name, extent in (("h", height), ("w", width), ("ch", channels)))
    b = BodyBuilder()
    x, out = b.buffer(f32), b.buffer(f32)
    at = sum((axis * stride for axis, stride in zip((h, w, c), read)), 0)
    b.store(out, h * (width * channels) + w * channels + c, b.load(x, at))
    return finish(b.finish(), Domain((("h", height), ("w", width), ("ch", channels)))).cols


@pytest.mark.parametrize(("channels", "read", "expected"), [
    (3, (40, 1, 800), 800),  # the planes of an image: along them
    (3, (50, 1, 1000), 40),  # of a part of one: along its lines
    (16, (50, 1, 1000), 16),  # enough channels for whole vectors
    (3, (1, 1000, 5000), 3),  # nothing long is read in sequence
    (3, (120, 3, 1), 3 * 40 * 20),  # in order as it is
])
def test_columns_are_what_is_read_in_sequence_where_there_are_few_others(channels: int, read: tuple[int, int, int], expected: int) -> None:
    assert columns(20 if read[0] != 1 else 4, 40, channels, read) == expected


def test_a_width_that_is_not_known_to_be_great_is_left() -> None:
    small, great = symbol("W", 1), symbol("W", 16)
    assert columns(20, small, 3, (small + 5, 1, 1000)) == 3
    assert columns(20, great, 3, (great + 5, 1, 1000)) == great
