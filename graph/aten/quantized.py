"""torch's `quantized_decomposed` operators, as PT2E graphs and simulated models are made of.

Rows are keyed by name: the operators exist only once a library that defines them has been imported. Scales become part of a type, so
those that are tensors must be constants; the capture remembers them, and the runtime refuses to go on when they change.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...diagnostics.errors import Unsupported
from .. import attrs as A
from .. import build as b
from ..ir import Value
from ..types import FROM_TORCH, QParams, TensorType, f32
from .call import Call, Row


def _numbers(item: Any, what: str) -> list[float]:
    """A scale or zero point that is known now."""
    if isinstance(item, Value):
        if isinstance(item.attrs, A.ConstantAttrs):
            return [float(x) for x in item.attrs.tensor.detach().double().reshape(-1).tolist()]
        if isinstance(item.attrs, A.FullAttrs):
            return [float(item.attrs.value)]
        raise Unsupported(f"the {what} is computed in each call")
    return [float(item)]


def _qparams(scale: Any, zero_point: Any, axis: int | None, qmin: int, qmax: int) -> QParams:
    scales = _numbers(scale, "scale")
    zeros = [0.0] if zero_point is None else _numbers(zero_point, "zero point")
    if len(set(zeros)) != 1:
        raise Unsupported("each channel has a zero point of its own")
    return QParams(tuple(scales), int(zeros[0]), axis, int(qmin), int(qmax))


def _f32(value: Value) -> Value:
    if value.dtype != f32:
        raise Unsupported(f"quantizes {value.dtype}")
    return value


def quantize_tensor(c: Call, x: Value, scale: Any, zero_point: Any, qmin: int, qmax: int, dtype: torch.dtype, *_: Any) -> Value:
    return b.quantize(_f32(x), FROM_TORCH[dtype], _qparams(scale, zero_point, None, qmin, qmax))


def quantize_channel(c: Call, x: Value, scales: Any, zeros: Any, axis: int, qmin: int, qmax: int, dtype: torch.dtype, *_: Any) -> Value:
    return b.quantize(_f32(x), FROM_TORCH[dtype], _qparams(scales, zeros, axis % x.tensor.rank, qmin, qmax))


def _dequantized(x: Value, q: QParams) -> Value:
    """scale * (x - zero_point): of integers known to be quantized that way, of a constant, or spelled out."""
    if x.tensor.qparams == q:
        return b.dequantize(x)
    if isinstance(x.attrs, A.ConstantAttrs):
        return b.dequantize(replace(x, type=TensorType(x.dtype, x.shape, q)))
    if q.axis is not None:
        raise Unsupported("integers that are computed are dequantized by channel")
    return b.mul(b.sub(b.cast(x, f32), float(q.zero_point)), q.scale[0])


def dequantize_tensor(c: Call, x: Value, scale: Any, zero_point: Any, qmin: int, qmax: int, dtype: torch.dtype, *_: Any) -> Value:
    return b.cast(_dequantized(x, _qparams(scale, zero_point, None, qmin, qmax)), c.dtype)


def dequantize_channel(c: Call, x: Value, scales: Any, zeros: Any, axis: int, qmin: int, qmax: int, dtype: torch.dtype, *_: Any) -> Value:
    return b.cast(_dequantized(x, _qparams(scales, zeros, axis % x.tensor.rank, qmin, qmax)), c.dtype)


ROWS: dict[str, Row] = {
    **{f"quantized_decomposed.quantize_per_tensor.{o}": quantize_tensor for o in ("default", "tensor", "tensor2")},
    **{f"quantized_decomposed.dequantize_per_tensor.{o}": dequantize_tensor for o in ("default", "tensor", "tensor2")},
    "quantized_decomposed.quantize_per_channel.default": quantize_channel,
    "quantized_decomposed.dequantize_per_channel.default": dequantize_channel,
}
