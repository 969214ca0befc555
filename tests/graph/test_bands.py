"""Convolutions of which many taps see only padding: each band of results reads the taps that it sees."""

from __future__ import annotations

import random
from math import prod

import pytest
import torch

from sashiko.graph.aten.bands import Band, bands
from tests.graph.eager import Recorded
from tests.graph.test_aten_table import compared

aten = torch.ops.aten


@pytest.mark.parametrize("seed", range(200))
def test_every_result_is_in_one_band_that_has_what_it_sees(seed: int) -> None:
    choose = random.Random(seed)
    n, size, step, apart = choose.randint(1, 30), choose.randint(1, 5), choose.randint(1, 3), choose.randint(1, 16)
    reach = apart * (size - 1) + 1
    padding = choose.randint(max(0, -(-(reach - n) // 2)), reach + 3)
    out = (n + 2 * padding - reach) // step + 1
    (cut,) = bands([n], [out], [size], [step], [padding], [apart], 64)
    found = cut or [Band(0, out, 0, size)]
    assert [o for band in found for o in range(band.start, band.start + band.length)] == list(range(out))
    for band in found:
        here = range(band.start, band.start + band.length)
        places = {o: [k for k in range(size) if 0 <= o * step + k * apart - padding < n] for o in here}
        taps = range(band.first, band.first + band.taps)
        assert all(set(seen) <= set(taps) for seen in places.values())
        assert not cut or all(seen == list(taps) for seen in places.values())
        read = [o * step + k * apart - padding for o in places for k in taps]
        assert band.reach(step, apart, padding) == (min(read), max(read) + 1)


def test_axes_are_cut_where_it_pays() -> None:
    def cut(n: int, apart: int, batch: int = 1, padding: int | None = None) -> list[list[Band]]:
        edge = apart if padding is None else padding
        return bands([n, n], [n, n], [3, 3], [1, 1], [edge, edge], [apart, apart], batch)

    assert cut(16, 24) == [[Band(0, 16, 1, 1)]] * 2, "only the tap in the middle lies inside"
    assert cut(14, 12) == [[Band(0, 2, 1, 2), Band(2, 10, 1, 1), Band(12, 2, 0, 2)]] * 2
    assert cut(56, 1) == [[], []]
    assert cut(2, 1) == [[], []], "four rows: reading the weights takes the time"
    assert bands([9, 9], [9, 9], [17, 17], [1, 1], [8, 8], [1, 1], 1) == [[], []], "81 products"
    (few, rest) = bands([9, 90], [9, 90], [17, 3], [1, 1], [8, 1], [1, 1], 9)
    assert len(few) == 9 and not rest
    assert bands([10**6], [10**6], [40000], [1], [20000], [1], 1) == [[]]
    assert cut(2, 1, 64) == [[Band(0, 1, 1, 2), Band(1, 1, 0, 2)]] * 2


@pytest.mark.parametrize(("x", "window", "stride", "padding", "dilation", "groups"), [
    ((2, 8, 16, 16), (3, 3), (1, 1), (12, 12), (12, 12), 1),
    ((2, 8, 16, 20), (3, 3), (1, 1), (24, 6), (24, 6), 2),
    ((1, 8, 9, 40), (5, 2), (2, 3), (14, 1), (7, 1), 4),
    ((3, 8, 30), (3,), (1,), (24,), (24,), 1),
    ((1, 8, 6, 7, 8), (3, 3, 3), (1, 2, 1), (5, 6, 1), (5, 6, 1), 2),
])
def test_convolutions_by_bands(x: tuple[int, ...], window: tuple[int, ...], stride: tuple[int, ...], padding: tuple[int, ...],
                               dilation: tuple[int, ...], groups: int) -> None:
    torch.manual_seed(0)
    w, bias = torch.randn(4, 8 // groups, *window), torch.randn(4)
    call = Recorded(aten.convolution.default, (torch.randn(x), w, bias, stride, padding, dilation, False, (0,) * len(window), groups), {})
    captured = compared(call)
    assert not captured.leftovers
    rows = [v.inputs[0].shape for v in captured.graph.order if v.op == "linear"]
    taps = 8 * prod(window)
    assert all(row[-1] < taps for row in rows)
    assert sum(prod(map(int, row)) for row in rows) < 0.75 * taps * x[0] * prod(captured.graph.outputs[0].shape[2:])
