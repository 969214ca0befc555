"""Diagonals, compiled with nothing left to PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch.export import Dim
from torch.testing import assert_close

import sashiko
from tests.driver.functions import Apply, agree


@pytest.mark.parametrize("offset", [0, 2, -1, 5, 9, -7])
def test_diagonals(offset: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 6, 4)
    agree(lambda x: (x.diagonal(offset), x.diagonal(offset, -1, 0), x.relu().diagonal(offset, 2, 1), torch.diagonal_copy(x, offset)), x)
    agree(lambda x: (torch.view_as_complex(x.reshape(3, 6, 2, 2)).diagonal(offset) * 2).abs(), x)
    agree(lambda x: (torch.diag(x, offset), x.diagonal(offset).sum()), torch.randint(-9, 9, (5, 7), dtype=torch.int8))


def test_diagonals_of_any_size() -> None:
    torch.manual_seed(0)
    model = Apply(lambda x, y: (torch.einsum("bii->b", x), x.diagonal(0, 1, 2), y.diagonal(-1), y.diagonal(2, 1, 0) * 2)).eval()
    batch, size, rows, columns = (Dim(name, min=low, max=64) for name, low in (("b", 1), ("n", 1), ("r", 4), ("c", 4)))
    shapes = (({0: batch, 1: size, 2: size}, {0: rows, 1: columns}),)
    fast = sashiko.compile(model, (torch.randn(3, 6, 6), torch.randn(5, 8)), dynamic_shapes=shapes, strict=True)
    for one, other in (((2, 9, 9), (5, 19)), ((1, 1, 1), (40, 5)), ((4, 33, 33), (6, 6))):
        x, y = torch.randn(one), torch.randn(other)
        assert_close(fast(x, y), model(x, y))
