"""torch's `quantized_decomposed` operators, as PT2E graphs and simulated models are made of.

Rows are keyed by name: the operators exist only once a library that defines them has been imported. Scales known now become part of a
type; the capture remembers the tensors they came from, and the runtime refuses to go on when they change. Scales computed in each call
stay values: the integers are then those of scale 1, `quantize(x * (1 / scale) + zero_point)`, and what they stand for is
`(dequantize(q) - zero_point) * scale`. Activations with a scale for each channel are written that way, too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...diagnostics.errors import Unsupported
from .. import attrs as A
from .. import build as b
from ..dims import Dim
from ..ir import Graph, Value
from ..types import FROM_TORCH, QParams, TensorType, f32, f64, i8, u8
from .call import Call, Row
from .choose_qparams import ROWS as CHOOSE_ROWS
from .choose_qparams import by_row
from .weight_only import ROWS as GROUP_ROWS

_LEAST = 1e-30  # scales whose reciprocals, and the products with either, are no denormals


def _numbers(item: Any) -> tuple[float, ...] | None:
    """Scales or zero points that are known now; None for those that are computed."""
    if not isinstance(item, Value):
        return (0.0,) if item is None else (float(item),)
    if isinstance(item.attrs, A.ConstantAttrs):
        return tuple(float(x) for x in item.attrs.tensor.detach().double().reshape(-1).tolist())
    return (float(item.attrs.value),) if isinstance(item.attrs, A.FullAttrs) else None


def _limits(qmin: Any, qmax: Any) -> tuple[int, int]:
    low, high = _numbers(qmin), _numbers(qmax)
    if low is None or high is None:
        raise Unsupported("the range of the integers is computed in each call")
    return int(low[0]), int(high[0])


def qparams_of(scale: Any, zero: Any, axis: int | None, qmin: Any, qmax: Any) -> QParams | None:
    """What a type can say; None for numbers that are computed, and for zero points that differ or are no integers."""
    scales, zeros = _numbers(scale), _numbers(zero)
    if scales is None or zeros is None or len(set(zeros)) != 1 or not zeros[0].is_integer():
        return None
    return QParams(scales, int(zeros[0]), axis, *_limits(qmin, qmax))


def _f32(value: Value) -> Value:
    if value.dtype != f32:
        raise Unsupported(f"quantizes {value.dtype}")
    return value


def narrow(item: Any, shape: tuple[Dim, ...] | None = None) -> Value:
    """A scale or zero point in f32, where both were computed before torch widened them to f64 and i64."""
    value: Value = item if isinstance(item, Value) else b.full(float(item), f32)
    if value.op in ("aten", "get"):
        raise Unsupported("its scale is computed by PyTorch, whose type is not the one it declares")
    source = value.inputs[0] if value.op == "cast" else value
    was_f32 = source.dtype == f32 and (value.dtype == f64 or source.op == "round")
    value = source if was_f32 else b.cast(value, f32)
    return value if shape is None else b.reshape(value, shape)


def zero_of(item: Any, shape: tuple[Dim, ...] | None = None) -> Value | None:
    """A zero point in f32; None when it is known to be 0."""
    known = _numbers(item)
    return None if known is not None and not any(known) else narrow(item, shape)


def _channels(x: Value, axis: int) -> tuple[Dim, ...]:
    """The shape in which one number for each index of an axis broadcasts against `x`."""
    return tuple(d if a == axis else 1 for a, d in enumerate(x.shape))


def _scaled(x: Value, scale: Value) -> Value:
    return b.mul(_f32(x), b.reciprocal(scale))


def _saturated(real: Value, qmin: Any, qmax: Any, dtype: torch.dtype) -> Value:
    """The nearest integers, which have a scale of 1."""
    return b.quantize(real, FROM_TORCH[dtype], QParams((1.0,), 0, None, *_limits(qmin, qmax)))


def rounded_first(real: Value, zero: Value | None) -> Value:
    """real + zero, rounding before the addition as torch does per tensor and per channel; it matters in ties."""
    return real if zero is None else b.add(b.round_(real), zero)


def quantize_tensor(c: Call, x: Value, scale: Any, zero: Any, qmin: Any, qmax: Any, dtype: torch.dtype, *_: Any) -> Value:
    q = qparams_of(scale, zero, None, qmin, qmax)
    if q is not None:
        return b.quantize(_f32(x), FROM_TORCH[dtype], q)
    return _saturated(rounded_first(_scaled(x, narrow(scale, ())), zero_of(zero, ())), qmin, qmax, dtype)


def quantize_channel(c: Call, x: Value, scales: Any, zeros: Any, axis: int, qmin: Any, qmax: Any, dtype: torch.dtype, *_: Any) -> Value:
    q = qparams_of(scales, zeros, axis % x.tensor.rank, qmin, qmax)
    if q is not None and _frozen(x):
        return b.quantize(_f32(x), FROM_TORCH[dtype], q)
    shape = _channels(x, axis % x.tensor.rank)
    return _saturated(rounded_first(_scaled(x, narrow(scales, shape)), zero_of(zeros, shape)), qmin, qmax, dtype)


def quantize_token(c: Call, x: Value, scales: Any, zeros: Any, qmin: Any, qmax: Any, dtype: torch.dtype, *_: Any) -> Value:
    """Here the zero point is added before rounding."""
    real, zero = _scaled(x, narrow(scales)), zero_of(zeros)
    return _saturated(real if zero is None else b.add(real, zero), qmin, qmax, dtype)


def _frozen(x: Value) -> bool:
    """Whether `x` is made of weights alone."""
    return all(v.op not in ("input", "aten", "call") for v in Graph((), (x,)).order)


def typed_by(x: Value, q: QParams | None) -> Value | None:
    """Integers whose type says that they are quantized by `q`; None when that is not known of them. Where the range is that of all bytes,
    they are within it: of what they stand for, `quantize` makes the same ones."""
    if q is None:
        return None
    if x.tensor.qparams == q:
        return x
    if isinstance(x.attrs, A.ConstantAttrs):
        return replace(x, type=TensorType(x.dtype, x.shape, q))
    least, most = (0, 255) if x.dtype == u8 else (-128, 127)
    whole = x.dtype in (i8, u8) and x.tensor.qparams is None and (q.qmin, q.qmax) == (least, most) and len(q.scale) == 1
    if not whole or not _LEAST < q.scale[0] < 1 / _LEAST or not least <= q.zero_point <= most:
        return None
    return b.quantize(b.mul(b.sub(b.cast(x, f32), float(q.zero_point)), q.scale[0]), x.dtype, q)


def spelled(x: Value, scale: Value, zero: Value | None) -> Value:
    """(x - zero) * scale"""
    q = x.tensor.qparams
    real = b.dequantize(x) if q is not None and (q.scale, q.zero_point) == ((1.0,), 0) else b.cast(x, f32)
    return b.mul(real if zero is None else b.sub(real, zero), scale)


def dequantize_tensor(c: Call, x: Value, scale: Any, zero: Any, qmin: Any, qmax: Any, dtype: torch.dtype, *_: Any) -> Value:
    typed = typed_by(x, qparams_of(scale, zero, None, qmin, qmax))
    return b.cast(b.dequantize(typed) if typed is not None else spelled(x, narrow(scale, ()), zero_of(zero, ())), c.dtype)


def dequantize_channel(c: Call, x: Value, scales: Any, zeros: Any, axis: int, qmin: Any, qmax: Any, dtype: torch.dtype, *_: Any) -> Value:
    typed = typed_by(x, qparams_of(scales, zeros, axis % x.tensor.rank, qmin, qmax))
    shape = _channels(x, axis % x.tensor.rank)
    return b.cast(b.dequantize(typed) if typed is not None else spelled(x, narrow(scales, shape), zero_of(zeros, shape)), c.dtype)


def dequantize_token(c: Call, x: Value, scales: Any, zeros: Any, qmin: Any, qmax: Any, dtype: torch.dtype, *_: Any) -> Value:
    return b.cast(spelled(x, narrow(scales), zero_of(zeros)), c.dtype)


def rounded_rows(x: Value, affine: bool) -> Value:
    """What integers leave of each row, with a scale from the row itself, and with `affine` a zero point."""
    c = Call(x.tensor, frozenset((0, 1)))
    parameters = *by_row(c, x, affine), -128 if affine else -127, 127, torch.int8
    return dequantize_token(c, quantize_token(c, x, *parameters), *parameters)


_OVERLOADS = ("default", "tensor", "tensor2")
ROWS: dict[str, Row] = {
    **{f"quantized_decomposed.quantize_per_tensor.{o}": quantize_tensor for o in _OVERLOADS},
    **{f"quantized_decomposed.dequantize_per_tensor.{o}": dequantize_tensor for o in _OVERLOADS},
    "quantized_decomposed.quantize_per_channel.default": quantize_channel,
    "quantized_decomposed.dequantize_per_channel.default": dequantize_channel,
    "quantized_decomposed.quantize_per_token.default": quantize_token,
    "quantized_decomposed.dequantize_per_token.default": dequantize_token,
    **CHOOSE_ROWS,
    **GROUP_ROWS,
}
