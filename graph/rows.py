"""A scale for each row, from the row itself: the functions behind torch's `quantized_decomposed` operators per token, and what is left of a
row when they have rounded it.

The operators are torch's own where it has them; these are what they are checked against.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def choose_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scales max|x| / 127 and zero points 0 for each row of the last axis, [..., 1]. A row below 1e-5 throughout counts as that."""
    scales = x.abs().amax(-1, keepdim=True).clamp(min=1e-5).div(127)
    return scales, torch.zeros_like(scales)


def choose_affine_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scales and zero points with which each row fills [-128, 127]; both [..., 1], float64 and int64."""
    low, high = x.amin(-1, keepdim=True).clamp(max=0.0), x.amax(-1, keepdim=True).clamp(min=0.0)
    scales = ((high - low) / 255.0).clamp(min=torch.finfo(torch.float32).eps)
    below, above = low / scales, high / scales
    zeros = torch.where(below + above - 1.0 > 0, -128 - below, 127 - above).clamp(-128, 127).round()
    return scales.to(torch.float64), zeros.to(torch.int64)


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
    parameters = *choose_rows(x, torch.int8), -127, 127, torch.int8
    return _passing(x, dequantize_rows(quantize_rows(x, *parameters), *parameters, torch.float32))


def rounded_affine_rows(x: Tensor) -> Tensor:
    """The reals that integers in [-128, 127] with a zero point leave of each row. Gradients pass as if nothing were rounded."""
    parameters = *choose_affine_rows(x, torch.int8), -128, 127, torch.int8
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
