"""A linear layer with integer weights, in the place of one in floating point."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from . import ops
from .scheme import OpScheme, WeightScheme
from .weights import QuantizedWeight

_MULTIPLIED = (torch.float32, torch.bfloat16)  # what products with integer weights are made of; the rest is cast to float32


def dequantized(values: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, scheme: WeightScheme) -> torch.Tensor:
    """The reals that integers [N, K] stand for, float32. scale: [N], or for each group of inputs [N, groups]; zero_point: zeros like it."""
    most, scale = scheme.qmax, scale.to(torch.float32)
    result: torch.Tensor
    if scale.dim() == 1:
        result = ops.dequantize_per_channel(values, scale, zero_point, 0, -most, most, torch.int8)
    else:
        group = values.shape[1] // scale.shape[1]
        result = ops.dequantize_per_group(values, scale, zero_point, -most, most, torch.int8, group, torch.float32)
    return result


class QuantizedLinear(nn.Module):
    """y = x W^T + b for x [..., in_features], simulated; compiled it is a product with integers. For inference: integers do not train.

    weight: int8 [out_features, in_features]. scale: float32 [out_features], or for each group of inputs [out_features, groups].
    With `scheme.activation`, x is rounded to 8 bits with a scale for each row.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor

    def __init__(self, weight: QuantizedWeight, bias: nn.Parameter | None, scheme: OpScheme) -> None:
        super().__init__()
        assert scheme.weight is not None
        self.out_features, self.in_features = weight.values.shape
        self.scheme = scheme
        self.bias = bias
        self.register_buffer("weight", weight.values)
        self.register_buffer("scale", weight.scales)
        # Always zero; the operators take one.
        self.register_buffer("zero_point", torch.zeros(weight.scales.shape, dtype=torch.int64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in_features]. The result is of its type."""
        if self.scheme.activation is not None:
            factor = ops.rounded_rows(x.to(torch.float32), self.scheme.activation.signed)
        else:
            factor = x if x.dtype in _MULTIPLIED else x.to(torch.float32)
        bias = None if self.bias is None else self.bias.to(factor.dtype)
        return F.linear(factor, self.dequantized().to(factor.dtype), bias).to(x.dtype)

    def dequantized(self) -> torch.Tensor:
        """The reals that the weights stand for, float32."""
        assert self.scheme.weight is not None
        return dequantized(self.weight, self.scale, self.zero_point, self.scheme.weight)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, {self.scheme.label}"
