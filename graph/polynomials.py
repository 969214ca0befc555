"""What tables of polynomials compute, of tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from . import attrs as A


def polynomials(x: Tensor, a: A.PiecewiseAttrs) -> Tensor:
    """What `piecewise` rounds: f32, NaN where x has no number. Products and the sums they go into are rounded once."""
    u = x.double().clamp(a.low, a.high)
    k = torch.round(u * a.density).nan_to_num().clamp(a.first, a.last).long() % len(a.coefficients[0])
    numbers = torch.tensor(a.coefficients, dtype=torch.float64)
    total = numbers[-1][k]
    for power, each in reversed(list(enumerate(numbers[:-1]))):
        total = (total * (x.double() if a.line and power == 0 else u) + each[k]).float().double()
    return total.float()


def piecewise(x: Tensor, a: A.PiecewiseAttrs, factor: Tensor | None = None) -> Tensor:
    """See PiecewiseAttrs."""
    real = polynomials(x, a)
    if a.dtype.is_float:
        return real
    if factor is not None:
        real = (real.double() * factor + a.zero).float()
    whole = torch.round(real)
    if a.least is not None or a.greatest is not None:
        whole = whole.clamp(a.least, a.greatest)
    return torch.where(whole.isnan(), torch.full_like(whole, a.least or 0), whole).to(a.dtype.torch)
