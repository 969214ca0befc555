"""Numbers evenly spaced between two ends that would fix how many they are as they are traced: torch takes the steps of `linspace` for a
constant, and so the sizes of `affine_grid`, which is made of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


def _free(number: Any) -> bool:
    return isinstance(number, torch.SymInt)


def _linspace(start: Any, end: Any, steps: Any, *, dtype: torch.dtype | None = None, device: Any = None, **others: Any) -> Tensor | None:
    """In the arithmetic of ATen/native/cpu/RangeFactoriesKernel.cpp; None where the steps are known, and for other than plain floats."""
    kind = dtype or torch.get_default_dtype()
    if not _free(steps) or isinstance(start, Tensor) or isinstance(end, Tensor) or others or not kind.is_floating_point:
        return None
    first, last, gaps = (torch.full((), number, dtype=kind, device=device) for number in (start, end, steps - 1))
    step = (last - first) / gaps.clamp(min=1)  # of a tensor: torch takes sizes for 2 or more
    before = torch.arange(steps, device=device)
    behind = steps - 1 - before
    return torch.where((before < behind) | (before == 0), first + step * before.to(kind), last - step * behind.to(kind))


def _affine(theta: Tensor, size: Sequence[Any], align_corners: bool | None = None) -> Tensor | None:
    """The grid of points that `theta` maps those of an image to; None where all sizes are known, and for what torch refuses."""
    rank = len(size) - 2
    if not any(map(_free, size[2:])) or not theta.is_floating_point() or rank not in (2, 3):
        return None
    if theta.dim() != 3 or theta.shape[1:] != (rank, rank + 1) or theta.shape[0] != size[0]:
        return None
    columns = theta.reshape(-1, *[1] * rank, rank, rank + 1).unbind(-1)
    grid = columns[-1]
    for axis, n in enumerate(reversed(size[2:])):
        grid = grid + _centred(n, theta, align_corners).view(-1, *[1] * (axis + 1)) * columns[axis]
    return grid


def _centred(n: Any, like: Tensor, ends: bool | None) -> Tensor:
    """Places of n pixels between -1 and 1: of their middles, or with the `ends` those of the outermost ones. That of one is 0."""
    line, number = torch.linspace(-1, 1, n, dtype=like.dtype, device=like.device), torch.full((), n, dtype=like.dtype, device=like.device)
    return line * (number - 1).clamp(max=1) if ends else line * (number - 1) / number


_FREE: dict[Any, Callable[..., Tensor | None]] = {
    torch.linspace: _linspace, torch.nn.functional.affine_grid: _affine, torch.affine_grid_generator: _affine,
}


class FreeSteps(TorchFunctionMode):
    """Counts the steps by `arange`, where their number is free."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = None
        if func in _FREE:
            with self:  # the grid is made of lines
                found = _FREE[func](*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if found is None else found
