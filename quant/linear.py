"""A linear layer with integer weights, in the place of one in floating point."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..diagnostics.errors import InputError
from ..graph.computed import computed
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


def converted(dtype: torch.dtype, fn: Callable[[torch.Tensor], torch.Tensor], like: torch.Tensor) -> torch.dtype:
    """What `fn`, as Module.to and its kin have one, makes of numbers of a type. like: a tensor that lies where they would."""
    return fn(like.new_empty(0, dtype=dtype)).dtype


class QuantizedLinear(nn.Module):
    """y = x W^T + b for x [..., in_features], simulated; compiled it is a product with integers. For inference: integers do not train.

    integers: int8 [out_features, in_features]. scale: float32 [out_features], or for each group of inputs [out_features, groups]; it
    stays float32 when the layer is converted to another type, which is that of its weight and bias.
    With `scheme.activation`, x is rounded to 8 bits with a scale for each row.
    """

    integers: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor

    def __init__(
        self, weight: QuantizedWeight, bias: nn.Parameter | None, scheme: OpScheme, dtype: torch.dtype = torch.float32,
        transposed: bool = False,
    ) -> None:
        """dtype and transposed: what `weight` is to be, that of the layer in whose place this one is put."""
        super().__init__()
        assert scheme.weight is not None
        self.out_features, self.in_features = weight.values.shape
        self.scheme, self.dtype, self.transposed = scheme, dtype, transposed
        self.bias = bias
        self.register_buffer("integers", weight.values)
        self.register_buffer("scale", weight.scales)
        # Always zero; the operators take one.
        self.register_buffer("zero_point", torch.zeros(weight.scales.shape, dtype=torch.int64), persistent=False)

    @property
    def weight(self) -> torch.Tensor:
        """W in floating point, for models that cast to the type of a layer's weight or multiply with it themselves. Computed whenever it
        is read, and read only: what is written to it would be lost, and raises Unsupported."""
        return computed(self._whole)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":  # as models that tie it to their embedding do
            what = "the weight of a quantized layer is computed from its integers; nothing is assigned to it"
            hint = "tie weights before quantize_ and not again (transformers: config.tie_word_embeddings = False), or exclude the layer"
            raise InputError(what, hint=hint)
        super().__setattr__(name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in_features], floating point. The result is of its type."""
        if not x.is_floating_point():
            raise InputError(f"a quantized linear layer takes floating point, got {x.dtype}", hint="cast what it is called with")
        if self.scheme.activation is not None:
            factor = ops.rounded_rows(x.to(torch.float32), self.scheme.activation.signed)
        else:
            factor = x if x.dtype in _MULTIPLIED else x.to(torch.float32)
        bias = None if self.bias is None else self.bias.to(factor.dtype)
        return F.linear(factor, self.dequantized().to(factor.dtype), bias).to(x.dtype)

    def _whole(self) -> torch.Tensor:
        whole = self.dequantized().to(self.dtype)
        return whole.t() if self.transposed else whole

    def dequantized(self) -> torch.Tensor:
        """The reals that the integers stand for, float32 [out_features, in_features]."""
        assert self.scheme.weight is not None
        return dequantized(self.integers, self.scale, self.zero_point, self.scheme.weight)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, {self.scheme.label}"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> QuantizedLinear:
        """Another type is for what the weight stands for; all of its rows would be off by what a scale is rounded."""
        scale, self.dtype = self.scale, converted(self.dtype, fn, self.scale)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.scale.dtype != scale.dtype:
            self.scale = scale.to(self.scale.device)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """Takes states, too, in which the integers are called what they are in the place of: `weight`."""
        old = state_dict.get(f"{prefix}weight")
        if isinstance(old, torch.Tensor) and old.dtype == torch.int8:
            state_dict[f"{prefix}integers"] = state_dict.pop(f"{prefix}weight")
        super()._load_from_state_dict(state_dict, prefix, *others)
