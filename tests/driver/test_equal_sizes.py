"""Sizes that are equal by what the model, or PyTorch, asked of them: nothing is left to PyTorch, and calls without that are refused."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch.export import Dim
from torch.nn import functional as F
from torch.testing import assert_close

import sashiko
from tests.driver.functions import Apply, left

BIAS = torch.randn(64, 8)
DOWN = torch.nn.Conv2d(3, 4, 3, 2, 1)


def _padded(x: torch.Tensor) -> torch.Tensor:
    rest = x.shape[1] % 4
    return (F.pad(x, (0, 0, 0, 4 - rest)) if rest else x).view(x.shape[0], -1, 4, 8).relu()


def _every_other(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if (x.shape[1] + 1) // 2 != y.shape[1]:
        raise ValueError("other lengths")
    return x[:, ::2] + y


def _those_after(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Whether the table is read from so far before its end is not told by the sizes' ranges."""
    return y + BIAS[x.shape[1] - y.shape[1] : x.shape[1]] + x[:, -1:]


def _hidden(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    x = x * 2
    x[~mask] = 0
    return x + 1


def _grown(x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, hidden: torch.Tensor | None = None) -> torch.Tensor:
    """A step with caches that grow. PyTorch's attention asks nothing of their lengths, and reads what is not there where they differ."""
    q, k, v = (t.unflatten(2, (2, 4)).transpose(1, 2) for t in (x, torch.cat([keys, x], 1), torch.cat([values, x], 1)))
    return F.scaled_dot_product_attention(q, k, v, None if hidden is None else hidden.mT.unsqueeze(1))


def _pyramid(x: torch.Tensor) -> torch.Tensor:
    down = DOWN(x)
    return torch.cat([down, F.interpolate(DOWN(down[:, :3]), scale_factor=2.0)], 1)


def _strided(x: torch.Tensor) -> torch.Tensor:
    """Sizes that are rounded up, in all the ways that there are."""
    height, width = x.shape[2:]
    down, rounded = DOWN(x), ((height + 1) // 2, (width + 1) // 2)
    padded = F.interpolate(x[:, :1], size=rounded) + F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, 1))
    windows = F.unfold(x, 3, padding=1, stride=2).mean(1).view(-1, 1, -(-height // 2), math.ceil(width / 2))
    return (down + padded + windows).reshape(-1, 4, rounded[0] * rounded[1]).relu()


def _cropped(x: torch.Tensor) -> torch.Tensor:
    """As much of the middle of an image as there is of one half and one fourth the size, twice as large."""
    half = F.max_pool2d(x, 2)
    small = F.max_pool2d(half, 2)
    for image in (half, x):
        small = F.interpolate(small, scale_factor=2.0)
        (height, width), (top, left) = small.shape[2:], ((n - m) // 2 for n, m in zip(image.shape[2:], small.shape[2:]))
        small = torch.cat([image[:, :, top : top + height, left : left + width], small], 1)
    return small.relu()


def _padded(x: torch.Tensor) -> torch.Tensor:
    """Padded, if it is needed, as Swin does it."""
    padding = (4 - x.shape[1] % 4) % 4
    y = F.pad(x, (0, 0, 0, padding)).view(x.shape[0], -1, 4, 8).softmax(2).view(x.shape[0], -1, 8)
    return (y[:, : x.shape[1]].contiguous() if padding > 0 else y) + x


def _rows(*sizes: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(2, size, 8) for size in sizes)


def _batches(*sizes: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(size, 5, 8) for size in sizes)


def _with_mask(length: int, masked: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(2, length, 8), torch.rand(2, masked) > 0.5


def _step(length: int, masked: int) -> tuple[torch.Tensor, ...]:
    return *_rows(3, length, length), torch.randn(2, masked, 3)


def _image(size: int, other: int = 0) -> tuple[torch.Tensor, ...]:
    return (torch.randn(1, 3, size, other or size),)


def _windows(x: torch.Tensor) -> torch.Tensor:
    return F.pixel_unshuffle(DOWN(x), 4) * 2


def _in_floats(x: torch.Tensor) -> torch.Tensor:
    halves = x.view(x.shape[0], x.shape[1] // 2, 2, 8).amax(2)
    return F.interpolate(x.mT, scale_factor=0.7) + F.interpolate(halves.mT, scale_factor=1.4)


def _counted(x: torch.Tensor, n: int) -> torch.Tensor:
    return x * n + max(n, 1) if n % 2 == 0 else x - n


def _in_fours(x: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
    """One of four rows is as many as the other has."""
    sums = x.view(-1, 4, *x.shape[1:]).sum(1)
    return sums @ e.mT + F.scaled_dot_product_attention(sums[:, None], e[:, None], e[:, None]).sum()


def _side_by_side(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Two batches as one, which is cut again."""
    u, v = torch.chunk(torch.cat([x, y]).relu(), 2)
    return (u * v).sum((1, 2)).view(x.shape[0], 1) + x.mean((1, 2))[:, None]


CASES: dict[str, tuple[Callable[..., torch.Tensor], list[tuple[torch.Tensor, ...]], list[tuple[torch.Tensor, ...]]]] = {
    "blocks": (lambda x: x.view(x.shape[0], x.shape[1] // 4, 4, 8).relu(), [_rows(64), _rows(16)], [_rows(18)]),
    "blocks that are counted": (lambda x: x.view(x.shape[0], -1, 4, 8).relu(), [_rows(64), _rows(16)], [_rows(18)]),
    "without padding": (_padded, [_rows(64), _rows(16)], [_rows(18)]),
    "the first of a table": (lambda x: x + BIAS[: min(x.shape[1], 64)], [_rows(32), _rows(64), _rows(1)], [_rows(70)]),
    "the last of a table": (lambda x: x + BIAS[max(0, 64 - x.shape[1]) :], [_rows(32), _rows(64), _rows(1)], [_rows(70)]),
    "a part of a table": (_those_after, [_rows(9, 3), _rows(9, 9), _rows(40, 7)], [_rows(3, 9)]),
    "every other": (_every_other, [_rows(8, 4), _rows(5, 3)], [_rows(8, 5)]),
    "mask": (_hidden, [_with_mask(8, 8), _with_mask(5, 5)], [_with_mask(5, 6)]),
    "caches that grow": (_grown, [_rows(3, 8, 8), _rows(3, 5, 5), _rows(2, 1, 1)], []),
    "caches that grow, and a mask": (_grown, [_step(8, 11), _step(1, 4)], [_step(5, 9)]),
    "one of four": (_in_fours, [_batches(8, 2), _batches(4, 1)], [_batches(8, 3)]),
    "two batches as one": (_side_by_side, [_batches(2, 2), _batches(1, 1), _batches(3, 3)], [_batches(2, 3)]),
    "pyramid": (_pyramid, [_image(64), _image(36)], [_image(34)]),
    "windows": (_windows, [_image(16, 24), _image(15, 32), _image(8, 7)], [_image(16, 21), _image(17, 24)]),
    "strides": (_strided, [_image(16), _image(9), _image(3)], []),
    "crops": (_cropped, [_image(20), _image(17), _image(18), _image(7)], []),
    "halves": (lambda x: torch.stack(x.tensor_split(2, 1)), [_rows(64), _rows(18)], [_rows(17)]),
    "thirds": (lambda x: torch.stack(x.tensor_split(3, 1)), [_rows(63), _rows(9)], [_rows(64)]),
    "windows that are padded": (_padded, [_rows(62), _rows(17)], [_rows(64)]),
}


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_left_to_pytorch(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    function, right, wrong = CASES[name]
    axes = dict.fromkeys((2, 3) if right[0][0].dim() == 4 else (0, 1), Dim.AUTO)
    compiled = sashiko.compile(Apply(function).eval(), right[0], dynamic_shapes=(tuple(axes for _ in right[0]),))
    assert not left(compiled)
    for args in right:
        assert_close(compiled(*args), function(*args))
    for args in wrong:
        with pytest.raises(sashiko.InputError, match=r"expected|captured where"):
            compiled(*args)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("name", CASES)
def test_the_backend_serves_all(name: str) -> None:
    function, right, wrong = CASES[name]
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="sashiko", dynamic=True)
    with torch.no_grad():
        for args in (*right, *wrong):
            try:
                expected = function(*args)
            except (RuntimeError, IndexError, ValueError) as error:
                with pytest.raises(type(error)):
                    compiled(*args)
            else:
                assert_close(compiled(*args), expected)


def test_numbers_that_are_no_sizes_keep_zero_and_less() -> None:
    torch._dynamo.reset()
    compiled, x = torch.compile(_counted, backend="sashiko", dynamic=True), torch.randn(3)
    with torch.no_grad():
        for n in (4, 8, 6, 0, -2, -4):
            assert_close(compiled(x, n), _counted(x, n))
    whole = sashiko.compile(Apply(_counted).eval(), (x, 4), dynamic_shapes=((None, Dim.DYNAMIC),))
    for n in (4, 0):
        assert_close(whole(x, n), _counted(x, n))


def test_sizes_computed_in_floats_go_with_sizes_in_parts() -> None:
    compiled = sashiko.compile(Apply(_in_floats).eval(), _rows(64), dynamic_shapes=(({0: Dim.AUTO, 1: Dim.AUTO},),))
    for args in (_rows(64), _rows(32)):
        assert_close(compiled(*args), _in_floats(*args))
