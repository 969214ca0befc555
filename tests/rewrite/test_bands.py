"""Convolutions of which many taps see only padding: each band of results reads the taps that it sees."""

from __future__ import annotations

import copy
import random
from math import prod

import pytest
import torch
from torch.export import Dim

import sashiko
from sashiko.driver.captures import captured_of
from sashiko.graph import build as b
from sashiko.graph.aten.windows import dense, windows
from sashiko.graph.interpret import run
from sashiko.graph.ir import Graph, Value
from sashiko.graph.types import DType, bf16, f32
from sashiko.graph.verify import verify
from sashiko.rewrite.rules.bands import Axis, Band, Convolution, bands, by_bands


def axis(n: int, size: int, step: int, padding: int, apart: int) -> Axis:
    return Axis(n, (n + 2 * padding - apart * (size - 1) - 1) // step + 1, size, step, padding, padding, apart)


@pytest.mark.parametrize("seed", range(200))
def test_every_result_is_in_one_band_that_has_what_it_sees(seed: int) -> None:
    choose = random.Random(seed)
    n, size, step, apart = choose.randint(1, 30), choose.randint(1, 5), choose.randint(1, 3), choose.randint(1, 16)
    reach = apart * (size - 1) + 1
    padding = choose.randint(max(0, -(-(reach - n) // 2)), reach + 3)
    one = axis(n, size, step, padding, apart)
    (cut,) = bands([one], 64)
    found = cut or [Band(0, one.out, 0, size)]
    assert [o for band in found for o in range(band.start, band.start + band.length)] == list(range(one.out))
    for band in found:
        here = range(band.start, band.start + band.length)
        places = {o: [k for k in range(size) if 0 <= o * step + k * apart - padding < n] for o in here}
        taps = range(band.first, band.first + band.taps)
        assert all(set(seen) <= set(taps) for seen in places.values())
        assert not cut or all(seen == list(taps) for seen in places.values())
        read = [o * step + k * apart - padding for o in places for k in taps]
        assert band.reach(step, apart, padding) == (min(read), max(read) + 1)


def cut(n: int, apart: int, batch: int = 1, tile_rows: int = 1, whole_costs: float = 1.0) -> list[list[Band]]:
    """Of a convolution of 3 x 3 that keeps the size of its image."""
    return bands([axis(n, 3, 1, apart, apart)] * 2, batch, 1 << 16, tile_rows, whole_costs)


def test_axes_are_cut_where_it_pays() -> None:
    lines = [[Band(0, 2, 1, 2), Band(2, 12, 0, 3), Band(14, 2, 0, 2)], []]
    assert cut(16, 24) == [[Band(0, 16, 1, 1)]] * 2, "only the tap in the middle lies inside"
    assert cut(14, 12) == [[Band(0, 2, 1, 2), Band(2, 10, 1, 1), Band(12, 2, 0, 2)]] * 2
    assert cut(56, 1) == [[], []]
    assert cut(14, 1) == [[], []], "two and a half weights in memory for 3 %"
    assert cut(16, 2) == lines, "the corners save as much again, for five weights"
    assert [len(found) for found in cut(28, 4)] == [len(found) for found in cut(7, 1, batch=8)] == [3, 3]
    assert cut(2, 1) == [[], []], "four rows: reading the weights takes the time"
    assert cut(2, 1, 64) == [[Band(0, 1, 1, 2), Band(1, 1, 0, 2)]] * 2
    nine, few = Axis(9, 9, 17, 1, 8, 8, 1), Axis(90, 90, 3, 1, 1, 1, 1)
    assert sum(map(len, bands([nine, nine], 1))) == 9, "of both axes 81 products"
    first, rest = bands([nine, few], 9)
    assert len(first) == 9 and not rest
    assert bands([Axis(10**6, 10**6, 40000, 1, 20000, 20000, 1)], 1) == [[]]


def test_what_else_decides() -> None:
    assert len(cut(7, 3)[0]) == 3 and cut(7, 3, tile_rows=16) == [[], []], "results of a band take a tile of 16 rows at least"
    assert len(cut(28, 4, tile_rows=16)[0]) == 3
    assert bands([axis(28, 3, 1, 4, 4)] * 2, 1, 64) == [[], []], "calls take as long as such small products"
    assert cut(28, 4, whole_costs=0.6) == [[], []] and len(cut(14, 12, whole_costs=0.6)[0]) == 3


SHAPES = [
    ((2, 8, 16, 16), (3, 3), (1, 1), (12, 12), (12, 12), 1),
    ((2, 8, 16, 20), (3, 3), (1, 1), (24, 6), (24, 6), 2),
    ((2, 64, 9, 40), (5, 2), (2, 3), (14, 1), (7, 1), 4),
    ((1, 8, 9, 40), (5, 1), (1, 1), (14, 0), (7, 1), 1),
    ((3, 64, 30), (3,), (1,), (24,), (24,), 1),
    ((1, 8, 6, 7, 8), (3, 3, 3), (1, 2, 1), (5, 6, 1), (5, 6, 1), 2),
]  # fmt: skip


def convolution(x: tuple[int, ...], window: tuple[int, ...], stride: tuple[int, ...], padding: tuple[int, ...], dilation: tuple[int, ...],
                groups: int) -> torch.nn.Module:
    kind = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)[len(window) - 1]
    return kind(x[1], 64, window, stride, padding, dilation, groups).eval()  # type: ignore[arg-type]


def products(graph: Graph) -> list[int]:
    """Multiplications of each product."""
    return [prod(map(int, v.inputs[0].shape)) * v.shape[-1] for v in graph.order if v.op == "linear"]  # type: ignore[arg-type, operator, misc]


@pytest.mark.parametrize(("x", "window", "stride", "padding", "dilation", "groups"), SHAPES)
def test_convolutions_by_bands(x: tuple[int, ...], window: tuple[int, ...], stride: tuple[int, ...], padding: tuple[int, ...],
                               dilation: tuple[int, ...], groups: int) -> None:
    model, image = convolution(x, window, stride, padding, dilation, groups), torch.randn(x)
    whole = captured_of(model, (image,), {}, None).graph
    graph = by_bands(whole)
    verify(graph)
    assert len(products(whole)) == 1 < len(products(graph)) and sum(products(graph)) < 0.75 * products(whole)[0]
    with torch.no_grad():
        expected = copy.deepcopy(model).double()(image.double())
    assert torch.allclose(run(graph, [image])[0].double(), expected, rtol=0, atol=1e-5)


def test_what_a_product_is_multiplied_in_decides() -> None:
    """Minimal filtering saves more than bands do; there is none in other types, nor of a weight in integers."""
    image, model = torch.randn(1, 64, 32, 32), torch.nn.Conv2d(64, 64, 3, padding=4, dilation=4).eval()
    graph = captured_of(model, (image,), {}, None).graph
    assert by_bands(graph) is graph
    assert len(products(by_bands(graph, lambda linear: True))) == 9
    small = sashiko.quantize(model, [image], progress=False)
    assert len(products(by_bands(captured_of(small, (image,), {}, None).graph))) == 9


def test_tiles_are_of_products_that_are_not_of_f32() -> None:
    image, model = torch.randn(1, 64, 7, 7), torch.nn.Conv2d(64, 64, 3, padding=3, dilation=3, groups=2).eval()
    graph = captured_of(model, (image,), {}, None).graph
    assert len(products(by_bands(graph, tile_rows=16))) > 1
    assert by_bands(graph, lambda linear: True, tile_rows=16) is graph


@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
def test_only_what_is_a_convolution_is_cut(dtype: DType) -> None:
    x, w = b.input_(0, dtype, (1, 9, 9, 8)), b.input_(1, dtype, (8, 8, 3, 3))
    around = ((0, 0), (6, 6), (6, 6), (0, 0))

    def patches(value: float = 0.0, more: tuple[int, int] = (0, 0)) -> Value:
        return windows(b.pad(x, (more, *around[1:]), value), (3, 3), (1, 1), (6, 6))

    assert Convolution.of(dense(patches(), w, None, 1)) is not None
    for other in (patches(1.0), patches(more=(0, 1)), b.permute(patches(), (0, 2, 1, 3, 4, 5))):
        assert Convolution.of(dense(other, w, None, 1)) is None


@pytest.mark.parametrize(("size", "channels"), [(24, 3), (28, 48), (12, 12)])
def test_images_that_were_padded_before_are_left(size: int, channels: int) -> None:
    """Below the windows lies a padding, but of channels before lines; its numbers may make no convolution at all."""

    class Padded(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.nn.Conv2d(channels, 16, 3, stride=2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv(torch.nn.functional.pad(x, (0, 1, 0, 1)))  # type: ignore[no-any-return]

    model, image = Padded().eval(), torch.randn(1, channels, size, size)
    graph = captured_of(model, (image,), {}, None).graph
    assert by_bands(graph) is graph
    with torch.no_grad():
        assert torch.allclose(sashiko.compile(model, (image,))(image), model(image), atol=1e-5)


def test_sizes_that_are_not_known_are_left() -> None:
    model = torch.nn.Conv2d(8, 8, 3, padding=12, dilation=12).eval()
    graph = captured_of(model, (torch.randn(2, 8, 14, 14),), {}, ({2: Dim("height", min=2, max=99)},)).graph
    assert by_bands(graph) is graph
