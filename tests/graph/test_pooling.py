"""Pooling over an axis of any length."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

import sashiko
from sashiko.diagnostics.errors import InputError
from tests.graph.captures import capture, module, run
from tests.sweeps import swept

POOLS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: F.max_pool1d(x[0].mT, x.shape[2]),
    lambda x: nn.AvgPool1d(x.size(2))(x[0].mT),
    lambda x: F.max_pool2d(x, (x.shape[2], 1)),
    lambda x: F.avg_pool2d(input=x, kernel_size=x.size()[2:], stride=3),
    lambda x: F.avg_pool2d(x, (x.shape[2], 3), (1, 2), (0, 1)),
    lambda x: torch.max_pool2d(x, [x.shape[2], 2], [], 0, 1, True),
    lambda x: F.max_pool3d(x, (1, x.shape[2], 2), padding=(0, 0, 1)),
)


@pytest.mark.parametrize("pool", POOLS)
def test_an_axis_that_a_window_covers_may_have_any_length(pool: Callable[[Tensor], Tensor]) -> None:
    model = module(lambda self, x: pool(x))
    captured = capture(model, (torch.randn(2, 3, 8, 5),), None, ({2: Dim.DYNAMIC},))
    assert not captured.leftovers
    for length in (8, 1, 11):
        x = torch.randn(2, 3, length, 5)
        x[0, 0, 0, 3] = torch.nan
        torch.testing.assert_close(run(captured, (x,)), model(x), equal_nan=True)


def test_pooling_that_is_more_fixes_the_length() -> None:
    x = torch.randn(3, 8)
    for pool in (lambda x: F.max_pool1d(x, x.shape[1], return_indices=True), lambda x: F.max_pool1d(x, x.shape[1], padding=2)):
        with pytest.raises(InputError, match=r"constant \(8\)"):
            capture(module(lambda self, x, pool=pool: pool(x)), (x,), None, ({1: Dim.DYNAMIC},))


LAST_IN_PART: tuple[tuple[int, nn.Module], ...] = (
    (2, nn.AvgPool2d(2, 2, ceil_mode=True, count_include_pad=False)),
    (2, nn.MaxPool2d(3, 2, ceil_mode=True)),
    (2, nn.AvgPool2d(3, 2, 1, ceil_mode=True)),
    (2, nn.MaxPool2d(2, 3, 1, dilation=3, ceil_mode=True)),
    (2, nn.MaxPool2d(1, 2, ceil_mode=True)),  # of even sizes, the last window would begin behind them
    (2, nn.AvgPool2d(3, (2, 1), 1, ceil_mode=True, divisor_override=5)),
    (1, nn.AvgPool1d(3, 2, ceil_mode=True)),
    (1, nn.AvgPool1d(5, 4, 2, ceil_mode=True, count_include_pad=False)),
    (3, nn.MaxPool3d(3, 2, 1, ceil_mode=True)),
    (3, nn.AvgPool3d(2, 2, ceil_mode=True)),
)


@pytest.mark.parametrize(("rank", "pool"), swept(LAST_IN_PART, [LAST_IN_PART[at] for at in (0, 1, 4, 8)]))
def test_the_last_window_may_end_behind_an_image_of_any_size(rank: int, pool: nn.Module) -> None:
    for example in (8, 9):
        x, free = torch.randn(2, 3, *[example] * rank), ({2 + axis: Dim.AUTO for axis in range(rank)},)
        captured, compiled = capture(pool, (x,), None, free), sashiko.compile(pool.eval(), (x,), dynamic_shapes=free, strict=True)
        assert not captured.leftovers
        answered = 0
        for sizes in ((example,) * 3, (1, 3, 2), (2, 2, 1), (3, 7, 6), (12, 10, 6), (13, 5, 11)):
            x = torch.randn(2, 3, *sizes[:rank])
            x[0, 1].view(-1)[-1] = torch.nan
            try:
                expected = pool(x)
            except RuntimeError:
                continue  # fewer elements than a window has
            with contextlib.suppress(InputError):  # torch has taken for granted that there are several windows, or where the last begins
                torch.testing.assert_close(run(captured, (x,)), expected, equal_nan=True)
                torch.testing.assert_close(compiled(x), expected, equal_nan=True)
                answered += 1
        assert answered >= 2


@pytest.mark.parametrize("pool", [nn.MaxPool2d(3, 2, 1, ceil_mode=True), nn.AvgPool2d(3, 2, 1, ceil_mode=True), nn.MaxPool1d(4, 2, 2)])
def test_what_has_no_elements_is_not_pooled(pool: nn.Module) -> None:
    rest = () if isinstance(pool, nn.MaxPool1d) else (24,)
    compiled = sashiko.compile(pool.eval(), (torch.randn(2, 3, 24, *rest),), dynamic_shapes=({0: Dim.AUTO, 2: Dim.AUTO},))
    assert compiled(torch.randn(0, 3, 24, *rest)).shape[0] == 0
    with pytest.raises(InputError):
        compiled(torch.randn(2, 3, 0, *rest))


LINES: tuple[Callable[[Tensor], Tensor], ...] = (
    nn.MaxPool1d(3),
    lambda x: F.max_pool1d(x[0], 3, 2, 1, 2, True),
    lambda x: F.max_pool1d(input=x, kernel_size=(4,), stride=[2], padding=(2,), return_indices=False),
    lambda x: torch.max_pool1d(x.bfloat16(), [3], [], ceil_mode=True),
)


@pytest.mark.parametrize("pool", LINES)
def test_the_maximum_along_a_line_of_any_length(pool: Callable[[Tensor], Tensor]) -> None:
    model = module(lambda self, x: pool(x))
    captured = capture(model, (torch.randn(2, 3, 24),), None, ({2: Dim("n", min=8)},))
    assert not captured.leftovers
    for length in (24, 8, 31):
        x = torch.randn(2, 3, length)
        x[1, 0, 5] = torch.nan
        torch.testing.assert_close(run(captured, (x,)), model(x), rtol=0, atol=0, equal_nan=True)


def test_the_maximum_along_a_line_is_refused_where_torch_refuses_it() -> None:
    for pool in (lambda x: F.max_pool1d(x, 3, 1, 2, 2), lambda x: F.max_pool1d(x, 3, 0), lambda x: F.max_pool1d(x[..., 0, 0], 3)):
        x = torch.randn(2, 3, 24)
        with pytest.raises((RuntimeError, IndexError)) as refusal:
            pool(x)
        with pytest.raises(InputError, match=re.escape(str(refusal.value))):
            sashiko.compile(module(lambda self, x, pool=pool: pool(x)), (x,), dynamic_shapes=({2: Dim.AUTO},))


def test_quantized_models_pool_along_any_length() -> None:
    torch.manual_seed(1)
    text = nn.Sequential(nn.Conv1d(3, 8, 3), nn.MaxPool1d(2), nn.Conv1d(8, 4, 3)).eval()
    small = sashiko.quantize(text, [torch.randn(2, 3, 24) for _ in range(8)], progress=False)
    compiled = sashiko.compile(small, (torch.randn(2, 3, 24),), dynamic_shapes=({2: Dim.AUTO},), strict=True)
    x = torch.randn(2, 3, 31)
    assert (small(x) - text(x)).norm() < 0.1 * text(x).norm()
    assert (compiled(x) - small(x)).norm() < 0.01 * small(x).norm()


def test_quantized_models_pool_over_any_length() -> None:
    model = nn.Conv1d(3, 4, 3)
    text = module(lambda self, x: F.max_pool1d(found := self.conv(x), found.shape[2]), conv=model)
    small = sashiko.quantize(text, [torch.randn(2, 3, 9)], progress=False)
    x = torch.randn(2, 3, 14)
    torch.testing.assert_close(small(x), text(x), rtol=0.1, atol=0.1)
