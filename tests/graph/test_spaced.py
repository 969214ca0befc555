"""Numbers between two ends, of which there may be any number."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.export import Dim

import sashiko
from sashiko.diagnostics.errors import InputError
from tests.graph.captures import capture, module, run

LINES: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: torch.linspace(-1.3, 2.1, x.shape[1]),
    lambda x: torch.linspace(start=0.5, end=x.shape[1] - 0.5, steps=x.shape[1] * 2, device=x.device),
    lambda x: torch.linspace(3, x.shape[1], (x.shape[1] + 1) // 2, dtype=torch.float64),
    lambda x: torch.linspace(0, 1, x.shape[1], dtype=torch.bfloat16),
)


@pytest.mark.parametrize("line", LINES)
def test_lines_of_any_length_are_those_of_torch(line: Callable[[Tensor], Tensor]) -> None:
    free = ({1: Dim("n", max=300)},)
    compiled = sashiko.compile(module(lambda self, x: line(x)), (torch.randn(3, 16),), dynamic_shapes=free, strict=True)
    for length in (16, 1, 2, 3, 67, 300):
        x = torch.randn(3, length)
        torch.testing.assert_close(compiled(x), line(x), rtol=1e-14 if line is LINES[2] else 0, atol=0)  # torch rounds products of doubles


def test_lines_that_are_no_floats_fix_their_length() -> None:
    whole = module(lambda self, x: torch.linspace(0, 9, x.shape[1], dtype=torch.int64))
    with pytest.raises(InputError, match=r"constant \(16\)"):
        capture(whole, (torch.randn(3, 16),), None, ({1: Dim.DYNAMIC},))


@pytest.mark.filterwarnings("ignore:.*affine_grid behavior")
@pytest.mark.parametrize("ends", [False, True, None])
@pytest.mark.parametrize("rank", [2, 3])
def test_grids_of_images_of_any_size(rank: int, ends: bool | None) -> None:
    model = module(lambda self, x, theta: F.affine_grid(theta.mT, x.shape, ends))
    free = {0: Dim.AUTO, 2: Dim.AUTO, 3: Dim.AUTO}, {0: Dim.AUTO}
    captured = capture(model, (torch.randn(2, 3, *(6, 5, 4)[:rank]), torch.randn(2, rank + 1, rank)), None, free)
    assert not captured.leftovers
    for batch, *sizes in ((2, 6, 5), (1, 9, 14), (3, 1, 7), (2, 3, 1), (1, 1, 1)):
        args = torch.randn(batch, 3, *sizes, *(4,) * (rank - 2)), torch.randn(batch, rank + 1, rank)
        torch.testing.assert_close(run(captured, args), model(*args))


def test_grids_that_torch_refuses() -> None:
    x, free = torch.randn(2, 3, 6, 5), ({0: Dim.AUTO, 2: Dim.AUTO, 3: Dim.AUTO}, None)
    for theta in (torch.randn(2, 3, 2), torch.randn(1, 2, 3), torch.ones(2, 2, 3, dtype=torch.int64)):
        with pytest.raises(InputError, match="fails with this example"):
            capture(module(lambda self, x, theta: F.affine_grid(theta, x.shape, False)), (x, theta), None, free)
