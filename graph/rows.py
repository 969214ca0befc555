"""A scale for each row, from the row itself: the functions behind torch's `quantized_decomposed` operators per token, and what is left of a
row when they have rounded it.

The operators are torch's own where it has them; these are what they are checked against. torch chooses no scale below 1e-5 / 127, or
1.2e-7 with a zero point, and so makes zeros of small numbers: `sashiko::choose_rows` is the same choice without such a floor.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

LEAST = torch.finfo(torch.float32).tiny
"""The least scale, whose inverse is finite."""
MOST = torch.finfo(torch.float32).max / 128
"""The greatest scale, with which every integer stands for a finite number."""


def choose_rows(x: Tensor, dtype: torch.dtype, least: float = 1e-5) -> tuple[Tensor, Tensor]:
    """Scales max|x| / 127 and zero points 0 for each row of the last axis, [..., 1]. A row below `least` throughout counts as that."""
    scales = _finite(x.abs().amax(-1, keepdim=True).clamp(min=least).div(127))
    return scales, torch.zeros_like(scales)


def choose_affine_rows(x: Tensor, dtype: torch.dtype, least: float = torch.finfo(torch.float32).eps) -> tuple[Tensor, Tensor]:
    """Scales, at least `least`, and zero points with which each row fills [-128, 127]; both [..., 1], float64 and int64."""
    low, high = x.amin(-1, keepdim=True).clamp(max=0.0), x.amax(-1, keepdim=True).clamp(min=0.0)
    scales = _finite(((high * 0.5 - low * 0.5) / 127.5).clamp(min=least))  # halves: the difference of these is finite
    below, above = low / scales, high / scales
    zeros = torch.where(below + above - 1.0 > 0, -128 - below, 127 - above).clamp(-128, 127).round()
    return scales.to(torch.float64), zeros.to(torch.int64)


def _finite(scales: Tensor) -> Tensor:
    """Scales of rows of finite numbers are no greater than MOST. That of other rows is NaN, and so is what they become, wherever the
    scale is multiplied by: integers times infinity would be infinities whose signs mean nothing."""
    return torch.where(scales == torch.inf, torch.nan, scales.clamp(max=MOST))


def _chosen(x: Tensor, affine: bool) -> tuple[Tensor, Tensor]:
    return choose_affine_rows(x, torch.int8, LEAST) if affine else choose_rows(x, torch.int8, 127 * LEAST)


def _shapes(x: Tensor, affine: bool) -> tuple[Tensor, Tensor]:
    """What `_chosen` returns, without numbers."""
    types = (torch.float64, torch.int64) if affine else (x.dtype, x.dtype)
    scales, zero_points = (x.new_empty((*x.shape[:-1], 1), dtype=dtype) for dtype in types)
    return scales, zero_points


# Composite for autograd: it stays whole in exported graphs. Ten operations on fake tensors would take a hundred times as long as shapes.
torch.library.define("sashiko::choose_rows", "(Tensor x, bool affine) -> (Tensor, Tensor)")
torch.library.impl("sashiko::choose_rows", "CompositeExplicitAutograd", _chosen)
torch.library.register_fake("sashiko::choose_rows", _shapes)
CHOOSE_ROWS: torch._ops.OpOverload = torch.ops.sashiko.choose_rows.default
"""(scales, zero points) of the rows of x, both [..., 1]: for integers in [-127, 127], or with `affine` in [-128, 127]."""


def quantize_rows(x: Tensor, scales: Tensor, zero_points: Tensor, qmin: int, qmax: int, dtype: torch.dtype) -> Tensor:
    """Integers of `dtype` in [qmin, qmax], with a scale and zero point [..., 1] for each row: round half to even, then saturate."""
    return (x * (1.0 / scales) + zero_points).round().clamp(qmin, qmax).to(dtype)


def dequantize_rows(
    q: Tensor, scales: Tensor, zero_points: Tensor, qmin: int, qmax: int, dtype: torch.dtype, out_dtype: torch.dtype
) -> Tensor:
    """The reals that the integers of each row stand for."""
    return ((q - zero_points) * scales).to(out_dtype)


def rounded_rows(x: Tensor) -> Tensor:
    """The reals that integers in [-127, 127] without a zero point leave of each row. Gradients pass as if nothing were rounded."""
    parameters = *_chosen(x, False), -127, 127, torch.int8
    return _passing(x, dequantize_rows(quantize_rows(x, *parameters), *parameters, torch.float32))


def rounded_affine_rows(x: Tensor) -> Tensor:
    """The reals that integers in [-128, 127] with a zero point leave of each row. Gradients pass as if nothing were rounded."""
    parameters = *_chosen(x, True), -128, 127, torch.int8
    return _passing(x, dequantize_rows(quantize_rows(x, *parameters), *parameters, torch.float32))


def rounded_bf16(x: Tensor) -> Tensor:
    """The reals that bf16 leaves."""
    return x.to(torch.bfloat16).to(torch.float32)


def _passing(x: Tensor, rounded: Tensor) -> Tensor:
    """Straight-through: the numbers of `rounded` with the gradients of `x`."""
    return x + (rounded - x).detach() if x.requires_grad else rounded


ROUNDINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x, "rows": rounded_rows, "affine_rows": rounded_affine_rows, "bf16": rounded_bf16,
}
"""What can be done to the rows of a factor before a product, by name."""
